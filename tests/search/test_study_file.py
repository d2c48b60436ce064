"""A study in a YAML file, as people write it."""

import argparse

import pytest

from job_server.api.errors import ConfigError
from search.study_file import (
    Choice,
    FloatRange,
    IntRange,
    PrunerSpec,
    SamplerSpec,
    StudySpec,
    read_study,
)
from tests.support import ROOT, code_blocks

LEAST = (
    "name: a\nfolder: f\nmetric: accuracy\ndirection: maximize\ntrials: 4\nepochs: 3\n"
    "parameters: {lr: {low: 1e-4, high: 0.1, log: true}}\n"
)


def read(tmp_path, text: str) -> StudySpec:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    return read_study(path)


def test_a_study_is_read_with_the_words_of_people(tmp_path):
    made = read(
        tmp_path,
        "name: cells\nfolder: cells\nmetric: loss\ndirection: minimize\n"
        "trials: 40\nparallel: 4\nepochs: 8\nmin: 1\nmax: 4\nresources: {cpu: 0.5, memory: 1 GB}\n"
        "priority: -5\nuser: ann\nmax_run_time: 10 min\nseed: 3\n"
        "sampler: {kind: tpe, startup_trials: 6}\npruner: {kind: halving, reduction: 4}\n"
        "parameters:\n  lr: {low: 1e-4, high: 1, log: true}\n"
        "  width: {type: int, low: 4, high: 32, step: 4}\n"
        "  drop: {type: float, low: 0, high: 1}\n  act: [relu, gelu]\n"
        "  norm: {choices: [true, false]}\n",
    )
    assert made == StudySpec(
        name="cells", folder="cells", metric="loss", maximize=False, trials=40, parallel=4,
        epochs=8, min_pods=1, max_pods=4, cpu_milli=500, memory_mb=1000, priority=-5, user="ann",
        max_run_time_s=600.0, seed=3, sampler=SamplerSpec(startup_trials=6),
        pruner=PrunerSpec(kind="halving", reduction=4),
        parameters={
            "lr": FloatRange(low=1e-4, high=1.0, log=True),
            "width": IntRange(low=4, high=32, step=4),
            "drop": FloatRange(low=0.0, high=1.0),
            "act": Choice(choices=("relu", "gelu")),
            "norm": Choice(choices=(True, False)),
        },
    )  # fmt: skip


def test_the_studies_that_the_example_and_the_guide_show_are_read(tmp_path):
    assert read_study(ROOT / "examples" / "search_cells" / "study.yaml").trials == 40
    (shown,) = code_blocks("docs/search.md", "yaml")
    assert read(tmp_path, shown).pruner.min_epochs == 2


def test_a_trials_job_shares_the_cluster_and_gets_the_values_as_arguments(tmp_path):
    made = read(tmp_path, LEAST + "max: 4\npruner: none\n")
    job = made.job("a-1f-0", {"lr": 0.01, "width": 8, "norm": True})
    assert job.args == ("--epochs", "3", "--lr", "0.01", "--width", "8", "--norm", "true")
    assert (job.job_id, job.folder, job.share) == ("a-1f-0", "f", True)
    assert (job.min_pods, job.max_pods) == (1, 4)
    assert made.pruner.kind == "none"


