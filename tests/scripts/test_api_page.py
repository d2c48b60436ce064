"""docs/api.md is what the docstrings say, and these name what there is."""

import ast
import re

import pytest

from scripts import api_page


def test_the_page_is_what_the_docstrings_say():
    assert api_page.PAGE.read_text() == api_page.page(), "run: python scripts/api_page.py"


HOMES = list(api_page.public_names())


def documented() -> list[tuple[str, api_page.Function, str]]:
    """Every function on the page, with its name and docstring."""
    found = []
    for home in HOMES:
        if isinstance(home.node, ast.ClassDef):
            shown = [each for each in api_page.members(home) if api_page.is_shown("", each)]
            is_made = home.node.name not in api_page.MADE_BY_EDL
            makers = [
                each for each in api_page.members(home) if each.name == "__init__" and is_made
            ]
            found += [(f"{home.shown}.{each.name}", each) for each in shown + makers]
        else:
            found.append((home.shown, home.node))
    return [(name, node, api_page.docstring(node)) for name, node in found]


def arguments_named(text: str) -> set[str]:
    _, _, section = text.partition("Args:\n")
    lines = re.split(r"\n\n(?=\S)", section)[0]
    return {
        name.strip()
        for names in re.findall(r"^    (\w[\w, ]*):", lines, flags=re.MULTILINE)
        for name in names.split(",")
    }


@pytest.mark.parametrize(
    ("name", "node", "text"), [pytest.param(*each, id=each[0]) for each in documented()]
)
def test_a_docstring_names_the_arguments_that_there_are(name, node, text):
    every = [*node.args.args, *node.args.kwonlyargs]
    there = {each.arg for each in every} - {"self"}
    named = arguments_named(text)
    assert named <= there, f"{name}: {named - there} are none of its arguments"
    if named:
        assert there - named <= mentioned(text), f"{name}: says nothing of {there - named}"


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_every_name_has_a_docstring():
    assert [home.shown for home in HOMES if not api_page.docstring(home.node)] == []
