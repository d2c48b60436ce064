"""For all tests."""

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

# Whoever runs the tests in the background (`&`, nohup, some CI) has these ignored, and all programs
# that a test starts would inherit that: Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# How long an example may take, to draw or to run, says nothing where other programs have the
# processor.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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
        gc.enable()
