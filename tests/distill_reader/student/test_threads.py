"""Processes that are forked beside threads."""

import os

import pytest

from distill_reader.student.threads import ForkSafeThread
from tests.support import end_late, is_there

pytestmark = pytest.mark.full  # forks


def test_no_process_is_forked_amid_the_end_of_a_thread():
    thread = ForkSafeThread(target=end_late)
    thread.start()
    thread.join()
    if (pid := os.fork()) == 0:
        os._exit(0)
    assert not is_there(thread)
    os.waitpid(pid, 0)
