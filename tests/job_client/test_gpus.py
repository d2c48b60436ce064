"""GPU slots against an NVML that behaves, and against the real one where there is a GPU."""

import inspect
import logging
import os
import time

import pytest

from job_client.devices.gpus import CpuSlots, GpuSlots, find_inventory, open_nvml, visible_indices
from job_client.errors import SetupError
from job_server.api.wire import SlotKind, SlotUsage
from tests.nvml.pynvml import GIB, Machine, healthy, real
from tests.support import wait_until


def slots_of(nvml: Machine, *, ours: bool = False, same_pids: bool = True) -> GpuSlots:
    return GpuSlots(nvml, None, lambda _pid: ours, same_pids)


def test_a_free_gpu_is_a_slot_with_its_figures():
    inventory = slots_of(Machine(healthy()))
    (slot,) = inventory.slots(())
    assert (slot.kind, slot.index, slot.name, slot.uuid) == (
        SlotKind.GPU, 0, "NVIDIA H200", "GPU-0abc",
    )  # fmt: skip
    assert slot.memory_bytes == 141 * GIB
    assert slot.usable
    (usage,) = inventory.usage(())
    assert (usage.utilization_percent, usage.temperature_c) == (37.0, 41.0)
    assert (usage.power_w, usage.power_limit_w) == (350.0, 700.0)
    assert (usage.clock_mhz, usage.max_clock_mhz, usage.throttled_by) == (1755, 1980, "")
    assert (usage.ecc_corrected, usage.ecc_uncorrected, usage.remapped_rows) == (0, 0, 0)
    assert (usage.stranger, usage.faults) == ("", ())
    assert inventory.obstacle(0) == ""


def test_a_stranger_on_a_gpu_is_named_and_keeps_the_slot_from_use():
    me = os.getpid()
    inventory = slots_of(Machine(healthy(used=9 * GIB, pids=(me,))))
    (slot,) = inventory.slots(())
    assert not slot.usable
    assert f"in use by pid {me} (" in slot.reason
    assert inventory.obstacle(0) == slot.reason
    assert inventory.usage(())[0].stranger.startswith(f"pid {me} (")


def test_our_own_trainers_are_no_strangers():
    inventory = slots_of(Machine(healthy(used=9 * GIB, pids=(os.getpid(),))), ours=True)
    assert inventory.slots({0})[0].usable
    assert inventory.usage({0})[0].stranger == ""


def test_a_process_that_the_driver_still_lists_after_its_end_is_no_stranger():
    inventory = slots_of(Machine(healthy(used=0, pids=(2**22 + 1,))))
    assert inventory.slots(())[0].usable


def test_in_a_container_processes_on_a_gpu_that_we_hold_count_as_ours():
    inventory = slots_of(Machine(healthy(used=9 * GIB, pids=(4711,))), same_pids=False)
    assert inventory.slots({0})[0].usable
    assert "pid 4711 of the host" in inventory.slots(())[0].reason


def test_memory_in_use_by_nobody_that_is_shown_keeps_the_slot_from_use():
    inventory = slots_of(Machine(healthy(used=50 * GIB)))
    assert "51200 MiB in use by processes that the driver does not show" in inventory.obstacle(0)
    assert inventory.slots({0})[0].usable


def test_a_desktop_that_draws_is_no_obstacle_and_a_big_one_is():
    small, big = [os.getpid(), 300 << 20], [os.getpid(), 3 * GIB]
    assert slots_of(Machine(healthy(drawing=[small]))).obstacle(0) == ""
    assert "in use by" in slots_of(Machine(healthy(drawing=[big]))).obstacle(0)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ({"recovery": 1}, "the driver asks for a reset of this GPU"),
        ({"recovery": 2}, "a reboot of this machine"),
        ({"rows": [0, 9, 0, 1]}, "more broken rows than it can replace"),
        ({"mig": [1, 1]}, "MIG is on"),
        ({"lost": True}, "fallen off the bus"),
        ({"unreachable": True}, "the driver cannot reach it"),
    ],
)
def test_a_sick_gpu_is_registered_as_not_usable_and_its_neighbour_stays(trouble, reason):
    inventory = slots_of(Machine({**healthy(0), **trouble}, healthy(1)))
    first, second = inventory.slots(())
    assert not first.usable
    assert reason in first.reason
    assert second.usable


def test_an_old_card_that_refuses_every_query_is_still_a_slot():
    inventory = slots_of(Machine({"uuid": "GPU-0"}))
    (slot,) = inventory.slots(())
    assert slot.usable
    assert slot.memory_bytes == 0
    assert inventory.usage(())[0].temperature_c is None


def names(usage: SlotUsage) -> list[str]:
    return [fault.name for fault in usage.faults]


