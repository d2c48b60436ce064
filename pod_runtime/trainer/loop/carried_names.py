"""Find the variables by which a script's epochs hand something on to the next ones.

No state carries them: a count of steps by which a rate is set, the best value so far, copies of the
best weights, a patience. The script's text is read, as it stands around its loop over the epochs.
"""

import ast
import linecache
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

_PLAIN = (bool, int, float, str, list, dict, tuple, set)
_CLOCKS = ("time(", "perf_counter(", "monotonic(", "now(")


def carried_names(frame: FrameType) -> list[str]:
    """Return names that have a value by now, and that the body of a loop hands on to its next turn.

    It reads them before it sets them, or sets them in a branch alone.

    Nothing where the text cannot be read: edited since, or parsed amid Python 3.11's collections.

    Args:
        frame: at the `for` of that loop.
    """
    try:
        return _carried(frame)
    except Exception:  # noqa: BLE001  a hint ends no training, whatever the script's objects do
        return []


def _carried(frame: FrameType) -> list[str]:
    tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    loops = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.For)
        and each.lineno <= frame.f_lineno <= (each.iter.end_lineno or each.lineno)
    ]
    if not loops:
        return []
    body = _Body()
    always = body.run(loops[-1].body, {*_stored(loops[-1].target)})
    known = {**frame.f_globals, **frame.f_locals}
    of_loop = {*_named(loops[-1].iter, ast.Load)}
    follows = {
        name
        for each in ast.walk(tree)
        if isinstance(each, ast.Assign) and each.lineno < loops[-1].lineno
        and of_loop.intersection(_named(each.value, ast.Load))
        for target in each.targets
        for name in _stored(target)
    }  # fmt: skip
    handed_on = (body.read & body.set) | (body.of_branches - always)
    return sorted(
        name for name in handed_on - body.clocks - follows if _may_be_carried(name, known)
    )


def _may_be_carried(name: str, known: dict[str, Any]) -> bool:
    if name not in known:
        return False
    value = known[name]
    return value is None or isinstance(value, _PLAIN) or hasattr(value, "dtype")


def _named(node: ast.AST, context: type) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, context):
            yield each.id


def _stored(target: ast.AST) -> Iterator[str]:
    return _named(target, ast.Store)


class _Body:
    """What the statements of a loop's body read before they have set it, and what they set."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.set: set[str] = set()
        self.of_branches: set[str] = set()  # set in one of them alone
        self.clocks: set[str] = set()  # names for times of day

    def run(self, body: Iterable[ast.stmt], known: set[str]) -> set[str]:
        """Go through statements; return `known` and what they set in any case."""
        for each in body:
            known = self._one(each, known)
        return known

    def _one(self, statement: ast.stmt, known: set[str]) -> set[str]:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return known | {statement.name}
        if isinstance(statement, ast.AugAssign):
            self.read |= {*_stored(statement.target)} - known
            return self._simple(statement, known)
        if isinstance(statement, ast.If):
            known = self._simple(statement.test, known)
            this, other = self.run(statement.body, known), self.run(statement.orelse, known)
            self.of_branches |= this ^ other
            return this & other
        if isinstance(statement, ast.For | ast.While):
            if isinstance(statement, ast.For):
                within = self._simple(statement.iter, known) | {*_stored(statement.target)}
            else:
                within = known = self._simple(statement.test, known)
            self.run(statement.body, within)
            self.run(statement.orelse, known)
            return known
        if isinstance(statement, ast.With):
            for item in statement.items:
                known = self._simple(item, known)
            return self.run(statement.body, known)
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                self.run(handler.body, known)
            known = self.run([*statement.body, *statement.orelse], known)
            return self.run(statement.finalbody, known)
        return self._simple(statement, known)

    def _simple(self, node: ast.AST, known: set[str]) -> set[str]:
        """Go through what has no statements in it."""
        own = {
            name
            for each in ast.walk(node)
            if isinstance(each, ast.comprehension)
            for name in _stored(each.target)
        }
        self.read |= {*_named(node, ast.Load)} - own - known
        found = {*_stored(node)} - own
        self.set |= found
        if any(clock in ast.unparse(node) for clock in _CLOCKS):
            self.clocks |= found
        return known | found
