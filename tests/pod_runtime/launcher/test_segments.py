"""What a launcher finds with the shims of its node: real shims, real segments."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from job_server.api.wire import Order, RestoreFrom, SnapshotRef, StagePlan, Way
from pod_runtime import shim_wire
from pod_runtime.channel_wire import SegmentMade
from pod_runtime.launcher import segments
from pod_runtime.launcher.channel import close_all
from pod_runtime.launcher.segments import NodeSegments
from pod_runtime.segment_header import (
    Geometry,
    SlotHeader,
    Stamp,
    make_geometry,
    pack_part,
    read_newest,
)
from pod_runtime.shim_wire import ShimError
from tests.pod_runtime.fake_job_server import make_part
from tests.support import wait_until

DIGEST = "d" * 64
PLAN = StagePlan(
    job_id="job", stage=2, flag=0, way=Way.REPLACE, order=Order.GO, master="127.0.0.1:9000",
    max_trainers=3,
    pods=tuple(make_part(f"pod_{rank}", rank, (rank,)) for rank in range(3)),
)  # fmt: skip


def ref(step: int, serial: int = 0) -> SnapshotRef:
    return SnapshotRef(stage=2, step=step, digest=DIGEST, serial=serial)


def source(step: int, serial: int = 0) -> RestoreFrom:
    return RestoreFrom(
        stage=2, step=step, serial=serial, pods=("pod_0", "pod_1"), local_on_all_nodes=True
    )


class Memory:
    """A segment of one writer, as far as its headers go."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test")
        self._geometry: Geometry = make_geometry(1, 64, 64)
        os.truncate(self.fd, self._geometry.total_bytes)
        os.pwrite(self.fd, self._geometry.pack(), 0)

    def put(self, step: int, serial: int = 0, slot: int = 0) -> None:
        header = SlotHeader(
            stamp=Stamp(stage=2, step=step, serial=serial),
            meta_bytes=64,
            data_bytes=64,
            digest=DIGEST,
        )
        os.pwrite(self.fd, pack_part(header), self._geometry.header_offset(slot, 0))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[NodeSegments]]:
    """Three pods of one node, each with a shim."""
    shims = []
    for rank in range(3):
        folder = tmp_path / f"pod_{rank}"
        folder.mkdir()
        command = [sys.executable, "-m", "pod_runtime.shim", "--pod_dir", str(folder), "--"]
        shims.append(subprocess.Popen([*command, "sleep", "600"], cwd=tmp_path))
    for rank in range(3):
        wait_until(lambda rank=rank: answers(tmp_path / f"pod_{rank}"))  # type: ignore[misc]
    yield [NodeSegments(f"pod_{rank}", tmp_path / f"pod_{rank}") for rank in range(3)]
    for rank, shim in enumerate(shims):
        for request in ({"op": "release"}, {"op": "kill"}):
            with contextlib.suppress(ShimError):  # it has gone: it held nothing
                shim_wire.request(tmp_path / f"pod_{rank}", request)
        shim.wait(120)


@pytest.fixture
def memory() -> Iterator[Callable[[], Memory]]:
    made: list[Memory] = []

    def make() -> Memory:
        made.append(Memory())
        return made[-1]

    yield make
    close_all(each.fd for each in made)


def answers(folder: Path) -> bool:
    try:
        shim_wire.request(folder, {"op": "status"})
    except ShimError:
        return False
    return True


def restored(pod: NodeSegments, wanted: RestoreFrom) -> list[Stamp]:
    """Return what the descriptors hold that a trainer would be given."""
    return stamps(pod, dataclasses.replace(PLAN, stage=3, restore_from=wanted))


def stamps(pod: NodeSegments, plan: StagePlan) -> list[Stamp]:
    fds = pod.for_restore(plan)
    headers = [read_newest(fd) for fd in fds]
    close_all(fds)
    return [header.stamp for header in headers if header is not None]


def test_trainers_that_are_prepared_are_shown_the_newest_state_of_their_node(pods, memory):
    plan = dataclasses.replace(PLAN, stage=4, order=Order.PREPARE)
    assert pods[0].for_restore(plan) == (), "no stage has made a step yet"
    first = memory()
    first.put(7)
    pods[0].keep(PLAN, made(first), first.fd)  # its own shim's, and the next pod's
    for pod in pods:
        assert stamps(pod, plan) == [Stamp(stage=2, step=7)]
    begins = dataclasses.replace(plan, order=Order.START)
    assert pods[0].for_restore(begins) == (), "from a checkpoint, or afresh"


