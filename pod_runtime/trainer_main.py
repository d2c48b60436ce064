"""Run a training script as the interpreter would, and report to the launcher what it raised.

    python pod_runtime/trainer_main.py SCRIPT [ARGS...]

It is started as a file, so that it imports nothing of EDL: the script must not notice it. Standard
library only; what is needed after an error is imported only then.
"""

from __future__ import annotations

import errno
import os
import sys

TYPE_CHECKING = False  # a trainer's start need not wait for `typing`
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

_SEND_S = 2.0  # a launcher that does not read must not delay the end
_TEXT_CHARS = 2000
_TRACE_CHARS = 6000
_CHAIN = 10  # exceptions of one error
_NAME_CHARS = 300
_TYPES = 20  # classes of one exception
_CHANNEL = "EDL_CHANNEL"
# Of a disk that is full, that the kernel has made read-only after an error, or that is gone.
DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE,
)  # fmt: skip


def main() -> None:
    run(sys.argv[1:])


def run(argv: list[str]) -> None:
    """Run the script `argv[0]` in this process.

    Raises:
        SystemExit: by the script, or after it has raised, which is shown and reported then.
    """
    script = argv[0]
    sys.argv = argv
    # As the interpreter does with links. With safe_path there is no folder of ours to replace.
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    channel, pid, cwd = os.environ.get(_CHANNEL), os.getpid(), os.getcwd()
    keep_sigterm_quiet()
    show_stacks_on_sigquit()
    forgive_failing_disks()
    try:
        _execute(script)
    except KeyboardInterrupt:
        raise
    except SystemExit as left:
        if os.getpid() == pid and isinstance(left.code, str):
            _report(left, left.__traceback__, channel, cwd)
        raise
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        trace = _of_the_script(error.__traceback__, script)
        hint = _ask_loop("explain_error", error) or explain_import(error)
        if hint:
            error.add_note(hint)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if os.getpid() == pid:  # else: a fork of the script that has come back here
            _report(error, trace, channel, cwd, hint)
        # As the interpreter does: what the frames hold is not closed before the end.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.exit(1)


def explain_import(error: BaseException) -> str:
    """Return how to run a script that only runs as a module of its package; "": it is none."""
    if not isinstance(error, ImportError) or "no known parent package" not in str(error):
        return ""
    return (
        "a script of a package, as python -m runs it: start a file beside the package instead, "
        "with the lines `import runpy; runpy.run_module('PACKAGE.SCRIPT', run_name='__main__', "
        "alter_sys=True)`"
    )


def _execute(script: str) -> None:
    """Run a script as `__main__`, which stays: threads and exit handlers need it."""
    import builtins
    import io
    from importlib.machinery import SourceFileLoader

    main = type(sys)("__main__")
    main.__dict__.update(
        __file__=script,
        __cached__=None,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", script),
    )
    sys.modules["__main__"] = main
    with io.open_code(script) as file:
        text = file.read()
    exec(compile(text, script, "exec", dont_inherit=True), main.__dict__)


def forgive_failing_disks() -> None:
    """Ignore what is printed to a disk that takes nothing: a `print` must not end a training."""
    import io
    import stat

    class Log(io.FileIO):
        def write(self, data: Any) -> int:
            try:
                super().write(data)
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
            return len(data)

    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if not isinstance(before, io.TextIOWrapper) or not stat.S_ISREG(os.fstat(fd).st_mode):
            continue
        before.flush()
        raw = Log(fd, "wb", closefd=False)
        raw.name = before.name
        made = io.TextIOWrapper(
            raw if before.write_through else io.BufferedWriter(raw),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        made.mode = "w"  # type: ignore[misc]  # as the interpreter's own has it
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def show_stacks_on_sigquit() -> None:
    """Have SIGQUIT write the stacks of all threads to the log, whatever this process does.

    As a Java program or one in Go does. It is written in C: also where the main thread waits in a
    library and holds the interpreter's lock. What this process forks, such as a loader's workers,
    does so as well. A script may take the signal for something else.
    """
    import faulthandler
    import signal

    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)


def keep_sigterm_quiet() -> None:
    """Give SIGTERM back to Python as soon as Paddle, which takes it, has been imported.

    Paddle would log a fatal error with a traceback of C++. But SIGTERM is how a trainer is asked to
    end. Paddle's text for real crashes (SIGSEGV, SIGABRT, SIGBUS, ...) stays.
    """
    if "paddle.base" in sys.modules:
        _take_sigterm_back()
    elif not any(isinstance(finder, _AfterPaddle) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterPaddle())


def _take_sigterm_back() -> None:
    import signal

    try:
        # As Python knows it: the default, or the handler that the script has set.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    except (ValueError, TypeError):  # not the main thread; or a handler that is not Python's
        return


