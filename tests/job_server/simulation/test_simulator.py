"""Jobs in virtual time."""

import json

import pytest

from job_server.cli.commands import main
from job_server.sharing.policies import Fulfilment
from job_server.sharing.resources import NodeRoom, Resources
from job_server.sharing.speedup import StepTime
from job_server.simulation.baselines import CONTENDERS
from job_server.simulation.simulator import Costs, SimulationResult, simulate
from job_server.simulation.summary import percentile, plot, summarize
from job_server.simulation.workload import SimulatedJob, WorkloadError, synthetic

LINEAR = StepTime(1.0, 0.0, 0.0)


def cluster(nodes: int, slots: int) -> list[NodeRoom]:
    return [
        NodeRoom(node_id=f"n{index}", capacity=Resources(slots=slots)) for index in range(nodes)
    ]


def job(
    name: str,
    submitted: float = 0.0,
    trainers: int = 1,
    seconds: float = 100.0,
    least: int = 1,
    most: int = 1,
) -> SimulatedJob:
    return SimulatedJob(
        job_id=name,
        submitted_s=submitted,
        trainers=trainers,
        duration_s=seconds,
        min_trainers=least,
        max_trainers=most,
        step_time=LINEAR,
    )


def ends(result: SimulationResult) -> dict[str, float]:
    return {each.job.job_id: round(each.ended_s, 6) for each in result.outcomes}


def test_a_job_alone_takes_its_start_and_its_work():
    jobs = [job("one"), job("wide", submitted=1000.0, trainers=2, seconds=100.0, most=4)]
    result = simulate(Fulfilment(), jobs, cluster(1, 4), costs=Costs(start_s=5.0))
    assert ends(result) == {"one": 105.0, "wide": 1055.0}
    assert [each.waiting_s for each in result.outcomes] == [0.0, 0.0]


def test_a_change_costs_what_it_costs_and_no_work_is_lost():
    """One runs with 4 for 100 s, gives two away for a while, and gets them back."""
    jobs = [
        job("first", trainers=4, seconds=200.0, least=2, most=4),
        job("second", submitted=100.0, trainers=2, seconds=50.0, least=2, most=2),
    ]
    result = simulate(Fulfilment(), jobs, cluster(1, 4), costs=Costs(start_s=0.0, change_s=2.0))
    # 400 done at 100; 2 from 102 to 150: 96; 4 from 152 on: 304 left take 76
    assert ends(result) == {"second": 150.0, "first": 228.0}
    assert {each.job.job_id: each.changes for each in result.outcomes} == {"second": 0, "first": 2}


def test_rigid_jobs_run_in_order_with_what_their_users_asked_for():
    jobs = [
        job("a", 0.0, 3, 100.0, 1, 4),
        job("b", 1.0, 3, 10.0, 1, 4),
        job("c", 2.0, 1, 10.0, 1, 4),
    ]
    contender = CONTENDERS["fifo"]
    result = simulate(
        contender.policy, jobs, cluster(1, 4), costs=Costs(start_s=0.0), rigid=contender.rigid
    )
    assert ends(result) == {"a": 100.0, "b": 110.0, "c": 110.0}


def test_a_job_that_can_never_run_is_refused_with_the_numbers():
    with pytest.raises(
        WorkloadError, match="big: it needs 9 trainers at least, the cluster has room for 8"
    ):
        simulate(Fulfilment(), [job("big", trainers=9, least=9, most=9)], cluster(2, 4))


@pytest.mark.parametrize("name", sorted(CONTENDERS))
def test_every_job_ends_once_and_never_faster_than_its_most_trainers(name):
    jobs = synthetic(60, seed=4, load=1.0, slots=16)
    contender = CONTENDERS[name]
    run = [simulate(contender.policy, jobs, cluster(2, 8), rigid=contender.rigid) for _ in range(2)]
    assert run[0] == run[1]  # the same numbers give the same answer
    assert sorted(each.job.job_id for each in run[0].outcomes) == sorted(
        each.job_id for each in jobs
    )
    for each in run[0].outcomes:
        most = each.job.trainers if contender.rigid else each.job.max_trainers
        fastest = each.job.work_s / max(each.job.step_time.speedup(n) for n in range(1, most + 1))
        assert each.ended_s - each.started_s >= fastest
        assert each.started_s >= each.job.submitted_s
    assert all(0 <= slots <= 16 for _, slots in run[0].busy)
    assert run[0].busy[-1][1] == 0


@pytest.mark.parametrize("name", ["fulfilment", "goodput"])
def test_below_full_load_elastic_jobs_end_much_sooner_and_none_starves(name):
    jobs = synthetic(200, seed=7, load=0.9, slots=32)
    nodes = cluster(4, 8)
    found = {
        each: summarize(
            simulate(CONTENDERS[each].policy, jobs, nodes, rigid=CONTENDERS[each].rigid)
        )
        for each in ("fifo", name)
    }
    rigid, elastic = found["fifo"], found[name]
    assert elastic.mean_completion_s < 0.7 * rigid.mean_completion_s
    assert elastic.p99_completion_s <= rigid.p99_completion_s
    assert elastic.longest_waiting_s < 1200  # twice the patience


def test_figures():
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
    result = simulate(Fulfilment(), [job("one")], cluster(1, 2), costs=Costs(start_s=0.0))
    assert summarize(result).used == pytest.approx(0.5)
    assert plot(result, width=4) == "▄▄▄▄"


def test_the_command(capsys, tmp_path):
    assert main(["simulate", "--nodes", "2x4", "--synthetic", "20", "--seed", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("20 jobs on 2 nodes with 8 slots")
    assert all(name in text for name in CONTENDERS)
    arguments = ["simulate", "--nodes=2x4", "--synthetic", "5", "--policy", "goodput", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["goodput"]
    assert found["goodput"]["jobs"] == 5
    assert main(["simulate", "--nodes", "2x4", "--trace", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err
    assert main(["simulate", "--nodes", "2x4", "--synthetic", "0"]) == 2
    assert "--synthetic: expected at least 1, got 0" in capsys.readouterr().err


def test_a_job_holds_its_slots_until_its_end_is_over():
    costs = Costs(start_s=5.0, change_s=1.0, end_s=3.0)
    jobs = [job("first"), job("second")]
    result = simulate(Fulfilment(), jobs, cluster(1, 1), costs=costs, round_s=0.0)
    assert [outcome.ended_s for outcome in result.outcomes] == [108.0, 216.0]
