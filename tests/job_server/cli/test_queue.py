"""What `edl queue` and `edl explain` print, and how they print it."""

from dataclasses import replace

from job_server.api.text import wanted_pods
from job_server.api.wire import Allotment, JobState
from job_server.cli.queue import (
    explain_other,
    explanation_json,
    explanation_text,
    queue_json,
    queue_text,
    slots_text,
)
from job_server.sharing.explain import explain
from tests.job_server.sharing.shared import cluster, shared_job, shared_node
from tests.scripts.statuses import status

RUNS = shared_job("train-a", 6, min_pods=6, max_pods=6, remaining_s=600.0, reason="there is room")
WAITS = shared_job("train-b", min_pods=4, max_pods=4, user="ann", priority=-2, waited_s=240.0)
LATER = shared_job("train-c", after=("train-b",), reason="waits for train-b")


def test_the_queue_is_a_row_for_each_job_and_who_has_the_slots():
    sharing = cluster(RUNS, WAITS, LATER, nodes=(shared_node(used_shared=6, used_others=1),))
    header, *rows, empty, last = queue_text(sharing).splitlines()
    assert header.split()[:4] == ["JOB", "USER", "PRIORITY", "STATE"]
    assert header.split()[4:] == ["PODS", "WAITED", "NEXT", "WHY"]
    assert [row.split()[0] for row in rows] == ["train-a", "train-b", "train-c"]
    assert " ".join(rows[0].split()[4:]) == "6 (6) 0 s ends in 2 min there is room"
    assert " ".join(rows[1].split()[4:]) == "0 (4) 4 min starts in 2 min -"
    assert rows[2].endswith("-                after train-b")
    assert empty == ""
    assert last.startswith(
        "8 slots on 1 node: 6 of shared jobs, 1 of others, 1 free; policy goodput"
    )


def test_users_have_a_column_where_there_are_any():
    header = queue_text(cluster(RUNS)).splitlines()[0]
    assert "USER" not in header


def test_an_empty_queue_says_how_a_job_comes_into_it():
    assert queue_text(cluster()).startswith("no job shares the cluster; `edl submit --share`")
    assert "no node can be reached" in slots_text(cluster(nodes=(shared_node(alive=False),)))


def test_a_job_on_its_way_to_another_size_shows_both():
    row = queue_text(cluster(replace(shared_job("a", 4), pods=2))).splitlines()[1]
    assert "2 -> 4 (1 to 8)" in row


def test_json_has_what_the_server_says_and_the_outlook():
    data = queue_json(cluster(RUNS, WAITS))
    assert data["policy"] == "goodput"
    assert data["jobs"][0]["starts_in_s"] == 0
    assert data["jobs"][1]["starts_in_s"] == data["jobs"][0]["ends_in_s"] > 0
    found = explanation_json("train-b", explain(cluster(RUNS, WAITS), "train-b"))
    assert found["starts_in_s"] == data["jobs"][1]["starts_in_s"]
    assert found["summary"].startswith("train-b waits since 4 min: needs 4 slots, 2 are free")


def test_an_explanation_is_a_sentence_with_facts_below():
    first, *facts = explanation_text(
        explain(cluster(replace(RUNS, user="ann"), WAITS), "train-b")
    ).splitlines()
    assert first.startswith("train-b waits since 4 min")
    assert facts[0] == "  wants   4 pods, priority -2, for ann"
    assert facts[1] == "  place   1 of 1 that wait"


def test_a_job_that_does_not_share_or_has_ended_is_explained_as_well():
    assert "quickstart does not share the cluster, it has 0 of 2 pods that are wanted" in (
        explain_other(status(reason="training")).summary
    )
    ended = explain_other(status(state=JobState.SUCCEEDED, reason="all steps are made"))
    assert ended.summary == "quickstart has SUCCEEDED: all steps are made"


def test_a_shared_job_that_waits_wants_no_pods_whatever_it_had():
    had = status(target_pods=2)
    waits = replace(had, allotment=Allotment(pods=0, reason="waits", since=1.0, nodes={}))
    assert [wanted_pods(each) for each in (had, waits)] == [2, 0]
