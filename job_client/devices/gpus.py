"""Find the slots of this node: GPUs as NVML shows them, or shares of the CPU.

An old driver or a small card may refuse any query of NVML, and a GPU that has fallen off the bus
refuses all. So each query is made alone, and one that is refused costs only its own figure.
"""

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from job_client.errors import SetupError
from job_server.api.wire import Slot, SlotKind, SlotUsage
from pod_runtime.cgroups import usable_cores

logger = logging.getLogger(__name__)
T = TypeVar("T")

_FREE_SHARE = 0.05  # of a GPU's memory that the driver itself may hold
_FREE_BYTES = 1 << 30
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the kernel


class Inventory(Protocol):
    """The slots of a node."""

    kind: SlotKind

    def slots(self, ours: Collection[int]) -> tuple[Slot, ...]:
        """Return the slots as they are now; our pods run on `ours`."""
        ...

    def usage(self, ours: Collection[int]) -> tuple[SlotUsage, ...]:
        """Return the present use of each slot; our pods run on `ours`."""
        ...

    def obstacle(self, slot: int) -> str:
        """Return why a pod cannot start on `slot` now; "" when it can."""
        ...


class CpuSlots:
    """Shares of the CPU: as many as asked for, whatever the number of cores."""

    kind = SlotKind.CPU

    def __init__(self, count: int) -> None:
        self._count = count

    def slots(self, ours: Collection[int]) -> tuple[Slot, ...]:
        del ours  # others' use of the CPU is no obstacle
        return tuple(Slot(index=i, kind=SlotKind.CPU, name="cpu") for i in range(self._count))

    def usage(self, ours: Collection[int]) -> tuple[SlotUsage, ...]:
        del ours
        return tuple(SlotUsage(index=i) for i in range(self._count))

    def obstacle(self, slot: int) -> str:
        return "" if 0 <= slot < self._count else f"slot {slot} is not one of {self._count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML shows it now; refused queries leave the default."""

    index: int
    uuid: str = ""
    name: str = ""
    memory_total: int = 0
    memory_used: int = 0
    utilization_percent: float = 0.0
    temperature_c: float | None = None  # None: not known
    capability: tuple[int, int] | None = None  # None: not known
    strangers: tuple[str, ...] = ()  # processes that are not ours: "pid 7 (python)"
    processes: int = 0  # all that NVML lists on it
    sick: str = ""  # why no trainer should run on it