def made(memory: Memory) -> SegmentMade:
    return SegmentMade(stage=2, size_bytes=os.fstat(memory.fd).st_size, digest=DIGEST)


def test_what_a_cut_puts_away_is_at_hand_without_asking_again(pods, memory, tmp_path):
    first = memory()
    pods[0].keep(PLAN, made(first), first.fd)  # its own shim's, and the next pod's
    for pod in pods:
        pod.have_at_hand(PLAN)
    first.put(7)  # parked
    for folder in ("pod_0", "pod_1"):
        shim_wire.request(tmp_path / folder, {"op": "drop", "below_stage": 9})
    assert [pod.confirm(ref(7)) for pod in pods] == [ref(7), ref(7), None]
    assert [restored(pod, source(7)) for pod in pods] == [[Stamp(stage=2, step=7)]] * 3
    for pod in pods:
        pod.let_go()
    assert [pod.confirm(ref(7)) for pod in pods] == [None] * 3
    assert [restored(pod, source(7)) for pod in pods] == [[]] * 3


def test_a_segment_that_was_made_since_is_found_by_asking(pods, memory):
    first, second = memory(), memory()
    first.put(7)
    pods[0].keep(PLAN, made(first), first.fd)
    for pod in pods:
        pod.have_at_hand(PLAN)
    second.put(7, serial=1)  # the state after an epoch, in a larger segment
    pods[0].keep(PLAN, made(second), second.fd)
    assert [pod.confirm(ref(7, 1)) for pod in pods] == [ref(7, 1), ref(7, 1), None]
    exactly = [Stamp(stage=2, step=7, serial=1)]
    assert [restored(pod, source(7, 1)) for pod in pods] == [exactly] * 3
    for pod in pods:
        pod.let_go()


def test_a_start_fails_where_the_shim_that_has_the_state_gives_no_answer(pods, monkeypatch):
    """It began at the last checkpoint, or at step 0, and the shim let go of the state."""
    wanted = dataclasses.replace(source(7), local_on_all_nodes=False)
    plan = dataclasses.replace(PLAN, stage=3, order=Order.START, restore_from=wanted)
    assert pods[0].for_restore(plan) == (), "the shims answer that they have it no longer"

    def gives_no_answer(*_: object) -> None:
        raise ShimError("pod_0: get: timed out") from TimeoutError("timed out")

    monkeypatch.setattr(segments, "request", gives_no_answer)
    with pytest.raises(ShimError, match="has the state of step 7 in memory, does not answer"):
        pods[0].for_restore(plan)
    takes_over = dataclasses.replace(plan, order=Order.GO, way=Way.REPLACE)  # as a standby does
    with pytest.raises(ShimError, match="has the state of step 7 in memory, does not answer"):
        pods[0].for_restore(takes_over)
    stays = dataclasses.replace(takes_over, way=Way.JOIN)
    assert pods[0].for_restore(stays) == (), "those that stay have it"
    away = dataclasses.replace(PLAN.pods[1], node_id="another")
    of_others = dataclasses.replace(plan, pods=(PLAN.pods[0], away, PLAN.pods[2]))
    assert pods[0].for_restore(of_others) == (), "another node sends it"


def test_an_older_state_of_the_own_shim_does_not_hide_the_one_that_is_wanted(
    pods, memory, tmp_path
):
    first, second = memory(), memory()
    first.put(6)
    second.put(7)
    for folder, each in (("pod_1", first), ("pod_0", second)):
        segment = {"pod_id": "pod_0", "stage": 2, "size_bytes": 1, "digest": DIGEST}
        shim_wire.request(tmp_path / folder, {"op": "put", "segment": segment}, (each.fd,))
    assert restored(pods[1], source(7)) == [Stamp(stage=2, step=7)]
    whatever = dataclasses.replace(source(7), local_on_all_nodes=False)
    assert restored(pods[1], whatever) == [Stamp(stage=2, step=6)]