@pytest.mark.parametrize("value", [-0.5, -1e-05, -7, "-1e-4", "-relu", 1e-05])
def test_a_script_takes_a_value_that_begins_with_a_dash_for_a_value(tmp_path, value):
    job = read(tmp_path, LEAST).job("a-1f-0", {"shift": value, "lr": 0.1})
    parser = argparse.ArgumentParser()
    for name in ("--epochs", "--shift", "--lr"):
        parser.add_argument(name)
    assert parser.parse_args(job.args).shift == str(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nme: b", "unknown key 'nme'; known: name, "),
        ("trials: 0", "trials: expected a whole number of 1 to 1000000, got 0"),
        ("direction: up", "direction: expected one of maximize, minimize, got 'up'"),
        ("min: 3\nmax: 2", "max: must be at least min (3), got 2"),
        ("folder: ../x", "folder: '../x' is not an id"),
        ("name: " + "x" * 61, "name: its characters: must be between 1 and 60, got 61"),
        ("metric: train_loss", "metric: train_loss is the loss of a batch; name one of a valid"),
        ("sampler: cma", "sampler.kind: expected one of tpe, random, got 'cma'"),
        ("sampler: {kind: random, startup_trials: 2}", "'sampler.startup_trials'; known: kind; t"),
        ("pruner: {kind: median, reduction: 2}", "unknown key 'pruner.reduction'; known: kind,"),
        ("pruner: {kind: median, min_epochs: 9}", "pruner: would prune only after more epochs"),
        ("resources: {gpu: 1}", "unknown key 'resources.gpu'; known: cpu, memory; a trainer has"),
        ("resources: {memory: 5}", "resources.memory: expected an amount with its unit"),
        ("weigh: 1", "weigh: expected true or false, got 1"),
        ("parameters: {}", "parameters: expected names with ranges, such as 'lr: {low: 0.01"),
        ("parameters: {epochs: [1, 2]}", "parameters.epochs: every trial gets --epochs from the"),
        ("parameters: {'a b': [1, 2]}", "parameters: 'a b' is no name of an argument"),
        ("parameters: {a: [1]}", "parameters.a: expected two choices at least; a fixed value"),
        ("parameters: {a: [1, '1']}", "parameters.a: '1' comes twice"),
        ("parameters: {a: [0, 0.5, false]}", "parameters.a: 'false' equals another choice, as 1,"),
        ("parameters: {a: [1.0, .inf]}", "parameters.a: expected texts, numbers, true or false, g"),
        ("parameters: {a: [0.1, 0.10]}", "parameters.a: '0.10' equals another choice, as 1, 1.0"),
        ("parameters: {a: [1, 01]}", "parameters.a: '01' equals another choice, as 1, 1.0 and"),
        ("parameters: {a: [10, 010]}", "parameters.a: '010' equals another choice, as 1, 1.0"),
        ("parameters: {a: [0x1F, 31]}", "parameters.a: '31' equals another choice, as 1, 1.0"),
        ("parameters: {a: 1}", "parameters.a: expected a list of choices, or low and high, got 1"),
        ("parameters: {a: {low: 0, high: 1}}", "parameters.a.type: missing: is it int or float"),
        (
            "parameters: {a: {low: 2.0, high: 1}}",
            "a: low must be below high, got 2 and 1",
        ),
        (
            "parameters: {a: {low: 0.0, high: 1, log: true}}",
            "a.low: must be above 0 with",
        ),
        ("parameters: {a: {low: x, high: 1}}", "parameters.a.low: expected a number, got 'x'"),
        (
            "parameters: {a: {low: 0.1, high: 3, hgh: 1}}",
            "key 'parameters.a.hgh'; known: ty",
        ),
        ("parameters: {a: {high: 3}}", "parameters.a.low: missing"),
        ("parameters: {a: {type: int, low: 0.5, high: 3}}", "parameters.a.low: expected a whole"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(tmp_path, text, says):
    keys = {line.partition(":")[0] for line in text.splitlines()}
    rest = [line for line in LEAST.splitlines() if line.partition(":")[0] not in keys]
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "\n".join([*rest, text]))
    assert says in str(refused.value)


def test_a_choice_comes_to_the_script_as_it_is_written(tmp_path):
    least = LEAST.replace("parameters: {lr: {low: 1e-4, high: 0.1, log: true}}\n", "")
    study = read(
        tmp_path,
        f"{least}parameters:\n  a: [on, off, true]\n  b: {{choices: [80:10, 70:20]}}\n"
        "  c: [1.10, 1.2, 16]\n  d: ['1.10', '1.1']\n",
    )
    assert study.parameters == {
        "a": Choice(choices=("on", "off", True)),
        "b": Choice(choices=("80:10", "70:20")),
        "c": Choice(choices=("1.10", 1.2, 16)),
        "d": Choice(choices=("1.10", "1.1")),
    }


@pytest.mark.parametrize("missing", ["name", "folder", "metric", "direction", "trials", "epochs"])
def test_what_has_no_default_has_to_be_there(tmp_path, missing):
    rest = [line for line in LEAST.splitlines() if not line.startswith(missing)]
    with pytest.raises(ConfigError, match=f"{missing}: missing"):
        read(tmp_path, "\n".join(rest))


def test_what_is_no_study_is_refused_with_the_line(tmp_path):
    with pytest.raises(ConfigError, match=r"study.yaml: line 2: not YAML"):
        read(tmp_path, "name: a\n\tb: c\n")
    with pytest.raises(ConfigError, match="line 3: not YAML: the key 'name' comes twice; leave"):
        read(tmp_path, "name: a\ntrials: 3\nname: b\n")
    with pytest.raises(ConfigError, match="expected fields of a study, such as 'name: cells'"):
        read(tmp_path, "- a\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_study(tmp_path / "none.yaml")
