"""When the jobs of a shared cluster start and end, as far as that can be foreseen."""

from dataclasses import replace

import pytest

from job_server.api.wire import JobState
from job_server.sharing.forecast import MAX_PASSES, decide, fits_now, foresee
from tests.job_server.sharing.shared import cluster, shared_job, shared_node


def test_a_job_that_runs_alone_ends_when_its_work_is_done():
    seen = foresee(cluster(shared_job("a", 1, max_pods=1, remaining_s=100.0)))["a"]
    assert seen.starts_in_s == 0
    assert seen.ends_in_s == pytest.approx(100.0)


def test_a_job_starts_when_enough_have_ended_and_they_are_named_in_order():
    jobs = (
        shared_job("slow", 4, min_pods=4, max_pods=4, remaining_s=4000.0),
        shared_job("quick", 2, min_pods=2, max_pods=2, remaining_s=100.0),
        shared_job("next", 2, min_pods=2, max_pods=2, remaining_s=200.0),
    )
    seen = foresee(cluster(*jobs, shared_job("new", min_pods=4, max_pods=4)))
    assert seen["new"].once == ("quick", "next")
    assert seen["new"].starts_in_s == seen["next"].ends_in_s
    assert sorted(seen, key=lambda job: seen[job].ends_in_s or 0.0)[1:] == [
        "quick", "next", "slow",
    ]  # fmt: skip


def test_what_a_job_leaves_makes_the_others_quicker():
    short = shared_job("short", 4, min_pods=4, max_pods=4, remaining_s=100.0)
    long = shared_job("long", 4, min_pods=1, max_pods=8, remaining_s=4000.0)
    beside = foresee(cluster(short, long))["long"].ends_in_s
    alone = foresee(cluster(long, nodes=(shared_node(slots=4),)))["long"].ends_in_s
    assert beside is not None
    assert alone is not None
    assert beside < alone


@pytest.mark.parametrize("policy", ["fulfilment", "goodput", "of a later version"])
def test_a_chain_of_jobs_is_foreseen_with_every_policy(policy):
    jobs = [
        shared_job("a", 2, max_pods=2, remaining_s=60.0),
        shared_job("b", after=("a",), max_pods=2, remaining_s=60.0, step_s={1: 0.1}),
        shared_job("c", after=("b",)),
    ]
    seen = foresee(cluster(*jobs, policy=policy))
    assert seen["b"].once == ("a",)
    assert seen["c"].once == ("a", "b")
    assert seen["c"].starts_in_s == seen["b"].ends_in_s


def test_what_waits_for_a_job_of_unknown_length_cannot_be_foreseen_unless_its_time_is_limited():
    endless = shared_job("endless", 8, min_pods=8)
    new = shared_job("new", min_pods=2)
    assert foresee(cluster(endless, new))["new"].starts_in_s is None
    limited = replace(endless, run_time_left_s=90.0)
    assert foresee(cluster(limited, new))["new"].starts_in_s == pytest.approx(90.0)


def test_users_have_equal_shares_in_the_forecast_too():
    jobs = [
        shared_job("has", 4, min_pods=4, max_pods=4, user="ann"),
        shared_job("first", min_pods=4, max_pods=4, user="ann"),
        shared_job("later", min_pods=4, max_pods=4, user="bob", submitted_at=5.0),
    ]
    assert fits_now(cluster(*jobs), "later")
    assert not fits_now(cluster(*jobs), "first")


def test_a_paused_job_and_one_that_no_node_serves_take_no_room():
    jobs = (
        shared_job("paused", state=JobState.PAUSED),
        shared_job("homeless", folder="other"),
        shared_job("a", min_pods=8),
    )
    seen = foresee(cluster(*jobs))
    assert seen["a"].starts_in_s == 0
    assert seen["paused"].starts_in_s is None
    assert seen["homeless"].starts_in_s is None


def test_limits_and_what_others_use_are_not_given_away():
    job = shared_job("a", min_pods=2)
    assert fits_now(cluster(job), "a")
    assert not fits_now(cluster(job, nodes=(shared_node(limit=1),)), "a")
    assert not fits_now(cluster(job, nodes=(shared_node(used_others=7),)), "a")
    assert not fits_now(cluster(job, nodes=(shared_node(alive=False),)), "a")
    assert decide(cluster(job, nodes=(shared_node(used_others=2, limit=3),)))["a"].trainers == 3


def test_room_on_a_node_that_cannot_run_a_job_is_none_for_it():
    other = shared_node("b", folders=("other",))
    full = shared_job("full", 8, min_pods=8, max_pods=8, remaining_s=80.0)
    seen = foresee(cluster(full, shared_job("a"), nodes=(shared_node(), other)))
    assert seen["a"].once == ("full",)


def test_a_nodes_memory_is_left_by_who_uses_it_and_not_counted_where_it_is_not_known():
    big = shared_job("big", min_pods=1, max_pods=1, memory_mb=6000)
    runs = shared_job("runs", 1, min_pods=1, max_pods=1, memory_mb=6000, remaining_s=50.0)
    node = shared_node(memory_mb=10_000, memory_used_mb=6000)
    assert not fits_now(cluster(big, runs, nodes=(node,)), "big")
    assert foresee(cluster(big, runs, nodes=(node,)))["big"].once == ("runs",)
    assert fits_now(cluster(big, runs), "big")


def test_a_forecast_has_a_bound_and_can_stop_at_the_job_that_was_asked_for():
    running = shared_job("running", 8, max_pods=8, min_pods=8, remaining_s=10.0)
    queue = [
        shared_job(f"j{n:03}", min_pods=8, submitted_at=float(n), remaining_s=10.0, step_s={1: 0.1})
        for n in range(MAX_PASSES)
    ]
    seen = foresee(cluster(running, *queue[:20]), until="j003")
    assert seen["j003"].ends_in_s is not None
    assert seen["j019"].starts_in_s is None
    assert foresee(cluster(running, *queue))[queue[-1].job_id].starts_in_s is None
