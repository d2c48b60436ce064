"""How a cluster is shared: the original's cases, the tutorial's story, and random clusters."""

import random
from dataclasses import replace
from typing import Any

import pytest

from job_server.sharing.allocate import Allocation, JobView, Policy, allocate
from job_server.sharing.policies import Fulfilment, Goodput
from job_server.sharing.resources import NodeRoom, Resources
from job_server.sharing.speedup import StepTime

ONE = Resources(slots=1)
POLICIES = {"fulfilment": Fulfilment, "goodput": Goodput}


def job(
    name: str = "job",
    least: int = 1,
    most: int = 3,
    now: int = 0,
    *,
    node: str = "n0",
    each: Resources = ONE,
    **rest: Any,
) -> JobView:
    rest = {"placed": {node: now} if now else {}} | rest
    return JobView(job_id=name, min_trainers=least, max_trainers=most, each=each, **rest)


def cluster(*slots: int) -> list[NodeRoom]:
    return [
        NodeRoom(node_id=f"n{index}", capacity=Resources(slots=count))
        for index, count in enumerate(slots)
    ]


def counts(found: dict[str, Allocation]) -> dict[str, int]:
    return {name: allocation.trainers for name, allocation in found.items()}


def applied(jobs: list[JobView], found: dict[str, Allocation], now: float = 0.0) -> list[JobView]:
    """The jobs as the policy sees them after what it has decided."""
    return [
        replace(
            each,
            placed=found[each.job_id].placed,
            changed_at=now
            if dict(found[each.job_id].placed) != dict(each.placed)
            else each.changed_at,
        )
        for each in jobs
    ]


# --- the cases of the original's own tests: total, foreign, load limit, job, what is decided

ORIGINAL = {
    "up, both limits allow it": (8, 2, 1.0, (1, 3, 1), 3),
    "up to what the limit leaves": (3, 0, 0.8, (1, 3, 1), 2),
    "down to the limit": (3, 0, 0.8, (1, 3, 3), 2),
    "never more than max": (20, 0, 1.0, (1, 3, 6), 3),
    "never less than min": (4, 4, 1.0, (2, 3, 2), 2),
}


@pytest.mark.parametrize("case", ORIGINAL)
def test_the_originals_cases(case):
    total, foreign, load, (least, most, now), wanted = ORIGINAL[case]
    each = Resources(cpu_milli=1000, memory_mb=10)
    node = NodeRoom(
        node_id="n0",
        capacity=Resources(cpu_milli=1000 * total, memory_mb=1000),
        foreign=Resources(cpu_milli=1000 * foreign, memory_mb=10 * foreign),
    )
    found = allocate(
        Fulfilment(max_load=load), [job(least=least, most=most, now=now, each=each)], [node], 0.0
    )
    assert counts(found) == {"job": wanted}


def test_of_equally_fulfilled_jobs_the_smaller_ones_grow_first():
    node = NodeRoom(node_id="n0", capacity=Resources(slots=4, cpu_milli=17_000, memory_mb=1000))
    demands = {
        "a": Resources(slots=1, cpu_milli=1000, memory_mb=1),
        "b": Resources(cpu_milli=1000, memory_mb=1),
        "c": Resources(cpu_milli=10_000, memory_mb=1),
        "d": Resources(cpu_milli=1000, memory_mb=2),
    }
    jobs = [job(name, most=2, now=1, each=each) for name, each in demands.items()]
    grown = []
    for room in (14_000, 15_000):  # 13,000 run; then one more core, then two
        limited = replace(node, foreign=Resources(cpu_milli=17_000 - room))
        found = allocate(Fulfilment(), jobs, [limited], 0.0)
        grown.append([name for name, each in found.items() if each.trainers == 2])
    assert grown == [["b"], ["b", "d"]]


# --- stories


def test_the_tutorials_story():
    """One job takes all up to its max; when another finds no room, those that run give way."""
    nodes, policy = cluster(6, 6), Fulfilment()
    jobs = [job("first", 2, 10)]
    jobs = applied(jobs, found := allocate(policy, jobs, nodes, 0.0))
    assert counts(found) == {"first": 10}
    jobs.append(job("second", 2, 8, submitted_at=1.0))
    jobs = applied(jobs, found := allocate(policy, jobs, nodes, 1.0))
    assert counts(found) == {"first": 10, "second": 2}
    third = job("third", 4, 4, submitted_at=2.0)
    found = allocate(policy, [*jobs, third], nodes, 2.0)
    assert counts(found) == {"first": 6, "second": 2, "third": 4}
    assert found["first"].reason == "gives way to third"
    assert found["third"].reason == "starts with its least, 4"
    assert allocate(policy, applied([*jobs, third], found), nodes, 3.0).keys() == found.keys()


