"""A job in a YAML file, as people write it."""

import argparse
from pathlib import Path

import pytest

from job_server.api.errors import ConfigError
from job_server.api.failure_policy import FailureRule, Then
from job_server.api.wire import JobSpec
from job_server.cli.job_flags import add_job_flags, read_job
from tests.support import ROOT


def read(path: Path, *flags: str) -> JobSpec:
    parser = argparse.ArgumentParser()
    add_job_flags(parser)
    return read_job(parser.parse_args(["--file", str(path), *flags]))


def test_a_job_that_shares_the_cluster_is_read_with_the_words_of_people(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: digits-a\nfolder: digits\nshare: true\nmin: 2\nmax: 8\n"
        "resources: {cpu: 1.5, memory: 2 GB}\npriority: 5\nuser: ann\nafter: prepare\n"
        "max_run_time: 1 h 30 min\nfault_tolerant: true\n"
    )
    assert read(path) == JobSpec(
        job_id="digits-a", folder="digits", share=True, min_pods=2, max_pods=8, cpu_milli=1500,
        memory_mb=2000, priority=5, user="ann", after=("prepare",), max_run_time_s=5400.0, spares=1,
    )  # fmt: skip


def test_flags_override_the_file_and_have_the_same_words(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nshare: true\nmax: 4\nresources: {cpu: 1}\nafter: [x, y]\n")
    flags = ("--name", "b", "--cpu", "500m", "--memory", "1Gi", "--after", "z", "--after", "w")
    spec = read(path, *flags, "--max_run_time", "2h", "--priority", "-3", "--user", "bob")
    assert (spec.job_id, spec.cpu_milli, spec.memory_mb) == ("b", 500, 1074)
    assert (spec.after, spec.max_run_time_s) == (("z", "w"), 7200.0)
    assert (spec.priority, spec.user, spec.max_pods) == (-3, "bob", 4)


def test_a_job_has_arguments_for_its_script(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nargs: [--lr, 0.1, --name, b c]\n")
    assert read(path).args == ("--lr", "0.1", "--name", "b c")
    assert read(path, "--args=--lr 0.2 --name 'd e'").args == ("--lr", "0.2", "--name", "d e")


@pytest.mark.parametrize(
    "text",
    [
        "80:10:10", "00012", "1_000", "0x1F", "2:30", "1.10", "1.0e-3", "1e3", ".5", "5.", "on",
        "yes", "2024-01-02", "0b1", "1:30.5", "007", "=", "<<",
    ],
)  # fmt: skip
def test_an_argument_comes_to_the_script_as_it_is_written(tmp_path, text):
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\nargs: [--split, {text}]\n")
    assert read(path).args == ("--split", text)
    path.write_text(f"name: a\nargs:\n- --split\n- {text}\n")
    assert read(path).args == ("--split", text)


def test_a_job_that_tolerates_no_failure_ends_with_the_first_and_has_a_fixed_size(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nmin: 2\nmax: 2\nfault_tolerant: false\n")
    assert read(path).max_failures == 0
    with pytest.raises(ConfigError, match=r"fixed size, got min 2 and max 4; give max the value"):
        read(path, "--max", "4")
    assert read(path, "--min", "3", "--max", "3").max_pods == 3
    assert read(path, "--max", "4", "--max_failures", "2").max_failures == 2
    path.write_text("name: a\nmax: 2\nfault_tolerant: false\n")
    with pytest.raises(ConfigError, match=r"fault_tolerant: .* fixed size, got min 1 and max 2"):
        read(path)
    assert read(path, "--min", "2").max_failures == 0


def test_a_number_that_is_not_finite_comes_as_python_reads_it(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nargs: [--low, -.inf, --high, .inf]\n")
    assert read(path).args == ("--low", "-inf", "--high", "inf")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nme: a", "unknown key 'nme'; known: name, min, max, resources,"),
        ("name: a\njob_id: b", "name and job_id say the same; give one of them"),
        ("name: a\nresources: 2", "resources: expected fields, such as 'memory: 2 GB'"),
        ("name: a\nresources: {gpu: 1}", "unknown key 'resources.gpu'; known: cpu, memory; a "),
        ("name: a\nresources: {memory: 5}", "resources.memory: expected an amount with its unit"),
        ("name: a\nresources: {cpu: many}", "resources.cpu: expected cores, such as 0.5"),
        ("name: a\nresources: {cpu: 1}\ncpu_milli: 5", "resources.cpu and cpu_milli say the same"),
        ("name: a\nmax_run_time: soon", "max_run_time: expected a time, such as 90 s"),
        ("name: a\nmax_run_time: [1]", "max_run_time: expected a number or a text"),
        ("name: a\nfault_tolerant: 1", "fault_tolerant: expected true or false"),
        ("name: a\nargs: [--flip, true]", "args: expected texts and numbers, such as [--lr, 0.1]"),
        ("name: a\nargs: --lr 0.1", "args: expected"),
        ("name: a\nargs: [~]", "got None; write another in quotes"),
        ("name: a\nargs: [a]\nmin: 1\nargs: [b]", "line 4: not YAML: the key 'args' comes twice"),
        ("name: a\nscript: {kind: walk, kind: none}", "line 2: not YAML: the key 'kind' comes"),
        ("name: a\nmax_run_time: 1:30", "max_run_time: expected a time, such as 90 s"),
        ("name: a\nmin: 010", "min_pods: expected int"),
        ("name: 2024-13-45", "not YAML: month must be in 1..12"),
        ("name: a\nscript: train.py", "what trains is train.sh in the job's folder"),
        ("name: a\npriority: 5", "priority: only of a job that shares the cluster; add share"),
        ("name: a\nshare: true\npods: 3", "pods: the server chooses how many pods"),
        ("name: a\nmin: 3\nmax: 2", "max_pods: must be at least min_pods"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read(path)
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_the_jobs_of_the_example_are_read(name):
    spec = read(ROOT / f"examples/shared_cluster/{name}.yaml")
    assert spec.job_id == name
    assert spec.share
    assert (ROOT / f"examples/shared_cluster/jobs/{spec.folder}/train.sh").is_file()


def test_a_failure_policy_stands_in_the_file_or_in_one_beside_it_and_a_flag_comes_before_it(
    tmp_path,
):
    path, policy = tmp_path / "job.yaml", tmp_path / "policy.yaml"
    policy.write_text("- {exit_code: 3, then: ignore}\n")
    rules = (FailureRule(exit_code=(3,), then=Then.IGNORE),)
    path.write_text("name: a\nfailure_policy: policy.yaml\n")
    assert read(path).failure_policy == rules
    path.write_text("name: a\nfailure_policy:\n- {exit_code: 3, then: ignore}\n")
    assert read(path).failure_policy == rules
    path.write_text("name: a\nfailure_policy: [{exit_code: 4, then: fail}]\n")
    assert read(path, "--failure_policy", str(policy)).failure_policy == rules
    path.write_text("name: a\nfailure_policy: [{exitcode: 4, then: fail}]\n")
    with pytest.raises(ConfigError, match=r"job.yaml: failure_policy: rule 1: unknown key 'exitc"):
        read(path)
    path.write_text("name: a\nfailure_policy: none.yaml\n")
    with pytest.raises(ConfigError, match=r"failure_policy: .*none.yaml cannot be read"):
        read(path)
