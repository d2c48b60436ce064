"""Hooks and fixtures of all tests."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import lanes

# Whoever runs the tests in the background (`&`, nohup, some CI) has these ignored, and all programs
# that a test starts would inherit that: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# A network of these tests is so small that threads of OpenMP only wait for each other, and burn
# the processor meanwhile. For numpy, the frameworks and all programs that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The servers of tests are in a list of their own: whoever runs the tests may have some as well.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="edl_tests_")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# How long an example may take, to draw or to run, says nothing where other programs have the
# processor.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_watch = lanes.Watch()
_frozen_modules = 0


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without garbage collection, as `job_server.server.app` makes its routes.

    Tests are rewritten by `ast.parse`, which CPython 3.11 breaks off with SystemError when a
    collection amid it formats a traceback, say of a warning that became an error in a finalizer.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # collections of tests need not look through all modules each time
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules out of a lane that has none of their tests: each worker collects them all."""
    if not collection_path.match("test_*.py"):
        return None
    if config.option.markexpr == "fast":
        return not lanes.is_fast_module(collection_path) or None
    if config.option.markexpr.startswith("not fast"):
        return lanes.is_wholly_fast(collection_path) or None
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a fast lane that loads a framework as it is collected."""
    loaded = lanes.FRAMEWORKS & sys.modules.keys()
    if session.config.option.markexpr == "fast" and loaded:
        names = " and ".join(sorted(loaded))
        raise pytest.UsageError(
            f"a module of the fast lane imports {names}: import it in a function"
        )


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if lanes.is_fast_test(item):
            item.add_marker("fast")
        elif lanes.is_wholly_fast(item.path):  # no lane would run it
            raise pytest.UsageError(f"mark {item.nodeid} with `full`: a fixture of it is not fast")
    items.sort(key=lanes.order)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Leave what tests import out of collections, and of what a loop looks through."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 50:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _fast_tests_start_nothing(request: pytest.FixtureRequest):
    """Fail a fast test that starts a process or imports a framework."""
    _watch.seen.clear()
    yield
    if request.node.get_closest_marker("fast"):
        assert not _watch.seen, f"mark it with `full`: a fast test {_watch.seen[0]}"
