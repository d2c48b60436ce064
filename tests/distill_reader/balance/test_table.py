"""Tables of services, and the speeds that they go by: pure."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distill_reader.balance.client import UnusableTeachers
from distill_reader.balance.table import (
    Measured,
    ServiceState,
    Student,
    Table,
    guest_table,
    measured_speeds,
    next_table,
    speed_classes,
    speed_of,
    student_of,
    student_text,
    table_of,
    table_text,
)


def student(name: str, *held: str, require: int = 9, **measured: Measured) -> Student:
    return Student(student=name, session=1, require=require, held=held, measured=measured)


def service(*students: Student, teachers: str = "", table: Table | None = None) -> ServiceState:
    return ServiceState(
        teachers=frozenset(f"{each}:1" for each in teachers.split()),
        students={each.student: each for each in students},
        table=table,
    )


def test_a_table_that_is_in_force_is_the_same_object():
    table = next_table(service(student("s"), teachers="a b"))
    assert (table.version, dict(table.links)) == (1, {"s": ("a:1", "b:1")})
    assert next_table(service(student("s"), teachers="a b", table=table)) is table
    changed = next_table(service(student("s"), teachers="b c", table=table))
    assert (changed.version, dict(changed.links)) == (2, {"s": ("b:1", "c:1")})


def test_of_a_lost_table_each_student_has_its_part():
    students = student("s", "a:1", "c:1"), student("t", "b:1", "d:1")
    table = next_table(service(*students, teachers="a b c d"))
    assert table.links == {"s": ("a:1", "c:1"), "t": ("b:1", "d:1")}


def test_what_a_student_says_it_has_does_not_take_it_from_others():
    table = Table(version=5, links={"s": ("a:1", "b:1", "c:1", "d:1")})
    back = service(student("s"), student("t", "a:1", "b:1"), teachers="a b c d e", table=table)
    after = next_table(back)
    assert set(after.links["s"]) < set(table.links["s"])
    assert len(after.links["s"]) == 3
    assert "e:1" in after.links["t"]


def test_guests_share_and_move_nobody():
    table = Table(version=5, links={"s": ("a:1", "b:1"), "t": ("c:1",)})
    now = service(student("s"), student("t"), student("u"), teachers="a b c", table=table)
    assert guest_table(now).links == {**table.links, "u": ("a:1",)}
    assert guest_table(service(student("u"), teachers="")).links == {}


def test_speeds_of_one_kind_of_teachers_are_all_the_same():
    assert speed_classes({}, {"a": 100.0, "b": 120.0, "c": 75.0}) == {}
    assert speed_classes({}, {"a": 100.0}) == {}


def test_a_speed_changes_only_when_it_is_far_off():
    measured = {"a": 100.0, "b": 100.0, "fast": 200.0}
    classes = speed_classes({}, measured)
    assert classes == {"fast": 2}
    assert speed_of(2) == 2 * speed_of(0)
    assert speed_classes(classes, {**measured, "fast": 150.0}) == {"fast": 2}
    assert speed_classes(classes, {**measured, "fast": 100.0}) == {}
    assert speed_classes(classes, {"a": 100.0, "b": 100.0}) == {"fast": 2}  # nobody measures it


@given(st.dictionaries(st.text(max_size=3), st.floats(1e-3, 1e9), max_size=8))
@example({"a": 1e300, "b": 1e-300})  # a student may report any two
@example({"a": float("inf"), "b": 1.0})  # the sum of some
def test_any_speeds_are_of_a_few_classes(measured):
    classes = speed_classes({}, measured)
    assert all(-6 <= each <= 6 for each in classes.values())
    assert all(speed_of(each) >= 1 for each in classes.values())
    assert speed_classes(classes, measured) == classes


def test_a_teachers_speed_is_what_it_would_answer_if_it_were_always_busy():
    half = {"a": Measured(samples_per_s=50.0, busy_share=0.5)}
    assert measured_speeds([half]) == {"a": 100.0}
    assert measured_speeds([half, half]) == {"a": 200.0}
    nothing = Measured(samples_per_s=0.0, busy_share=1.0)
    hardly = Measured(samples_per_s=1.0, busy_share=0.001)
    assert measured_speeds([{"a": nothing, "b": hardly}]) == {}


def test_fast_teachers_weigh_more_once_they_are_measured():
    fast = Measured(samples_per_s=400.0, busy_share=1.0)
    slow = Measured(samples_per_s=100.0, busy_share=1.0)
    measured = {"a:1": fast, "b:1": slow, "c:1": slow, "d:1": slow, "e:1": slow}
    both = Student(student="s", session=1, require=9, measured=measured), student("t")
    table = next_table(service(*both, teachers="a b c d e"))
    assert table.links == {"s": ("a:1",), "t": ("b:1", "c:1", "d:1", "e:1")}


def test_tables_and_students_are_the_same_when_they_come_back_from_texts():
    table = Table(version=7, links={"s": ("a:1", "b:1"), "t": ()}, classes={"a:1": -2})
    assert table_of(table_text(table)) == table
    told = Student(
        student="s",
        session=3,
        require=4,
        held=("a:1",),
        wait_share=0.5,
        samples_per_s=12.5,
        measured={"a:1": Measured(samples_per_s=12.5, busy_share=0.25)},
        unusable=("b:1",),
    )
    assert student_of("s", 3, student_text(told)) == told


def test_a_student_of_an_older_server_complains_of_nobody():
    body = json.loads(student_text(student("s")))
    del body["unusable"]
    assert student_of("s", 1, json.dumps(body)) == student("s")


def test_a_teacher_that_gives_a_student_nothing_goes_and_comes_back_only_on_trial():
    fed = {"b:1": Measured(samples_per_s=100.0, busy_share=1.0)}
    table = Table(version=1, links={"s": ("a:1",), "t": ("b:1",)})
    starves = Student(student="s", session=1, require=9, unusable=("a:1",))
    is_fed = Student(student="t", session=1, require=9, measured=fed)
    after = next_table(service(starves, is_fed, teachers="a b", table=table))
    assert after.links == {"s": ("b:1",), "t": ("a:1", "b:1")}
    assert next_table(service(starves, is_fed, teachers="a b", table=after)) is after
    alone = service(replace(starves, held=("a:1",)), teachers="a b")
    assert guest_table(alone).links == {"s": ("b:1",)}


def test_a_teacher_that_gives_nothing_is_out_for_longer_each_time_that_it_is_found_so():
    unusable = UnusableTeachers()
    assert unusable.note(["a:1"], 0.0) == ("a:1",)
    assert unusable.note([], 29.0) == ("a:1",)
    assert unusable.note([], 31.0) == ()
    assert unusable.note(["a:1"], 40.0) == ("a:1",)
    assert unusable.note(["b:1"], 99.0) == ("a:1", "b:1")
    assert unusable.note([], 101.0) == ("b:1",)
    assert unusable.note([], 1000.0) == ()
    assert unusable.note(["a:1"], 1001.0) == ("a:1",)
    assert unusable.note([], 1032.0) == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"version": 0, "links": {}, "classes": {}}',
        '{"version": 1, "links": [], "classes": {}}',
        '{"version": 1, "links": {"s": 5}, "classes": {}}',
        '{"version": 1, "links": {}, "classes": {"a:1": "x"}}',
        '{"version": 1, "links": {}, "classes": {"a:1": Infinity}}',
        "[" * 100_000,
    ],
)
def test_other_texts_are_no_tables(text):
    assert table_of(text) is None


@pytest.mark.parametrize(
    "change",
    [
        {"require": 0},
        {"require": "1"},
        {"held": None},
        {"wait_share": "x"},
        {"wait_share": float("nan")},
        {"wait_share": 10**400},
        {"samples_per_s": float("inf")},
        {"samples_per_s": -1},
        {"measured": {"a:1": 3}},
        {"measured": {"a:1": [1, None]}},
        {"unusable": 3},
    ],
)
def test_other_texts_are_no_students(change):
    body = json.loads(student_text(student("s")))
    assert student_of("s", 1, json.dumps(body)) is not None
    assert student_of("s", 1, json.dumps({**body, **change})) is None
