"""The fast lane: tests that start no process and load no framework.

    pytest -m fast          a test gets this marker here, by what its module imports
    pytest                  the full run
    pytest -m slow          the long forms

A module is fast if neither it nor the helpers that it imports from `tests` import a framework, or
what starts processes. Where that cannot be seen, or where tests take seconds, the module or the
test is marked `full`. A fast test that starts a process all the same fails.
"""

import atexit
import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

FRAMEWORKS = frozenset({"paddle", "torch"})
_PROCESSES = frozenset({"subprocess", "multiprocessing"})
_FIXTURES = frozenset({"paddle_folder", "redis_server"})  # which do either
_NOT_FAST = re.compile(r"mark\.(full|slow)\b|" + "|".join(sorted(_FIXTURES)))
# Parsing the modules instead takes each worker seconds.
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import (.*))", re.MULTILINE)
_NAME = re.compile(r"[\w.]+")
_SKIPS_WITHOUT = re.compile(r"^(?:\w+ = )?pytest\.importorskip\(.(\w+)", re.MULTILINE)
_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})


def is_fast_module(path: Path) -> bool:
    """Whether a module of tests imports nothing that starts processes, and no framework."""
    return _reached(path).isdisjoint(FRAMEWORKS | _PROCESSES)


def is_wholly_fast(path: Path) -> bool:
    """Whether all tests of a module are fast: nothing in it names a mark or a fixture of others."""
    fixtures = path.with_name("conftest.py")
    texts = [path.read_text(), fixtures.read_text() if fixtures.is_file() else ""]
    return is_fast_module(path) and not any(_NOT_FAST.search(text) for text in texts)


def is_fast_test(item: pytest.Item) -> bool:
    marked = item.get_closest_marker("full") or item.get_closest_marker("slow")
    fixtures = getattr(item, "fixturenames", ())
    return not marked and _FIXTURES.isdisjoint(fixtures) and is_fast_module(item.path)


@functools.cache
def _reached(path: Path) -> frozenset[str]:
    """Return the top-level names of all that a module imports, itself or through `tests`."""
    found: set[str] = set()
    waiting, seen = [path], {path}
    while waiting:
        for name in _imports(waiting.pop()):
            found.add(name.split(".")[0])
            helper = (ROOT / name.replace(".", "/")).with_suffix(".py")
            if name.startswith("tests.") and helper.is_file() and helper not in seen:
                seen.add(helper)
                waiting.append(helper)
    return frozenset(found)


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Return what the lines of a module import, those of scripts that it holds as text as well."""
    found: set[str] = set()
    text = path.read_text()
    for package, names, modules in _IMPORT.findall(text):
        found.update(_NAME.findall(modules), [package] if package else [])
        found.update(f"{package}.{name}" for name in _NAME.findall(names))
    return frozenset(found.union(_SKIPS_WITHOUT.findall(text)))


# Files with tests of half a minute and more, then folders whose tests take seconds each. They begin
# first: one that began last would run on while the other workers have nothing left to do. Of the
# folders, first those whose tests share a training: it is made once as long as no other worker
# takes over some of them.
_LONGEST = (
    "test_quickstart.py", "test_training.py", "test_search.py", "test_two_nodes.py",
    "test_taught.py", "test_stack.py", "test_torch.py", "test_shared_jobs.py",
    "test_epoch_checkpoint.py", "test_failures.py", "test_mnist_train.py",
)  # fmt: skip
_LONG = ("resnet50", "mnist_distill", "nlp_distill", "scripts", "e2e", "benchmarks", "docker")


def order(item: pytest.Item) -> tuple[int, int]:
    """Return a sort key: tests of long files come first, then those of long folders."""
    file, folder = item.path.name, item.path.parent.name
    return (
        _LONGEST.index(file) if file in _LONGEST else len(_LONGEST),
        _LONG.index(folder) if folder in _LONG else len(_LONG),
    )


class Watch:
    """Notes each process that is started and each framework that is imported, by whatever code."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._ended = False
        atexit.register(self._end)  # what is imported while modules go is nobody's
        sys.addaudithook(self._on_event)  # for the rest of this process

    def _end(self) -> None:
        self._ended = True

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._ended:
            return
        if event in _EVENTS:
            self.seen.append(f"starts a process: {args[0] if args else event}")
        elif event == "import" and args[0] in FRAMEWORKS and args[0] not in sys.modules:
            self.seen.append(f"imports {args[0]}")
