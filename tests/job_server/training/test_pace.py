"""Ranks that make the others wait, and which part of the time is lost by what."""

from dataclasses import replace

import pytest

from job_server.api.wire import JobSpec, RankPace, ReportKind, WireError
from job_server.training.reports.pace import is_slow, lost
from job_server.training.rules.share import run_time_s
from tests.job_server.world import World, tell, trains, world


def pace(rank: int, *, computing: float = 6.0, reading: float = 0.0, saving: float = 0.0,
         samples: int = 240, window: float = 20.0) -> RankPace:  # fmt: skip
    """A window of 30 steps; the rest of it the rank waits for its peers."""
    return RankPace(
        rank=rank, steps=30, samples=samples, window_s=window, computing_s=computing,
        reading_s=reading, saving_s=saving, exchanging_s=window - computing - reading - saving,
    )  # fmt: skip


def test_a_rank_that_computes_twice_as_long_as_the_median_for_a_sample_is_slow():
    others = {rank: pace(rank) for rank in range(3)}
    assert not any(is_slow(each, others) for each in others.values())
    assert is_slow(pace(3, computing=13.0), {**others, 3: pace(3, computing=13.0)})
    assert not is_slow(pace(3, computing=11.0), {**others, 3: pace(3, computing=11.0)})
    twice_the_samples = pace(3, computing=13.0, samples=480)  # it has another shard
    assert not is_slow(twice_the_samples, {**others, 3: twice_the_samples})
    tiny = {0: pace(0, computing=0.01), 1: pace(1, computing=0.03)}  # nobody loses by it
    assert not is_slow(tiny[1], tiny)
    assert not is_slow(pace(0, computing=20.0), {0: pace(0, computing=20.0)})  # it is alone


@pytest.mark.parametrize(
    ("slowest", "parts"),
    [
        (pace(1, computing=6.0, reading=14.0), (14.0, 0.0, 0.0)),
        (pace(1, computing=6.0, saving=5.0, reading=9.0), (9.0, 5.0, 0.0)),
        (pace(1, computing=20.0), (0.0, 0.0, 14.0)),
        (pace(1, computing=6.0), (0.0, 0.0, 0.0)),  # sums over a slow network are training
        (replace(pace(1, computing=3.0, reading=7.0, window=10.0)), (14.0, 0.0, 0.0)),
    ],
)
def test_what_the_slowest_rank_waits_for_or_computes_beyond_the_median_is_lost(slowest, parts):
    found = lost({0: pace(0, computing=5.9), 1: slowest})
    assert tuple(found.values()) == pytest.approx(parts, abs=0.2)


def report(made: World, *paces: RankPace) -> None:
    step = made.job.progress.step
    for each in paces:
        tell(made, f"pod_{each.rank}_0", ReportKind.PROGRESS, 1, step=step, paces=(each,))


def test_a_straggler_is_named_once_with_slot_and_host_and_the_time_it_costs_is_no_training():
    made = trains(world())
    made.rounds(100)
    before = made.status.account
    report(made, pace(1, computing=20.0), pace(0))
    (warning,) = made.status.warnings
    assert warning.startswith("rank 1 (pod_1_0, slot 1 of a at ")
    assert "straggles: it computes 667 ms in a step, the median rank would 200 ms" in warning
    report(made, pace(1, computing=20.0), pace(0))
    assert sum("straggles" in reason for reason in made.reasons) == 1
    account = made.status.account
    assert account.straggling_s == pytest.approx(28)
    assert account.training_s == pytest.approx(before.training_s - 28)
    assert account.total_s == pytest.approx(made.now - made.job.submitted_at)
    report(made, pace(1), pace(0))
    assert made.status.warnings == ()
    assert made.reasons[-1].endswith("rank 1 is as fast as the others again")


