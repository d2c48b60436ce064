"""Write docs/api.md from the docstrings of what scripts import: python scripts/api_page.py

It reads the source, and imports nothing. A name that `edl` or `elastic` gets is on the page by
itself; tests/scripts/test_api_page.py fails where the page is not what this would write.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
ELASTIC = "pod_runtime.trainer.elastic"
HEAD = """# API

What training scripts import, made from the docstrings by `python scripts/api_page.py`: edit those,
not this page. [Training scripts](training-scripts.md), [distillation](distillation.md) and
[checkpoints by epoch](epoch-checkpoints.md) show how it is used.

```python
from edl import elastic, DistillReader
```
"""
# Where a name's module begins so, its section: title, and what stands below it.
SECTIONS = {
    ELASTIC: ("The elastic loop", "`from edl import elastic`"),
    "distill_reader.": (
        "Distillation",
        "`from edl import DistillReader`, and the losses by their names.",
    ),
    "pod_runtime.trainer.data.": (
        "The task queue",
        "`from edl import cloud_reader, write_shards`",
    ),
    "pod_runtime.trainer.epochs.": (
        "Checkpoints by epoch",
        "`from edl import load_checkpoint, save_checkpoint`: for Paddle scripts without the loop.",
    ),
    "pod_runtime.trainer.tensorboard.": ("TensorBoard", "`from edl import RunLog`"),
}
ERRORS = {"The elastic loop": "pod_runtime.trainer.errors", "Distillation": "distill_reader.errors"}
MADE_BY_EDL = {
    "Epoch",
    "Step",
    "ReadFrom",
    "BestCheckpoint",
    "CloudReader",
}  # scripts get these, and make none
FIRST = ("elastic.Loop", "elastic.Epoch", "elastic.Step", "DistillReader")
HIDDEN = {  # which EDL calls itself
    "BestCheckpoint.beats", "Discovered.servers", "Epoch.find", "Epoch.moved", "Loop.rehearse",
}  # fmt: skip
SHOWN_DUNDERS = {"__call__", "__iter__", "__len__"}
SIGNATURE_CELLS = 96
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Home:
    """Where a public name is defined."""

    shown: str  # as a script writes it
    module: str
    node: ast.ClassDef | Function


def source(module: str) -> str:
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return by name the module that it comes from, and its name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def find(name: str, module: str, shown: str) -> Home:
    """Follow imports to the definition of `name`."""
    tree = ast.parse(source(module))
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return Home(shown, module, node)
    home, real = imports(tree)[name]
    return find(real, home, shown)


def public_names() -> Iterator[Home]:
    """Yield what `edl` and `elastic` give to scripts, errors left out."""
    for name, (module, _) in imports(ast.parse(source(ELASTIC))).items():
        if not module.endswith(".errors"):
            yield find(name, module, f"elastic.{name}")
    for name, (module, _) in imports(ast.parse(source("edl"))).items():
        if name not in ("elastic", "TYPE_CHECKING"):
            yield find(name, module, name)


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    homes = sorted(public_names(), key=lambda home: [home.shown != name for name in FIRST])
    for prefix, (title, intro) in SECTIONS.items():
        inside = [home for home in homes if section_of(home) == prefix]
        links = ", ".join(f"[`{home.shown}`](#{anchor(home.shown)})" for home in inside)
        parts.append(f"## {title}\n\n{intro}\n\n{links}\n")
        parts += [render(home) for home in inside]
        if title in ERRORS:
            parts.append(render_errors(ERRORS[title], inside[0].shown.partition(".")[0]))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def section_of(home: Home) -> str:
    if home.shown.startswith("elastic."):
        return ELASTIC
    return next(prefix for prefix in SECTIONS if home.module.startswith(prefix))


def anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-")


def render(home: Home) -> str:
    if isinstance(home.node, Function):
        text = code(signature(home.shown, home.node))
        return f"### {home.shown}\n\n{text}\n{markdown(docstring(home.node))}\n"
    name, node = home.node.name, home.node
    lines = [f"### {home.shown}", ""]
    methods = list(members(home))
    made = next((each for each in methods if each.name == "__init__"), None)
    if name not in MADE_BY_EDL and made is not None:
        lines += [code(signature(home.shown, made))]
    lines += [markdown(docstring(node)), ""]
    if name not in MADE_BY_EDL and made is not None and ast.get_docstring(made):
        lines += [markdown(docstring(made)), ""]
    if is_dataclass(node):
        lines += [*fields(home), ""]
    shown = [method for method in methods if is_shown(name, method)]
    properties = [method for method in shown if is_property(method)]
    if properties:
        lines += ["| attribute | type | |", "|---|---|---|"]
        lines += [
            f"| `{short(name)}.{each.name}` | `{ast.unparse(each.returns or ast.Constant(None))}` "
            f"| {' '.join(docstring(each).split())} |".replace(" | None`", " \\| None`")
            for each in properties
        ]
        lines.append("")
    for method in shown:
        if method not in properties and docstring(method):
            lines += [*render_method(short(name), method), ""]
    bare = [method for method in shown if method not in properties and not docstring(method)]
    if bare:
        lines += ["Also, as their names say:", ""]
        lines += [f"- `{signature(f'{short(name)}.{each.name}', each)}`" for each in bare]
    return "\n".join(lines).rstrip() + "\n"


def is_shown(name: str, method: Function) -> bool:
    if method.name.startswith("_"):
        return method.name in SHOWN_DUNDERS and bool(docstring(method))
    is_callback = method.name.startswith("on_")  # which Paddle calls
    return f"{name}.{method.name}" not in HIDDEN and not is_callback


def is_property(method: Function) -> bool:
    return any(ast.unparse(each) == "property" for each in method.decorator_list)


def short(name: str) -> str:
    """Return what documents call an object of this class."""
    known = {"DistillReader": "reader", "Loop": "loop", "Epoch": "epoch", "Step": "step"}
    return known.get(name, name)


def render_method(what: str, method: Function) -> Iterator[str]:
    call = {"__call__": what, "__iter__": f"for ... in {what}", "__len__": f"len({what})"}.get(
        method.name, f"{what}.{method.name}"
    )
    if method.name in ("__iter__", "__len__"):
        yield f"#### {call}\n"
    else:
        yield f"#### {call}()\n"
        yield code(signature(call, method))
    yield markdown(docstring(method))


def members(home: Home) -> Iterator[Function]:
    """Yield the functions of a class, then those of its bases in this project."""
    assert isinstance(home.node, ast.ClassDef)
    seen = set()
    for node in home.node.body:
        if isinstance(node, Function):
            seen.add(node.name)
            yield node
    tree = ast.parse(source(home.module))
    for base in home.node.bases:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == ast.unparse(base):
                inherited = members(Home(home.shown, home.module, node))
                yield from (each for each in inherited if each.name not in seen)


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list)


def fields(home: Home) -> Iterator[str]:
    assert isinstance(home.node, ast.ClassDef)
    lines = source(home.module).splitlines()
    for node in home.node.body:
        if isinstance(node, ast.AnnAssign):
            default = "" if node.value is None else f" = {ast.unparse(node.value)}"
            comment = lines[(node.end_lineno or 0) - 1].partition("  # ")[2]
            text = f"- `{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{default}`"
            yield text + (f": {comment}" if comment else "")


def signature(shown: str, node: Function) -> str:
    """Return the call with its types, on one line or one line for each argument."""
    given = [each for each in arguments(node.args) if each not in ("self", "cls")]
    result = "" if node.returns is None or node.name == "__init__" else ast.unparse(node.returns)
    arrow = f" -> {result}" if result else ""
    line = f"{shown}({', '.join(given)}){arrow}"
    if len(line) <= SIGNATURE_CELLS:
        return line
    return f"{shown}(\n" + "".join(f"    {each},\n" for each in given) + f"){arrow}"


def arguments(args: ast.arguments) -> Iterator[str]:
    """Yield each argument as a definition has it."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    yield from map(argument, plain, defaults)
    if args.vararg:
        yield f"*{argument(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    yield from map(argument, args.kwonlyargs, args.kw_defaults)
    if args.kwarg:
        yield f"**{argument(args.kwarg)}"


