"""scripts/check_containers.sh as far as it goes without an engine: it says so, and does nothing."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docker.compose import services
from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "check_containers.sh"
SKIPPED = 77


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for $PATH with what the script needs of the system, and no engine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm", "awk", "seq", "sleep", "id", "cat"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def add(tools: Path, name: str, program: str) -> None:
    (tools / name).write_text(f"#!/usr/bin/env bash\n{program}\n")
    (tools / name).chmod(0o755)


def run(tools: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tools / "bash", SCRIPT, *args],
        env={"PATH": str(tools), "TMPDIR": str(tools.parent), "CALLS": str(tools.parent / "calls")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_docker_nothing_is_tried(tools: Path):
    done = run(tools)
    assert (done.returncode, done.stdout) == (SKIPPED, "")
    assert done.stderr.startswith("Skipped: no docker here")


def test_without_its_compose_plugin_nothing_is_tried(tools: Path):
    add(tools, "docker", 'echo "$*" >>"$CALLS"; exit 1')
    done = run(tools)
    assert (done.returncode, done.stdout) == (SKIPPED, "")
    assert done.stderr.startswith("Skipped: docker has no compose plugin")
    assert (tools.parent / "calls").read_text() == "compose version\n"


def test_without_an_engine_nothing_is_tried_and_nothing_left(tools: Path):
    add(tools, "docker", 'echo "$*" >>"$CALLS"; [ "$1" = compose ]')
    before = set(tools.parent.iterdir())
    done = run(tools)
    assert (done.returncode, done.stdout) == (SKIPPED, "")
    assert done.stderr.startswith("Skipped: docker reaches no engine, and there is no podman")
    assert set(tools.parent.iterdir()) - before == {tools.parent / "calls"}
    assert set((tools.parent / "calls").read_text().splitlines()) == {"compose version", "info"}


def test_a_build_that_fails_ends_it_with_the_reason_and_what_was_started_is_taken_down(tools: Path):
    add(
        tools,
        "docker",
        'echo "$*" >>"$CALLS"\n'
        'case "$*" in *" build "*) echo "no space left"; exit 1 ;; version*) echo Engine ;; esac',
    )
    for name in ("grep", "tail", "od", "tr", "mkdir", "chown", "date", "rmdir"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = run(tools)
    assert done.returncode == 1
    assert "no space left" in done.stderr
    assert "the image is not built" in done.stderr
    assert done.stdout.endswith("Failed: see above.\n")
    calls = (tools.parent / "calls").read_text()
    assert calls.count(" down --volumes ") == 3
    assert " up " not in calls


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [(["--help"], 0, "Exit code: 0 all is well"), (["--fast"], 2, "unknown argument '--fast'")],
)
def test_its_arguments_are_explained(tools: Path, args: list[str], code: int, text: str):
    done = run(tools, *args)
    assert done.returncode == code
    assert text in done.stdout + done.stderr


def test_each_service_of_each_profile_is_brought_up():
    text = SCRIPT.read_text()
    for profile in ("resnet50", "mnist", "teachers"):
        line = re.search(rf"^cold_up {profile} (.*)$", text, re.MULTILINE)
        assert line is not None
        wanted = {name for name, each in services({}).items() if profile in each.profiles}
        assert set(line[1].split()) == wanted


@pytest.mark.parametrize(
    "script",
    [
        "scripts/check_containers.sh", "scripts/docker_resnet50.sh", "scripts/start_job_server.sh",
        "scripts/start_job_client.sh", "docker/entry.sh",
    ],
)  # fmt: skip
def test_shellcheck_finds_nothing(script: str):
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck (Debian: apt-get install shellcheck)")
    done = subprocess.run(
        [shellcheck, "--external-sources", "--source-path", ROOT / "scripts", script],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