def test_a_higher_priority_stops_lower_ones_only_where_their_surplus_is_not_enough():
    nodes = cluster(8)
    low, lower = job("low", 2, 4, 4, priority=1), job("lower", 4, 4, 4)
    found = allocate(Fulfilment(), [low, lower, job("high", 2, 2, priority=2)], nodes, 0.0)
    assert counts(found) == {"low": 2, "lower": 4, "high": 2}
    found = allocate(Fulfilment(), [low, lower, job("high", 4, 4, priority=2)], nodes, 0.0)
    assert counts(found) == {"low": 4, "lower": 0, "high": 4}
    assert found["lower"].reason == "stopped for high, whose priority is higher"


def test_one_that_has_waited_too_long_is_not_passed_by_for_ever():
    nodes, policy = cluster(4), Fulfilment(patience_s=60.0)
    running = job("running", 2, 2, 2)
    large = job("large", 4, 4, submitted_at=0.0)
    small = job("small", 1, 1, submitted_at=10.0)
    found = allocate(policy, [running, large, small], nodes, 30.0)
    assert counts(found) == {"running": 2, "large": 0, "small": 1}
    found = allocate(policy, [running, large, small], nodes, 61.0)
    assert counts(found) == {"running": 2, "large": 0, "small": 0}
    assert found["small"].reason == "waits behind large, which waits for room for longer"
    found = allocate(policy, [large, small], nodes, 62.0)
    assert counts(found) == {"large": 4, "small": 0}


NOT_BY_ANY_END = {
    "it needs more than there is": (job("large", 4, 4), [0, 3]),
    "its home has nothing to use": (job("large", 1, 1, home="n0"), [0, 3]),
    "its home is gone": (job("large", 1, 1, home="n7"), [3]),
    "no node of its own is there": (job("large", 1, 1, nodes=frozenset({"n7"})), [3]),
}


@pytest.mark.parametrize("case", NOT_BY_ANY_END)
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_behind_a_job_that_the_nodes_could_not_hold_as_they_are(policy, case):
    large, slots = NOT_BY_ANY_END[case]
    running, small = job("running", 1, 1, 1, node="n1"), job("small", 1, 1, submitted_at=10.0)
    found = allocate(POLICIES[policy](), [running, large, small], cluster(*slots), 5000.0)
    assert (found["large"].trainers, found["small"].trainers) == (0, 1), found


def test_a_job_waits_for_what_others_have_who_share_and_keep_it_for_now():
    large, small = job("large", 4, 4), job("small", 1, 1, submitted_at=10.0)
    kept = Resources(slots=2)  # by one that is about to end, say
    node = NodeRoom(node_id="n0", capacity=Resources(slots=4), foreign=kept, lent=kept)
    found = allocate(Fulfilment(), [large, small], [node], 5000.0)
    assert found["small"].reason.startswith("waits behind large")


def test_foreign_load_takes_trainers_from_where_it_is():
    nodes = [
        NodeRoom(node_id="n0", capacity=Resources(slots=4), foreign=Resources(slots=3)),
        NodeRoom(node_id="n1", capacity=Resources(slots=4)),
    ]
    spread = job(least=2, most=8)
    spread = replace(spread, placed={"n0": 4, "n1": 2})
    found = allocate(Fulfilment(), [spread], nodes, 0.0)["job"]
    assert found.placed == {"n0": 1, "n1": 4}


def test_a_limit_of_a_node_stops_jobs_at_their_least_the_lowest_priority_first():
    jobs = [job("high", 2, 4, 2, priority=1), job("low", 2, 4, 2)]
    used = NodeRoom(node_id="n0", capacity=Resources(slots=4), foreign=Resources(slots=2))
    assert counts(allocate(Fulfilment(), jobs, [used], 0.0)) == {"high": 2, "low": 2}
    found = allocate(Fulfilment(), jobs, [replace(used, limit=2)], 0.0)
    assert counts(found) == {"high": 2, "low": 0}
    assert found["low"].reason == "shared jobs may have fewer slots of n0"
    keeps = [replace(each, stoppable=False) for each in jobs]
    found = allocate(Fulfilment(), keeps, [replace(used, limit=2)], 0.0)
    assert counts(found) == {"high": 2, "low": 2}, "those that keep their least stay"


