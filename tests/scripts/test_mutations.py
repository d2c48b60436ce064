import textwrap

import pytest

from scripts import mutations

SOURCE = textwrap.dedent('''\
    """Text."""
    LIMIT = 3

    class Queue:
        def take(self, most=1):
            """Return up to 2."""
            if not self.items and most < LIMIT:
                return None
            self.items.sort()
            return self.items[most]
    ''')


def _changes(source: str) -> set[tuple[str, str, str]]:
    return {
        (operator, place.original.strip(), place.mutated.strip())
        for operator, place in mutations.mutations_of("queue.py", source)
    }


def test_each_operator_changes_its_part_of_a_line():
    condition = "if not self.items and most < LIMIT:"
    assert _changes(SOURCE) == {
        ("constant", "LIMIT = 3", "LIMIT = 4"),
        ("constant", "def take(self, most=1):", "def take(self, most=2):"),
        ("and/or", condition, "if (not self.items or most < LIMIT):"),
        ("not removed", condition, "if (self.items) and most < LIMIT:"),
        ("comparison", condition, "if not self.items and (most <= LIMIT):"),
        ("statement removed", "self.items.sort()", "pass"),
        ("return value", "return self.items[most]", "return None"),
    }


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("log.info('%d', 1 < 2)", id="a message to the log"),
        pytest.param("assert x is not None", id="an assertion"),
        pytest.param('text = f"{1 + 2} times"', id="a text"),
        pytest.param("x: int", id="an annotation"),
    ],
)
def test_some_lines_have_no_mutation(line):
    assert _changes(f"{line}\n") == set()


def test_a_mutation_is_found_again_where_lines_have_moved():
    places = dict(mutations.mutations_of("queue.py", SOURCE))
    moved = SOURCE.replace("class Queue:", "def other():\n    self.items.sort()\n\nclass Queue:")
    mutated = mutations.apply(moved, places["statement removed"])
    assert mutated == "pass".join(moved.rsplit("self.items.sort()", 1))


def test_a_mutation_of_code_that_has_changed_is_not_found():
    place = dict(mutations.mutations_of("queue.py", SOURCE))["and/or"]
    assert mutations.apply(SOURCE.replace("most < LIMIT", "most <= LIMIT"), place) is None
    assert mutations.apply(SOURCE.replace("def take", "def get"), place) is None


def test_which_of_several_like_lines_is_meant():
    source = "def f():\n    g()\n    g()\n"
    first, second = (place for _, place in mutations.mutations_of("m.py", source))
    assert mutations.apply(source, first) == "def f():\n    pass\n    g()\n"
    assert mutations.apply(source, second) == "def f():\n    g()\n    pass\n"


def _write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_tests_that_import_a_module_run_first_and_of_those_the_cheap_ones(tmp_path):
    _write(tmp_path, {
        "edl/near.py": "",
        "edl/far.py": "from edl import near\n",
        "tests/support.py": "import subprocess\n",
        "tests/test_near_but_dear.py": "import edl.near\nfrom tests.support import x\n",
        "tests/test_far.py": "import edl.far\n",
        "tests/test_near.py": "import edl.near\n",
        "tests/test_other.py": "",
    })  # fmt: skip
    assert mutations.tests_for(tmp_path, "edl/near.py") == [
        "tests/test_near.py", "tests/test_near_but_dear.py", "tests/test_far.py",
    ]  # fmt: skip


def test_a_moved_module_is_found_by_its_text(tmp_path):
    _write(tmp_path, {"edl/lists/queue.py": SOURCE})
    place = dict(mutations.mutations_of("edl/queue.py", SOURCE))["return value"]
    path, mutated = mutations.find(tmp_path, place)
    assert path == tmp_path / "edl/lists/queue.py"
    assert "return None\n    return" not in mutated
    assert mutated.endswith("return None\n")


def test_a_mutation_that_is_not_found_again_is_told(tmp_path):
    place = dict(mutations.mutations_of("edl/queue.py", SOURCE))["return value"]
    with pytest.raises(
        mutations.NotFoundError, match=r"edl/queue\.py: Queue\.take: return self\.items"
    ):
        mutations.find(tmp_path, place)
