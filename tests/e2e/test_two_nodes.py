"""Two nodes with nothing in common but a network: changed, killed, cut off, and healed.

Neither sees the other's checkpoints. The nodes are network namespaces, which only root may make.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from job_server.api.wire import JobSpec, JobState, JobStatus, Way
from pod_runtime.verify import read_ledger
from tests.e2e.netns import Network, require_network_namespaces
from tests.e2e.nodes import Commit, Nodes
from tests.e2e.proof import check_counts
from tests.support import ROOT

pytest.importorskip("paddle", reason="trains with Paddle")

EPOCHS = 10_000  # more than any test has the time for: it ends the training
SAMPLES = 1000
SETTLED_S = 3.0  # after a cut: steps that were under way have ended, also on a busy machine
STEP_S = 0.1


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Nodes]:
    """A server and a client on node 1; node 2 has a client once it is started."""
    require_network_namespaces()
    script = (
        f"{{python}} -m pod_runtime.launch --log_dir $NODE_DIR/log "
        f"{ROOT}/tests/e2e/count_train.py --samples {SAMPLES} --epochs {EPOCHS} "
        f"--step_s {STEP_S} --end {tmp_path}/end --checkpoint $NODE_DIR/checkpoint "
        f"--out $NODE_DIR/seen.npy --journal $NODE_DIR/journal"
    )
    network = Network(2)
    cluster = Nodes(tmp_path / "c", network, slots=1, script=script)
    try:
        cluster.start_server()
        yield cluster
    finally:
        cluster.stop()
        network.close()


def finish(cluster: Nodes, *, rank0: int) -> JobStatus:
    """End the training; every sample of every epoch counts once."""
    (cluster.folder.parent / "end").touch()
    status = cluster.wait_for(lambda now: now.state is JobState.SUCCEEDED, "success", 300)
    check_counts(cluster.node_dir(rank0))
    check_one_world(cluster, rank0)
    return status


def check_one_world(cluster: Nodes, rank0: int) -> None:
    """No stage makes a step once a later one has begun to, and what counts is one lineage."""
    of_stage: dict[int, list[Commit]] = defaultdict(list)
    restored: dict[int, int] = {}  # stage -> the step that it began from
    for commit in sorted(cluster.commits(), key=lambda each: each.at):
        began_at = restored.setdefault(commit.stage, commit.step)
        if commit.step > began_at:
            of_stage[commit.stage].append(commit)
    stages = sorted(of_stage)
    for earlier, later in pairwise(stages):
        # A trainer that is frozen right after an exchange notes its step when it is thawed: it is
        # made when the first of its ranks has noted it.
        made: dict[int, Commit] = {}
        for commit in of_stage[earlier]:
            made.setdefault(commit.step, commit)
        assert max(each.at for each in made.values()) <= of_stage[later][0].at, (earlier, later)

    _run, ledger = read_ledger(str(cluster.node_dir(rank0) / "checkpoint"))
    owner: dict[int, int] = {}  # step -> the stage whose commit of it counts
    for entry in ledger.values():
        for row in entry.rows:
            for step in range(row.first_step, row.last_step + 1):
                assert step not in owner, (step, owner.get(step), entry.stage)
                owner[step] = entry.stage
    assert sorted(owner) == list(range(1, len(owner) + 1))
    for stage, commits in of_stage.items():
        for commit in commits:
            counted_by = owner[commit.step]
            assert counted_by >= stage, f"{commit} counts as a step of stage {counted_by}"
            assert commit.step in {each.step for each in of_stage[counted_by]}


def commits_between(cluster: Nodes, begin: float, end: float) -> dict[int, list[Commit]]:
    """What each node's trainers committed in that time; a step that was under way is let end."""
    found: dict[int, list[Commit]] = defaultdict(list)
    for commit in cluster.commits():
        if begin + SETTLED_S < commit.at < end:
            found[commit.node].append(commit)
    return found


def cut_for(cluster: Nodes, seconds: float, meanwhile: Callable[[], object]) -> tuple[float, float]:
    """Cut node 2 off for so long; return when it began and ended, in seconds since 1970."""
    began = time.time()
    cluster.network.cut(2)
    meanwhile()
    time.sleep(max(0.0, began + seconds - time.time()))  # the length of the cut is the test's input
    ended = time.time()
    cluster.network.heal(2)
    return began, ended


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cut_s", "overlap", "way"),
    [
        pytest.param(12, "auto", Way.REPLACE, id="short"),
        pytest.param(12, "join", Way.JOIN, id="join", marks=pytest.mark.slow),
        pytest.param(20, "auto", Way.REPLACE, id="long", marks=pytest.mark.slow),
    ],
)
def test_a_node_joins_dies_returns_and_is_cut_off_and_every_sample_counts_once(
    two_nodes: Nodes, cut_s: float, overlap: str, way: Way
) -> None:
    two_nodes.start_client_of(1)
    two_nodes.submit(JobSpec(job_id="two", pods=1, max_pods=2, overlap=overlap, spares=1))
    two_nodes.wait_trained_by(1)

    two_nodes.start_client_of(2)
    two_nodes.api().resize("two", 2)
    status = two_nodes.wait_trained_by(1, 2)
    assert status.redone_steps == 0, "the state came over the network"
    assert status.stages[-1].way is way
    assert not (two_nodes.node_dir(2) / "checkpoint").exists()

    two_nodes.kill_node(2)
    two_nodes.wait_trained_by(1)
    logs = (two_nodes.node_dir(1) / "log").glob("trainer_0.stage_*.log")
    assert any("peer lost: all-reduce" in log.read_text() for log in logs), "gone, not late"
    two_nodes.start_client_of(2)
    two_nodes.wait_trained_by(1, 2)

    began, ended = cut_for(two_nodes, cut_s, lambda: two_nodes.wait_trained_by(1))
    progress = commits_between(two_nodes, began, ended)
    assert progress[1]
    assert not progress[2]
    two_nodes.wait_trained_by(1, 2)
    finish(two_nodes, rank0=1)


