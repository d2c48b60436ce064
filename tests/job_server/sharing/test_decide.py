"""What the server tells shared jobs, from jobs and nodes as they are."""

from dataclasses import replace
from typing import Any

import pytest

from job_server.api.wire import (
    Allotment,
    DesiredState,
    JobSpec,
    JobState,
    NodeReport,
    Saved,
    SlotUsage,
)
from job_server.cluster.placement import Site
from job_server.jobs.events import Allotted
from job_server.server.nodes import SmoothedLoad
from job_server.sharing.decide import decide, rooms_of, why_never, why_not_after
from job_server.sharing.job_views import NodeUse, measured_step_s, remaining_s
from job_server.sharing.overview import overview
from job_server.sharing.policies import Fulfilment
from job_server.training.core.job import Job, Share, TrainingPod
from job_server.training.machine import new_job
from tests.job_server.world import node, trains, world


def shared(job_id: str, least: int = 1, most: int = 2, **more: Any) -> Job:
    fields = {"folder": "train", **more}
    spec = JobSpec(job_id=job_id, share=True, min_pods=least, max_pods=most, **fields)
    return new_job(spec, 1000.0)


def with_pods(job: Job, node_id: str, *slots: int, state: DesiredState | None = None) -> Job:
    """The job with a pod on each of these slots."""
    pods = tuple(
        TrainingPod(
            pod_id=f"pod_{slot}",
            site=Site(node_id=node_id, addr="x", slots=(slot,), port_low=1, port_high=2),
            desired=state or DesiredState.RUN,
        )
        for slot in slots
    )
    return replace(job, pods=pods)


def use(name: str, slots: int = 4, **more: Any) -> NodeUse:
    on_node = {key: more.pop(key) for key in ("cpu_milli", "memory_mb", "folders") if key in more}
    made = replace(node(name, slots, job_id=None), **{"folders": ("train",), **on_node})
    fields = {"alive": True, "report": NodeReport(node_id=name), "limit": None, **more}
    return NodeUse(node=made, **fields)


def told(jobs: list[Any], *nodes: NodeUse, now: float = 1000.0) -> dict[str, Allotted]:
    return dict(decide(Fulfilment(), jobs, nodes, now))


def test_others_slots_strangers_and_limits_are_not_shared():
    own = with_pods(new_job(JobSpec(job_id="own"), 1000.0), "a", 0)
    report = NodeReport(node_id="a", slots=(SlotUsage(index=0), SlotUsage(index=1, stranger="x")))
    rooms = rooms_of([own], [], [use("a", report=report), use("b", limit=1)], 1000.0)
    assert [(each.capacity.slots, each.foreign.slots) for each in rooms] == [(4, 2), (4, 3)]


def test_processors_and_memory_count_where_job_and_node_name_them():
    hungry = shared("hungry", most=4, cpu_milli=1500, memory_mb=100)
    found = told([hungry], use("a", cpu_milli=4000, foreign_cpu_milli=900))
    assert found["hungry"].nodes == {"a": 2}
    found = told([hungry], use("a", memory_mb=450, foreign_memory_mb=100))
    assert found["hungry"].nodes == {"a": 3}
    assert told([hungry], use("a"))["hungry"].nodes == {"a": 4}


def test_a_job_is_allotted_only_nodes_that_serve_it():
    there, nowhere = shared("there", folder="there"), shared("nowhere", folder="nowhere")
    found = told([there, nowhere], use("a"), use("b", folders=("there",)))
    assert found["there"].nodes == {"b": 2}
    assert found["nowhere"] == Allotted(
        {}, "no job client has the folder 'nowhere' in its --jobs_dir"
    )


