"""The fast lane holds fast tests, and notices those that do not belong there."""

import subprocess
import sys

import pytest

from tests import lanes
from tests.support import ROOT


@pytest.mark.parametrize(
    ("source", "fast"),
    [
        ("import json\nfrom job_server.api import wire\n", True),
        ("import subprocess\n", False),
        ("from multiprocessing import Process\n", False),
        ("import paddle.nn as nn\n", False),
        ("def test_it():\n    import paddle\n", False),
        ('import pytest\npaddle = pytest.importorskip("paddle")\n', False),
        ('import pytest\ndef test_it():\n    pytest.importorskip("paddle")\n', True),
        ("from tests.e2e.cluster import Cluster\n", False),  # which imports subprocess
        ("from tests import support\n", True),
    ],
)
def test_a_module_is_fast_by_what_it_and_its_helpers_import(tmp_path, source, fast):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert lanes.is_fast_module(path) is fast


def test_a_process_is_noticed():
    watch = lanes.Watch()
    assert watch.seen == []
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert watch.seen == [f"starts a process: {sys.executable}"]


def test_a_fast_test_that_starts_a_process_fails(pytester_folder):
    text = "import os\ndef test_it():\n    os.system('true')\ndef test_other():\n    pass\n"
    done = pytester_folder(text)
    assert "a fast test starts a process: b'true'" in done
    assert "2 passed, 1 error" in done


def test_a_test_that_is_marked_full_may_start_processes(pytester_folder):
    text = "import os, pytest\n@pytest.mark.full\ndef test_it():\n    os.system('true')\n"
    assert "1 passed" in pytester_folder(text)
    assert "1 deselected" in pytester_folder(text, "-m", "fast")


@pytest.fixture
def pytester_folder(tmp_path):
    """Run pytest on a module beside the conftest.py of all tests; return what it prints."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    fast\n    full\n    slow\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())

    def run(text: str, *options: str) -> str:
        (tmp_path / "test_it.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
            cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        return done.stdout

    return run
