"""Wait as a warm spare: an interpreter that has imported the framework, to become a trainer.

    python -m pod_runtime.spare FD MODULE...

Started by the launcher, which sends one JSON line over the socket FD when it needs a trainer:
{"argv": [...], "env": {...}, "log": PATH}. The spare then runs the training script as
`trainer_main` does. Standard library only, except for MODULE...
"""

import contextlib
import importlib
import importlib.util
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from pod_runtime.processes import may_raise_priority, set_priority
from pod_runtime.trainer_main import keep_sigterm_quiet, run

_GENTLE = 19  # nice: an import can double the time of a training's small steps


def main(argv: Sequence[str]) -> None:
    launcher = socket.socket(fileno=int(argv[0]))
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    gentle = may_raise_priority()  # else it could never be raised again
    if gentle:
        set_priority(_GENTLE)
    keep_sigterm_quiet()
    preload(argv[1:])
    if gentle:
        set_priority(usual)
    with contextlib.suppress(OSError):  # the launcher did not wait, and has sent its order
        launcher.sendall(b"ready\n")
    with launcher.makefile("r", encoding="utf-8") as lines:
        line = lines.readline()
    launcher.close()
    if line:  # else the launcher does not need it, or is gone
        become_trainer(json.loads(line))


def preload(modules: Iterable[str]) -> None:
    """Import installed modules. One that cannot be imported is left to the script."""
    sites = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    own = str(Path(__file__).resolve().parent)
    for name in modules:
        try:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise ImportError("there is no such module")
            # The user's own modules change from run to run, and may look at the environment.
            if not spec.origin.startswith((*sites, own)):
                raise ImportError(f"{spec.origin} is not in site-packages")
            importlib.import_module(name)
        except ImportError as error:
            sys.stderr.write(f"spare: --preload: {name} is left out: {error}\n")


def become_trainer(order: dict[str, object]) -> None:
    """Run the script that `order` names, in its environment, with its log."""
    argv, env, log = order["argv"], order["env"], order["log"]
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    fd = os.open(str(log), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
