"""Why a shared job has so many pods, or waits, in words."""

from dataclasses import replace

import pytest

from job_server.api.wire import JobState, NodeLimit, SharedJob, Sharing
from job_server.jobs.events import PauseAsked
from job_server.sharing.explain import explain, outlook_text, range_text
from job_server.sharing.forecast import foresee
from tests.job_server.shared_cluster import SharedCluster
from tests.job_server.sharing.shared import cluster, shared_job, shared_node

FIRST = shared_job("train-a", 4, min_pods=4, max_pods=4, remaining_s=2400.0, priority=2)
SECOND = shared_job("train-b", 4, min_pods=4, max_pods=4, remaining_s=9000.0)


def of(sharing: Sharing, job_id: str, **states: JobState) -> str:
    return explain(sharing, job_id, states).summary


def facts(sharing: Sharing, job_id: str) -> list[tuple[str, str]]:
    return list(explain(sharing, job_id).facts)


def test_who_waits_for_room_is_told_what_is_free_who_has_it_and_when_it_starts():
    sharing = cluster(FIRST, SECOND, shared_job("train-c", min_pods=2))
    assert of(sharing, "train-c") == (
        "train-c waits since 4 min: needs 2 slots, 0 are free; train-a (priority 2) and train-b "
        "hold 8 and are at their least; it starts when one of them ends, train-a first, in about "
        "11 min"
    )


def test_what_would_let_it_start_sooner_is_what_the_policy_would_do():
    sharing = cluster(FIRST, SECOND, shared_job("train-c", min_pods=2))
    sooner = [text for name, text in facts(sharing, "train-c") if name == "sooner"]
    assert sooner == [
        "with --priority 1 it would start now; train-b would wait meanwhile, and lose no step"
    ]
    limited = cluster(shared_job("big", min_pods=6), nodes=(shared_node(limit=4),))
    assert [text for name, text in facts(limited, "big") if name == "sooner"] == [
        "with --min 4 it would start now",
        "without the limits of `edl capacity` it would start now",
    ]


def test_a_job_that_runs_on_nodes_that_cannot_be_reached_is_explained():
    sharing = cluster(shared_job("train", 4), nodes=(shared_node(alive=False),))
    assert of(sharing, "train").endswith("runs with 4 pods (1 to 8) since 4 min; "
                                         "none of its nodes can be reached")  # fmt: skip


def test_a_job_that_has_pods_and_no_allotment_is_explained(tmp_path):
    made = SharedCluster(tmp_path)
    try:
        for name in ("b", "c"):
            made.service.limit_node(name, NodeLimit(slots=0))
        made.add("job", 1, 4)
        made.job("job").memory = False
        made.run(20)
        made.machines["a"].link = False  # nobody has heard of its state: the pause is called off
        made.service.ask("job", PauseAsked())
        made.run(40)
        assert made.status("job").allotment is None
        sharing = made.service.sharing()
        (job,) = sharing.jobs
        assert (job.allotted, job.nodes) == (2, {"a": 2})
        assert of(sharing, "job").startswith("job runs with 2 pods (1 to 4) since")
    finally:
        made.end_server(kill=True)


def test_who_waits_for_a_node_that_gets_no_pods_is_told_why_it_gets_none(tmp_path):
    made = SharedCluster(tmp_path)
    try:
        made.add("job", 2, 4)
        made.run(20)
        for name in ("a", "b", "c"):
            made.service.limit_node(name, NodeLimit(slots=0, drain=True))
        made.run(40)
        assert made.status("job").state is JobState.WAITING
        drained = "its node is drained: an operator asked for it (`edl drain`)"
        assert (
            f"needs 2 slots, its nodes have 0 for it, as slots get no pods (a: {drained}, b: "
        ) in of(made.service.sharing(), "job")
    finally:
        made.end_server(kill=True)


@pytest.mark.parametrize(
    ("job", "node", "words"),
    [
        (shared_job("job", 2), {"slots": 2, "used_shared": 2}, "no slot is free for more"),
        (shared_job("job", min_pods=2), {"slots": 2, "used_others": 1}, "1 is free"),
    ],
)
def test_slots_that_get_no_pods_are_named_where_they_are_missed(job, node, words):
    of_node = shared_node(barred="in quarantine: XID 79", **node)
    text = of(cluster(job, nodes=(of_node,)), "job")
    assert f"{words}, as slots get no pods (a: in quarantine: XID 79)" in text


