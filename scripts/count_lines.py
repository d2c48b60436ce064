"""Count lines of Python code without blank lines, comments and docstrings, per folder.

    python scripts/count_lines.py                   the product's packages, tests, benchmarks, ...
    python scripts/count_lines.py --depth 2         the folders within them too
    python scripts/count_lines.py --commit HEAD~20  as they were in a commit

Only files that git knows are counted.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PRODUCT = (
    "job_server", "job_client", "pod_runtime", "distill_reader", "k8s_controller", "search", "edl",
    "paddle_edl",
)  # fmt: skip
EXAMPLES = ("examples", "mnist_distill", "nlp_distill", "resnet50", "word2vec")
OTHERS = ("tests", "benchmarks", *EXAMPLES, "scripts", "docker")

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def count(source: str) -> int:
    """Return how many lines of a module hold code. A string of several lines counts with all."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines.difference_update(_docstring_lines(node))
    return len(lines)


def _docstring_lines(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> range:
    if ast.get_docstring(node, clean=False) is None:
        return range(0)
    docstring = node.body[0]
    return range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def sources(root: Path, commit: str | None) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield path and text of each Python file, of the working tree or of a commit."""
    if commit is None:
        for name in _git(root, "ls-files", "-z", "*.py").split("\0"):
            if name and (root / name).is_file():
                yield PurePosixPath(name), (root / name).read_text("utf-8")
        return
    for name in _git(root, "ls-tree", "-rz", "--name-only", commit).split("\0"):
        if name.endswith(".py"):
            yield PurePosixPath(name), _git(root, "show", f"{commit}:{name}")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode("utf-8")


def count_folders(root: Path, commit: str | None, depth: int) -> Counter[str]:
    """Return lines of code by folder, cut at `depth` names."""
    lines: Counter[str] = Counter()
    for path, source in sources(root, commit):
        folder = "/".join(path.parts[:-1][:depth])
        if path.parts[0] in (*PRODUCT, *OTHERS):
            lines[folder] += count(source)
    return lines


def report(lines: Counter[str]) -> str:
    """Return a table: the product's folders and their sum, then the others."""

    def rows(packages: tuple[str, ...]) -> list[tuple[str, int]]:
        order = {package: number for number, package in enumerate(packages)}
        return sorted(
            ((name, n) for name, n in lines.items() if name.split("/")[0] in order),
            key=lambda row: (order[row[0].split("/")[0]], row[0]),
        )

    product = rows(PRODUCT)
    table = [*product, ("product", sum(n for _, n in product)), *rows(OTHERS)]
    width = max(len(name) for name, _ in table)
    return "\n".join(f"{name:<{width}}  {n:>7,}" for name, n in table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=1, help="names of folders shown (1)")
    parser.add_argument("--commit", help="count what git has in this commit")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    print(report(count_folders(root, options.commit, max(1, options.depth))))


if __name__ == "__main__":
    main()
