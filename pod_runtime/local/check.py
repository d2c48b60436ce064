"""Rehearse a training script on this machine, alone, before pods are there to train it.

    edl check --shards 3 train.py ARGS...

Runs the script to the body of its loop, cuts one batch as several trainers would, and names what
fails or differs; writes no checkpoints. Exit codes: 0 nothing was found, 1 something was, 2 a wrong
command line.
"""

import argparse
import ast
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pod_runtime.env import OF_A_LAUNCHER
from pod_runtime.trainer_main import explain_import, place_of

_OWN = ("edl", "pod_runtime", "paddle_edl")
_GUIDE = "docs/training-scripts.md"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="edl check",
        usage="edl check [--shards N] SCRIPT [ARGS...]",
        description="Rehearse a training script alone: what fails when its batches are cut.",
        allow_abbrev=False,
    )
    parser.add_argument("--shards", type=int, default=3, metavar="N", help="of a batch (3)")
    parser.add_argument("script", help="a Python script that uses elastic.Loop")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    args = parser.parse_args(argv)
    if args.shards < 2:
        parser.error(f"--shards: expected 2 or more, got {args.shards}; one is the whole batch")
    script = Path(args.script)
    try:
        if not script.is_file():
            parser.error(f"{script}: there is no such file")
    except OSError as error:  # in a folder that this user may not enter, say
        parser.error(f"{script}: {error.strerror}")
    if not any(_imports_edl(file) for file in _own_files(script)):
        print(
            f"{script}: it does not use the elastic loop: a change of the pods starts it afresh, "
            f"and what it does not save is lost. {_GUIDE} shows the dozen lines that it takes"
        )
        return 1
    return _rehearse(script, [args.script, *args.args], args.shards)


def _rehearse(script: Path, argv: list[str], shards: int) -> int:
    from pod_runtime.trainer.loop.loop import Loop, explain_error
    from pod_runtime.trainer.loop.rehearsal import Rehearsal, RehearsalOver

    for name in OF_A_LAUNCHER:  # the rehearsal is a world of one
        os.environ.pop(name, None)
    rehearsal = Rehearsal(shards)
    Loop.rehearse(rehearsal)
    warnings, logger = _Warnings(), logging.getLogger("pod_runtime")
    logger.addHandler(warnings)
    sys.argv = argv
    sys.path[0] = str(script.resolve().parent)
    findings: list[str] = []
    is_over = False
    try:
        runpy.run_path(str(script), run_name="__main__")
    except RehearsalOver:
        is_over = True
    except KeyboardInterrupt:
        raise
    except SystemExit as left:
        if left.code not in (None, 0):
            findings.append(f"{script}: it left with {left.code!r} before its epoch was over")
    except BaseException as error:  # noqa: BLE001  whatever the script raises is what was asked for
        where = place_of(error, os.getcwd()) or str(script)
        findings.append(f"{where}: {type(error).__name__}: {_first_lines(error)}")
        if rehearsal.doing:
            findings[-1] += f"\n    in {rehearsal.doing}"
        if hint := explain_error(error) or explain_import(error):
            findings[-1] += f"\n    {hint}"
    finally:
        Loop.rehearse(None)
        logger.removeHandler(warnings)
    if not (rehearsal.has_begun or findings):
        findings.append(
            f"{script}: it ended without elastic.Loop: nothing was rehearsed; give it the "
            f"arguments that make it train"
        )
    elif not (is_over or findings):
        findings.append(
            f"{script}: it ended before its epoch was over; go through loop.epochs() and every "
            f"step of an epoch, without break"
        )
    findings += [f"{rehearsal.where}: {text}" for text in [*rehearsal.findings, *warnings.texts]]
    sys.stdout.flush()
    for text in rehearsal.done:
        print(f"ok: {text}")
    for text in rehearsal.notes:
        print(f"note: {text}")
    for text in findings:
        print(text)
    count = len(findings)
    print(f"{script}: {count or 'no'} finding{'' if count == 1 else 's'}")
    return 1 if findings else 0


class _Warnings(logging.Handler):
    """Keeps what the loop warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _own_files(script: Path) -> Iterator[Path]:
    """Yield a script and the modules that it imports, and those that these import.

    Those of Python and of installed packages are left out.
    """
    waiting, seen = [script], {script}
    while waiting:
        file = waiting.pop()
        yield file
        for level, name in _imports(file):
            for folder in _folders_of(level, name, file, script):
                place = folder.joinpath(*name.split("."))
                for path in (place.with_suffix(".py"), place / "__init__.py"):
                    if path not in seen and path.is_file():
                        seen.add(path)
                        waiting.append(path)


def _folders_of(level: int, name: str, file: Path, script: Path) -> list[Path]:
    """Return where a module may be that a file imports.

    Args:
        level: of a relative import, 1 for one dot; 0: it is none.
    """
    if level:
        return [file.absolute().parents[level - 1]]
    folders, top = [script.parent], name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return folders
    try:
        spec = importlib.util.find_spec(top)  # of a package without a dot, which imports nothing
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    for place in places:
        folder = Path(place).parent
        if not {"site-packages", "dist-packages"}.intersection(folder.parts):
            folders.append(folder)
    return folders


def _imports_edl(file: Path) -> bool:
    return any(not level and name.partition(".")[0] in _OWN for level, name in _imports(file))


def _imports(file: Path) -> list[tuple[int, str]]:
    """Return the modules that a file imports: the dots before them, and their names.

    Ours if it cannot be read: running it tells why.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return [(0, _OWN[0])]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            within = f"{node.module}." if node.module else ""
            found += [(node.level, f"{within}{each.name}") for each in node.names]
            found += [(node.level, node.module)] if node.module else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("run_module"):
            names = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
            found += [(0, each) for each in names if isinstance(each, str)]
    return found


def _first_lines(error: BaseException) -> str:
    """Return the text of an error without a C++ traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line or "(at " not in line]
    text = " ".join(told)
    return text if len(text) <= 500 else f"{text[:200]} ... {text[-300:]}"


if __name__ == "__main__":
    raise SystemExit(main())