def test_a_job_whose_state_is_on_a_node_without_room_waits_for_that_node():
    job = shared_job("job", home="b", started_at=0.0)
    full = cluster(job, nodes=(shared_node(), shared_node("b", slots=1, used_others=1)))
    assert "on b, which has its state and has no room; when it starts is not" in of(full, "job")
    away = cluster(job, nodes=(shared_node(), shared_node("b", alive=False)))
    assert "on b, which has its state and cannot be reached; when it" in of(away, "job")
    assert "there is room for it now" in of(cluster(replace(job, home="a")), "job")


def test_who_is_being_paused_keeps_nobody_from_being_told_what_would_be_sooner():
    pausing = replace(SECOND, state=JobState.PAUSING, nodes={"b": 4})
    low = shared_job("low", 8, min_pods=8)
    sharing = cluster(pausing, low, shared_job("train-c", min_pods=2))
    sooner = [text for name, text in facts(sharing, "train-c") if name == "sooner"]
    assert sooner == [
        "with --priority 1 it would start now; low would wait meanwhile, and lose no step"
    ]


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        pytest.param(
            (SECOND, shared_job("x", after=("train-b",))),
            "it is to start once train-b (RUNNING) has succeeded; it starts then, in about 42 min",
            id="after a job that runs",
        ),
        pytest.param(
            (SECOND, shared_job("x", after=("train-b", "y"))),
            "(RUNNING) and y (no job of this server) have succeeded; it never starts by itself: "
            "run y again",
            id="after a job that is unknown",
        ),
        pytest.param(
            (shared_job("x", folder="elsewhere"),),
            "has a folder 'elsewhere' for it, start an `edl client` whose --jobs_dir has one",
            id="no node serves it",
        ),
        pytest.param(
            (shared_job("x", min_pods=16, max_pods=16),),
            "needs 16 slots, its nodes have 8 for it; when it starts is not known",
            id="more than there is",
        ),
        pytest.param(
            (replace(SECOND, allotted=8, nodes={"a": 8}, remaining_s=None, min_pods=8, max_pods=8),
             shared_job("x")),
            "when it starts is not known, as how long train-b takes is not yet",
            id="behind one that never says",
        ),
        pytest.param(
            (replace(SECOND, min_pods=1, max_pods=8, allotted=8, nodes={"a": 8}, priority=5),
             shared_job("x")),
            "train-b (priority 5) holds 8 at a higher priority",
            id="behind a higher priority",
        ),
        pytest.param((shared_job("x"),), "there is room for it now; it starts now", id="room"),
        pytest.param(
            (shared_job("x", state=JobState.PAUSED),),
            "x is paused; `edl resume x` puts it into the queue again",
            id="paused",
        ),
        pytest.param(
            (SECOND, shared_job("x", min_pods=8, started_at=5.0)), "x waits again since", id="again"
        ),
    ],
)  # fmt: skip
def test_each_reason_to_wait_has_its_words(jobs: tuple[SharedJob, ...], says: str):
    assert says in of(cluster(*jobs), "x")


def test_a_job_behind_one_that_failed_is_told_so():
    assert "y (FAILED) has succeeded; it never starts by itself" in of(
        cluster(shared_job("x", after=("y",))), "x", y=JobState.FAILED
    )


def test_a_job_behind_others_that_wait_is_told_who_they_are_and_its_place():
    ahead = [shared_job(f"j{n}", min_pods=8, submitted_at=n) for n in range(6)]
    late = shared_job("late", min_pods=2, submitted_at=9.0)
    sharing = cluster(*ahead, late)
    assert "needs 2 slots, 8 are free, which j0, j1, j2 and 3 others are to have first" in of(
        sharing, "late"
    )
    assert "when it starts is not known, as 6 jobs are before it" in of(sharing, "late")
    assert dict(facts(sharing, "late"))["place"] == "7 of 7 that wait"


