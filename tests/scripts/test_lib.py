"""The installation of quickstart.sh and test.sh, with a Python that only notes its calls."""

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import ROOT

# Says yes to every question, makes a "virtual environment" of copies of itself, notes pip's calls.
FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
    "-m venv")
        mkdir -p "$3/bin"
        echo "$3" >"$3/bin/activate"
        [ -e "$3/bin/python" ] || cp "$0" "$3/bin/python" ;;
    "-m ensurepip") echo "ensurepip" >>"$CALLS" ;;
    "-m pip")
        echo "pip $*" >>"$CALLS"
        sleep "${PIP_S:-0}"
        echo "pip says something"
        exit "${PIP_EXIT:-0}" ;;
    "-c "*"ensurepip"*) exit "${ENSUREPIP_EXIT:-0}" ;;
    "-c import pip") exit "${PIP_IS_MISSING:-0}" ;;
    "-c "*"version_info"*) exit "${VERSION_EXIT:-0}" ;;
esac
"""


class Checkout:
    """A copy of what the installation looks at, and a way to run it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone with a blank"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "setup.py", "scripts/lib.sh", "scripts/quickstart.sh"):
            shutil.copy(ROOT / name, self.root / name)
        self.python = folder / "python-that-notes"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.calls = folder / "calls"

    def install(self, extras: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(f'source scripts/lib.sh; ensure_venv {extras}; echo "has $python"', **env)

    def run(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.root,
            env={
                "PATH": os.environ["PATH"],
                "PYTHON": str(self.python),
                "CALLS": str(self.calls),
                "EDL_NO_GPU": "1",
                **env,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def pip_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_run_installs_and_the_second_asks_pip_nothing(checkout: Checkout):
    first, second = checkout.install("examples"), checkout.install("examples")
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == second.stdout == f"has {checkout.root}/.venv/bin/python\n"
    (call,) = checkout.pip_calls()
    assert call.endswith(f"--editable {checkout.root}[paddle,examples]")
    assert second.stderr == ""


def test_pip_is_not_heard_when_it_succeeds(checkout: Checkout):
    assert "pip says" not in checkout.install("examples").stderr


def test_other_requirements_are_installed_anew(checkout: Checkout):
    checkout.install("examples")
    (checkout.root / "pyproject.toml").write_text("other")
    checkout.install("examples")
    assert len(checkout.pip_calls()) == 2


def test_what_the_tests_need_contains_what_the_quickstart_needs_but_not_the_reverse(
    checkout: Checkout,
):
    checkout.install("examples")
    checkout.install("dev")
    assert len(checkout.pip_calls()) == 2
    checkout.install("examples")
    checkout.install("dev")
    assert len(checkout.pip_calls()) == 2


def test_torch_is_installed_only_where_it_is_asked_for_and_leaves_paddle_there(checkout: Checkout):
    for script in ("quickstart.sh --pods 2", "quickstart.sh --framework torch", "quickstart.sh"):
        assert checkout.run(f"bash scripts/{script}").returncode == 0
    assert [call.rpartition("[")[2] for call in checkout.pip_calls()] == [
        "paddle,examples]", "torch,examples]",
    ]  # fmt: skip
    assert checkout.run("bash scripts/quickstart.sh --framework=torch").returncode == 0
    assert len(checkout.pip_calls()) == 2, "the second time it is there"


def test_what_the_tests_need_contains_torch(checkout: Checkout):
    checkout.install("dev")
    checkout.install("examples torch")
    assert len(checkout.pip_calls()) == 1


def test_a_failed_installation_is_shown_fails_and_is_tried_again(checkout: Checkout):
    failed = checkout.install("examples", PIP_EXIT="3")
    assert failed.returncode == 1
    assert "pip says something" in failed.stderr
    assert "failed with exit code 3" in failed.stderr
    assert "has" not in failed.stdout
    assert checkout.install("examples").returncode == 0
    assert len(checkout.pip_calls()) == 2


def test_an_environment_of_another_user_that_is_out_of_date_is_told_with_the_remedy(
    checkout: Checkout,
):
    checkout.install("examples")
    (checkout.root / "pyproject.toml").write_text("other")
    (checkout.root / ".venv" / "install.log").unlink()
    (checkout.root / ".venv" / "install.log").mkdir()  # whose rights root would not heed
    refused = checkout.install("examples")
    assert refused.returncode == 1
    assert "have its owner call" in refused.stderr
    assert len(checkout.pip_calls()) == 1


def test_of_two_that_install_at_once_one_waits_and_asks_pip_nothing(checkout: Checkout):
    """As on machines that mount the folder: the second deleted what the first was making."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: checkout.install("examples", PIP_S="0.3"), range(2)))
    assert [each.returncode for each in both] == [0, 0]
    assert len(checkout.pip_calls()) == 1


@pytest.mark.parametrize("of_a_disk", [False, True])
def test_a_copy_of_the_folder_does_not_run_the_code_of_the_first_one(
    checkout: Checkout, of_a_disk: bool
):
    """Also of one that was taken back from a copy of the disk, as /backup/home/me/edl."""
    copy = checkout.root.with_name("copy")
    if of_a_disk:
        first = Path(f"{checkout.root.with_name('disk')}{copy}")
        shutil.copytree(checkout.root, first)
        checkout.root = first
    checkout.install("examples")
    shutil.copytree(checkout.root, copy)
    (copy / ".venv" / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    checkout.root = copy
    assert checkout.install("examples").stdout == f"has {copy}/.venv/bin/python\n"
    assert checkout.pip_calls()[1].endswith(f"--editable {copy}[paddle,examples]")
    assert (copy / ".venv" / "bin" / "activate").read_text() == f"{copy}/.venv\n"
    checkout.install("examples")
    assert len(checkout.pip_calls()) == 2


def test_an_environment_that_was_cut_off_before_it_had_pip_gets_it(checkout: Checkout):
    """By a Ctrl-C, say: each later start ended with "No module named pip"."""
    checkout.install("examples", PIP_EXIT="3")
    assert checkout.install("examples", PIP_IS_MISSING="1").returncode == 0
    assert checkout.pip_calls()[1] == "ensurepip"


def test_a_python_without_venv_is_told_which_package_is_missing(checkout: Checkout):
    refused = checkout.install("examples", ENSUREPIP_EXIT="1")
    assert refused.returncode == 1
    assert "apt-get install python3-venv" in refused.stderr
    assert not (checkout.root / ".venv").exists()


def test_without_a_fitting_python_the_versions_are_named(checkout: Checkout, tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "sha256sum"):
        (tools / name).symlink_to(shutil.which(name) or name)
    refused = checkout.install("examples", VERSION_EXIT="1", PATH=str(tools))
    assert refused.returncode == 1
    assert "No Python 3.11 to 3.13 found" in refused.stderr


@pytest.mark.parametrize(
    ("code", "says", "count"),
    [(0, "GPU 0: NVIDIA H200 (UUID: GPU-0abc)", "1"), (9, "couldn't communicate", "0")],
)
def test_gpus_are_counted_and_none_is_without_a_driver(checkout: Checkout, code, says, count):
    assert count_gpus(checkout, code, says).stdout.strip() == count


def test_a_driver_that_fails_is_no_machine_without_gpus(checkout: Checkout):
    refused = count_gpus(checkout, 18, "Failed to initialize NVML: Driver/library version mismatch")
    assert refused.returncode == 1
    assert "version mismatch" in refused.stderr
    assert "EDL_NO_GPU=1" in refused.stderr
    path = f"{checkout.root / 'bin'}:{os.environ['PATH']}"
    assert checkout.install("examples", EDL_NO_GPU="", PATH=path).returncode == 0


def count_gpus(checkout: Checkout, code: int, says: str) -> subprocess.CompletedProcess[str]:
    """Count GPUs by an nvidia-smi that says this."""
    folder = checkout.root / "bin"
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/bash\necho {shlex.quote(says)}\nexit {code}\n")
    smi.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return checkout.run(
        "source scripts/lib.sh; gpus=$(gpu_count); echo $gpus", PATH=path, EDL_NO_GPU=""
    )