def argument(arg: ast.arg, default: ast.expr | None = None) -> str:
    kind = "" if arg.annotation is None else f": {ast.unparse(arg.annotation)}"
    equal = " = " if kind else "="
    return arg.arg + kind + ("" if default is None else equal + ast.unparse(default))


def docstring(node: ast.ClassDef | Function) -> str:
    return ast.get_docstring(node) or ""


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def markdown(text: str) -> str:
    """Return a docstring as Markdown: its sections become lists, indented text code."""
    lines: list[str] = []
    for block in re.split(r"\n\n(?=\S)", text):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Returns:", "Raises:") and rest:
            if head == "Returns:":
                lines += [f"Returns: {' '.join(textwrap.dedent(rest).split())}", ""]
            else:
                lines += [*([] if head == "Args:" else ["Raises:", ""]), *entries(rest), ""]
        else:
            lines += [block_markdown(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def entries(text: str) -> Iterator[str]:
    """Yield a list item for each argument of an `Args:` section, or each error of `Raises:`."""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text)):
        names, _, said = entry.partition(":")
        shown = ", ".join(f"`{name.strip()}`" for name in names.split(","))
        yield f"- {shown}: {' '.join(said.split())}"


def block_markdown(block: str) -> str:
    """Return text as one paragraph; of lines that are indented below it, make code."""
    parts = re.split(r"\n\n(?=    )", block, maxsplit=1)
    said = " ".join(parts[0].split())
    return said if len(parts) == 1 else f"{said}\n\n{code(textwrap.dedent(parts[1]))}".rstrip()


def render_errors(module: str, prefix: str) -> str:
    tree = ast.parse(source(module))
    listed = {name for name, _ in imports(ast.parse(source(ELASTIC))).items()}
    lines = ["### Errors" + (" of the loop" if prefix == "elastic" else " of the reader"), ""]
    lines += ["| error | is a | when |", "|---|---|---|"]
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name == "StageChanged":
            continue
        if prefix == "elastic" and node.name not in listed:
            continue
        bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
        said = " ".join(docstring(node).split())
        lines.append(f"| `{node.name}` | {bases} | {said} |")
    where = "`elastic`" if prefix == "elastic" else f"`{module}`"
    return "\n".join([*lines, "", f"They are in {where}.", ""])


if __name__ == "__main__":
    PAGE.write_text(page())
