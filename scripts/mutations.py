"""Change the product's code in small ways, and see whether the tests notice.

    python scripts/mutations.py draw --commit COMMIT --seed 1 --count 40 > tests/mutations.json
    python scripts/mutations.py run --worktree FOLDER --results FILE    one mutation after the other

`draw` chooses modules by lines of code, and one mutation in each. A mutation names its module,
its function and the text of its line, so that it is found again after lines have moved. Where the
code itself has changed, "now" in the list holds the equivalent.

`run` wants a clean worktree that nobody uses, with its own .venv. It runs the tests that import
the mutated module, directly or not, until one fails that passes without the mutation, and fails
again with it. Tests that start no process run first.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as a program

from scripts.count_lines import PRODUCT, count, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef

TEST_S = 120  # a test that takes longer hangs by its mutation
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = {"_log", "log", "logger", "_logger", "logging", "print", "warnings"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a mutation is, by text: line numbers do not last."""

    module: str
    function: str  # "Class.method"; "" on a module's or a class's own level
    original: str  # whole lines
    mutated: str
    occurrence: int = 0  # of the original's text within the function


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    number: int
    operator: str
    place: Place
    now: Place | None = None  # the equivalent, where the code has changed since
    note: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Mutation":
        now = data.get("now")
        places = {"place": Place(**data["place"]), "now": Place(**now) if now else None}
        return cls(**(data | places))


# --- drawing


@dataclass(slots=True)
class _Edit:
    operator: str
    node: ast.expr | ast.stmt
    text: str  # that stands for the node
    function: str