def test_a_job_whose_node_is_gone_starts_again_elsewhere():
    found = allocate(Fulfilment(), [job(least=2, most=2, now=2, node="gone")], cluster(2), 0.0)
    assert found["job"] == Allocation(placed={"n0": 2}, reason="moves to other nodes")


def test_goodput_gives_to_the_job_that_is_nearer_to_its_end():
    near = job("near", 1, 8, 4, remaining_s=600.0)
    far = job("far", 1, 8, 4, remaining_s=60_000.0)
    found = allocate(Goodput(), [near, far], cluster(8), 100.0)
    assert counts(found) == {"near": 7, "far": 1}
    assert found["near"].reason == "a trainer is worth more here than to far"


def test_goodput_leaves_alone_what_has_just_changed_or_is_nearly_done():
    near = job("near", 1, 8, 4, remaining_s=600.0)
    far = job("far", 1, 8, 4, remaining_s=60_000.0)
    for unmoved in (replace(near, changed_at=90.0), replace(near, remaining_s=60.0)):
        found = allocate(Goodput(), [unmoved, far], cluster(8), 100.0)
        assert counts(found) == {"near": 4, "far": 4}


def test_goodput_gives_to_the_job_that_more_trainers_help():
    good = job("good", 1, 8, 4, step_time=StepTime(1.0, 0.0, 0.0), remaining_s=3600.0)
    bad = job("bad", 1, 8, 4, step_time=StepTime(0.3, 0.7, 0.0), remaining_s=3600.0)
    assert counts(allocate(Goodput(), [good, bad], cluster(8), 100.0)) == {"good": 7, "bad": 1}


def test_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="job: expected 1 <= min <= max trainers, got 3 and 2"):
        allocate(Fulfilment(), [job(least=3, most=2)], cluster(4), 0.0)


# --- users


def test_two_users_have_as_much_however_many_jobs_one_of_them_has():
    for policy in (Fulfilment(), Goodput()):
        mine = [job(f"mine{n}", 1, 8, 2, user="ada") for n in range(4)]
        jobs, nodes = [*mine, job("other", 1, 8, user="ben")], cluster(8)
        found = allocate(policy, jobs, nodes, 1000.0)
        assert counts(found) == {"mine0": 1, "mine1": 1, "mine2": 1, "mine3": 1, "other": 4}
        alone = allocate(policy, mine, nodes, 1000.0)  # nobody else has work: all is one user's
        assert sum(counts(alone).values()) == 8


def test_a_user_who_has_less_than_an_equal_share_gets_it_from_jobs_that_run_and_from_high_ones():
    high = job("high", 2, 8, 8, user="ada", priority=5)
    low = job("low", 1, 8, user="ben", submitted_at=1.0)
    found = allocate(Fulfilment(), [high, low], cluster(8), 10.0)
    assert counts(found) == {"high": 4, "low": 4}
    assert found["high"].reason == "gives way to low, whose user has fewer slots"
    own = replace(low, user="ada")  # within a user's jobs priorities stand as ever
    assert counts(allocate(Fulfilment(), [high, own], cluster(8), 10.0)) == {"high": 8, "low": 0}


def test_users_shares_leave_a_job_alone_whose_trainers_have_just_come_or_gone():
    large = job("large", 1, 8, 6, user="ada", changed_at=90.0)
    small = job("small", 1, 8, 2, user="ben")
    found = allocate(Fulfilment(), [large, small], cluster(8), 100.0)
    assert counts(found) == {"large": 6, "small": 2}
    found = allocate(Fulfilment(), [large, small], cluster(8), 120.0)
    assert counts(found) == {"large": 4, "small": 4}


def test_a_share_may_be_made_up_of_a_free_slot_and_another_users_surplus():
    jobs = [job("high", 1, 4, 4, user="ada", priority=1), job("low", 2, 3, user="ben")]
    assert counts(allocate(Fulfilment(), jobs, cluster(5), 10.0)) == {"high": 3, "low": 2}


def test_of_those_that_wait_the_job_of_the_user_with_the_fewest_slots_starts_first():
    running = job("running", 2, 2, 2, user="ada")
    waiting = [job(f"a{n}", 1, 1, user="ada", submitted_at=float(n)) for n in range(3)]
    late = job("late", 1, 1, user="ben", submitted_at=9.0)
    found = allocate(Fulfilment(), [running, *waiting, late], cluster(4), 10.0)
    assert counts(found) == {"running": 2, "a0": 1, "a1": 0, "a2": 0, "late": 1}


