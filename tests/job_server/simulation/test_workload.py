"""The jobs of a simulation, made up or read."""

import json

import pytest

from job_server.simulation.workload import WorkloadError, curves, read_trace, synthetic


def test_made_up_jobs_ask_for_the_load_that_was_wanted():
    jobs = synthetic(4000, seed=3, load=0.9, slots=64)
    asked = sum(job.trainers * job.duration_s for job in jobs)
    assert asked / (64 * jobs[-1].submitted_s) == pytest.approx(0.9, rel=0.05)
    assert all(1 <= job.min_trainers <= job.trainers <= job.max_trainers <= 64 for job in jobs)


def test_the_same_seed_makes_the_same_jobs():
    assert synthetic(50, seed=1, load=0.7, slots=8) == synthetic(50, seed=1, load=0.7, slots=8)
    assert synthetic(50, seed=1, load=0.7, slots=8) != synthetic(50, seed=2, load=0.7, slots=8)


def test_the_curves_fit_what_was_measured():
    found = curves()["resnet50_p100"]
    assert [found.speedup(n) for n in (2, 4, 8)] == pytest.approx([1.93, 3.89, 7.92], rel=0.04)


def test_a_csv_trace(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(
        "job_id,submitted_s,trainers,duration_s,min_trainers,max_trainers,priority,curve\n"
        "late,60,2,100,1,4,1,resnet50_p100\n"
        "early,0,8,50,,,,\n",
        encoding="utf-8-sig",  # as a spreadsheet writes it
    )
    early, late = read_trace(path, slots=16)
    assert (early.job_id, early.trainers, early.min_trainers, early.max_trainers) == (
        "early",
        8,
        2,
        16,
    )
    assert (late.min_trainers, late.max_trainers, late.priority) == (1, 4, 1)
    assert late.work_s == pytest.approx(193, rel=0.05)


HEAD = "job_id,submitted_s,trainers,duration_s"
WRONG = {
    "a number": (f"{HEAD}\na,0,1,x\n", r"jobs.csv:2: duration_s: expected a number .* got 'x'"),
    "not finite": (f"{HEAD}\na,nan,1,1\n", "submitted_s: expected a number"),
    "half a trainer": (f"{HEAD}\na,0,1.5,1\n", "trainers: expected a whole number"),
    "columns": ("job_id,when\na,0\n", "missing: submitted_s, trainers, duration_s, unknown: when"),
    "twice": (f"{HEAD}\na,0,1,1\na,1,1,1\n", "'a' stands there twice"),
    "curve": (f"{HEAD},curve\na,0,1,1,foo\n", "no 'foo'; there are resnet50_p100, inception3_k80"),
    "range": (f"{HEAD},min_trainers\na,0,1,1,2\n", "expected min_trainers <= trainers"),
    "empty": (f"{HEAD}\n", "holds no job that ran"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_trace_is_refused_with_line_and_field(case, tmp_path):
    text, error = WRONG[case]
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=error):
        read_trace(path, slots=16)


def test_phillys_job_log(tmp_path):
    ran = {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "submitted_time": "2017-10-07 01:10:00",
        "user": "ce2a4f",
        "attempts": [
            {
                "start_time": "2017-10-07 01:12:00",
                "end_time": "2017-10-07 01:13:00",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
            {"start_time": "2017-10-07 01:14:00", "end_time": None, "detail": []},
        ],
    }
    never = {**ran, "jobid": "application_2", "attempts": []}
    later = {**ran, "jobid": "application_3", "submitted_time": "2017-10-07 02:10:00"}
    path = tmp_path / "cluster_job_log.json"
    path.write_text(json.dumps([later, never, ran]))
    first, second = read_trace(path, slots=16)
    assert (first.job_id, first.submitted_s, first.trainers, first.duration_s) == (
        "application_1", 0.0, 3, 60.0,
    )  # fmt: skip
    assert (second.job_id, second.submitted_s) == ("application_3", 3600.0)
    path.write_text(json.dumps([{"jobid": "x"}]))
    with pytest.raises(WorkloadError, match="job 0: KeyError"):
        read_trace(path, slots=16)