# The short forms: a node that is cut off and comes back, above; a standby without a lost pod, in
# test_standby.py; a frozen peer, in the trainers' test_worlds.py.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("standby", [pytest.param(0, id="no_standby"), pytest.param(2)])
def test_a_node_that_is_frozen_and_thawed_makes_no_second_world(
    two_nodes: Nodes, standby: int
) -> None:
    two_nodes.start_client_of(1)
    two_nodes.submit(JobSpec(job_id="two", pods=1, max_pods=2, standby=standby, spares=1))
    two_nodes.wait_trained_by(1)
    two_nodes.start_client_of(2)
    two_nodes.api().resize("two", 2)
    two_nodes.wait_trained_by(1, 2)
    if standby:
        two_nodes.wait_for(lambda now: _stands_by(now), "somebody stands by", 120)

    began = time.time()
    frozen = two_nodes.network.suspend(2)  # its sockets stay open: nobody is told anything
    status = two_nodes.wait_trained_by(1)  # after four heartbeats at the earliest
    ended = time.time()
    two_nodes.network.resume(frozen)
    progress = commits_between(two_nodes, began, ended)
    assert progress[1]
    assert not progress[2]
    taken_over = [each.reason for each in status.stages if each.committed_at is not None][-1]
    assert taken_over.startswith("standby, without" if standby else "recovery")
    two_nodes.wait_trained_by(1, 2)
    finish(two_nodes, rank0=1)


def _stands_by(now: JobStatus) -> bool:
    newest = now.stages[-1]
    ready = (newest.reason, newest.outcome) == ("standby", "preparing")
    return ready and now.state is JobState.RUNNING


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_node_of_rank_0_is_cut_off_and_the_other_goes_on_from_its_own_copy(
    two_nodes: Nodes,
) -> None:
    two_nodes.start_client_of(2)
    two_nodes.submit(JobSpec(job_id="two", pods=1, max_pods=2, spares=1))
    two_nodes.wait_trained_by(2)
    two_nodes.start_client_of(1)
    two_nodes.api().resize("two", 2)
    two_nodes.wait_trained_by(2, 1)

    began, ended = cut_for(two_nodes, 20, lambda: two_nodes.wait_trained_by(1))
    progress = commits_between(two_nodes, began, ended)
    assert progress[1]
    assert not progress[2]
    two_nodes.wait_trained_by(1, 2)
    finish(two_nodes, rank0=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_that_is_wholly_on_the_far_side_of_a_cut_goes_on_there_and_nowhere_else(
    two_nodes: Nodes,
) -> None:
    two_nodes.start_client_of(2)
    two_nodes.submit(JobSpec(job_id="two", pods=1, max_pods=2, spares=1))
    before = two_nodes.wait_trained_by(2)
    two_nodes.start_client_of(1)
    two_nodes.wait_for(lambda _now: len(two_nodes.api().nodes()) == 2, "node 1 is there")

    def is_waiting() -> None:
        two_nodes.wait_for(lambda now: now.state is JobState.WAITING, "the job waits")

    began, ended = cut_for(two_nodes, 20, is_waiting)
    progress = commits_between(two_nodes, began, ended)
    assert progress[2]
    assert not progress[1]
    after = two_nodes.wait_trained_by(2)
    assert (after.stage, after.redone_steps) == (before.stage, 0)
    finish(two_nodes, rank0=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cut_amid_a_change_stops_nobody_and_the_change_succeeds_afterwards(
    two_nodes: Nodes,
) -> None:
    two_nodes.start_client_of(1)
    two_nodes.submit(JobSpec(job_id="two", pods=1, max_pods=2, spares=1))
    two_nodes.wait_trained_by(1)
    two_nodes.start_client_of(2)
    two_nodes.wait_for(lambda _now: len(two_nodes.api().nodes()) == 2, "node 2 is there")

    two_nodes.api().resize("two", 2)
    two_nodes.wait_for(lambda now: len(now.pods) == 2, "node 2 is to join")
    began, ended = cut_for(two_nodes, 20, lambda: two_nodes.wait_trained_by(1, timeout_s=120))
    assert not commits_between(two_nodes, began, ended)[2]
    if two_nodes.status().target_pods == 1:  # the change was dropped, and not made later
        two_nodes.api().resize("two", 2)
    two_nodes.wait_trained_by(1, 2, timeout_s=120)
    finish(two_nodes, rank0=1)
