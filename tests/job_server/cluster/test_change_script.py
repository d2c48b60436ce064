"""Which changes a script makes, and which scripts are refused with which line."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job_server.api.codec import WireError
from job_server.api.wire import JobSpec, ScriptKind, ScriptSpec
from job_server.cluster.change_script import parse_script, timeline

JOB = JobSpec(job_id="digits", min_pods=1, max_pods=4, slots_per_pod=2)


def yaml_script(text: str) -> ScriptSpec:
    return ScriptSpec(kind=ScriptKind.TIMELINE, text=text)


def csv_script(text: str) -> ScriptSpec:
    return ScriptSpec(kind=ScriptKind.TRACE, text=text)


def changes(spec: ScriptSpec, count: int = 20, job: JobSpec = JOB):
    """(at_s, action, pods or target) of the first changes."""
    script = parse_script(spec, job)
    found = []
    for index in range(count):
        change = script.change(index)
        if change is None:
            break
        found.append((change.at_s, change.action, change.target or change.pods))
    return found


def test_no_script_makes_no_change():
    assert changes(ScriptSpec()) == []
    assert timeline(ScriptSpec(), JOB) == ["0:00:00  start with 4 pods", "no change is scripted"]


def test_the_alternation_removes_first_and_then_adds():
    spec = ScriptSpec(kind=ScriptKind.ALTERNATE, interval_s=900, del_pods=1, add_pods=2)
    assert changes(spec, 4) == [
        (900, "remove", 1),
        (1800, "add", 2),
        (2700, "remove", 1),
        (3600, "add", 2),
    ]


def test_a_timeline_says_what_happens_when():
    text = """
    - {at: 90s, remove: 1}
    - at: 3m
      pods: 4
    - {at: 1h30m, add: 2}
    - {at: 6000, kill: 1}
    - {at: 1.75h, kill: pod_2_0}
    """
    assert changes(yaml_script(text)) == [
        (90, "remove", 1),
        (180, "set", 4),
        (5400, "add", 2),
        (6000, "kill", "1"),
        (6300, "kill", "pod_2_0"),
    ]


@pytest.mark.parametrize(
    ("repeat", "expected"),
    [
        pytest.param("{every: 10m, times: 2}", [60, 120, 660, 720], id="counts the first time"),
        pytest.param("{every: 120s, times: 2}", [60, 120, 180, 240], id="follows directly"),
        pytest.param("{every: 10m}", [60, 120, 660, 720, 1260, 1320], id="for ever"),
    ],
)
def test_a_repeated_timeline_runs_the_list_again(repeat, expected):
    text = f"repeat: {repeat}\nchanges:\n- {{at: 1m, remove: 1}}\n- {{at: 2m, add: 1}}\n"
    assert [at_s for at_s, _, _ in changes(yaml_script(text), 6)] == expected


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        pytest.param("- {at: 1m, add: 1}\n- {at: 2m", 2, "not YAML", id="broken"),
        pytest.param("- {at: 1m, add: 1}\n\x00", 2, "not YAML", id="control character"),
        pytest.param("", 1, "empty", id="empty"),
        pytest.param("[" * 5000, 1, "nested", id="deep"),
        pytest.param("hello", 1, "list of changes", id="no list"),
        pytest.param("changes: 3", 1, "list of changes", id="changes is no list"),
        pytest.param("repeat: {every: 1m}", 1, "changes", id="repeat of nothing"),
        pytest.param("- 1m", 1, "a change such as", id="entry is no mapping"),
        pytest.param("- {at: 1m, add: 1}\n- {add: 1}", 2, "at: missing", id="no time"),
        pytest.param("\n- {at: 1m}", 2, "exactly one", id="no action"),
        pytest.param("- {at: 1m, add: 1, pods: 2}", 1, "exactly one", id="two actions"),
        pytest.param("- {at: 1m, adds: 1}", 1, "unknown key 'adds'", id="unknown key"),
        pytest.param("- {at: 1m, at: 2m, add: 1}", 1, "at: named twice", id="twice"),
        pytest.param("- {at: 5x, add: 1}", 1, "'5x' is no time", id="unit"),
        pytest.param("- {at: -5, add: 1}", 1, "is no time", id="negative"),
        pytest.param("- {at: 1:30, add: 1}", 1, "is no time", id="sexagesimal"),
        pytest.param("- {at: .nan, add: 1}", 1, "is no time", id="nan"),
        pytest.param("- {at: 1e9, add: 1}", 1, "is no time", id="exponent"),
        pytest.param("- {at: 99999h, add: 1}", 1, "more than a year", id="far away"),
        pytest.param("- {at: [1], add: 1}", 1, "single value", id="time is a list"),
        pytest.param("- {at: 2m, add: 1}\n- {at: 1m, add: 1}", 2, "order", id="unordered"),
        pytest.param("- {at: 1m, pods: 5}", 1, "1 to 4", id="above the job's most"),
        pytest.param("- {at: 1m, pods: 0}", 1, "1 to 4", id="below the job's fewest"),
        pytest.param("- {at: 1m, add: 0}", 1, "add", id="add nothing"),
        pytest.param("- {at: 1m, remove: 1.5}", 1, "whole number", id="half a pod"),
        pytest.param("- {at: 1m, add: true}", 1, "whole number", id="a boolean"),
        pytest.param("- {at: 1m, kill: ../x}", 1, "not an id", id="kill a path"),
        pytest.param(
            "changes:\n- {at: 9m, add: 1}\nrepeat: {every: 1m}", 1, "no sooner", id="overlap"
        ),
        pytest.param(
            "changes: [{at: 0, add: 1}]\nrepeat: {every: 0}", 2, "at least", id="too often"
        ),
        pytest.param("changes: []\nrepeat: {times: 2}", 2, "every: missing", id="no period"),
        pytest.param(
            "changes: []\nrepeat: {every: 1m, times: 0}", 2, "repeat.times", id="no times"
        ),
        pytest.param("changes: []\nrepeat: 5", 2, "expected", id="repeat is a number"),
    ],
)
def test_a_wrong_timeline_is_refused_with_its_line(text, line, says):
    with pytest.raises(WireError) as refused:
        parse_script(yaml_script(text), JOB)
    assert str(refused.value).startswith(f"script.text: line {line}: ")
    assert says in str(refused.value)


def test_an_overlong_timeline_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="at most 200000"):
        parse_script(yaml_script("# " + "x" * 200_000), JOB)


def test_yaml_tags_build_no_objects():
    with pytest.raises(WireError, match="a change such as"):
        parse_script(yaml_script("!!python/object/apply:os.getenv [HOME]\n"), JOB)


def test_a_trace_becomes_pods_within_the_bounds():
    text = "time_s,free_slots\n0,8\n60,7\n120.5,6\n180,0\n240,100\n"
    assert changes(csv_script(text)) == [
        (0, "set", 4),
        (60, "set", 3),  # 7 slots hold 3 pods of 2
        (180, "set", 1),  # 6 slots are no change; 0 slots leave the fewest
        (240, "set", 4),
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        pytest.param("0,4\n60,2\n", 1, "header", id="no header"),
        pytest.param("time_s,free_slots\n0,4\n60,\n", 3, "hole", id="missing value"),
        pytest.param("time_s,free_slots\n0,4\n\n60,2\n", 3, "hole", id="empty line"),
        pytest.param("time_s,free_slots\n0,4\n60\n", 3, "hole", id="missing column"),
        pytest.param("time_s,free_slots\n0,4,1\n", 2, "hole", id="extra column"),
        pytest.param("time_s,free_slots\n0,4\n0,2\n", 3, "order", id="same time"),
        pytest.param("time_s,free_slots\n9,4\n5,2\n", 3, "order", id="back in time"),
        pytest.param("time_s,free_slots\nsoon,4\n", 2, "time_s: 'soon'", id="no number"),
        pytest.param("time_s,free_slots\nnan,4\n", 2, "time_s: 'nan'", id="nan"),
        pytest.param("time_s,free_slots\n0,-1\n", 2, "free_slots: '-1'", id="negative"),
        pytest.param("time_s,free_slots\n0,1.5\n", 2, "free_slots: '1.5'", id="half a slot"),
        pytest.param('time_s,free_slots\n0,"4\n', 2, "not CSV", id="open quote"),
    ],
)
def test_a_trace_with_a_hole_is_refused_with_its_row(text, line, says):
    with pytest.raises(WireError) as refused:
        parse_script(csv_script(text), JOB)
    assert str(refused.value).startswith(f"script.text: line {line}: ")
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["", "time_s,free_slots\n"])
def test_a_trace_without_rows_is_refused(text):
    with pytest.raises(WireError, match="no rows"):
        parse_script(csv_script(text), JOB)


@given(seed=st.integers(), low=st.integers(1, 3), high=st.integers(4, 9), count=st.integers(1, 60))
def test_a_walk_stays_in_its_bounds_and_depends_on_seed_and_index_alone(seed, low, high, count):
    job = JobSpec(job_id="digits", min_pods=low, max_pods=high)
    spec = ScriptSpec(kind=ScriptKind.WALK, interval_s=10, seed=seed)
    walked = changes(spec, count, job)
    pods = [job.first_pods, *(pods for _, _, pods in walked)]
    assert all(low <= here <= high for here in pods)
    assert all(abs(after - before) == 1 for before, after in itertools.pairwise(pods))
    assert [at_s for at_s, _, _ in walked] == [10 * (index + 1) for index in range(count)]
    # Asked for the last one first, it is the same: a restarted server knows only the index.
    other = JobSpec(job_id="other", min_pods=low, max_pods=high, pods=high)
    last = parse_script(spec, other).change(count - 1)
    assert last is not None
    assert last.pods == pods[-1]


def test_walks_of_two_seeds_differ():
    walks = {
        tuple(pods for _, _, pods in changes(ScriptSpec(kind=ScriptKind.WALK, seed=seed), 30))
        for seed in range(5)
    }
    assert len(walks) == 5


@pytest.mark.parametrize(
    ("spec", "job"),
    [
        pytest.param(ScriptSpec(kind=ScriptKind.WALK, min_pods=4), JOB, id="one size"),
        pytest.param(ScriptSpec(kind=ScriptKind.WALK, max_pods=5), JOB, id="above the job's"),
    ],
)
def test_a_walk_that_cannot_go_is_refused(spec, job):
    with pytest.raises(WireError, match=r"script\.max_pods"):
        parse_script(spec, job)


@given(text=st.text(max_size=200))
def test_any_text_is_either_a_script_or_refused(text):
    for kind in (ScriptKind.TIMELINE, ScriptKind.TRACE):
        try:
            script = parse_script(ScriptSpec(kind=kind, text=text), JOB)
        except WireError:
            continue
        first = script.change(0)
        assert first is None or first.at_s >= 0


def test_the_preview_tells_what_is_skipped_and_where_it_stops():
    text = (
        "- {at: 1m, remove: 3}\n- {at: 2m, remove: 1}\n- {at: 3m, kill: 0}\n- {at: 4m, pods: 2}\n"
    )
    assert timeline(yaml_script(text), JOB) == [
        "0:00:00  start with 4 pods",
        "0:01:00  remove 3 pods: 4 -> 1 pod",
        "0:02:00  remove 1 pod: skipped: 0 is outside 1 to 4 pods",
        "0:03:00  kill rank 0: 1 pod",
        "0:04:00  set 2 pods: 1 -> 2 pods",
    ]
    assert timeline(yaml_script(text), JOB, until_s=90) == timeline(yaml_script(text), JOB)[:2]
    assert timeline(yaml_script(text), JOB, count=1)[-1] == "... and more; so far 1 of its changes"
