"""What a server makes of what clients report of their slots."""

import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from job_server.api import wire
from job_server.api.errors import BadRequest, Conflict, NotFound
from job_server.api.text import slot_lines
from job_server.jobs.events import KillAsked, ResizeAsked
from job_server.server.service import JobService
from job_server.training.core.job import BadSlot, Job
from job_server.training.core.work import Work
from tests.job_server.serving import cpu_node, open_service

LOST = wire.SlotFault(name="gpu_lost", text="it has fallen off the bus")
SPEC = wire.JobSpec(job_id="digits", pods=2, max_pods=2)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def report(service: JobService, *faults: wire.SlotFault, idle_s: float = 0.0) -> None:
    slots = (
        wire.SlotUsage(index=0, idle_s=idle_s),
        wire.SlotUsage(index=1, faults=faults, idle_s=idle_s),
    )
    service.report_node("node-a", wire.NodeReport(node_id="node-a", slots=slots))


def usable(service: JobService) -> list[bool]:
    (known,) = service.node_statuses()
    return [slot.usable for slot in known.node.slots]


def lines(service: JobService) -> list[str]:
    (known,) = service.node_statuses()
    return slot_lines(known, service.now())


def test_a_slot_with_a_fault_is_in_quarantine_until_the_probe_is_over():
    clock = Clock()
    with open_service(now=clock) as service:
        service.register(cpu_node())
        report(service)
        assert (usable(service), lines(service)) == ([True, True], [])
        report(service, LOST)
        assert usable(service) == [True, False]
        clock.now += 60
        (line,) = lines(service)
        assert line == (
            "slot 1 is in quarantine for 60 s: it has fallen off the bus; used again once it "
            "was well and idle for 10 min"
        )
        service.register(cpu_node())  # a client that registers again changes nothing
        assert usable(service) == [True, False]
        clock.now += 600
        report(service, idle_s=600.0)
        assert usable(service) == [True, True]


