"""Who gets which teachers: on tables, and on any input that hypothesis thinks of."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill_reader.balance.assign import assign_teachers, count_moves


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}{number:03d}" for number in range(count)]


def assign(students: int, teachers: int, most: int = 1000, links=None):
    return assign_teachers(
        dict.fromkeys(names("s", students), most),
        dict.fromkeys(names("t", teachers), 64),
        links or {},
    )


def loads(links) -> dict[str, int]:
    counts: dict[str, int] = {}
    for teacher in itertools.chain(*links.values()):
        counts[teacher] = counts.get(teacher, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("students", "teachers", "counts"),
    [
        (1, 4, [4]),
        (2, 4, [2, 2]),
        (3, 4, [1, 1, 2]),
        (4, 7, [1, 2, 2, 2]),
        (5, 9, [1, 2, 2, 2, 2]),
        (3, 97, [32, 32, 33]),
        (3, 2, [1, 1, 1]),
        (97, 3, [1] * 97),
        (2, 0, [0, 0]),
    ],
)
def test_no_teacher_is_idle_and_students_have_alike(students, teachers, counts):
    links = assign(students, teachers)
    assert sorted(map(len, links.values())) == counts
    assert len(loads(links)) == teachers


@pytest.mark.parametrize(("students", "teachers"), [(97, 3), (200, 100), (7, 5)])
def test_more_students_than_teachers_share_them_evenly(students, teachers):
    counts = loads(assign(students, teachers)).values()
    assert max(counts) - min(counts) <= 1


def test_of_eight_teachers_and_four_students_one_leaves_and_all_other_links_stay():
    before = assign(4, 8)
    gone = before["s000"][0]
    speeds = {teacher: 64 for teacher in names("t", 8) if teacher != gone}
    after = assign_teachers(dict.fromkeys(before, 8), speeds, before)
    assert sum(map(len, after.values())) == 7
    assert count_moves(before, after) == 0
    assert count_moves(after, assign(4, 8, links=after)) == 1  # it comes back


def test_the_teachers_of_a_student_that_leaves_go_to_the_others_and_nothing_else_moves():
    before = assign(4, 8)
    left = {student: links for student, links in before.items() if student != "s002"}
    after = assign_teachers(dict.fromkeys(left, 8), dict.fromkeys(names("t", 8), 64), before)
    assert count_moves(left, after) == 2
    assert sorted(map(len, after.values())) == [2, 3, 3]


def test_a_student_has_no_more_teachers_than_it_wants():
    links = assign_teachers({"a": 1, "b": 3}, dict.fromkeys(names("t", 9), 64), {})
    assert (len(links["a"]), len(links["b"])) == (1, 3)
    fewer = assign_teachers({"a": 1, "b": 2}, dict.fromkeys(names("t", 9), 64), links)
    assert set(fewer["b"]) < set(links["b"])


def test_fast_teachers_count_for_more():
    links = assign_teachers({"a": 9, "b": 9}, {"fast": 256, "t1": 64, "t2": 64, "t3": 64}, {})
    assert sorted(links.values()) == [("fast",), ("t1", "t2", "t3")]
    shared = assign_teachers(dict.fromkeys(names("s", 10), 1), {"fast": 256, "slow": 64}, {})
    assert loads(shared) == {"fast": 8, "slow": 2}


def test_an_idle_teacher_replaces_one_that_is_much_slower():
    links = assign_teachers({"a": 1}, {"slow": 32, "fast": 64}, {"a": ("slow",)})
    assert links == {"a": ("fast",)}
    stays = assign_teachers({"a": 1}, {"slow": 45, "fast": 64}, {"a": ("slow",)})
    assert stays == {"a": ("slow",)}


def test_the_order_of_what_is_given_does_not_matter():
    one = assign(5, 17)
    other = assign_teachers(
        dict.fromkeys(reversed(names("s", 5)), 1000),
        dict.fromkeys(reversed(names("t", 17)), 64),
        {},
    )
    assert one == other


def least_moves(students: list[str], teachers: list[str], links) -> int:
    """How many links must be new to students that were there, with teachers of one speed."""
    kept = {each: [t for t in links.get(each, ()) if t in teachers] for each in students}
    if len(teachers) < len(students):  # those over an even load move, and those without
        counts = sorted((loads(kept).get(teacher, 0) for teacher in teachers), reverse=True)
        low, high = divmod(len(students), len(teachers))
        quotas = [low + (place < high) for place in range(len(teachers))]
        stay = sum(map(min, counts, quotas))
        new = sum(not each for student, each in kept.items() if student not in links)
        return max(0, len(students) - stay - new)
    counts = sorted((len(kept[each]) for each in students), reverse=True)
    low, high = divmod(len(teachers), len(students))
    quotas = [low + (place < high) for place in range(len(students))]
    return sum(
        max(0, quota - count)
        for (count, quota), student in zip(
            zip(counts, quotas, strict=True),
            sorted(students, key=lambda each: -len(kept[each])),
            strict=True,
        )
        if student in links
    )


members = st.sets(st.integers(0, 14), min_size=1, max_size=15)


@given(first=st.tuples(members, members), second=st.tuples(members, members))
@settings(max_examples=100, deadline=None)
def test_whatever_comes_and_goes_all_are_fed_evenly_with_few_moves(first, second):
    before: dict[str, tuple[str, ...]] = {}
    for number, (some_students, some_teachers) in enumerate((first, second)):
        students = [f"s{each:02d}" for each in sorted(some_students)]
        teachers = [f"t{each:02d}" for each in sorted(some_teachers)]
        after = assign_teachers(dict.fromkeys(students, 99), dict.fromkeys(teachers, 64), before)
        assert sorted(after) == students
        assert all(after.values())
        assert set(itertools.chain(*after.values())) == set(teachers)
        counts = list(loads(after).values())
        sizes = list(map(len, after.values()))
        assert max(counts) - min(counts) <= 1
        assert max(sizes) - min(sizes) <= 1
        again = assign_teachers(dict.fromkeys(students, 99), dict.fromkeys(teachers, 64), after)
        assert again == after
        if number and len(students) <= len(teachers) and len(first[0]) <= len(first[1]):
            assert count_moves(before, after) <= least_moves(students, teachers, before)
        if number and len(students) > len(teachers) and len(first[0]) > len(first[1]):
            assert count_moves(before, after) <= least_moves(students, teachers, before)
        before = after


@given(
    most=st.dictionaries(st.sampled_from(names("s", 8)), st.integers(1, 5), min_size=1),
    speeds=st.dictionaries(st.sampled_from(names("t", 12)), st.integers(8, 512), min_size=1),
    links=st.dictionaries(
        st.sampled_from(names("s", 10)), st.lists(st.sampled_from(names("t", 14)), max_size=9)
    ),
)
@settings(max_examples=150, deadline=None)
def test_any_speeds_bounds_and_old_links_end_in_an_assignment_that_stays(most, speeds, links):
    after = assign_teachers(most, speeds, links)
    assert after.keys() == most.keys()
    for student, teachers in after.items():
        assert 1 <= len(teachers) <= most[student]
        assert set(teachers) <= speeds.keys()
        assert len(set(teachers)) == len(teachers)
    used = set(itertools.chain(*after.values()))
    if sum(most.values()) >= len(speeds) or len(speeds) <= len(most):
        assert used == speeds.keys()
    if len(speeds) >= len(most):
        assert max(loads(after).values()) == 1
    assert assign_teachers(most, speeds, after) == after


# --- teachers that do not answer some students

T = dict.fromkeys(("t1", "t2", "t3", "t4"), 64)


@pytest.mark.parametrize(
    ("teachers", "links", "unusable", "proven", "expected"),
    [
        pytest.param(
            "t1 t2",
            {"a": ["t1"], "b": ["t2"]},
            {"a": ["t1"]},
            {"t2"},
            {"a": ("t2",), "b": ("t1", "t2")},
            id="it shares the other's, who tries the teacher in addition to that",
        ),
        pytest.param(
            "t1 t2",
            {"a": ["t2"], "b": ["t1", "t2"]},
            {"a": ["t1"], "b": ["t1"]},
            {"t2"},
            {"a": ("t2",), "b": ("t2",)},
            id="nobody is left to try it",
        ),
        pytest.param(
            "t1 t2",
            {"a": ["t2"], "b": ["t1", "t2"]},
            {"a": ["t1"]},
            {"t1", "t2"},
            {"a": ("t2",), "b": ("t1",)},
            id="it answers the other, who has it alone",
        ),
        pytest.param(
            "t1 t2 t3 t4",
            {"a": ["t1", "t2"], "b": ["t3", "t4"]},
            {"a": ["t1"]},
            {"t2", "t3", "t4"},
            {"a": ("t2",), "b": ("t1", "t3", "t4")},
            id="with enough teachers nothing else moves",
        ),
        pytest.param(
            "t1 t2",
            {"a": ["t1"], "b": ["t2"]},
            {"a": ["t1", "t2"]},
            {"t2"},
            {"a": ("t1",), "b": ("t2",)},
            id="who gets nothing from all of them keeps what it has",
        ),
        pytest.param(
            "t1 t2",
            {"a": ["t1"], "b": ["t2"]},
            {"a": ["t1"], "b": ["t2"]},
            set(),
            {"a": ("t2",), "b": ("t1",)},
            id="each tries the other's where all are on trial",
        ),
        pytest.param(
            "t1 t2 t3",
            {"a": ["t1"], "b": ["t2"], "c": ["t3"]},
            {"a": ["t1", "t3"], "b": ["t2"]},
            {"t3"},
            {"a": ("t2",), "b": ("t1", "t3"), "c": ("t3",)},
            id="who may have none of the proven ones tries another",
        ),
    ],
)
def test_a_student_is_not_left_with_what_gives_it_nothing(
    teachers, links, unusable, proven, expected
):
    speeds = dict.fromkeys(teachers.split(), 64)
    found = assign_teachers(dict.fromkeys(links, 9), speeds, links, unusable, proven)
    assert found == expected
    assert assign_teachers(dict.fromkeys(links, 9), speeds, found, unusable, proven) == found


some_teachers = st.sets(st.sampled_from(names("t", 12)))


@given(
    most=st.dictionaries(st.sampled_from(names("s", 8)), st.integers(1, 5), min_size=1),
    speeds=st.dictionaries(st.sampled_from(names("t", 12)), st.integers(8, 512), min_size=1),
    links=st.dictionaries(st.sampled_from(names("s", 8)), some_teachers.map(sorted)),
    unusable=st.dictionaries(st.sampled_from(names("s", 8)), some_teachers, max_size=8),
    proven=some_teachers,
)
@settings(max_examples=150, deadline=None)
def test_whatever_students_complain_of_all_have_a_teacher_that_they_do_not(
    most, speeds, links, unusable, proven
):
    after = assign_teachers(most, speeds, links, unusable, proven)
    assert after.keys() == most.keys()
    for student, teachers in after.items():
        assert 1 <= len(teachers) <= most[student]
        assert set(teachers) <= speeds.keys()
        if not speeds.keys() <= unusable.get(student, set()):
            assert unusable.get(student, set()).isdisjoint(teachers)
    assert assign_teachers(most, speeds, after, unusable, proven) == after