def test_pods_that_wait_beside_a_state_at_home_keep_no_slots_from_others():
    bad = use("a", 1)
    slots = tuple(replace(slot, usable=False, quarantine="faulty") for slot in bad.node.slots)
    home = replace(bad, node=replace(bad.node, slots=slots))
    held = Allotment(pods=1, reason="others use a", since=1000.0, nodes={"b": 1})
    saved = Saved(stage=1, step=4, path="/checkpoint", node_id="a")
    job = with_pods(shared("job"), "b", 0)
    job = replace(job, share=Share(allotment=held), ending=replace(job.ending, saved=saved))
    assert overview("", [job], [home], 1000.0).nodes[0].quarantine == "faulty"
    found = told([job, shared("other")], home, use("b", 1))
    assert (found["job"].nodes, found["other"].nodes) == ({}, {"b": 1})
    found = told([job, shared("other")], use("a", 1), use("b", 1))
    assert found["job"].nodes["a"] == 1  # where it begins


def test_what_is_no_news_is_not_told():
    job = shared("job")
    event = told([job], use("a"))["job"]
    held = Allotment(pods=2, reason="there is room", since=1000.0, nodes={"a": 2})
    assert event.nodes == held.nodes
    assert told([replace(job, share=Share(allotment=held))], use("a")) == {}


def test_jobs_that_give_way_are_told_first():
    held = Allotment(pods=4, reason="there is room", since=900.0, nodes={"a": 4})
    old = with_pods(replace(shared("old", most=4), share=Share(allotment=held)), "a", 0, 1, 2, 3)
    new = shared("a-new-one")
    assert list(told([new, old], use("a"))) == ["old", "a-new-one"]


def test_what_was_allotted_but_never_begun_is_taken_back_when_others_have_the_slots():
    held = Allotment(pods=2, reason="there is room", since=990.0, nodes={"a": 2})
    job = replace(shared("job", least=2), share=Share(allotment=held))
    own = with_pods(new_job(JobSpec(job_id="own", max_pods=3), 1000.0), "a", 0, 1, 2)
    assert told([own, job], use("a"))["job"] == Allotted({}, "waits: no room for its least, 2")


def test_a_job_is_allotted_other_nodes_where_it_has_no_pods_and_is_served_no_more():
    held = Allotment(pods=2, reason="there is room", since=990.0, nodes={"a": 2})
    job = replace(shared("job"), share=Share(allotment=held))
    nodes = use("a", folders=()), use("b")
    assert told([job], *nodes)["job"].nodes == {"b": 2}
    assert told([with_pods(job, "a", 0)], *nodes)["job"].nodes == {"a": 1, "b": 1}
    assert told([with_pods(job, "a", 0, 1)], *nodes) == {}


def test_a_silent_node_keeps_the_pods_that_nobody_has_given_up_and_gets_no_more():
    held = Allotment(pods=1, reason="there is room", since=900.0, nodes={"a": 1})
    job = with_pods(replace(shared("job", most=4), share=Share(allotment=held)), "a", 0)
    silent = use("a", alive=False)
    assert told([job], silent) == {}
    assert told([job, shared("other")], silent)["other"].nodes == {}
    given_up = with_pods(job, "a", 0, state=DesiredState.HOLD)
    assert told([given_up], silent)["job"].nodes == {}


def test_pods_keep_their_places_on_a_node_that_gets_no_new_ones():
    held = Allotment(pods=3, reason="there is room", since=900.0, nodes={"a": 3})
    job = with_pods(replace(shared("job", most=4), share=Share(allotment=held)), "a", 0, 1, 2)
    short = use("a")
    slots = tuple(replace(slot, usable=False, reason="full") for slot in short.node.slots)
    short = replace(short, node=replace(short.node, slots=slots))
    assert told([job], short) == {}
    assert told([job, shared("other")], short)["other"].nodes == {}
    assert told([with_pods(job, "a", 0, 1)], short)["job"].nodes == {"a": 2}, "one was lost"
    (node,) = overview("", [job], [short], 1000.0).nodes
    assert (node.slots, node.used_shared, node.barred) == (3, 3, "full")
    assert node.quarantine == "", "it goes on there"
    leave = tuple(replace(slot, quarantine="is drained") for slot in slots)
    drained = replace(short, node=replace(short.node, slots=leave))
    assert told([job], drained, use("b"))["job"].nodes == {"b": 4}