def test_slots_that_are_of_no_use_are_named_with_what_lacks():
    two = (shared_node(slots=4), shared_node("b", slots=4))
    spread = shared_job("q", 2, min_pods=2, nodes={"a": 1, "b": 1}, remaining_s=100.0)
    wide = shared_job("p", slots_per_pod=4, max_pods=2)
    assert (
        "needs 4 slots (1 pod of 4, each on one node), 6 are free, but no node has enough of them"
        in of(cluster(wide, spread, nodes=two), "p")
    )
    node = shared_node(memory_mb=10_000, memory_used_mb=4000, cpu_milli=4000, cpu_used_milli=3000)
    assert "8 are free, but a pod needs 8 GB of memory, of which 6 GB are left" in of(
        cluster(shared_job("m", memory_mb=8000), nodes=(node,)), "m"
    )
    assert "8 are free, but a pod needs 2.5 CPUs, of which 1 CPU is left" in of(
        cluster(shared_job("c", cpu_milli=2500), nodes=(node,)), "c"
    )


def test_what_lacks_beside_slots_is_named_though_others_would_give_way():
    node = shared_node(memory_mb=10_000, cpu_milli=2000, cpu_used_milli=1900)
    soft = shared_job("soft", 8, min_pods=1)
    text = of(cluster(soft, shared_job("c", cpu_milli=500), nodes=(node,)), "c")
    assert "0 are free, but a pod needs 0.5 CPUs, of which 0.1 CPUs are left" in text
    assert text.endswith("; it starts when other programs use less of that")
    both = shared_job("both", cpu_milli=500, memory_mb=20_000)
    assert "a pod needs 20 GB of memory, of which 10 GB are left, and 0.5 CPUs, of which" in of(
        cluster(soft, both, nodes=(node,)), "both"
    )


def test_a_job_that_runs_says_why_so_many_and_why_not_more():
    text = of(cluster(replace(FIRST, max_pods=8, reason="gives way to train-b"), SECOND), "train-a")
    assert text == (
        "train-a runs with 4 pods (4 to 8) since 4 min: gives way to train-b; no slot is free for "
        "more; it ends in about 11 min"
    )
    assert "that is its most" in of(cluster(replace(FIRST, min_pods=2)), "train-a")
    assert "it is about to have 8" in of(cluster(replace(FIRST, max_pods=8)), "train-a")
    shown = dict(facts(cluster(replace(FIRST, max_pods=8), SECOND), "train-a"))
    assert shown["speed"] == "0.2 s a step with 4; 8 would be about 1.6 times as fast as 4"
    assert shown["where"] == "4 on a"
    assert shown["beside"] == "train-b 4"


def test_a_job_on_its_way_to_what_it_is_to_have_says_so():
    start = replace(shared_job("a", 2, reason="starts with its least, 2"), pods=0)
    assert of(cluster(start), "a").startswith(
        "a is about to start with 2 pods (1 to 8), since 4 min: starts with its least, 2"
    )
    shrink = replace(shared_job("a", 2), pods=4)
    assert of(cluster(shrink), "a").startswith("a goes from 4 to 2 pods (1 to 8), since 4 min")


def test_an_end_by_max_run_time_is_the_latest_one():
    sharing = cluster(shared_job("a", 8, run_time_left_s=7200.0))
    assert "; it ends within 2 h" in of(sharing, "a")
    assert outlook_text(sharing.jobs[0], foresee(sharing)["a"]) == "ends within 2 h"
    known = cluster(shared_job("a", 8, run_time_left_s=7200.0, remaining_s=800.0))
    assert outlook_text(known.jobs[0], foresee(known)["a"]) == "ends in 2 min"


def test_the_queue_says_what_comes_next_of_each():
    sharing = cluster(FIRST, SECOND, shared_job("train-c", min_pods=2))
    seen = foresee(sharing)
    texts = [outlook_text(job, seen[job.job_id]) for job in sharing.jobs]
    assert texts == ["ends in 11 min", "ends in 42 min", "starts in 11 min"]
    assert [range_text(job) for job in sharing.jobs] == ["4", "4", "2 to 8"]
