"""Training scripts as the launcher runs them: what they print, and what is told when they raise."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pod_runtime import trainer_main
from pod_runtime.channel_wire import Raised, parse_trainer

MAIN = trainer_main.__file__


class Script:
    """Scripts that run in one folder, with somebody who listens as a launcher does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        self.name = f"edl-test-{folder}"[-90:]
        self.listener.bind(f"\0{self.name}")
        self.listener.listen()
        self.listener.setblocking(False)

    def run(
        self, text: str, *args: str, plain: bool = False
    ) -> tuple[subprocess.CompletedProcess[str], Raised | None]:
        """Return how it ended, and what it said; `plain`: the interpreter alone runs it."""
        (self.folder / "train.py").write_text(text)
        script = str(self.folder / "train.py")
        done = subprocess.run(
            [sys.executable, *([] if plain else [MAIN]), script, *args],
            cwd=self.folder,
            env={**os.environ, "EDL_CHANNEL": self.name},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done, self.heard()

    def heard(self) -> Raised | None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return None
        with connection, connection.makefile() as lines:
            said = parse_trainer(json.loads(lines.read()))
        assert isinstance(said, Raised)
        return said


@pytest.fixture
def script(tmp_path: Path):
    made = Script(tmp_path)
    yield made
    made.listener.close()


FAILS: dict[str, tuple[str, str, str]] = {  # script; what is shown of it; its types
    "raise": ("def f():\n    raise ValueError('bad')\nf()\n", "train.py:2: ValueError: bad", ""),
    "syntax": ("def f(:\n", "train.py:1: SyntaxError: invalid syntax", ""),
    "import": (
        "import no_such\n",
        "train.py:1: ModuleNotFoundError: No module named 'no_such'",
        "ImportError",
    ),
    "in a library": (
        "import json\n\njson.loads('x')\n",
        "train.py:3: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "ValueError",
    ),
    "amid another": (
        "try:\n    open('/no/such')\nexcept OSError:\n    raise KeyError('k')\n",
        "train.py:4: KeyError: 'k'",
        "LookupError",
    ),
}


@pytest.mark.parametrize("name", FAILS)
def test_an_error_is_printed_as_the_interpreter_prints_it_and_told(script, name):
    text, shown, base = FAILS[name]
    plain, nothing = script.run(text, plain=True)
    done, said = script.run(text)
    assert nothing is None
    assert (done.returncode, done.stdout, done.stderr) == (1, "", plain.stderr)
    assert said is not None
    assert str(said.error) == shown
    assert base in ("", *said.error.chain[0].types)
    assert said.error.step is None


def test_the_innermost_line_and_what_an_error_came_from_are_told(script):
    _, said = script.run(
        "import errno, json\n"
        "try:\n    raise OSError(errno.ENOSPC, 'full')\n"
        "except OSError as e:\n    raise RuntimeError('not saved') from e\n"
    )
    error, cause = said.error.chain
    assert error.types[0] == "RuntimeError"
    assert (cause.types[0], cause.errno) == ("OSError", 28)
    _, said = script.run("import json\njson.loads('x')\n")
    assert "/json/decoder.py:" in said.error.chain[0].at
    assert said.error.where == "train.py:2"


def test_a_script_of_a_package_is_told_how_it_runs(script):
    done, said = script.run("from .sizes import HIDDEN\n")
    assert "start a file beside the package instead" in done.stderr
    assert "relative import with no known parent package; a script of a pack" in str(said.error)


def test_a_script_of_a_package_has_its_classes_by_the_lines_that_are_named(script: Script):
    hint = trainer_main.explain_import(ImportError("relative import with no known parent package"))
    (lines,) = re.findall(r"`(.*)`", hint)
    (script.folder / "lib").mkdir()
    (script.folder / "lib" / "sizes.py").touch()
    (script.folder / "lib" / "train.py").write_text(
        "import pickle\nfrom . import sizes\nclass Net: ...\n"
        "print(pickle.loads(pickle.dumps(Net)))\n"
    )
    done, said = script.run(lines.replace("PACKAGE.SCRIPT", "lib.train"))
    assert (done.returncode, said) == (0, None), done.stderr
    assert "__main__.Net" in done.stdout


def test_an_error_that_others_raise_from_one_of_the_users_code_is_told_with_that_ones_place(script):
    # As Python itself does with a StopIteration in a generator, here one of the library's.
    text = (
        "import json, random\n"
        "def f():\n    return next(iter(()))\n"
        "class D(dict):\n    def items(self):\n        return [(1, f())]\n"
        "json.dumps(D(a=1), indent=1)\n"
    )
    _, said = script.run(text)
    assert str(said.error) == "train.py:3: RuntimeError: generator raised StopIteration"
    _, said = script.run(
        "def f():\n    return next(iter(()))\ndef g():\n    yield f()\nfor _ in g():\n    pass\n"
    )
    assert str(said.error) == "train.py:2: RuntimeError: generator raised StopIteration"
    # What the user's code raises itself stands where it raises it, whatever it is from.
    _, said = script.run(
        "def f():\n    return {}['k']\n"
        "try:\n    f()\nexcept KeyError as error:\n    raise ValueError('bad') from error\n"
    )
    assert str(said.error) == "train.py:6: ValueError: bad"


def test_a_script_that_leaves_with_words_has_failed_with_these_and_one_with_a_number_says_no_more(
    script,
):
    done, said = script.run("import sys\n\nsys.exit('no data here')\n")
    assert (done.returncode, done.stderr) == (1, "no data here\n")
    assert str(said.error) == "train.py:3: SystemExit: no data here"
    done, said = script.run("import argparse\nargparse.ArgumentParser().parse_args()\n", "--odd")
    assert (done.returncode, said) == (2, None)
    done, said = script.run("print('well')\n")
    assert (done.returncode, done.stdout, said) == (0, "well\n", None)


def test_a_script_finds_the_names_that_it_has_when_the_interpreter_runs_it(script):
    text = (
        "import sys\nclass A: pass\ndef f(): yield from ()\nx: int = 1\n"
        "print(__name__, __file__, sys.argv, sys.path, A.__module__, __spec__, __builtins__)\n"
        "print({k: type(v) for k, v in sorted(globals().items())}, __annotations__)\n"
        "print(sys.modules['__main__'].A is A)\n"
    )
    plain, _ = script.run(text, "--epochs", "3", plain=True)
    done, _ = script.run(text, "--epochs", "3")
    assert done.stdout == plain.stdout
    assert done.stdout.endswith("True\n")


def test_a_hook_that_the_script_has_set_is_called_and_a_fork_that_raises_says_nothing(script):
    done, said = script.run(
        "import sys\nsys.excepthook = lambda *what: print('mine', what[0].__name__)\n1 / 0\n"
    )
    assert done.stdout == "mine ZeroDivisionError\n"
    assert str(said.error) == "train.py:3: ZeroDivisionError: division by zero"
    done, said = script.run(
        "import os\nif os.fork() == 0:\n    raise ValueError('the child')\nos.wait()\n"
    )
    assert done.returncode == 0
    assert "ValueError: the child" in done.stderr
    assert said is None


def test_without_a_launcher_that_listens_the_script_ends_as_ever(script):
    script.listener.close()
    (script.folder / "train.py").write_text("1 / 0\n")
    done = subprocess.run(
        [sys.executable, MAIN, str(script.folder / "train.py")],
        env={**os.environ, "EDL_CHANNEL": script.name},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


# Stands in for Paddle, whose import takes seconds: it sets a handler behind Python's back.
FAKE_PADDLE = """
import ctypes
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(
    lambda number: (print("FatalError:", number, flush=True), __import__("os")._exit(7)))
for number in {signals}:
    ctypes.CDLL(None).signal(number, handler)
"""


def fake_paddle(folder: Path, *signals: signal.Signals) -> None:
    """Let scripts of this folder import it; it takes these signals."""
    base = folder / "paddle" / "base"
    base.mkdir(parents=True)
    (base.parent / "__init__.py").write_text("from . import base\n")
    numbers = [int(each) for each in signals]
    (base / "__init__.py").write_text(FAKE_PADDLE.format(signals=numbers))


@pytest.mark.parametrize(
    ("number", "code", "output"),
    [
        (signal.SIGTERM, -signal.SIGTERM, ""),
        (signal.SIGABRT, 7, "FatalError: 6\n"),
    ],
)
def test_sigterm_is_taken_back_from_paddle_and_a_crash_keeps_its_words(
    script, number, code, output
):
    fake_paddle(script.folder, signal.SIGTERM, signal.SIGABRT)
    text = f"import os, time, paddle\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n"
    done, _ = script.run(text)
    assert (done.returncode, done.stdout) == (code, output)
    plain, _ = script.run(text, plain=True)
    assert plain.stdout == f"FatalError: {int(number)}\n"


def test_a_handler_of_the_script_is_in_force_again_after_paddle_was_imported(script):
    fake_paddle(script.folder, signal.SIGTERM)
    done, _ = script.run(
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "import paddle\nos.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(60)\n"
    )
    assert (done.returncode, done.stdout) == (5, "")


def test_names_that_cannot_be_written_and_endless_texts_are_told_all_the_same(script):
    _, said = script.run("raise ValueError('/no/\\udcff')\n")
    assert str(said.error) == "train.py:1: ValueError: /no/\\udcff"
    _, said = script.run("raise ValueError('x' * 10**6)\n")
    assert len(said.error.chain[0].text) == 2000


@pytest.mark.parametrize(
    "message",
    [
        {"say": "raised"},
        {"say": "raised", "error": {"chain": []}},
        {"say": "raised", "error": {"chain": [{"types": 3}]}},
    ],
)
def test_a_malformed_error_is_refused(message: dict[str, Any]):
    from pod_runtime.errors import ChannelError

    with pytest.raises(ChannelError, match="raised: "):
        parse_trainer(message)


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_full_disk_under_the_log_ends_no_script_that_prints(tmp_path, unbuffered):
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, os, sys, warnings\n"
        "print('fits')\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "for _ in range(100):\n"
        "    print('x' * 50)\n"
        "    sys.stderr.write('y' * 50 + '\\n')\n"
        "    logging.error('z')\n"
        "    warnings.warn('w')\n"
        "    sys.stdout.flush()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print('in a fork')\n"
        "    os._exit(0)\n"
        "code = os.waitpid(child, 0)[1]\n"
        "assert sys.stdout.name == '<stdout>' and sys.stdout.mode == 'w'\n"
        f"open({str(tmp_path / 'end')!r}, 'w').write(str(code))\n"
    )
    log = tmp_path / "log"
    with log.open("wb") as output:
        ended = subprocess.run(
            # Not by a function in the fork: gRPC, of other tests here, may abort that (SIGABRT).
            ["prlimit", "--fsize=1000", sys.executable, MAIN, str(script)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert ended.returncode == 0
    assert (tmp_path / "end").read_text() == "0"
    assert log.read_bytes().startswith(b"fits\n") or not unbuffered
    assert log.stat().st_size == 1000


def test_a_log_on_a_failing_disk_ends_no_script_that_prints(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"print('x', flush=True)\nopen({str(tmp_path / 'end')!r}, 'w').write('0')\n")
    # A regular file of which each write fails (EIO): the memory at address 0, where nothing is.
    with open("/proc/self/mem", "r+b", buffering=0) as output:
        with pytest.raises(OSError, match="Input/output error"):
            output.write(b"x")
        ended = subprocess.run(
            [sys.executable, MAIN, str(script)],
            stdout=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            check=False,
        )
    assert (ended.returncode, (tmp_path / "end").read_text()) == (0, "0")


def test_an_output_that_is_closed_is_an_error_as_ever(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os\nos.close(1)\nprint('lost')\n")
    with (tmp_path / "log").open("wb") as output:
        ended = subprocess.run(
            [sys.executable, MAIN, str(script)], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert ended.returncode == 1
    assert b"OSError: [Errno 9] Bad file descriptor" in ended.stderr
