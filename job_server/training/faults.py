"""Decide which errors are permanent, so that another try would fail the same way. Pure.

A trainer describes the exception that ended it, and this module judges:

- *at once*: a second try runs the same code into the same error (a SyntaxError, a missing module, a
wrong command line);

- *the second time*: any other exception that has come again with the same type, text and line, at
the same committed step, in processes that were started again in between;

- *never*: what the next try may not meet (a full disk, a lost connection, a device that failed).
Such an error is no `Fault`; only the budgets count it. A signal is none either.
"""

import errno
import re

from job_server.api.wire import RaisedError, TrainerError
from job_server.training.job import Fault

USAGE_EXIT = 2  # argparse's, and by custom: the command line is wrong
TEXT_CHARS = 600  # of an exception with its explanation

_AT_ONCE = frozenset(
    {
        "SyntaxError",
        "ImportError",
        "pod_runtime.trainer.errors.InUseError",
        "pod_runtime.trainer.errors.UsageError",
        "distill_reader.errors.UsageError",
    }
)
# These OSErrors are permanent: a file or its rights will not change by themselves. All others may
# pass, also those without a number: libraries raise them for any trouble of a network.
_LASTING_ERRNOS = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
        errno.ENOENT, errno.ENOEXEC, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
_LASTING_TYPES = frozenset(
    {
        "FileExistsError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError",
        "PermissionError",
    }
)  # fmt: skip
# Matched against names of classes, of this package and of any library.
_PASSING_TYPE = re.compile(
    r"Timeout|TimedOut|Connect|Network|Transport|Unavailable|Unreachable|Retry|Temporar|Throttl"
    r"|MemoryError|OutOfMemory|ResourceExhausted|HTTP|Http|SSL|Ssl|Socket|gaierror|EOFError"
    r"|IncompleteRead|BrokenPipe|NoTeacher|TeacherBusy|TeacherGone|PeerLost|LinkError"
    r"|CheckpointError|KeyboardInterrupt|BrokenProcessPool|BrokenExecutor"
)
_PASSING_TEXT = re.compile(
    r"cuda\w*[ _]?(error|runtime|driver|kernel)|cu(dnn|blas|fft|solver|sparse)|nccl|gloo\b"
    r"|\becc\b|\bxid\b|out of memory|bad_?alloc|cannot allocate|not enough memory"
    r"|resource ?exhausted|time[ds]?[ -]?out|deadline exceeded|connection|socket|broken pipe"
    r"|unreachable|unavailable|temporar|try again|no space left|quota|input/output error"
    r"|stale file|stale nfs|in use|resource busy|too many open files|name resolution"
    r"|worker.*(exited|killed|died)|killed by signal|remote end",
    re.IGNORECASE,
)

_ERRNO = re.compile(r"\[Errno (\d{1,4})\]")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_PROCESS = re.compile(r"\b(pid|process|thread|port|tid)([ =:#(-]*)\d+", re.IGNORECASE)
_TEMPORARY = re.compile(r"\btmp[._]?\w{8,10}\b")
_POD = re.compile(r"\bpod_\d+_\d+(_\d+)?\b")


def fault_of(who: str, *, code: int | None, error: TrainerError | None, words: str) -> Fault | None:
    """Return the fault that ended a trainer. None: the error may go away.

    Args:
        code: exit code, negative for a signal; None: not known.
        error: None: the trainer raised nothing, or did not describe it.
        words: the last that it wrote, where there is no error.
    """
    if error is not None:
        if any(may_pass(raised) for raised in error.chain):
            return None
        return Fault(
            who=who,
            text=str(error)[:TEXT_CHARS],
            mark=_mark(error),
            at_once=_is_final(error.chain[0]),
            step=error.step,
        )
    if code == USAGE_EXIT and not _may_read_later(words):
        text = f"exited with {code}" + (f": {words}" if words else "")
        return Fault(who=who, text=text[:TEXT_CHARS], mark=normal(text), at_once=True)
    return None


def fault_of_pod(who: str, *, code: int | None, words: str) -> Fault | None:
    """Return the fault of a pod whose script never reached training. None: it may go away.

    Exit code 2 also means trouble that passes, for `tar` and others, so it has to come twice. The
    launcher exits with it where its own command line is wrong.
    """
    if code != USAGE_EXIT or _may_read_later(words):
        return None
    text = f"exited with {code}" + (f": {words}" if words else "")
    return Fault(who=who, text=text[:TEXT_CHARS], mark=normal(text))


def may_pass(raised: RaisedError) -> bool:
    """Return whether the next try may not meet this exception although nothing was changed."""
    types = frozenset(raised.types)
    if "OSError" in types:
        lasts = raised.errno in _LASTING_ERRNOS or types & _LASTING_TYPES
        return not lasts
    if types & _AT_ONCE:
        return False
    if any(_PASSING_TYPE.search(name.rpartition(".")[2]) for name in raised.types):
        return True
    return _PASSING_TEXT.search(raised.text) is not None


def _may_read_later(words: str) -> bool:
    """Return whether a program could not read its script just now: Python then exits with 2."""
    found = _ERRNO.search(words)
    return found is not None and int(found[1]) not in _LASTING_ERRNOS


def find_lasting(faults: tuple[Fault, ...], before: tuple[Fault, ...], *, of_change: bool) -> str:
    """Return why another try makes no sense. "": it may succeed.


    Args:
        faults: of the trainers that failed now.
        before: of those that failed the last time.
        of_change: they failed in a change that was not yet committed, so that the next try is
            another one: of the pods before it.
    """
    known = {fault.mark for fault in before}
    for fault in faults:
        at = "" if fault.step is None else f" at step {fault.step}"
        if fault.at_once and not of_change:
            return f"{fault.text}; {fault.who}{at}, not tried again: it would come again"
        if fault.mark in known:
            return f"{fault.text}; {fault.who}, not tried again: it has come twice{at}"
    return ""


def normal(text: str) -> str:
    """Return a text without the parts that differ between two tries of the same error.

    Those are memory addresses, numbers of processes, threads and ports, and names of temporary
    files and of pods, each of which has its own copy of a script. Other numbers stay: they belong
    to the data, which comes again at the same step.
    """
    text = _ADDRESS.sub("0x", text)
    text = _PROCESS.sub(r"\1\2N", text)
    text = _TEMPORARY.sub("tmp", text)
    return " ".join(_POD.sub("pod", text).split())


def _is_final(raised: RaisedError) -> bool:
    made_of_data = raised.at.startswith("<")  # eval("..."), compile("...")
    return bool(_AT_ONCE & set(raised.types)) and not made_of_data


def _mark(error: TrainerError) -> str:
    raised = error.chain[0]
    return normal(f"{error.step} {raised.types[0]} {raised.at} {raised.text}")