def test_no_value_of_a_trainer_takes_it_from_another_users_share():
    near = job("near", 1, 8, 4, remaining_s=600.0, user="ada")
    far = job("far", 1, 8, 4, remaining_s=60_000.0, user="ben")
    assert counts(allocate(Goodput(), [near, far], cluster(8), 100.0)) == {"near": 4, "far": 4}


# --- properties


def random_case(
    rng: random.Random, users: tuple[str, ...] = ("",), *, slots_only: bool = False
) -> tuple[list[JobView], list[NodeRoom]]:
    def amount(top: int) -> Resources:
        return Resources(
            slots=rng.randint(0, top),
            cpu_milli=1000 * rng.randint(1, top),
            memory_mb=rng.randint(1, top),
        )

    nodes = []
    for index in range(rng.randint(1, 5)):
        capacity = Resources(slots=rng.randint(0, 8)) if slots_only else amount(8)
        foreign = Resources(
            *(rng.randint(0, part) if rng.random() < 0.3 else 0 for part in capacity)
        )
        nodes.append(NodeRoom(node_id=f"n{index}", capacity=capacity, foreign=foreign))
    jobs = []
    for index in range(rng.randint(1, 6)):
        least = rng.randint(1, 3)
        jobs.append(
            JobView(
                job_id=f"j{index}",
                min_trainers=least,
                max_trainers=least + rng.choice((0, 1, 3, 6)),
                each=ONE if slots_only else rng.choice((ONE, Resources(cpu_milli=1000), amount(2))),
                placed={f"n{rng.randint(0, 5)}": rng.randint(1, 4)} if rng.random() < 0.5 else {},
                priority=rng.choice((0, 0, 0, 1)),
                submitted_at=float(rng.randint(0, 900)),
                remaining_s=rng.choice((None, 10.0, 1000.0, 1e5)),
                user=rng.choice(users),
            )
        )
    return jobs, nodes


def check_shares(jobs: list[JobView], nodes: list[NodeRoom], found: dict[str, Allocation]) -> None:
    """Of two users with work, none has less than a share while the other's have more than min.

    Args:
        jobs: of one slot for each trainer, which fit any node.
    """
    have = counts(found)
    used = {user: 0 for user in (each.user for each in jobs)}
    for each in jobs:
        used[each.user] += have[each.job_id]
    share = sum(node.capacity.slots - node.foreign.slots for node in nodes) / len(used)
    spare = dict.fromkeys(used, 0)
    for each in jobs:
        spare[each.user] += max(0, have[each.job_id] - each.min_trainers)
    for each in jobs:
        others = [user for user in used if user != each.user and spare[user]]
        if 0 < have[each.job_id] < each.max_trainers:
            assert all(used[user] <= used[each.user] + 1 for user in others), (each, have)
        elif have[each.job_id] or "behind" in found[each.job_id].reason:
            continue
        elif used[each.user] + each.min_trainers <= share:
            room = sum(min(spare[user], max(0, used[user] - int(share))) for user in others)
            assert room < each.min_trainers, (each, have)


def check_properties(
    policy: Policy, jobs: list[JobView], nodes: list[NodeRoom], now: float
) -> dict[str, Allocation]:
    """One decision and those after it hold what is promised; return the last of them."""
    before = None
    for _ in range(12):
        found = allocate(policy, jobs, nodes, now)
        for each in jobs:
            allowed = (0, *range(each.min_trainers, each.max_trainers + 1))
            assert found[each.job_id].trainers in allowed
            if each.home and not each.runs and found[each.job_id].trainers:
                assert each.home in found[each.job_id].placed, each
            assert found[each.job_id].reason
        placed = {name: dict(allocation.placed) for name, allocation in found.items()}
        if placed == before:
            break
        jobs, before, now = applied(jobs, found, now), placed, now + 60.0
    else:
        raise AssertionError(f"never comes to rest: {counts(found)}")
    for node in nodes:
        check_node(node, jobs, found)
    for each in jobs:  # whoever can start does
        if not found[each.job_id].trainers and "behind" not in found[each.job_id].reason:
            alone = allocate(policy, [each], left_over(nodes, jobs, found), now)
            assert not alone[each.job_id].trainers, each
    return found


