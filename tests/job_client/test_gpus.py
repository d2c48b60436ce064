"""GPU slots against an NVML that behaves, and against the real one where there is a GPU."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest

from job_client.devices.gpus import CpuSlots, GpuSlots, find_inventory, open_nvml, visible_indices
from job_client.errors import SetupError
from job_server.api.wire import SlotKind

GIB = 1 << 30


class FakeNvml:
    """NVML for a machine whose GPUs are dictionaries; what one lacks is refused, as on old ones."""

    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVML_GPU_RECOVERY_ACTION_GPU_RESET = 1
    NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 2
    NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 4

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = list(gpus)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        gpu = self.gpus[index]
        if gpu.get("unreachable"):
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def nvmlDeviceGetFieldValues(self, gpu: dict[str, Any], _fields: list[int]) -> list[Any]:  # noqa: N802
        value = SimpleNamespace(uiVal=self._get(gpu, "recovery"))
        return [SimpleNamespace(nvmlReturn=0, value=value)]

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"

    def nvmlSystemGetProcessName(self, _pid: int) -> str:  # noqa: N802
        raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)

    def __getattr__(self, name: str) -> Any:
        fields = {
            "nvmlDeviceGetUUID": "uuid",
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetMemoryInfo": "memory",
            "nvmlDeviceGetUtilizationRates": "rates",
            "nvmlDeviceGetTemperature": "temperature",
            "nvmlDeviceGetCudaComputeCapability": "capability",
            "nvmlDeviceGetComputeRunningProcesses": "computing",
            "nvmlDeviceGetGraphicsRunningProcesses": "drawing",
            "nvmlDeviceGetRemappedRows": "rows",
            "nvmlDeviceGetMigMode": "mig",
        }
        if name not in fields:
            raise AttributeError(name)
        return lambda gpu, *_args: self._get(gpu, fields[name])

    def _get(self, gpu: dict[str, Any], field: str) -> Any:
        if gpu.get("lost"):
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if field not in gpu:
            raise self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return gpu[field]


def gpu(index: int = 0, used: int = 0, pids: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-{index}abc",
        "name": "NVIDIA H200",
        "memory": SimpleNamespace(total=141 * GIB, used=used, free=141 * GIB - used),
        "rates": SimpleNamespace(gpu=37, memory=5),
        "temperature": 41,
        "computing": [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid in pids],
        "drawing": [],
        **more,
    }


def slots_of(nvml: FakeNvml, *, ours: bool = False, same_pids: bool = True) -> GpuSlots:
    return GpuSlots(nvml, None, lambda _pid: ours, same_pids)


def test_a_free_gpu_is_a_slot_with_its_figures():
    inventory = slots_of(FakeNvml(gpu()))
    (slot,) = inventory.slots(())
    assert (slot.kind, slot.index, slot.name, slot.uuid) == (
        SlotKind.GPU, 0, "NVIDIA H200", "GPU-0abc",
    )  # fmt: skip
    assert slot.memory_bytes == 141 * GIB
    assert slot.usable
    (usage,) = inventory.usage(())
    assert (usage.utilization_percent, usage.temperature_c) == (37.0, 41.0)
    assert usage.stranger == ""
    assert inventory.obstacle(0) == ""


def test_a_stranger_on_a_gpu_is_named_and_keeps_the_slot_from_use():
    me = os.getpid()
    inventory = slots_of(FakeNvml(gpu(used=9 * GIB, pids=(me,))))
    (slot,) = inventory.slots(())
    assert not slot.usable
    assert f"in use by pid {me} (" in slot.reason
    assert inventory.obstacle(0) == slot.reason
    assert inventory.usage(())[0].stranger.startswith(f"pid {me} (")


def test_our_own_trainers_are_no_strangers():
    inventory = slots_of(FakeNvml(gpu(used=9 * GIB, pids=(os.getpid(),))), ours=True)
    assert inventory.slots({0})[0].usable
    assert inventory.usage({0})[0].stranger == ""


def test_a_process_that_the_driver_still_lists_after_its_end_is_no_stranger():
    inventory = slots_of(FakeNvml(gpu(used=0, pids=(2**22 + 1,))))
    assert inventory.slots(())[0].usable


def test_in_a_container_processes_on_a_gpu_that_we_hold_count_as_ours():
    inventory = slots_of(FakeNvml(gpu(used=9 * GIB, pids=(4711,))), same_pids=False)
    assert inventory.slots({0})[0].usable
    assert "pid 4711 of the host" in inventory.slots(())[0].reason


def test_memory_in_use_by_nobody_that_is_shown_keeps_the_slot_from_use():
    inventory = slots_of(FakeNvml(gpu(used=50 * GIB)))
    assert "51200 MiB in use by processes that the driver does not show" in inventory.obstacle(0)
    assert inventory.slots({0})[0].usable


def test_a_desktop_that_draws_is_no_obstacle_and_a_big_one_is():
    small = SimpleNamespace(pid=os.getpid(), usedGpuMemory=300 << 20)
    big = SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB)
    assert slots_of(FakeNvml(gpu(drawing=[small]))).obstacle(0) == ""
    assert "in use by" in slots_of(FakeNvml(gpu(drawing=[big]))).obstacle(0)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"recovery": 1}, "the driver asks for a reset of this GPU"),
        ({"recovery": 2}, "a reboot of this machine"),
        ({"rows": (0, 9, 0, 1)}, "more broken rows than it can replace"),
        ({"mig": [1, 1]}, "MIG is on"),
        ({"lost": True}, "fallen off the bus"),
        ({"unreachable": True}, "the driver cannot reach it"),
    ],
)
def test_a_sick_gpu_is_registered_as_not_usable_and_its_neighbour_stays(trouble, reason):
    inventory = slots_of(FakeNvml({**gpu(0), **trouble}, gpu(1)))
    first, second = inventory.slots(())
    assert not first.usable
    assert reason in first.reason
    assert second.usable


def test_an_old_card_that_refuses_every_query_is_still_a_slot():
    inventory = slots_of(FakeNvml({"uuid": "GPU-0"}))
    (slot,) = inventory.slots(())
    assert slot.usable
    assert slot.memory_bytes == 0
    assert inventory.usage(())[0].temperature_c is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2,0", (2, 0)),
        ("0,-1,2", (0,)),
        ("1,9,2", (1,)),
        ("GPU-1", (1,)),
        ("1,1", (1,)),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible, expected):
    assert visible_indices(visible, ["GPU-0abc", "GPU-1abc", "GPU-2abc"]) == expected


@pytest.mark.parametrize("visible", ["GPU-", "GPU-9", "MIG-1234", "first"])
def test_a_device_that_names_no_one_gpu_is_refused(visible):
    with pytest.raises(SetupError, match="CUDA_VISIBLE_DEVICES"):
        visible_indices(visible, ["GPU-0abc", "GPU-1abc"])


def test_cpu_slots_are_as_many_as_were_asked_for():
    inventory = find_inventory(3, None, lambda _pid: False)
    assert isinstance(inventory, CpuSlots)
    assert [slot.index for slot in inventory.slots(())] == [0, 1, 2]
    assert inventory.obstacle(3) == "slot 3 is not one of 3"


def test_without_nvml_there_are_cpu_slots_and_the_log_says_why(monkeypatch, caplog):
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with caplog.at_level(logging.INFO):
        inventory = find_inventory(None, None, lambda _pid: False)
    assert inventory.kind is SlotKind.CPU
    assert "no GPU slots: NVML" in caplog.text


@pytest.mark.gpu
def test_the_gpus_of_this_machine_can_be_read():
    inventory = open_nvml(None, lambda _pid: False)
    if inventory is None or not inventory.indices:
        pytest.skip("no NVIDIA GPU")
    look = inventory.look(inventory.indices[0])
    assert look.name
    assert look.uuid.startswith("GPU-")
    assert look.memory_total > GIB
    assert look.capability is not None
    assert inventory.driver_version()
    assert len(inventory.usage(())) == len(inventory.indices)