@dataclass(slots=True)
class _Finder(ast.NodeVisitor):
    """Collects every edit of a module."""

    edits: list[_Edit] = field(default_factory=list)
    _scope: list[str] = field(default_factory=list)

    def _add(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self.edits.append(_Edit(operator, node, text, ".".join(self._scope)))

    def _add_changed(self, operator: str, node: ast.expr, **changes: Any) -> None:
        fields = {name: value for name, value in ast.iter_fields(node)} | changes
        self._add(operator, node, f"({ast.unparse(type(node)(**fields))})")

    def _enter(self, node: ast.ClassDef | Function) -> None:
        self._scope.append(node.name)
        for part in node.body:
            self.visit(part)
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: Function) -> None:
        self._scope.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self._scope.pop()
        self._enter(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone; what is within them has no position."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they are for the type checker."""

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            ops = list(node.ops)
            ops[index] = _COMPARISONS[type(operator)]()
            self._add_changed("comparison", node, ops=ops)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add_changed("and/or", node, op=other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        if other is not None and not _is_text(node.left) and not _is_text(node.right):
            self._add_changed("arithmetic", node, op=other())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("not removed", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("boolean", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("constant", node, repr(node.value + 1))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add_changed("branches swapped", node, body=node.orelse, orelse=node.body)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _NAMES and isinstance(node.ctx, ast.Load):
            self._add("min/max, any/all", node, _NAMES[node.id])

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not _is_none(node.value):
            self._add("return value", node, "return None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add("break/continue", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("break/continue", node, "break")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if _called(node.value) in _LOGGERS:
                return
            self._add("statement removed", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._scope and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets):
            self._add("statement removed", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement removed", node, "pass")
        self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).split(".")[0]


def mutations_of(module: str, source: str) -> list[tuple[str, Place]]:
    """Return operator and place of every mutation of a module that still can be parsed."""
    finder = _Finder()
    tree = ast.parse(source)
    finder.visit(tree)
    lines = source.splitlines(keepends=True)
    spans = dict(_functions(tree))
    found = []
    for edit in finder.edits:
        node = edit.node
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        block = lines[first:last]
        # ast counts columns in bytes of UTF-8
        head = block[0].encode()[: node.col_offset].decode()
        tail = block[-1].encode()[node.end_col_offset :].decode()
        original, mutated = "".join(block), head + edit.text + tail
        try:
            ast.parse("".join([*lines[:first], mutated, *lines[last:]]))
        except SyntaxError:
            continue
        start = spans[edit.function][0] if edit.function else 0
        occurrence = "".join(lines[start:first]).count(original)
        place = Place(
            module=module, function=edit.function, original=original, mutated=mutated,
            occurrence=occurrence,
        )  # fmt: skip
        found.append((edit.operator, place))
    return found


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield classes and functions: dotted name, its first line (from 0) and the line after it."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}.{node.name}" if outer else node.name
            yield name, (node.lineno - 1, node.end_lineno or node.lineno)
        yield from _functions(node, name)


def draw(root: Path, commit: str, seed: int, number: int) -> list[Mutation]:
    """Draw mutations from all of the product's code, at most one in a function."""
    chance = random.Random(seed)
    modules = {
        str(path): source
        for path, source in sources(root, commit)
        if path.parts[0] in PRODUCT and count(source)
    }
    names = sorted(modules)
    weights = [count(modules[name]) for name in names]
    drawn: list[Mutation] = []
    used: set[tuple[str, str]] = set()
    while len(drawn) < number:
        name = chance.choices(names, weights)[0]
        places = mutations_of(name, modules[name])
        if not places:
            continue
        operator, place = chance.choice(places)
        if (name, place.function) not in used:
            used.add((name, place.function))
            drawn.append(Mutation(number=len(drawn) + 1, operator=operator, place=place))
    return drawn


# --- finding one again


class NotFoundError(Exception):
    """The code has changed: the list needs the equivalent."""


def find(root: Path, place: Place) -> tuple[Path, str]:
    """Return the file of a mutation and its mutated text: at the old path, or where it moved."""
    files = [root / place.module]
    files += sorted(path for package in PRODUCT for path in (root / package).rglob("*.py"))
    for path in files:
        if path.is_file():
            mutated = apply(path.read_text("utf-8"), place)
            if mutated is not None:
                return path, mutated
    raise NotFoundError(f"{place.module}: {place.function}: {place.original.strip()}")


def apply(source: str, place: Place) -> str | None:
    """Return a module's mutated text; None: it has no such function, or not with such a line."""
    start, end = 0, len(source.splitlines())
    if place.function:
        spans = dict(_functions(ast.parse(source)))
        if place.function not in spans:
            return None
        start, end = spans[place.function]
    lines = source.splitlines(keepends=True)
    parts = "".join(lines[start:end]).split(place.original)
    if len(parts) < place.occurrence + 2:
        return None
    cut = place.occurrence + 1
    body = place.original.join(parts[:cut]) + place.mutated + place.original.join(parts[cut:])
    return "".join([*lines[:start], body, *lines[end:]])


# --- choosing tests


def tests_for(root: Path, module: str) -> list[str]:
    """Return the test files that reach a module: those that import it first, then cheap ones.

    The tests of its package that start programs follow, though they import nothing of it.
    """
    graph = _import_graph(root)
    name = _module_name(PurePosixPath(module))
    package = name.split(".")[0]
    folders = {f"tests.{package}"} | (set() if package == "distill_reader" else {"tests.e2e"})
    found: list[tuple[bool, bool, bool, int, str]] = []
    for test in filter(_is_test, graph):
        is_own = any(test.startswith(f"{folder}.") for folder in folders)
        distance = _distance(graph, test, name)
        if distance is not None or is_own:
            steps = len(graph) if distance is None else distance
            found.append((steps > 1, _is_dear(test, graph), not is_own, steps, test))
    return [f"{test.replace('.', '/')}.py" for *_, test in sorted(found)]


def _module_name(path: PurePosixPath) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _is_test(name: str) -> bool:
    return name.startswith("tests.") and name.rsplit(".", 1)[1].startswith("test_")


def _import_graph(root: Path) -> dict[str, set[str]]:
    """Return which modules of product and tests each of them imports, or names in a string."""
    paths = {
        _module_name(PurePosixPath(path.relative_to(root))): path
        for folder in (*PRODUCT, "tests")
        for path in (root / folder).rglob("*.py")
    }
    scripts = {path.name: name for name, path in paths.items() if not _is_test(name)}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
                imported.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # a module that is loaded later, or started with -m; a script
                imported |= {node.value, f"{node.value}.__main__", scripts.get(node.value, "")}
        graph[name] = {module for module in imported if module in paths}
        graph[name] |= imported & {"paddle", "subprocess"}
        if _is_test(name):  # what pytest imports by itself
            folders = name.split(".")[:-1]
            conftests = {".".join([*folders[:n], "conftest"]) for n in range(1, len(folders) + 1)}
            graph[name] |= conftests & paths.keys()
    return graph


def _distance(graph: dict[str, set[str]], start: str, goal: str) -> int | None:
    seen, edge, steps = {start}, {start}, 0
    while edge:
        if goal in edge:
            return steps
        edge = {module for name in edge for module in graph.get(name, ())} - seen
        seen |= edge
        steps += 1
    return None


def _is_dear(test: str, graph: dict[str, set[str]]) -> bool:
    """Whether a test starts processes or a framework, as far as its own imports tell."""
    seen, edge = {test}, {test}
    while edge:
        if edge & {"paddle", "subprocess"}:
            return True
        edge = {m for name in edge if name.startswith("tests.") for m in graph[name]} - seen
        seen |= edge
    return False


# --- running


def run_one(worktree: Path, mutation: Mutation, limit_s: float) -> dict[str, Any]:
    """Run tests with one mutation in place; return which test found it, if any."""
    try:
        path, mutated = find(worktree, mutation.place)
    except NotFoundError:
        if mutation.now is None:
            raise
        path, mutated = find(worktree, mutation.now)
    original = path.read_text("utf-8")
    tests = tests_for(worktree, path.relative_to(worktree).as_posix())
    start = time.monotonic()
    unsure: list[str] = []
    result: dict[str, Any] = {"number": mutation.number, "found": False, "files": len(tests)}
    while time.monotonic() - start < limit_s:
        with _mutated(path, original, mutated):
            failed, ended = _pytest(worktree, tests, limit_s - (time.monotonic() - start), unsure)
        result["all run"] = ended and not failed
        if not failed:
            break
        passes_without = not _pytest(worktree, failed, limit_s, [])[0]
        with _mutated(path, original, mutated):
            fails_again = passes_without and _pytest(worktree, failed, limit_s, [])[0]
        if fails_again:
            result |= {"found": True, "by": failed[0]}
            break
        unsure += failed
    return result | {"seconds": round(time.monotonic() - start), "unsure": unsure}


@contextlib.contextmanager
def _mutated(path: Path, original: str, mutated: str) -> Iterator[None]:
    path.write_text(mutated, "utf-8")
    try:
        yield
    finally:
        path.write_text(original, "utf-8")


def _pytest(
    worktree: Path, tests: list[str], limit_s: float, without: list[str]
) -> tuple[list[str], bool]:
    """Run tests until one fails. Return its id, if one did, and whether pytest came to its end."""
    report = worktree / ".venv" / "mutation.xml"
    report.unlink(missing_ok=True)
    command = [
        str(worktree / ".venv/bin/python"), "-m", "pytest", "-x", "-q", f"--timeout={TEST_S}",
        "-p", "no:cacheprovider", f"--junit-xml={report}", "-o", "junit_family=xunit1",
        *(f"--deselect={test}" for test in without), *tests,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=worktree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(limit_s, 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return [], False
    finally:
        _end_programs_of(worktree)
    if process.returncode == 0:
        return [], True
    found = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", output, re.MULTILINE)
    if not found and report.exists():
        found = [case.get("file", "") for case in ET.parse(report).iter("testcase")][-1:]
    return found[:1] or tests[:1], True


def _end_programs_of(worktree: Path) -> None:
    """Kill what tests have left, which runs the worktree's own interpreter."""
    interpreter = str(worktree / ".venv" / "bin" / "python")
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0] == interpreter:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def run(worktree: Path, mutations: list[Mutation], results: Path, limit_s: float) -> None:
    """Run all that `results` does not have yet; write it after each."""
    changed = subprocess.run(
        ["git", "-C", str(worktree), "status", "--porcelain"], capture_output=True, check=True
    )
    if changed.stdout:
        sys.exit(f"{worktree}: has changes; a mutation is run in a worktree that nobody uses")
    done = json.loads(results.read_text()) if results.exists() else []
    for mutation in mutations:
        if mutation.number in {result["number"] for result in done}:
            continue
        try:
            result = run_one(worktree, mutation, limit_s)
        except NotFoundError as error:
            result = {"number": mutation.number, "found": None, "error": str(error)}
        done.append(result)
        results.write_text(json.dumps(done, indent=1) + "\n")
        print(result, flush=True)
    found = sum(result["found"] is True for result in done)
    print(f"{found} of {len(done)} found")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[1]
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--commit", default="HEAD")
    drawing.add_argument("--seed", type=int, default=1)
    drawing.add_argument("--count", type=int, default=40)
    running = commands.add_parser("run")
    running.add_argument("--worktree", type=Path, required=True)
    running.add_argument("--results", type=Path, required=True)
    running.add_argument("--list", type=Path, default=root / "tests" / "mutations.json")
    running.add_argument("--limit_s", type=float, default=360, help="for one mutation (360)")
    options = parser.parse_args()
    if options.command == "draw":
        drawn = draw(root, options.commit, options.seed, options.count)
        print(json.dumps([asdict(mutation) for mutation in drawn], indent=1))
        return
    if options.worktree.resolve() == root:
        sys.exit("--worktree: not the one that this program is in")
    mutations = [Mutation.from_json(data) for data in json.loads(options.list.read_text())]
    run(options.worktree.resolve(), mutations, options.results, options.limit_s)


if __name__ == "__main__":
    main()