def test_an_xid_is_reported_of_the_gpu_that_has_announced_it_and_stays_known():
    nvml = Machine(healthy(0), healthy(1))
    inventory = slots_of(nvml)
    assert [names(each) for each in inventory.usage(())] == [[], []]
    nvml.add(gpu=1, xid=79)
    nvml.add(gpu=1, xid=31)
    first, second = inventory.usage(())
    assert (names(first), sorted(names(second))) == ([], ["xid_31", "xid_79"])
    nvml.end_faults()
    (again,) = [each for each in inventory.usage(())[1].faults if each.name == "xid_79"]
    assert "fallen off the bus" in again.text
    assert again.age_s > 0


def test_memory_errors_count_from_the_first_look_on():
    nvml = Machine(healthy(ecc_uncorrected=5))
    inventory = slots_of(nvml)
    assert names(inventory.usage(())[0]) == []
    nvml.add(gpu=0, set={"ecc_uncorrected": 7, "ecc_corrected": 90})
    (usage,) = inventory.usage(())
    assert usage.faults[0].text == "2 memory errors that ECC could not correct"
    assert (usage.ecc_corrected, usage.ecc_uncorrected) == (90, 7)


def test_a_gpu_that_is_lost_keeps_its_name_and_its_neighbour_its_figures():
    nvml = Machine(healthy(0), healthy(1))
    inventory = slots_of(nvml)
    before = inventory.slots(())
    nvml.add(gpu=0, lost=True)
    lost, other = inventory.slots(())
    assert (lost.name, lost.uuid, lost.memory_bytes) == ("NVIDIA H200", "GPU-0abc", 141 * GIB)
    assert "fallen off the bus" in lost.reason
    assert other == before[1]
    assert [names(each) for each in inventory.usage(())] == [["gpu_lost"], []]


@pytest.mark.parametrize("missing", [name for name in healthy() if name != "uuid"])
def test_any_query_may_be_refused_alone(missing):
    gpu = healthy(no_events=True)
    del gpu[missing]
    inventory = slots_of(Machine(gpu))
    assert inventory.slots(())[0].usable
    assert inventory.usage(())[0].faults == ()


def test_gpus_before_ampere_say_how_many_pages_are_retired():
    inventory = slots_of(Machine(healthy(rows=None, pages=[3, 2, 1])))
    (usage,) = inventory.usage(())
    assert (usage.retired_pages, usage.remapped_rows) == (5, None)
    assert names(usage) == ["pages_pending"]
    assert inventory.slots(())[0].usable


def test_what_keeps_the_clocks_low_is_said_and_an_idle_gpu_is_not_throttled():
    nvml = Machine(healthy(throttling=1))
    inventory = slots_of(nvml)
    assert inventory.usage(())[0].throttled_by == ""
    heat = nvml.nvmlClocksEventReasonHwThermalSlowdown | nvml.nvmlClocksEventReasonHwSlowdown
    nvml.add(gpu=0, set={"throttling": heat})
    assert inventory.usage(())[0].throttled_by == "heat, hardware slowdown"


def test_a_driver_that_hangs_about_one_gpu_holds_up_nobody_who_asks():
    nvml = Machine(healthy(0), healthy(1))
    inventory = slots_of(nvml)
    inventory.watch()
    nvml.add(gpu=0, hangs=True, set={"temperature": 99})
    wait_until(lambda: nvml.waiting > 0)
    began = time.monotonic()
    assert [each.temperature_c for each in inventory.usage(())] == [41.0, 41.0]
    assert time.monotonic() - began < 1.0
    nvml.end_faults()
    nvml.add(gpu=1, set={"temperature": 50})
    wait_until(lambda: inventory.usage(())[1].temperature_c == 50.0)


def test_the_fake_has_what_the_real_binding_has():
    """What a client asks of the fake the binding has as well, with as many arguments."""
    ours = {name for name in vars(Machine) if name.startswith("nvml")}
    for name in ours:
        theirs = inspect.signature(getattr(real(), name)).parameters.values()
        needed = [each for each in theirs if each.default is inspect.Parameter.empty]
        assert len(inspect.signature(getattr(Machine, name)).parameters) - 1 == len(needed), name


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


@pytest.mark.parametrize("error", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED"])
def test_without_nvml_there_are_cpu_slots_and_the_log_says_why(monkeypatch, caplog, error):
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{error}"))

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with caplog.at_level(logging.INFO):
        inventory = find_inventory(None, None, lambda _pid: False)
    assert inventory.kind is SlotKind.CPU
    assert "no GPU slots: NVML" in caplog.text


@pytest.mark.parametrize("error", ["LIB_RM_VERSION_MISMATCH", "UNKNOWN", "GPU_IS_LOST"])
def test_a_driver_that_fails_is_no_machine_without_gpus(monkeypatch, error):
    """As after an update of the driver: the node would train on its CPU, without a word."""
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{error}"))

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with pytest.raises(SetupError, match=r"the driver of the GPUs fails.*--cpu_slots"):
        find_inventory(None, None, lambda _pid: False)
    assert find_inventory(2, None, lambda _pid: False).kind is SlotKind.CPU


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
