"""What the documents show is what the code does."""

import ast
import difflib
import re
import tomllib
from pathlib import Path

import pytest

from job_server.api.codec import WireError
from job_server.api.wire import JobSpec, ScriptKind, ScriptSpec
from job_server.cluster.change_script import parse_script
from tests.support import ROOT, code_blocks

DIGITS = ROOT / "examples" / "digits"
DIGITS_TORCH = ROOT / "examples" / "digits_torch"


def code(path: Path) -> list[str]:
    """The lines after the module's docstring."""
    text = path.read_text()
    first = ast.parse(text).body[0]
    assert first.end_lineno is not None
    return text.splitlines()[first.end_lineno :]


def the_difference(example: Path) -> list[str]:
    before, after = code(example / "plain.py"), code(example / "train.py")
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]
    return ["..." if line.startswith("@@") else line for line in lines][1:]


def test_the_diff_in_readme_is_the_difference_of_the_two_scripts():
    (shown,) = code_blocks("README.md", "diff")
    assert shown.splitlines() == the_difference(DIGITS)


def added(example: Path) -> list[str]:
    return [line for line in the_difference(example) if line.startswith("+") and line[1:].strip()]


@pytest.mark.parametrize("example", [DIGITS, DIGITS_TORCH], ids=lambda folder: folder.name)
def test_a_plain_script_becomes_elastic_by_at_most_a_dozen_lines(example: Path):
    assert len(added(example)) <= 12


def test_the_lines_are_the_same_in_both_frameworks():
    assert added(DIGITS) == added(DIGITS_TORCH)


def test_the_loop_in_the_guide_is_the_one_of_the_example():
    text = (DIGITS / "train.py").read_text()
    example = [line for line in text[text.index("for epoch in") :].splitlines() if line]
    guide = next(  # the first one; others show what else a script may do
        block for block in code_blocks("docs/training-scripts.md", "python") if "Loop(" in block
    )
    assert guide[guide.index("for epoch in") :].splitlines() == example


def test_architecture_shows_the_layers_that_the_import_contracts_hold():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    held = {
        contract["containers"][0]: contract["layers"]
        for contract in contracts
        if contract["type"] == "layers"
    }
    text = (ROOT / "docs" / "architecture.md").read_text()
    text = text[text.index("## Layers") :].split("```")[1]
    shown = {
        package: [line.strip() for line in layers.splitlines()]
        for package, layers in re.findall(r"^(\S+)\n((?:    .*\n)+)", text, flags=re.MULTILINE)
    }
    assert shown == held


@pytest.mark.parametrize("text", code_blocks("docs/change-scripts.md", "yaml"))
def test_every_timeline_in_the_guide_is_accepted(text: str):
    spec = ScriptSpec(kind=ScriptKind.TIMELINE, text=text)
    assert parse_script(spec, JobSpec(job_id="j", max_pods=8)).change(0) is not None


@pytest.mark.parametrize("text", code_blocks("docs/change-scripts.md", "csv"))
def test_every_trace_in_the_guide_is_accepted(text: str):
    spec = ScriptSpec(kind=ScriptKind.TRACE, text=text)
    assert parse_script(spec, JobSpec(job_id="j", max_pods=8)).change(2) is not None


def test_the_refusal_in_the_guide_is_the_one_of_the_code():
    guide = (ROOT / "docs" / "change-scripts.md").read_text()
    text = "- {at: 5s, add: 1}\n- {at: 6s, add: 1}\n- {at: 5x, add: 1}\n"
    with pytest.raises(WireError) as refusal:
        parse_script(ScriptSpec(kind=ScriptKind.TIMELINE, text=text), JobSpec(job_id="j"))
    assert f"`{refusal.value}`" in guide


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_between_documents_lead_somewhere(document: str):
    path = ROOT / document
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    missing = [link for link in links if not (path.parent / link).exists()]
    assert missing == []


def test_every_command_in_readme_that_is_a_file_exists_and_may_be_run():
    named = set(re.findall(r"\./(scripts/[a-z_]+\.sh)", (ROOT / "README.md").read_text()))
    assert named >= {"scripts/quickstart.sh", "scripts/test.sh", "scripts/start_job_server.sh"}
    assert [name for name in sorted(named) if not (ROOT / name).stat().st_mode & 0o100] == []


def prose(text: str) -> list[str]:
    """The lines of a page that are no code, table or heading."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [each for each in text.splitlines() if not each.lstrip().startswith(tuple("|#<["))]


def test_the_lines_of_the_pages_are_no_longer_than_a_reader_of_the_source_sees():
    folders = ("docs/**", "docker/**", "examples/**", "*", ".")
    pages = {page for folder in folders for page in ROOT.glob(f"{folder}/*.md")}
    assert len(pages) > 20
    too_long = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        if page.name != "api.md"  # which is made from the docstrings
        for line in prose(page.read_text())
        if len(line) > 120
    ]
    assert not too_long


def test_the_changelog_says_nothing_twice():
    entries = re.split(r"\n(?=- |\n|#)", (ROOT / "CHANGELOG.md").read_text())
    words = [" ".join(each.split()) for each in entries if each.startswith("- ")]
    assert [each for each in words if words.count(each) > 1] == []