def test_time_that_is_lost_counts_for_the_limit_of_its_run_time():
    made = trains(world())
    made.rounds(100)
    before = run_time_s(made.job)
    report(made, pace(1, reading=4.0, saving=2.0, computing=14.0), pace(0))
    assert made.status.account.reading_s > 0
    assert made.status.account.saving_s > 0
    assert made.status.account.straggling_s > 0
    assert run_time_s(made.job) >= before


def test_a_window_without_steps_is_refused():
    with pytest.raises(WireError, match="steps: must be between 1 and"):
        replace(pace(0), steps=0)


def test_another_stage_begins_without_the_paces_of_the_one_before():
    made = trains(world())
    report(made, pace(1, computing=20.0), pace(0))
    made.crash("pod_1_0")
    made.run_until(*(type(made.job.state)[name] for name in ("RECOVERING",)))
    assert made.status.warnings == ()


def test_a_job_shows_what_each_trainer_uses_once_its_stage_has_told_it():
    made = trains(world())
    assert [pod.memory_mb for pod in made.status.pods] == [(), ()]
    report(made, *(replace(pace(rank), cpu_percent=90.0, memory_mb=700 + rank) for rank in (0, 1)))
    assert [pod.memory_mb for pod in made.status.pods] == [(700,), (701,)]
    assert [pod.cpu_percent for pod in made.status.pods] == [(90.0,), (90.0,)]
    report(made, pace(0))  # of the version before
    assert [pod.memory_mb for pod in made.status.pods] == [(), (701,)]


def where(made: World) -> set[tuple[str, int]]:
    assert made.job.active is not None
    return {(m.pod.node_id, s) for m in made.job.active.members for s in m.pod.slots}


def tell_paces(made: World, slow: int) -> None:
    """Each launcher of the active stage reports its rank's window."""
    stage, step = made.active, made.job.progress.step
    for member in stage.members:
        (rank,) = member.pod.ranks
        each = pace(rank, computing=20.0 if rank == slow else 6.0)
        pod_id, number = member.pod.pod_id, stage.stage
        tell(made, pod_id, ReportKind.PROGRESS, number, step=step, paces=(each,))


def three() -> World:
    made = trains(world(nodes=2, pods=3, total_steps=4000, straggler_policy="evict"))
    assert where(made) == {("a", 0), ("a", 1), ("b", 0)}
    return made


def test_a_straggler_is_evicted_to_a_free_slot_by_a_planned_change_if_the_job_wants_that():
    made = three()
    tell_paces(made, slow=0)
    made.rounds(40)
    assert where(made) == {("a", 1), ("b", 0), ("b", 1)}
    assert made.job.lineage.redone_steps == made.job.resizes == 0
    assert any("leaves slot 0 of a: rank 0 straggled" in reason for reason in made.reasons)
    tell_paces(made, slow=0)  # whoever is rank 0 is slow: it is not the slot
    made.rounds(40)
    assert where(made) == {("a", 1), ("b", 0), ("b", 1)}
    assert made.job.lineage.redone_steps == 0


def test_a_slot_that_a_straggler_left_is_not_where_the_next_one_goes():
    made = three()
    tell_paces(made, slow=0)
    made.rounds(40)
    tell_paces(made, slow=1)
    made.rounds(40)
    assert where(made) == {("a", 1), ("b", 0), ("b", 1)}


def test_without_a_free_slot_or_the_policy_a_straggler_stays():
    full = trains(
        world(nodes=1, slots=3, pods=3, total_steps=4000, min_pods=2, straggler_policy="evict")
    )
    only_said = trains(world(nodes=2, pods=3, total_steps=4000))
    for made in (full, only_said):
        before = where(made)
        tell_paces(made, slow=0)
        made.rounds(40)
        assert where(made) == before
        assert made.job.active is not None
        assert made.job.active.stage == 1
        assert "straggles" in made.status.warnings[0]


def test_a_shared_job_cannot_ask_for_evictions():
    with pytest.raises(WireError, match="straggler_policy: evict: where the pods"):
        JobSpec(job_id="job", max_pods=2, share=True, straggler_policy="evict")
