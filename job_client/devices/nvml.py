"""Read GPUs through NVML.

An old driver or a small card may refuse any query, an older binding lacks some, and a GPU that has
fallen off the bus refuses all. So each query is made alone, and one that is refused costs only its
own figure.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from job_client.devices.gpu_faults import GpuHealth

logger = logging.getLogger(__name__)

_BIG_BYTES = 1 << 30  # of memory: who only draws (a desktop) and has less is no obstacle
_EVENT_WAIT_MS = 1
_MAX_EVENTS = 64  # of a GPU that are taken at once
_THROTTLING = {  # bits of the binding; what only says that there is nothing to do is left out
    "HwThermalSlowdown": "heat",
    "SwThermalSlowdown": "heat",
    "SwPowerCap": "power limit",
    "HwPowerBrakeSlowdown": "power brake",
    "HwSlowdown": "hardware slowdown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML shows it now; refused queries leave the default."""

    index: int
    uuid: str = ""
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    utilization_percent: float = 0.0
    temperature_c: float | None = None  # None, here and below: not known
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttled_by: str = ""
    capability: tuple[int, int] | None = None
    processes: tuple[int, ...] = ()  # pids of all that count
    mig: bool = False
    health: GpuHealth = field(default_factory=GpuHealth)


class Nvml:
    """The GPUs of this machine.

    Args:
        nvml: the module `pynvml` (initialised), or what behaves like it.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._known: dict[int, Gpu] = {}  # what never changes; a lost GPU does not say it any more
        self._events: dict[int, Any] = {}  # event sets by index; None: it announces nothing

    def count(self) -> int:
        """Raise the module's NVMLError where the driver does not answer."""
        return int(self._nvml.nvmlDeviceGetCount())

    def driver_version(self) -> str:
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def process_name(self, pid: int) -> str:
        return _text(self._ask("nvmlSystemGetProcessName", pid))

    def look(self, index: int) -> Gpu:
        """Query one GPU."""
        nvml = self._nvml
        known = self._known.get(index, Gpu(index=index))
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return Gpu(
                index=index,
                uuid=known.uuid,
                name=known.name,
                memory_total=known.memory_total,
                health=GpuHealth(unreachable=str(error)),
            )
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        degrees = self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
        mig = self._ask("nvmlDeviceGetMigMode", handle)
        gpu = Gpu(
            index=index,
            uuid=known.uuid or _text(self._ask("nvmlDeviceGetUUID", handle)),
            name=known.name or _text(self._ask("nvmlDeviceGetName", handle)),
            memory_total=known.memory_total if memory is None else int(memory.total),
            memory_used=0 if memory is None else int(memory.used),
            utilization_percent=0.0 if rates is None else float(rates.gpu),
            temperature_c=None if degrees is None else float(degrees),
            power_w=self._watts("nvmlDeviceGetPowerUsage", handle),
            power_limit_w=self._watts("nvmlDeviceGetEnforcedPowerLimit", handle),
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            max_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            throttled_by=self._throttled_by(handle),
            capability=known.capability or self._ask("nvmlDeviceGetCudaComputeCapability", handle),
            processes=self._pids(handle),
            mig=mig is not None and bool(mig[0]),
            health=self._health(handle),
        )
        if gpu.uuid:
            self._known[index] = gpu
        return gpu

    def xids(self, index: int) -> list[int]:
        """Return the numbers of the errors (XID) that a GPU has announced since the last call.

        The first call only has it announce them. An event set of its own says whose they are:
        a GPU that is lost does not.
        """
        nvml = self._nvml
        if index not in self._events:
            self._events[index] = self._register(index)
        event_set, found = self._events[index], list[int]()
        while event_set is not None and len(found) < _MAX_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(event_set, _EVENT_WAIT_MS)
            except nvml.NVMLError:  # as a rule NVML_ERROR_TIMEOUT: there is none
                break
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                found.append(int(event.eventData))
        return found

    def _register(self, index: int) -> Any:
        nvml = self._nvml
        try:
            event_set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            logger.info("GPU %d: its XID errors are not heard: %s", index, error)
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, event_set)
        except nvml.NVMLError as error:
            logger.info("GPU %d: its XID errors are not heard: %s", index, error)
            self._ask("nvmlEventSetFree", event_set)
            return None
        return event_set

    def _ask(self, name: str, *args: Any) -> Any:
        """Return the answer, or None where this GPU, driver or binding has none."""
        query = getattr(self._nvml, name, None)
        if query is None:
            return None
        try:
            return query(*args)
        except self._nvml.NVMLError:
            return None

    def _watts(self, name: str, handle: Any) -> float | None:
        milliwatts = self._ask(name, handle)
        return None if milliwatts is None else milliwatts / 1000

    def _throttled_by(self, handle: Any) -> str:
        # The binding has renamed them, and has both names for a while.
        for name, prefix in (
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlClocksEventReason"),
            ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlClocksThrottleReason"),
        ):
            bits = self._ask(name, handle)
            if bits is not None:
                words = [
                    word
                    for reason, word in _THROTTLING.items()
                    if bits & getattr(self._nvml, prefix + reason, 0)
                ]
                return ", ".join(dict.fromkeys(words))
        return ""

    def _pids(self, handle: Any) -> tuple[int, ...]:
        computing = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
        drawing = self._ask("nvmlDeviceGetGraphicsRunningProcesses", handle) or []
        big = [each for each in drawing if (each.usedGpuMemory or 0) > _BIG_BYTES]
        return tuple(sorted({int(each.pid) for each in [*computing, *big]}))

    def _health(self, handle: Any) -> GpuHealth:
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return GpuHealth(lost=True)
        volatile = nvml.NVML_VOLATILE_ECC
        corrected, uncorrected = (
            self._ask("nvmlDeviceGetTotalEccErrors", handle, kind, volatile)
            for kind in (
                nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
        )
        rows = self._ask("nvmlDeviceGetRemappedRows", handle)
        return GpuHealth(
            ecc_corrected=corrected,
            ecc_uncorrected=uncorrected,
            retired_pages=self._retired_pages(handle) if rows is None else None,
            pages_pending=rows is None
            and bool(self._ask("nvmlDeviceGetRetiredPagesPendingStatus", handle)),
            remapped_rows=None if rows is None else int(rows[0]) + int(rows[1]),
            rows_pending=rows is not None and bool(rows[2]),
            rows_failed=rows is not None and bool(rows[3]),
            recovery=self._recovery(handle),
        )

    def _retired_pages(self, handle: Any) -> int | None:
        counts = [
            self._ask("nvmlDeviceGetRetiredPages", handle, cause)
            for cause in (
                self._nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
                self._nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
            )
        ]
        known = [len(pages) for pages in counts if pages is not None]
        return sum(known) if known else None

    def _recovery(self, handle: Any) -> str:
        nvml = self._nvml
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = None if field is None else self._ask("nvmlDeviceGetFieldValues", handle, [field])
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return ""
        # The other actions concern links between GPUs, which a trainer alone can do without.
        known = {
            "GPU_RESET": "reset",
            "BUS_RESET": "reset",
            "DRAIN_AND_RESET": "drain_reset",
            "NODE_REBOOT": "reboot",
            "SYSTEM_REBOOT": "reboot",
        }
        asked = int(values[0].value.uiVal)
        return next(
            (
                word
                for name, word in known.items()
                if getattr(nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None) == asked
            ),
            "",
        )


def _text(value: Any) -> str:
    """NVML's texts are bytes in some versions."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