class _AfterPaddle:
    """Finds `paddle.base` as other finders do, and takes SIGTERM back after its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "paddle.base":
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _take_sigterm_back()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _of_the_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Return the traceback from the script's first frame on; None: it has none."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def _ask_loop(name: str, *args: Any) -> Any:
    """Call a function of the elastic loop's module, if the script has imported that."""
    function = getattr(sys.modules.get("pod_runtime.trainer.loop.loop"), name, None)
    return None if function is None else function(*args)


def _report(
    error: BaseException,
    trace: TracebackType | None,
    channel: str | None,
    cwd: str,
    hint: str = "",
) -> None:
    """Send `raised` to the launcher; without one, the exit code has to do."""
    if not channel:
        return
    import json
    import socket

    chain = _chain(error)
    message = {
        "say": "raised",
        "error": {
            "chain": [_describe(each, trace if each is error else None, cwd) for each in chain],
            "where": _where(error, trace, cwd),
            "step": _ask_loop("committed_step"),
            "hint": hint,
            "traceback": _printed(error, trace),
        },
    }
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as launcher:
            launcher.settimeout(_SEND_S)
            launcher.connect("\0" + channel)
            launcher.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return


def _printed(error: BaseException, trace: TracebackType | None) -> str:
    """Return the end of what Python prints about an error."""
    import traceback

    try:
        lines = traceback.format_exception(type(error), error, trace)
    except Exception:  # noqa: BLE001  a class of the script that cannot be shown
        return ""
    return _writable("".join(lines))[-_TRACE_CHARS:]


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and those that it was raised from or while handling, as a traceback does."""
    found: list[BaseException] = []
    open_ends: list[BaseException | None] = [error]
    while open_ends and len(found) < _CHAIN:
        each = open_ends.pop(0)
        if each is None or any(each is other for other in found):
            continue
        found.append(each)
        open_ends.append(each.__cause__)
        if not each.__suppress_context__:
            open_ends.append(each.__context__)
        if isinstance(each, BaseExceptionGroup):
            open_ends += each.exceptions
    return found


def _describe(error: BaseException, trace: TracebackType | None, cwd: str) -> dict[str, Any]:
    number = getattr(error, "errno", None)
    return {
        "types": [_name(kind) for kind in type(error).__mro__[:_TYPES]],
        "text": _text(error)[:_TEXT_CHARS],
        "errno": number if isinstance(error, OSError) and type(number) is int else None,
        "at": _place(_frames(error, trace, cwd)[-1:]),
    }


def _text(error: BaseException) -> str:
    try:
        if isinstance(error, SyntaxError):
            return _writable(str(error.msg))  # where it is stands in `at`
        return _writable(str(error))
    except Exception as broken:  # noqa: BLE001  a class of the script that cannot be shown
        return f"(its text cannot be made: {type(broken).__name__})"


def _writable(text: str) -> str:
    """Return a text that can be encoded: names of files may hold bytes that are not text."""
    return text.encode(errors="backslashreplace").decode()


def _name(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return _writable(module + kind.__qualname__)[:_NAME_CHARS]


def _frames(
    error: BaseException, trace: TracebackType | None, cwd: str
) -> list[tuple[str, str, int]]:
    """Return the frames of an error: (file, file as it is shown, line), innermost last."""
    frames: list[tuple[str, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    below = cwd.rstrip("/") + "/"
    return [(file, file.removeprefix(below), line) for file, line in frames]


def place_of(error: BaseException, cwd: str) -> str:
    """Return FILE:LINE where an error came from in the user's own files; "": in none."""
    return _where(error, error.__traceback__, cwd)


def _place(frames: list[tuple[str, str, int]]) -> str:
    return _writable(f"{frames[-1][1]}:{frames[-1][2]}") if frames else ""


def _where(error: BaseException, trace: TracebackType | None, cwd: str) -> str:
    """Return FILE:LINE of the innermost frame in files that are the user's own.

    Of an error that others raised from one of the user's code, it is that one's; of one that was
    raised in a loader's worker, the place that the worker has told.
    """
    import sysconfig

    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    others = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others += [f"{root}/{package}" for package in ("pod_runtime", "job_server", "distill_reader")]
    not_own = (*(f"{folder}/" for folder in others), "<")
    found = ""
    each: BaseException | None = error
    for _ in range(_CHAIN):
        if each is None:
            break
        found = getattr(each, "edl_place", "") or found
        frames = _frames(each, trace if each is error else each.__traceback__, cwd)
        own = [frame for frame in frames if not frame[0].startswith(not_own)]
        found = _place(own) or found
        # A generator that a StopIteration leaves is not among the frames of Python's own error.
        of_generator = isinstance(each, RuntimeError) and isinstance(each.__cause__, StopIteration)
        if own and own[-1] == frames[-1] and not of_generator:
            break
        each = each.__cause__
    return found


if __name__ == "__main__":
    main()
