"""Find the slots of this node, and say how they are: GPUs, or shares of the CPU."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from job_client.devices.gpu_faults import (
    NO_ANSWER,
    GpuRecord,
    StuckCall,
    describe_xid,
    lasting,
    look,
    prevents,
    reported,
)
from job_client.devices.nvml import Gpu, Nvml
from job_client.errors import SetupError
from job_server.api.wire import Slot, SlotKind, SlotUsage
from pod_runtime.cgroups import usable_cores

logger = logging.getLogger(__name__)

READ_EVERY_S = 1.0
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

    def watch(self) -> None:
        pass  # there is nothing to be seen

    def obstacle(self, slot: int) -> str:
        return "" if 0 <= slot < self._count else f"slot {slot} is not one of {self._count}"


class GpuSlots:
    """The GPUs of this node, as far as `visible` goes.

    Until `watch` is called each question reads them anew. A GPU that has fallen off the bus may
    let the driver hang, so a client has a thread read them, and is told what that saw last.

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
        self._nvml = Nvml(nvml)
        self._is_ours = is_ours
        self._same_pids = _sees_all_pids() if same_pids is None else same_pids
        self._gpus: dict[int, Gpu] = {}  # as they were seen last
        self._records: dict[int, GpuRecord] = {}
        self._held: frozenset[int] = frozenset()  # slots of our pods, as we were told last
        self._reading: tuple[int, float] | None = None  # index, since when; None: between two
        self._stuck = StuckCall()
        self._thread: threading.Thread | None = None
        uuids = [self._nvml.look(index).uuid for index in range(self._nvml.count())]
        self.indices = visible_indices(visible, uuids)

    def watch(self) -> None:
        """Read the GPUs in a thread from now on, once a second."""
        self.read()
        self._thread = threading.Thread(target=self._keep_reading, name="gpus", daemon=True)
        self._thread.start()

    def _keep_reading(self) -> None:
        while True:
            time.sleep(READ_EVERY_S)
            try:
                self.read()
            except Exception:  # the figures grow old; the client goes on
                logger.exception("the GPUs could not be read")

    def read(self) -> None:
        """Look at each GPU, and hear what it has announced."""
        for index in self.indices:
            self._reading = (index, time.monotonic())
            try:
                gpu = self._nvml.look(index)
                xids = self._nvml.xids(index)
            finally:
                self._reading = None
            now = time.monotonic()
            for xid in xids:
                logger.warning("GPU %d: %s", index, describe_xid(xid))
            used = index in self._held or bool(gpu.processes)
            before = self._records.get(index)
            self._records[index] = look(before, gpu.health, xids, used=used, now=now)
            self._gpus[index] = gpu

    def _seen(self, index: int) -> Gpu:
        if self._thread is None:
            return self._nvml.look(index)
        return self._gpus[index]

    def slots(self, ours: Collection[int]) -> tuple[Slot, ...]:
        found = []
        for index in self.indices:
            gpu = self._seen(index)
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
        self._held = frozenset(ours)
        if self._thread is None:
            self.read()
        now = time.monotonic()
        hung = self._stuck.index_of(self._reading, now)
        found = []
        for index in self.indices:
            gpu, record = self._gpus[index], self._records[index]
            faults = reported(record, now)
            if index == hung:
                faults = (NO_ANSWER, *faults)
            found.append(
                SlotUsage(
                    index=index,
                    utilization_percent=gpu.utilization_percent,
                    memory_used_bytes=gpu.memory_used,
                    temperature_c=gpu.temperature_c,
                    stranger=", ".join(self._strangers(gpu, held=index in ours)),
                    power_w=gpu.power_w,
                    power_limit_w=gpu.power_limit_w,
                    clock_mhz=gpu.clock_mhz,
                    max_clock_mhz=gpu.max_clock_mhz,
                    throttled_by=gpu.throttled_by,
                    ecc_corrected=gpu.health.ecc_corrected,
                    ecc_uncorrected=gpu.health.ecc_uncorrected,
                    retired_pages=gpu.health.retired_pages,
                    remapped_rows=gpu.health.remapped_rows,
                    faults=faults,
                    idle_s=0.0 if index in ours else now - record.used_at,
                )
            )
        return tuple(found)

    def obstacle(self, slot: int) -> str:
        if slot not in self.indices:
            shown = ",".join(map(str, self.indices))
            return f"GPU {slot} is not one of this client's ({shown or 'none'})"
        return self._obstacle(self._nvml.look(slot), held=False)

    def look(self, index: int) -> Gpu:
        """Query NVML about one GPU."""
        return self._nvml.look(index)

    def driver_version(self) -> str:
        return self._nvml.driver_version()

    def _strangers(self, gpu: Gpu, *, held: bool) -> tuple[str, ...]:
        if held and not self._same_pids:
            return ()
        return tuple(self._describe(pid) for pid in gpu.processes if self._is_stranger(pid))

    def _obstacle(self, gpu: Gpu, *, held: bool) -> str:
        sick = next((each.text for each in lasting(gpu.health) if prevents(each)), "")
        if gpu.mig:
            sick = "MIG is on, and slots are whole GPUs; switch it off, or use --cpu_slots"
        if sick:
            return f"GPU {gpu.index}: {sick}"
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
            name = self._nvml.process_name(pid) or "?"
        return f"pid {pid} ({name})"


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
    """Return this node's slots: `cpu_slots` where given, else the GPUs, else the usable cores.

    Raises:
        SetupError: the driver of its GPUs fails, or CUDA_VISIBLE_DEVICES names none.
    """
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
    """Return the GPUs, or None, with a line in the log that says why there are none.

    Raises:
        SetupError: there is a driver, but it fails: the CPU would take the place of GPUs unnoticed.
    """
    try:
        import pynvml
    except ImportError:
        logger.info("no GPU slots: the Python module pynvml (nvidia-ml-py) is not installed")
        return None
    try:
        pynvml.nvmlInit()
        gpus = GpuSlots(pynvml, visible, is_ours)
    except pynvml.NVMLError as error:
        if error.value not in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            raise SetupError(
                f"the driver of the GPUs fails ({error}); see `nvidia-smi` (after an update of the "
                "driver a reboot helps), or train on the CPU: --cpu_slots N"
            ) from None
        logger.info("no GPU slots: NVML: %s", error)
        return None
    return gpus


def _sees_all_pids() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
    except OSError:
        return False
