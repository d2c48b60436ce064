"""YAML of users' files, read as people mean it."""

import pytest

from job_server.api.codec import WireError
from job_server.api.yaml_text import load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("010", "010"), ("-010", "-010"), ("0", 0),
        ("10", 10), ("0.5", 0.5), ("0x1F", 31), ("1_000", 1000), ("on", True), ("~", None),
        ("a:1", "a:1"),
    ],
)  # fmt: skip
def test_a_value_of_base_60_or_8_is_a_text(text, value):
    assert load_yaml(f"key: {text}") == {"key": value}


def test_values_of_some_lists_stay_as_they_are_written():
    text = "args: [1_000, 2, on, true, 1.10, 2024-01-02]\nrest: [1_000, on]\nin: {args: [0x1F]}\n"
    assert load_yaml(text, lists=("args",)) == {
        "args": ["1_000", 2, "on", True, "1.10", "2024-01-02"],
        "rest": [1000, True],
        "in": {"args": ["0x1F"]},
    }


def test_a_number_that_is_not_finite_is_no_text():
    text = f"args: [.inf, -.inf, .nan, '.inf', {10**400}]\n"
    found = load_yaml(text, lists=("args",))["args"]
    assert [str(each) for each in found] == ["inf", "-inf", "nan", ".inf", str(10**400)]


def test_a_value_that_a_list_shares_is_no_text_elsewhere():
    text = "time: &t 3600.00\nargs: [*t, &s 90.00]\nin: {step: *s, rest: &r [1.10], args: *r}\n"
    assert load_yaml(text, lists=("args",)) == {
        "time": 3600.0,
        "args": ["3600.00", "90.00"],
        "in": {"step": 90.0, "rest": [1.1], "args": ["1.10"]},
    }


def test_a_key_that_comes_twice_is_refused_and_one_that_overrides_a_merged_one_is_not():
    merged = load_yaml("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n")
    assert merged["b"] == {"x": 3, "y": 2}
    assert merged["c"]["y"] == 4
    with pytest.raises(WireError, match="line 3: not YAML: the key 'x' comes twice; leave out one"):
        load_yaml("a:\n  x: 1\n  x: 1\n")


@pytest.mark.parametrize(
    "text", ["a: [", "a: 2024-13-45", "a: \x00", "[" * 5000, "a: !!python/x y"]
)
def test_what_is_no_yaml_is_refused(text):
    with pytest.raises(WireError, match="not YAML"):
        load_yaml(text)


def test_nothing_is_none():
    assert load_yaml("# only a comment\n", lists=None) is None
