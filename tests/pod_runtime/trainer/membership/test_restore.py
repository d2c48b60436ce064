"""Where a stage finds the state that was written as its job was paused; ranks are threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from job_server.api.wire import RestoreFrom
from pod_runtime.segment_header import SlotHeader, Stamp, make_geometry, pack_part
from pod_runtime.trainer.errors import StateError
from pod_runtime.trainer.membership.restore import Restored, StateRestore
from pod_runtime.trainer.progress.loop_status import LoopOrigin
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.storage import LocalStorage
from tests.pod_runtime.trainer.membership.test_terms import Group
from tests.pod_runtime.trainer.states import make_host_state, make_status

LOADS_ANY: Any = SimpleNamespace(load=lambda *_: None)
WANTED = RestoreFrom(stage=3, step=12, pods=(), path="", spare=True)


def store(path: Path, *states: tuple[int, int]) -> CheckpointStore:
    """Return the checkpoints below `path`, those of these (stage, step) among them."""
    made = CheckpointStore(LocalStorage(path))
    for stage, step in states:
        made.write(make_host_state(stage=stage, step=step, fill=float(step)))
    return made


def restored(
    wanted: list[RestoreFrom] | list[None],
    own: CheckpointStore | None,
    paths: tuple[Path, ...] = (),
) -> list[Restored | str]:
    """Return what each rank restores, or the error that it raises.

    Args:
        own: the path of rank 0.
        paths: what each rank sees at the path of the script's checkpoints.
    """
    group = Group(len(wanted))

    def of_rank(rank: int) -> Restored | str:
        try:
            return StateRestore(
                group=group.of_rank(rank),
                state=LOADS_ANY,
                rank=rank,
                world_size=len(wanted),
                stage=5,
                wanted=wanted[rank],
                fds=(),
                store=own if rank == 0 else None,
                fresh=make_status(),
                path=str(paths[rank]) if paths else "",
            ).run()
        except StateError as error:
            return str(error)

    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(of_rank, range(len(wanted))))


@pytest.mark.parametrize(
    ("in_path", "came_from", "is_checkpoint"),
    [
        pytest.param(None, (3, 12), False, id="the script has no path"),
        pytest.param([], (3, 12), False, id="nothing is there"),
        pytest.param([(3, 7), (2, 90)], (3, 12), False, id="what is there is older"),
        pytest.param([(4, 15)], (4, 15), False, id="what is there is newer"),
    ],
)
def test_a_run_folder_that_one_node_sees_is_read_there_unless_the_path_holds_newer(
    tmp_path, in_path, came_from, is_checkpoint
):
    store(tmp_path / "run", (3, 12))
    own = None if in_path is None else store(tmp_path / "checkpoint", *in_path)
    elsewhere = replace(WANTED, path=str(tmp_path / "elsewhere"))
    found = restored([elsewhere, replace(WANTED, path=str(tmp_path / "run")), elsewhere], own)
    for each in found:
        assert isinstance(each, Restored), each
        assert each.came_from == came_from
        assert each.from_checkpoint is is_checkpoint


@pytest.mark.parametrize(
    ("stored", "here", "is_finished", "is_of"),
    [
        pytest.param((0, ""), (0, ""), True, True, id="the only loop"),
        pytest.param((1, ""), (0, ""), False, False, id="a later loop's"),
        pytest.param((0, ""), (1, ""), True, False, id="an earlier loop's"),
        pytest.param((1, "b"), (0, "b"), False, True, id="what was before it is left out"),
        pytest.param((0, "b"), (1, "b"), True, True, id="several with one path"),
        pytest.param((1, "b"), (1, "c"), False, False, id="another's, as one is left out"),
        pytest.param((0, "a"), (0, "b"), True, False, id="the one before, which is complete"),
        pytest.param((0, "/x/a"), (0, "/y/a"), False, True, id="each node has its path"),
    ],
)
def test_which_loop_of_a_script_a_state_is_of(stored, here, is_finished, is_of):
    one, other = (LoopOrigin(number=number, checkpoint=path) for number, path in (stored, here))
    assert one.is_of(other, is_finished=is_finished) is is_of


@pytest.mark.parametrize("in_path", [[], [(2, 5)]], ids=["afresh", "from its own checkpoint"])
def test_a_loop_does_not_begin_from_what_was_written_of_a_later_one_when_the_job_was_paused(
    tmp_path, in_path
):
    made = make_host_state(stage=3, step=12)
    origin = LoopOrigin(number=1, checkpoint="later")
    store(tmp_path / "run").write(replace(made, status=replace(made.status, origin=origin)))
    wanted = replace(WANTED, path=str(tmp_path / "run"))
    ranks = [wanted, wanted] if in_path else [wanted]  # who begins afresh sends a real model
    for each in restored(ranks, store(tmp_path / "checkpoint", *in_path)):
        assert isinstance(each, Restored), each
        assert each.came_from == (in_path[0] if in_path else None)


def test_a_state_that_no_rank_sees_is_an_error_and_no_fresh_start(tmp_path):
    lost = replace(WANTED, path=str(tmp_path / "gone"))
    for each in restored([lost, lost], store(tmp_path / "checkpoint")):
        assert isinstance(each, str)
        assert each.startswith("no trainer sees step 12 of stage 3 in ")


@pytest.mark.parametrize("in_path", [[], [(2, 5)]], ids=["nothing", "an older checkpoint"])
def test_a_state_that_only_an_absent_node_sees_is_no_reason_to_begin_from_less(tmp_path, in_path):
    away = replace(WANTED, path=str(tmp_path / "its"), spare=False, away=True)
    for each in restored([away, away], store(tmp_path / "mine", *in_path)):
        assert each == (
            f"no trainer sees step 12 of stage 3 in {tmp_path / 'its'}, where another node has "
            f"written it"
        )


@pytest.mark.parametrize("newest", [(3, 12), (3, 13), (4, 2)])
def test_a_state_of_an_absent_node_is_found_in_a_folder_that_nodes_share(tmp_path, newest):
    away = replace(WANTED, path=str(tmp_path), spare=False, away=True)
    (each,) = restored([away], store(tmp_path, (3, 12), newest))
    assert isinstance(each, Restored), each
    assert each.came_from == newest


def test_a_fresh_start_does_not_pass_by_what_another_node_has_at_the_same_path(tmp_path):
    older, newer, none = (tmp_path / name for name in "abc")
    stores = {older: store(older, (2, 5)), newer: store(newer, (3, 7)), none: store(none)}
    for first, mine in ((older, "step 5 of stage 2"), (none, "none")):
        for error in restored([None, None], stores[first], (first, newer)):
            assert isinstance(error, str), error
            assert "rank 1 sees step 7 of stage 3, and rank 0" in error
            assert mine in error
    for second in (older, newer, none):
        for found in restored([None, None], stores[newer], (newer, second)):
            assert isinstance(found, Restored), found
            assert found.came_from == (3, 7)


def test_a_snapshot_that_cannot_be_read_is_an_error_and_no_fresh_start():
    geometry = make_geometry(1, 64, 64)
    header = SlotHeader(stamp=Stamp(stage=3, step=12), meta_bytes=64, data_bytes=64, digest="d")
    fd = os.memfd_create("test")
    os.pwrite(fd, geometry.pack(), 0)
    os.pwrite(fd, pack_part(header), geometry.header_offset(0, 0))  # and nothing behind it
    alone = StateRestore(
        group=Group(1).of_rank(0),
        state=LOADS_ANY,
        rank=0,
        world_size=1,
        stage=5,
        wanted=RestoreFrom(stage=3, step=12, pods=("a",)),
        fds=(fd,),
        store=None,
        fresh=make_status(),
    )
    with pytest.raises(StateError, match=r"^the snapshot of step 12 cannot be read any more"):
        alone.run()
    os.close(fd)


def test_a_checkpoint_of_the_script_that_was_damaged_gives_way_to_the_one_before(tmp_path):
    own = store(tmp_path / "checkpoint", (3, 7), (3, 12))
    damaged = tmp_path / "checkpoint" / "stage_00000003" / "step_0000000012" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    wanted = replace(WANTED, path=str(tmp_path / "checkpoint"), spare=False)
    for each in restored([wanted, wanted], own):
        assert isinstance(each, Restored), each
        assert (each.came_from, each.from_checkpoint) == ((3, 7), True)