def test_a_quarantine_outlives_the_server(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        service.register(cpu_node())
        report(service, LOST)
    with open_service(path) as service:
        assert usable(service) == [True, False]
        service.order_slot("node-a", wire.SlotOrder(slot=1, take_back=True))
    with open_service(path) as service:
        assert usable(service) == [True, True]


def restarted(path: Path, clock: Clock) -> AbstractContextManager[JobService]:
    """A server whose machine's clock was set back by a month since the last one."""
    clock.now -= 30 * 86400.0
    return open_service(path, now=clock)


def test_a_quarantine_ends_though_the_clock_was_set_back_meanwhile(tmp_path):
    clock, path = Clock(), tmp_path / "server.db"
    with open_service(path, now=clock) as service:
        service.register(cpu_node())
        report(service, LOST)
    with restarted(path, clock) as service:
        service.register(cpu_node())
        assert usable(service) == [True, False]
        clock.now += 700
        report(service, idle_s=700.0)
        assert usable(service) == [True, True]


def test_a_fault_is_heard_of_though_the_clock_was_set_back_since_the_last_one(tmp_path):
    clock, path = Clock(), tmp_path / "server.db"
    with open_service(path, now=clock) as service:
        service.register(cpu_node())
        report(service, LOST)
        clock.now += 700
        report(service, idle_s=700.0)
        assert usable(service) == [True, True]
    with restarted(path, clock) as service:
        service.register(cpu_node())
        clock.now += 60
        report(service, wire.SlotFault(name="xid_48", text="a memory error", age_s=3.0))
        assert usable(service) == [True, False]


def test_an_operator_puts_a_slot_in_quarantine_and_takes_it_back():
    with open_service() as service:
        service.register(cpu_node())
        order = wire.SlotOrder(slot=0, why="it is slow")
        assert [each.why for each in service.order_slot("node-a", order).quarantines] == [order.why]
        assert lines(service)[0].endswith("used again after `edl capacity node-a --take_back 0`")
        report(service, idle_s=10**6)
        assert usable(service) == [False, True]
        taken_back = service.order_slot("node-a", replace(order, take_back=True))
        assert taken_back.quarantines == ()
        with pytest.raises(Conflict, match="slot 0 of node-a is not in quarantine"):
            service.order_slot("node-a", replace(order, take_back=True))
        with pytest.raises(NotFound, match="no slot 7; it has 0, 1"):
            service.order_slot("node-a", wire.SlotOrder(slot=7))


def test_a_slot_whose_fault_lasts_is_not_taken_back():
    with open_service() as service:
        service.register(cpu_node())
        report(service, LOST)
        with pytest.raises(Conflict, match="not taken back: it has fallen off the bus"):
            service.order_slot("node-a", wire.SlotOrder(slot=1, take_back=True))


def test_new_pods_are_placed_on_the_other_slots_and_the_job_says_why_it_has_no_more():
    with open_service() as service:
        service.register(cpu_node())
        report(service, LOST)
        service.submit(SPEC)
        (status,) = service.statuses()
        assert [pod.slots for pod in status.pods] == [(0,)]
        assert status.target_pods == 2


@pytest.mark.parametrize("how", ["short", "drained", "in quarantine"])
def test_a_shared_job_is_not_refused_for_slots_that_will_be_used_again(how):
    with open_service() as service:
        service.register(cpu_node())
        used_mb = 63_900 if how == "short" else 0
        load = wire.NodeLoad(memory_used_mb=used_mb, memory_total_mb=64_000)
        service.report_node("node-a", wire.NodeReport(node_id="node-a", load=load))
        if how == "drained":
            service.limit_node("node-a", wire.NodeLimit(slots=0, drain=True))
        for slot in (0, 1) if how == "in quarantine" else ():
            service.order_slot("node-a", wire.SlotOrder(slot=slot))
        assert usable(service) == [False, False]
        least = wire.JobSpec(job_id="digits", share=True, min_pods=2, max_pods=3)
        with pytest.raises(BadRequest, match="min_pods: 3 pods of 1 slot each are more than"):
            service.submit(replace(least, min_pods=3))
        assert service.submit(least).status == 201


def test_a_slot_that_a_job_has_found_bad_is_entered_once_and_again_after_a_restart(tmp_path):
    path = tmp_path / "server.db"
    with open_service(path) as service:
        service.register(cpu_node())
        service.submit(SPEC)
        entry = service.engine.jobs["digits"]
        assert isinstance(entry.job, Job)
        bad = BadSlot(node_id="node-a", slot=1, name="policy", why="NCCL says so", at=service.now())
        entry.job = replace(entry.job, bad_slots=(bad,))
        service.engine.store.save_job("digits", wire.encode(entry.job))
    with open_service(path) as service:  # it was killed before it could enter that
        assert usable(service) == [True, False]
        service.order_slot("node-a", wire.SlotOrder(slot=1, take_back=True))
    with open_service(path) as service:
        assert usable(service) == [True, True]
    clock = Clock()
    clock.now = time.time()
    with restarted(path, clock) as service:
        assert usable(service) == [True, True]


@pytest.mark.parametrize("how", ["another card", "forgiven"])
def test_a_slot_that_a_job_has_found_bad_long_ago_or_on_another_card_is_not_entered(how):
    clock = Clock()

    def node(uuid: str) -> wire.Node:
        bare = cpu_node()
        slots = tuple(replace(each, uuid=f"{uuid}-{each.index}") for each in bare.slots)
        return replace(bare, slots=slots)

    with open_service(now=clock) as service:
        service.register(node("old"))
        report(service)
        service.submit(SPEC)
        entry = service.engine.jobs["digits"]
        assert isinstance(entry.job, Job)
        work = Work(entry.job, clock.now, service.engine.cluster(entry))
        work.quarantine("node-a", 1, "policy", "NCCL says so")
        entry.job = work.job
        service.ask("digits", KillAsked(wire.Kill(pod_id="pod_0_0")))  # it is written
        assert usable(service) == [True, False]
        service.order_slot("node-a", wire.SlotOrder(slot=1, take_back=True))
        clock.now += 8 * 86400 if how == "forgiven" else 10
        service.register(node("old" if how == "forgiven" else "new"))
        report(service)
        assert usable(service) == [True, True]
        service.ask("digits", ResizeAsked(wire.Resize(pods=1)))
        assert usable(service) == [True, True]


def test_what_does_not_keep_a_slot_from_use_is_said_too():
    clock = Clock()
    with open_service(now=clock) as service:
        service.register(cpu_node())
        fault = wire.SlotFault(
            name="xid_31", text="XID 31: an error of the program's own", age_s=90
        )
        hot = wire.SlotUsage(index=0, throttled_by="heat, power limit", faults=(fault,))
        service.report_node("node-a", wire.NodeReport(node_id="node-a", slots=(hot,)))
        assert usable(service) == [True, True]
        assert lines(service) == [
            "slot 0: XID 31: an error of the program's own, 2 min ago",
            "slot 0: slowed by heat",
        ]


def test_a_node_that_is_short_of_memory_gets_no_new_pods_and_keeps_those_it_has():
    clock = Clock()

    def say(service: JobService, used_mb: int) -> None:
        load = wire.NodeLoad(memory_used_mb=used_mb, memory_total_mb=64_000)
        service.report_node("node-a", wire.NodeReport(node_id="node-a", load=load))

    def say_for(service: JobService, seconds: int, used_mb: int) -> None:
        for _second in range(seconds):  # at no moment has the node been silent for long
            clock.now += 1
            say(service, used_mb)

    with open_service(now=clock) as service:
        service.register(cpu_node())
        say(service, 10_000)
        service.submit(replace(SPEC, pods=1))
        assert len(service.statuses()[0].pods) == 1
        say_for(service, 100, 63_500)
        text = "its memory is nearly used up: 0.5 of 64.0 GB were free"
        assert lines(service) == [f"no new pods: {text}"]
        (status,) = service.statuses()
        assert status.warnings == (f"node node-a: {text}",)
        assert len(status.pods) == 1
        events = service.last_events("digits", 5)
        assert events[-1].text == f"warning: node node-a: {text}; no new pods go there"
        service.submit(replace(SPEC, job_id="other"))
        assert usable(service) == [False, False]
        say_for(service, 100, 20_000)
        assert lines(service) == []
        assert usable(service) == [True, True]
        assert service.statuses()[0].warnings == ()
