"""What a member of a stage agrees on with its peers, over a group that the test plays."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pod_runtime.channel_wire import PEER_LOST_EXIT_CODE, Cut
from pod_runtime.trainer.errors import LinkError, PeerLost, StageChanged
from pod_runtime.trainer.membership.member import StageMember
from pod_runtime.trainer.progress.agreement import AgreedCut, SnapshotRequest


class Group:
    """A group, and a step, whose peers contribute what the test says, call by call."""

    def __init__(self, *peers: list[float]) -> None:
        self.peers = list(peers)
        self.exchanged: list[tuple[list[float], bool]] = []

    def exchange(self, header: list[float], contribute: bool, of: Any = ()) -> list[float]:
        self.exchanged.append((list(header), contribute))
        return [mine + theirs for mine, theirs in zip(header, self.peers.pop(0), strict=True)]

    def all_reduce(self, values: Any) -> None:
        values += np.array(self.peers.pop(0))

    def broadcast(self, data: Any, source: int) -> None:
        assert source == 0


class StateManager:
    def __init__(self) -> None:
        self.parked: list[tuple[int, bool, bool]] = []
        self.wants_renewal = False
        self.writing: Iterator[bool] = iter([True, True, False])
        self.failures = [False]
        self.started = 0
        self.is_kept = True
        self.start: Any = None  # what a trainer that joins goes on as

    def snapshot_request(self) -> SnapshotRequest:
        return SnapshotRequest()

    request_after_epoch = snapshot_request

    def park(self, cut: AgreedCut, renew: bool) -> Any:
        self.parked.append((cut.id, cut.durable, renew))
        return self.start

    @property
    def is_writing(self) -> bool:
        return next(self.writing)

    @property
    def has_failed(self) -> bool:
        return self.failures.pop(0) if len(self.failures) > 1 else self.failures[0]

    def start_final(self) -> None:
        self.started += 1


class Channel:
    def __init__(self, cut: Cut | None = None) -> None:
        self.cut = cut

    def poll(self) -> None:
        pass


def make(group: Group, link: Channel | None = None) -> tuple[StageMember, StateManager]:
    state_manager = StateManager()
    made: Any = StageMember(group, group, state_manager, link, rank=0, world_size=2)  # type: ignore[arg-type]
    return made, state_manager


UNHASHED = [0.0] * 10
COMMITS = [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, *UNHASHED]
VOID = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, *UNHASHED]
CUT_AND_VOID = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, *UNHASHED]


def test_ranks_see_that_one_of_them_has_another_value():
    member, _state_manager = make(Group([0.0], [1.0]))
    assert member.agree(0.1) == 0.1
    assert member.agree(0.1) is None


def test_a_peer_that_waits_for_data_is_waited_for_with_the_same_gradients():
    group = Group(VOID, VOID, COMMITS)
    member, state_manager = make(group)
    assert member.exchange(5).samples == 8
    assert group.exchanged == [([0.0, 0.0, 5.0, 0.0, 0.0, 0.0, *UNHASHED], True)] * 3
    assert state_manager.parked == []


def test_a_void_step_under_a_cut_parks_before_it_and_is_exchanged_again_afterwards():
    member, state_manager = make(Group(CUT_AND_VOID, [0, 0, 0, 8, 1, 0, 1], COMMITS), Channel())
    verdict = member.exchange(5)
    assert state_manager.parked == [
        (7, True, True)
    ]  # the peer's newest cut, which we had not heard of
    assert (verdict.samples, verdict.void) == (8, False)


def test_a_cut_that_all_ranks_know_to_be_off_by_now_parks_nobody():
    member, state_manager = make(Group(CUT_AND_VOID, [0, 0, 0, 0, 0, 0, 0], COMMITS), Channel())
    member.exchange(5)
    assert state_manager.parked == []


def test_a_rank_without_data_shows_itself_before_its_peers_run_into_the_time_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pod_runtime.trainer.membership.member.time.monotonic", lambda: now[0])
    group = Group(COMMITS, COMMITS)
    member, _state_manager = make(group)
    for seconds in (0, 4, 4.5, 5):  # silent, silent, shows itself, silent again
        now[0] += seconds
        member.wait_for_data()
    assert group.exchanged == [(VOID, False)]
    member.have_data()
    now[0] += 100
    member.wait_for_data()
    assert len(group.exchanged) == 1


def test_a_cut_while_data_do_not_come_is_acted_on_at_once():
    member, state_manager = make(Group(COMMITS, [0, 0, 0, 0, 0, 0, 0]), Channel(Cut(id=4)))
    member.wait_for_data()
    assert state_manager.parked == [(4, False, False)]


def test_a_cut_for_those_who_stay_waits_for_data_and_for_the_step():
    group = Group(VOID, [*VOID[:5], 1.0, *UNHASHED], [*COMMITS[:5], 1.0, *UNHASHED])
    member, state_manager = make(group, Channel(Cut(id=4, patient=True)))
    member.wait_for_data()
    assert (group.exchanged, state_manager.parked) == ([], [])
    verdict = member.exchange(5)
    assert group.exchanged == [([0.0, 0.0, 5.0, 0.0, 0.0, 1.0, *UNHASHED], True)] * 3
    assert state_manager.parked == [], "it parks once the step is committed"
    assert (verdict.cut, verdict.void) == (True, False)


def test_another_cut_does_not_wait_because_a_peer_stays():
    patient = Channel(Cut(id=4, patient=True))
    member, state_manager = make(Group(CUT_AND_VOID, [0, 0, 0, 8, 1, 0, 0], COMMITS), patient)
    member.exchange(5)
    assert state_manager.parked == [(7, True, False)]


def test_who_stays_goes_on_in_the_next_stage_from_where_it_has_parked():
    member, state_manager = make(
        Group([1.0], [0, 0, 0, 3, 0, 0, 0]), Channel(Cut(id=4, patient=True))
    )
    state_manager.start = object()
    with pytest.raises(StageChanged) as caught:
        member.meet(may_move=True)
    assert caught.value.start is state_manager.start


def test_an_evaluation_that_new_trainers_would_not_come_by_is_not_left_for_the_next_stage():
    channel = Channel(Cut(id=4, patient=True))
    member, state_manager = make(Group([0.0], [0.0], [0, 0, 0, 0, 0, 0, 0]), channel)
    member.meet(may_move=False)
    assert state_manager.parked == []
    channel.cut = Cut(id=5)
    member.meet(may_move=False)
    assert state_manager.parked == [(5, False, False)]


def test_ranks_meet_between_steps():
    member, state_manager = make(Group([0.0], [1.0], [0, 0, 0, 3, 0, 0, 0]), Channel())
    member.meet(may_move=True)
    assert state_manager.parked == []
    member.meet(may_move=True)
    assert state_manager.parked == [(2, False, False)]


def test_a_trainer_without_launcher_never_parks():
    member, _state_manager = make(Group(CUT_AND_VOID, [0, 0, 0, 8, 1, 0, 1]))
    with pytest.raises(LinkError, match="no launcher"):
        member.exchange(5)


def test_no_rank_is_done_before_the_final_checkpoint_is_written(monkeypatch, caplog):
    monkeypatch.setattr("pod_runtime.trainer.membership.member.RETRY_S", 0.0)
    still, no, yes, waited, met = [1.0], [0.0], [1.0], [0.0], [0.0]
    member, state_manager = make(Group(still, still, no, no))
    member.write_final()
    assert (state_manager.started, caplog.text) == (1, "")

    # Rank 0 is the peer: it has failed, is waited with, and tries again.
    member, state_manager = make(Group(no, yes, waited, met, no, no))
    state_manager.writing = iter([False, False])
    member.write_final()
    assert (state_manager.started, caplog.text) == (2, "")

    member, state_manager = make(Group(no, no, waited, met, no, no))
    state_manager.writing, state_manager.failures = iter([False, False]), [True, True, False]
    member.write_final()
    assert state_manager.started == 2
    assert "its last checkpoint is not written (see above); make room or mend the" in caplog.text


@pytest.mark.parametrize("patient", [False, True])
def test_a_cut_does_not_wait_for_the_final_checkpoint_of_a_full_disk(patient):
    written, failed, waited, met, off = [0.0], [0.0], [0.0], [0.0], [0.0] * 7
    channel = Channel(Cut(id=4, patient=patient))
    member, state_manager = make(Group(written, failed, waited, met, off, written, failed), channel)
    state_manager.writing, state_manager.failures = iter([False, False]), [True, True, False]
    member.write_final()
    assert (state_manager.parked, state_manager.started) == ([(4, False, False)], 2)

    member, state_manager = make(Group(written, failed, waited, met, off), channel)
    state_manager.writing, state_manager.failures, state_manager.start = (
        iter([False]),
        [True],
        object(),
    )
    with pytest.raises(StageChanged) as caught:
        member.write_final()
    assert caught.value.start is state_manager.start


def test_who_waits_for_the_final_checkpoint_ends_when_it_is_told_to():
    member, state_manager = make(Group([1.0]))
    state_manager.is_kept = False

    def writing() -> Iterator[bool]:
        member.end_soon()
        yield True

    state_manager.writing = writing()
    with pytest.raises(PeerLost, match="told to end"):
        member.write_final()


def test_a_lost_peer_outside_edl_is_an_exception():
    member, _state_manager = make(Group())
    with pytest.raises(PeerLost, match="gone"):
        member.end_after_peer_lost(PeerLost("gone"), state_is_committed=True)


def test_ranks_agree_on_the_end_of_an_epoch_and_on_what_is_put_away_then():
    member, _state_manager = make(Group([0.0, 1.0, 0.0], [1.0, 0.0, 1.0]))
    assert member.end_epoch(stop=False) == (False, SnapshotRequest(snapshot=1.0))
    assert member.end_epoch(stop=False) == (True, SnapshotRequest(renew=True))


def test_a_victim_ends_as_one_whatever_the_script_has_put_in_the_place_of_its_output():
    """Else the script is blamed for the crash of a peer."""
    code = (
        "import sys\n"
        "from pod_runtime.trainer.membership.member import exit_as_victim\n"
        "print('kept', file=sys.stderr)\n"
        "sys.stdout = None\n"
        "exit_as_victim()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (PEER_LOST_EXIT_CODE, "kept\n")
