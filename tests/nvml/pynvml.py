"""An NVML that behaves, for machines without a GPU: it follows a script of faults.

It has the names, types, constants and errors of the real binding, whose file it loads, and answers
the calls that a job client makes. A process that finds this folder first on its PYTHONPATH imports
it as `pynvml`; the script is the JSON file that `FAKE_NVML` names. Tests in one process make a
`Machine` themselves.

A script is `{"gpus": [...], "faults": [...]}`. A GPU is a table of what it has (see `healthy`);
what it lacks is NOT_SUPPORTED, as on an old card. A fault is `{"gpu": 0, ...}` with when it begins
(`at_s` after the start, or `when`: as soon as a file is there; else at once), when it ends
(`until_s`, `until`), and what it does: `xid` (an event, once), `set` (other values; null takes the
value away), `lost` (every call about the GPU fails), `hangs` (every call waits for its end).
"""

# ruff: noqa: N802

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

GIB = 1 << 30


def healthy(index: int = 0, *, used: int = 0, pids: Iterable[int] = (), **more: Any) -> Any:
    """Return an H200 without faults, on which these processes use so many bytes each."""
    return {
        "uuid": f"GPU-{index}abc",
        "name": "NVIDIA H200",
        "memory_total": 141 * GIB,
        "memory_used": used,
        "utilization": 37,
        "temperature": 41,
        "power_mw": 350_000,
        "power_limit_mw": 700_000,
        "clock_mhz": 1755,
        "max_clock_mhz": 1980,
        "throttling": 0,
        "capability": [9, 0],
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "rows": [0, 0, 0, 0],
        "recovery": 0,
        "mig": [0, 0],
        "computing": [[pid, used] for pid in pids],
        "drawing": [],
        **more,
    }


