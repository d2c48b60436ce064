"""What a script's open files hold back is on the disk before its trainer is killed."""

import contextlib
import os

from pod_runtime.trainer.membership.open_files import flush_files


def test_files_are_flushed_and_pipes_are_not(tmp_path):
    """Nobody may read a pipe: to flush it might take for ever."""
    reading, writing = os.pipe()
    with contextlib.ExitStack() as files:
        files.callback(os.close, reading)
        pipe = files.enter_context(os.fdopen(writing, "w"))
        text = files.enter_context((tmp_path / "losses.csv").open("a"))
        data = files.enter_context((tmp_path / "losses.bin").open("w+b"))
        pipe.write("said")
        text.write("1,0.5\n")
        data.write(b"half")
        flush_files()
        assert (tmp_path / "losses.csv").read_text() == "1,0.5\n"
        assert (tmp_path / "losses.bin").read_bytes() == b"half"
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):
            assert os.read(reading, 4) == b"", "the pipe was flushed"