def test_slots_that_are_not_given_back_for_long_count_as_used():
    held = Allotment(pods=1, reason="gives way to other", since=1000.0, nodes={"a": 1})
    job = with_pods(replace(shared("job", most=1), share=Share(allotment=held)), "a", 0, 1)
    others = [shared("other", most=4)]
    assert told([job, *others], use("a"), now=1100.0)["other"].nodes == {"a": 3}
    found = told([job, *others], use("a"), now=2000.0)
    assert found["other"].nodes == {"a": 2}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"least": 9, "most": 9}, "min_pods: 9 pods of 1 slot each are more than the cluster has: "
                                  "8 fit; a has 4 slots, 4 cores, 1000 MB; b has 4 slots"),
        ({"least": 7, "most": 7, "memory_mb": 400}, "7 pods of 1 slot, 400 MB each .* 6 fit"),
        ({"least": 6, "most": 6, "cpu_milli": 3000}, "6 pods of 1 slot, 3 cores each .* 5 fit"),
    ],
)  # fmt: skip
def test_what_the_cluster_never_has_is_said_with_the_numbers(fields, says):
    nodes = [use("a", cpu_milli=4000, memory_mb=1000), use("b")]
    why = why_never(shared("job", **fields).spec, nodes)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(why)
    assert why_never(shared("job", 1, 9).spec, nodes) == ""
    assert why_never(shared("job", 9, 9, folder="unknown").spec, nodes) == ""  # it may come


def test_a_job_that_follows_one_which_cannot_succeed_is_refused():
    spec = shared("job", after=("one", "two")).spec
    one, two = shared("one"), replace(shared("two"), state=JobState.SUCCEEDED)
    failed = replace(one, state=JobState.FAILED)
    assert why_not_after(spec, {"one": one, "two": two}) == ""
    assert "job 'one' has FAILED" in why_not_after(spec, {"one": failed, "two": two})
    assert "no job 'two'" in why_not_after(spec, {"one": one})


def test_a_job_that_would_wait_for_one_which_waits_for_it_is_refused():
    waits, other = shared("waits", after=("other",)), shared("other", after=("job", "waits"))
    jobs = {"waits": waits, "other": other}
    spec = shared("job", after=("waits",)).spec
    assert "'waits' itself waits for the success of 'job'" in why_not_after(spec, jobs)
    went_on = replace(other, share=Share(met=("job",)))  # by an earlier job of that name
    assert why_not_after(spec, {**jobs, "other": went_on}) == ""
    assert why_not_after(shared("third", after=("waits",)).spec, jobs) == ""


def test_step_times_and_the_work_left_follow_from_what_stages_have_done():
    made = trains(world(min_pods=1, max_pods=2, pods=2, total_steps=1000))
    made.rounds(40)
    made.resize(1)
    made.rounds(60)
    job = made.job
    found = measured_step_s(job, made.now)
    assert found.keys() == {1, 2}  # a step of the world takes 0.5 s, with any number of trainers
    assert all(0.4 < seconds < 0.6 for seconds in found.values())
    assert remaining_s(job, made.now) is None  # nobody has said how many steps there are
    known = replace(job, progress=replace(job.progress, total_steps=job.progress.step + 100))
    left_s = remaining_s(known, made.now)
    assert left_s is not None
    assert 40.0 < left_s < 60.0


def test_short_peaks_of_foreign_load_do_not_count_and_lasting_ones_do():
    load = SmoothedLoad()
    load.note(1000, 8000, 0.0)
    load.note(4000, 8000, 1.0)
    assert load.used == 1000
    for second in range(2, 8):
        load.note(1000, 8000, float(second))
    assert load.used == 1000
    seen = set()
    for second in range(8, 60):
        load.note(5000 + (second % 2) * 600, 8000, float(second))
        seen.add(load.used)
    assert abs(load.used - 5300) < 500
    assert len(seen) < 12
    load.note(None, 8000, 61.0)
    assert abs(load.used - 5300) < 500
    load.note(None, 8000, 130.0)  # by a client of a version that does not measure it
    assert load.used == 0
