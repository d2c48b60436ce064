import textwrap
from collections import Counter

import pytest

from scripts.count_lines import count, report


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        pytest.param("", 0, id="empty"),
        pytest.param('"""What it is.\n\nMore.\n"""\n', 0, id="a docstring"),
        pytest.param("# why\n\nx = 1  # and more\n", 1, id="comments and blank lines"),
        pytest.param("x = (\n    1,\n    # one\n    2,\n)\n", 4, id="a statement of several lines"),
        pytest.param('x = """\na\n\nb\n"""\n', 5, id="a string that is no docstring"),
        pytest.param('def f():\n    x = 1\n    """Text."""\n', 3, id="a string after a statement"),
    ],
)
def test_which_lines_count(source, lines):
    assert count(source) == lines


def test_docstrings_of_classes_and_functions_are_left_out():
    source = '''\
        class A:
            """Text."""

            async def f(self):
                """Text
                of two lines.
                """
                return 1
        '''
    assert count(textwrap.dedent(source)) == 3


def test_the_product_is_summed_before_the_others():
    table = report(Counter({"tests": 7, "edl": 2, "job_server": 1000}))
    assert [line.split() for line in table.splitlines()] == [
        ["job_server", "1,000"], ["edl", "2"], ["product", "1,002"], ["tests", "7"],
    ]  # fmt: skip