@cache
def real() -> ModuleType:
    """Return the module of nvidia-ml-py, whose library is never loaded."""
    for folder in sys.path:
        path = Path(folder or ".", "pynvml.py").resolve()
        if path.exists() and path != Path(__file__).resolve():
            spec = importlib.util.spec_from_file_location("real_pynvml", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["real_pynvml"] = module  # it finds its own error classes there
            spec.loader.exec_module(module)
            return module
    raise ImportError("nvidia-ml-py is not installed: there is no pynvml.py beside this one")


class Machine:
    """The functions of the binding, about the GPUs of a script; all else is the real binding's."""

    def __init__(
        self,
        *gpus: dict[str, Any],
        faults: Iterable[dict[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = list(gpus)
        self._faults = list(faults)
        self._clock = clock
        self._began = clock()
        self._sets: dict[int, tuple[set[int], list[int]]] = {}  # their GPUs, and the faults told
        self.waiting = 0  # calls that wait now

    def __getattr__(self, name: str) -> Any:
        return getattr(real(), name)

    def add(self, **fault: Any) -> None:
        """Add a fault to the script."""
        self._faults.append(fault)

    def end_faults(self) -> None:
        self._faults.clear()

    # --- the script

    def _lasts(self, fault: dict[str, Any]) -> bool:
        now = self._clock() - self._began
        begun = now >= fault.get("at_s", 0.0) and _is_there(fault.get("when"), else_=True)
        over = now >= fault.get("until_s", float("inf")) or _is_there(fault.get("until"))
        return begun and not over

    def _now(self, gpu: int) -> dict[str, Any]:
        """Return a GPU as it is now; fail, or wait, as its faults say."""
        state = dict(self._gpus[gpu])
        for fault in list(self._faults):
            if fault["gpu"] != gpu or not self._lasts(fault):
                continue
            self.waiting += 1
            while fault.get("hangs") and self._lasts(fault) and fault in self._faults:
                time.sleep(0.01)
            self.waiting -= 1
            if fault.get("lost"):
                raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
            state |= fault.get("set", {})
        if state.get("lost"):
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return state

    def _get(self, gpu: int, field: str) -> Any:
        value = self._now(gpu).get(field)
        if value is None:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return value

    # --- the calls

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlSystemGetProcessName(self, _pid: int) -> str:
        raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(self._gpus):
            raise self.NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        if self._gpus[index].get("unreachable"):
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetUUID(self, gpu: int) -> Any:
        return self._get(gpu, "uuid")

    def nvmlDeviceGetName(self, gpu: int) -> Any:
        return self._get(gpu, "name")

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        major, minor = self._get(gpu, "capability")
        return major, minor

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        total, used = self._get(gpu, "memory_total"), self._get(gpu, "memory_used")
        return self.c_nvmlMemory_t(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return self.c_nvmlUtilization_t(gpu=self._get(gpu, "utilization"), memory=0)

    def nvmlDeviceGetTemperature(self, gpu: int, _sensor: int) -> Any:
        return self._get(gpu, "temperature")

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> Any:
        return self._get(gpu, "power_mw")

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> Any:
        return self._get(gpu, "power_limit_mw")

    def nvmlDeviceGetClockInfo(self, gpu: int, _kind: int) -> Any:
        return self._get(gpu, "clock_mhz")

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, _kind: int) -> Any:
        return self._get(gpu, "max_clock_mhz")

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> Any:
        return self._get(gpu, "throttling")

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, error: int, _counter: int) -> Any:
        uncorrected = error == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return self._get(gpu, "ecc_uncorrected" if uncorrected else "ecc_corrected")

    def nvmlDeviceGetRetiredPages(self, gpu: int, cause: int) -> list[int]:
        double = cause == self.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        return list(range(self._get(gpu, "pages")[1 if double else 0]))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu: int) -> int:
        return int(self._get(gpu, "pages")[2])

    def nvmlDeviceGetRemappedRows(self, gpu: int) -> tuple[int, ...]:
        return tuple(self._get(gpu, "rows"))

    def nvmlDeviceGetMigMode(self, gpu: int) -> Any:
        return self._get(gpu, "mig")

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> Any:
        values = (self.c_nvmlFieldValue_t * len(fields))()
        state = self._now(gpu)
        for value, field in zip(values, fields, strict=True):
            value.fieldId = field
            known = field == self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION and "recovery" in state
            value.nvmlReturn = self.NVML_SUCCESS if known else self.NVML_ERROR_NOT_SUPPORTED
            value.value.uiVal = state["recovery"] if known else 0
        return values

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: int) -> list[Any]:
        return [self._process(*each) for each in self._get(gpu, "computing")]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: int) -> list[Any]:
        return [self._process(*each) for each in self._get(gpu, "drawing")]

    def _process(self, pid: int, used: int) -> Any:
        return self.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": used})

    def nvmlDeviceGetSupportedEventTypes(self, gpu: int) -> int:
        self._now(gpu)
        return int(self.nvmlEventTypeXidCriticalError)

    def nvmlEventSetCreate(self) -> int:
        self._sets[len(self._sets) + 1] = (set(), [])
        return len(self._sets)

    def nvmlDeviceRegisterEvents(self, gpu: int, _types: int, event_set: int) -> None:
        if self._now(gpu).get("no_events"):
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        self._sets[event_set][0].add(gpu)

    def nvmlEventSetWait_v2(self, event_set: int, timeout_ms: int) -> Any:
        gpus, told = self._sets[event_set]
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            for number, fault in enumerate(list(self._faults)):
                new = fault["gpu"] in gpus and number not in told
                if "xid" in fault and new and self._lasts(fault):
                    told.append(number)
                    return self.nvmlFriendlyObject(
                        {
                            "device": fault["gpu"],
                            "eventType": self.nvmlEventTypeXidCriticalError,
                            "eventData": fault["xid"],
                        }
                    )
            if time.monotonic() >= deadline:
                raise self.NVMLError(self.NVML_ERROR_TIMEOUT)
            time.sleep(0.001)

    def nvmlEventSetFree(self, event_set: int) -> None:
        self._sets[event_set] = (set(), [])


def _is_there(path: str | None, *, else_: bool = False) -> bool:
    return else_ if path is None else Path(path).exists()


@cache
def _scripted() -> Machine:
    script = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return Machine(*script["gpus"], faults=script.get("faults", ()))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_scripted(), name)
