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


@pytest.mark.parametrize(
    ("source", "wholly"),
    [
        ("def test_it():\n    'full'\n", True),
        ("import subprocess\n", False),
        ("@pytest.mark.full\ndef test_it():\n    pass\n", False),
        ("pytestmark = pytest.mark.slow\n", False),
        ("def test_it(redis_server):\n    pass\n", False),
    ],
)
def test_the_other_lane_collects_no_module_whose_tests_are_all_fast(tmp_path, source, wholly):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    assert lanes.is_wholly_fast(path) is wholly
    (tmp_path / "conftest.py").write_text("def fixture(redis_server):\n    pass\n")
    assert not lanes.is_wholly_fast(path)


def test_a_test_that_no_lane_would_run_is_refused(pytester_folder, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "test_sub.py").write_text("def test_it(indirect):\n    pass\n")
    with (tmp_path / "conftest.py").open("a") as conftest:
        conftest.write("@pytest.fixture\ndef redis_server():\n    pass\n")
        conftest.write("@pytest.fixture\ndef indirect(redis_server):\n    pass\n")
    done = pytester_folder("def test_it():\n    pass\n", "-m", "fast")
    assert "mark sub/test_sub.py::test_it with `full`" in done


def test_a_fast_lane_that_loads_a_framework_as_it_is_collected_is_refused(
    pytester_folder, tmp_path
):
    (tmp_path / "torch.py").touch()
    (tmp_path / "product.py").write_text("import torch\n")
    text = "import product\ndef test_it():\n    pass\n"
    assert "the fast lane imports torch" in pytester_folder(text, "-m", "fast")


@pytest.fixture
def pytester_folder(tmp_path):
    """Run pytest on a module beside the conftest.py of all tests; return what it prints."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    fast\n    full\n    slow\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())

    def run(text: str, *options: str) -> str:
        (tmp_path / "test_it.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
            cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.stdout

    return run