class GpuSlots:
    """The GPUs of this node, as far as `visible` goes.

    Args:
        nvml: the module `pynvml` (initialised), or what behaves like it.
        visible: value of CUDA_VISIBLE_DEVICES; None: all GPUs.
        is_ours: whether a process belongs to a pod of this client.
        same_pids: whether NVML's pids mean our processes. In a container they are those of the
            host, so a process on a GPU of one of our pods is taken for ours.
    """

    kind = SlotKind.GPU

    def __init__(
        self,
        nvml: Any,
        visible: str | None,
        is_ours: Callable[[int], bool],
        same_pids: bool | None = None,
    ) -> None:
        self._nvml = nvml
        self._is_ours = is_ours
        self._same_pids = _sees_all_pids() if same_pids is None else same_pids
        count = nvml.nvmlDeviceGetCount()
        uuids = [self._uuid(index) for index in range(count)]
        self.indices = visible_indices(visible, uuids)

    def slots(self, ours: Collection[int]) -> tuple[Slot, ...]:
        found = []
        for index in self.indices:
            gpu = self.look(index)
            reason = self._obstacle(gpu, held=index in ours)
            found.append(
                Slot(
                    index=index,
                    kind=SlotKind.GPU,
                    name=gpu.name,
                    uuid=gpu.uuid,
                    memory_bytes=gpu.memory_total,
                    usable=not reason,
                    reason=reason,
                )
            )
        return tuple(found)

    def usage(self, ours: Collection[int]) -> tuple[SlotUsage, ...]:
        found = []
        for index in self.indices:
            gpu = self.look(index)
            found.append(
                SlotUsage(
                    index=index,
                    utilization_percent=gpu.utilization_percent,
                    memory_used_bytes=gpu.memory_used,
                    temperature_c=gpu.temperature_c,
                    stranger=", ".join(self._strangers(gpu, held=index in ours)),
                )
            )
        return tuple(found)

    def obstacle(self, slot: int) -> str:
        if slot not in self.indices:
            shown = ",".join(map(str, self.indices))
            return f"GPU {slot} is not one of this client's ({shown or 'none'})"
        return self._obstacle(self.look(slot), held=False)

    def _strangers(self, gpu: Gpu, *, held: bool) -> tuple[str, ...]:
        return () if held and not self._same_pids else gpu.strangers

    def _obstacle(self, gpu: Gpu, *, held: bool) -> str:
        if gpu.sick:
            return f"GPU {gpu.index}: {gpu.sick}"
        strangers = self._strangers(gpu, held=held)
        if strangers:
            return f"GPU {gpu.index} is in use by {', '.join(strangers)}; end it, or leave it out"
        limit = max(_FREE_BYTES, _FREE_SHARE * gpu.memory_total)
        if not held and not gpu.processes and gpu.memory_used > limit:
            return (
                f"GPU {gpu.index} has {gpu.memory_used >> 20} MiB in use by processes that the "
                "driver does not show here (another container?)"
            )
        return ""

    def look(self, index: int) -> Gpu:
        """Query NVML about one GPU."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return Gpu(index=index, sick=f"the driver cannot reach it: {error}")
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        degrees = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        pids = self._pids(handle)
        return Gpu(
            index=index,
            uuid=_text(self._ask(nvml.nvmlDeviceGetUUID, handle)),
            name=_text(self._ask(nvml.nvmlDeviceGetName, handle)),
            memory_total=0 if memory is None else int(memory.total),
            memory_used=0 if memory is None else int(memory.used),
            utilization_percent=0.0 if rates is None else float(rates.gpu),
            temperature_c=None if degrees is None else float(degrees),
            capability=self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle),
            strangers=tuple(self._describe(pid) for pid in pids if self._is_stranger(pid)),
            processes=len(pids),
            sick=self._sickness(handle),
        )

    def driver_version(self) -> str:
        return _text(self._ask(self._nvml.nvmlSystemGetDriverVersion))

    def _ask(self, query: Callable[..., T], *args: Any) -> T | None:
        """Return the answer, or None where this GPU or driver has none."""
        try:
            return query(*args)
        except self._nvml.NVMLError:
            return None

    def _uuid(self, index: int) -> str:
        handle = self._ask(self._nvml.nvmlDeviceGetHandleByIndex, index)
        return "" if handle is None else _text(self._ask(self._nvml.nvmlDeviceGetUUID, handle))

    def _pids(self, handle: Any) -> list[int]:
        computing = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        drawing = self._ask(self._nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
        # A desktop (Xorg) holds a little of every GPU and is no obstacle: only processes that
        # compute count, and those that draw with much memory.
        big = [each for each in drawing if (each.usedGpuMemory or 0) > _FREE_BYTES]
        return sorted({int(each.pid) for each in [*computing, *big]})

    def _is_stranger(self, pid: int) -> bool:
        if not self._same_pids:
            return True
        # The driver may list a process for a moment longer than the kernel does.
        return Path(f"/proc/{pid}").exists() and not self._is_ours(pid)

    def _describe(self, pid: int) -> str:
        if not self._same_pids:
            return f"pid {pid} of the host"
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            name = _text(self._ask(self._nvml.nvmlSystemGetProcessName, pid)) or "?"
        return f"pid {pid} ({name})"

    def _sickness(self, handle: Any) -> str:
        """Return why no trainer should run here, and what would mend that; "": it is fit."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return "it has fallen off the bus; reboot the machine"
        action = self._recovery_action(handle)
        if action:
            return f"the driver asks for {action}"
        rows = self._ask(nvml.nvmlDeviceGetRemappedRows, handle)
        if rows is not None and rows[3]:
            return "its memory has more broken rows than it can replace; replace the card"
        mig = self._ask(nvml.nvmlDeviceGetMigMode, handle)
        if mig is not None and mig[0]:
            return "MIG is on, and slots are whole GPUs; switch it off, or use --cpu_slots"
        return ""

    def _recovery_action(self, handle: Any) -> str:
        nvml = self._nvml
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return ""
        values = self._ask(nvml.nvmlDeviceGetFieldValues, handle, [field])
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return ""
        # The other actions concern links between GPUs, which a trainer alone can do without.
        known = {
            nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset of this GPU (nvidia-smi -r)",
            nvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot of this machine",
            nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "a reset of this GPU once it is free",
        }
        return known.get(int(values[0].value.uiVal), "")


def visible_indices(visible: str | None, uuids: list[str]) -> tuple[int, ...]:
    """Return which GPUs CUDA_VISIBLE_DEVICES leaves, as CUDA reads it, numbered as NVML does.

    Numbers are taken in PCI order. As in CUDA, what follows the first unknown entry is not seen.

    Raises:
        SetupError: an entry is neither a number nor the beginning of one GPU's UUID.
    """
    if visible is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in ("", "-1", "NoDevFiles", "void", "none"):
            break
        if entry.isascii() and entry.isdigit():
            if int(entry) >= len(uuids):
                break
            index = int(entry)
        else:
            matches = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(entry)]
            if len(matches) != 1:
                raise SetupError(
                    f"CUDA_VISIBLE_DEVICES: {entry!r} is neither a GPU's number nor the beginning "
                    "of one GPU's UUID; see `nvidia-smi -L` (parts of a GPU, MIG, are not slots)"
                )
            index = matches[0]
        if index not in found:
            found.append(index)
    return tuple(found)


def find_inventory(
    cpu_slots: int | None, visible: str | None, is_ours: Callable[[int], bool]
) -> CpuSlots | GpuSlots:
    """Return this node's slots: `cpu_slots` where given, else the GPUs, else the usable cores."""
    if cpu_slots is not None:
        return CpuSlots(cpu_slots)
    gpus = open_nvml(visible, is_ours)
    if gpus is not None and gpus.indices:
        return gpus
    cores = usable_cores()
    if gpus is not None:
        logger.info("CUDA_VISIBLE_DEVICES=%s leaves no GPU: %d CPU slots", visible, cores)
    return CpuSlots(cores)


def open_nvml(visible: str | None, is_ours: Callable[[int], bool]) -> GpuSlots | None:
    """Return the GPUs, or None, with a line in the log that says why there are none."""
    try:
        import pynvml
    except ImportError:
        logger.info("no GPU slots: the Python module pynvml (nvidia-ml-py) is not installed")
        return None
    try:
        pynvml.nvmlInit()
        gpus = GpuSlots(pynvml, visible, is_ours)
    except pynvml.NVMLError as error:
        logger.info("no GPU slots: NVML: %s", error)
        return None
    return gpus


def _sees_all_pids() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _text(value: Any) -> str:
    """NVML's texts are bytes in some versions."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