def check_node(node: NodeRoom, jobs: list[JobView], found: dict[str, Allocation]) -> None:
    """A node is used beyond what it has only where others take what jobs at their least need."""
    for k in range(3):
        users = [
            each for each in jobs if each.each[k] and found[each.job_id].placed.get(node.node_id)
        ]
        used = sum(found[each.job_id].placed[node.node_id] * each.each[k] for each in users)
        least = all(found[each.job_id].trainers == each.min_trainers for each in users)
        assert used + node.foreign[k] <= node.capacity[k] or least, (node, found)


def left_over(
    nodes: list[NodeRoom], jobs: list[JobView], found: dict[str, Allocation]
) -> list[NodeRoom]:
    return [
        replace(
            node,
            foreign=Resources(
                *(
                    node.foreign[k]
                    + sum(
                        found[each.job_id].placed.get(node.node_id, 0) * each.each[k]
                        for each in jobs
                    )
                    for k in range(3)
                )
            ),
        )
        for node in nodes
    ]


def check_random_clusters(name: str, count: int) -> None:
    for seed in range(count):
        rng = random.Random(seed)
        jobs, nodes = random_case(rng, ("",) if seed % 2 else ("", "ada", "ben"))
        policy = POLICIES[name](max_load=rng.choice((1.0, 1.0, 0.8)))
        if seed % 3 == 0:
            jobs = [with_home(rng, each, nodes) for each in jobs]
        try:
            check_properties(policy, jobs, nodes, 1000.0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def with_home(rng: random.Random, job: JobView, nodes: list[NodeRoom]) -> JobView:
    """Half of the jobs are to begin where their state is."""
    if rng.random() < 0.5:
        return job
    home = rng.choice(nodes).node_id
    placed = job.placed if home in job.placed else {}
    return replace(job, home=home, placed=placed, runs=bool(placed) and rng.random() < 0.3)


def check_random_users(name: str, count: int) -> None:
    for seed in range(count):
        rng = random.Random(seed)
        jobs, nodes = random_case(rng, ("ada", "ben", "cem")[: rng.randint(2, 3)], slots_only=True)
        try:
            check_shares(jobs, nodes, check_properties(POLICIES[name](), jobs, nodes, 1000.0))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_users_have_their_shares(name):
    check_random_users(name, 300)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_clusters_are_shared_within_their_bounds_and_come_to_rest(name):
    check_random_clusters(name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_ten_thousand_random_clusters(name):
    check_random_clusters(name, 10_000)
    check_random_users(name, 10_000)


# --- which nodes


def test_a_job_gets_trainers_only_on_nodes_that_can_run_it():
    nodes = cluster(2, 2, 2)
    picky = job("picky", 1, 6, nodes=frozenset({"n1"}))
    found = allocate(Fulfilment(), [picky, job("other", 1, 6)], nodes, 0.0)
    assert found["picky"].placed == {"n1": 2}
    assert found["other"].trainers == 4


def test_a_job_begins_on_the_node_that_has_its_state_and_others_give_way_there():
    nodes = cluster(2, 2)
    there = job("there", 1, 2, 2, node="n1")
    found = allocate(Fulfilment(), [there, job("job", 1, 1, home="n1")], nodes, 0.0)
    assert found["job"].placed == {"n1": 1}
    assert found["there"].trainers == 2
    least = job("there", 2, 2, 2, node="n1")
    found = allocate(Fulfilment(), [least, job("job", 1, 1, home="n1")], nodes, 0.0)
    assert found["job"].trainers == 0
    found = allocate(Fulfilment(), [least, job("job", 1, 1, home="n1", priority=1)], nodes, 0.0)
    assert found["job"].placed == {"n1": 1}
    assert found["there"].reason == "stopped for job, whose priority is higher"


def test_a_job_that_is_about_to_begin_keeps_its_place_where_its_state_is():
    nodes = cluster(2, 2, 1)
    begins = job("begins", 1, 3, placed={"n1": 1, "n0": 2}, home="n1", runs=False, priority=1)
    other = job("other", 1, 3, each=Resources(slots=2), home="n1", runs=False, user="ada")
    found = allocate(Goodput(), [begins, other], nodes, 0.0)
    assert found["begins"].placed == begins.placed
    assert "the first on n1, which has its state" in found["other"].reason
    full = [nodes[0], replace(nodes[1], foreign=Resources(slots=2)), nodes[2]]
    found = allocate(Goodput(), [begins], full, 0.0)
    assert found["begins"].trainers == 0, "elsewhere it cannot begin"
