"""Stories in which still more goes wrong: see `RoughStory`."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from job_server.api import wire
from job_server.api.errors import Conflict, JobServerError
from job_server.jobs.events import Event, StopAsked
from tests.job_server.stories import Machine, Story

_CLOCK_S = (-3600.0, -7.0, -0.5, 0.5, 7.0, 3600.0)


class RoughStory(Story):
    """As `Story`, and the rest of what users, nodes and clocks do.

    The server's clock is set between two of its lives, nodes get limits, other programs use their
    cores and slots, no node can write a state, a second client comes for a node, jobs want much or
    are not elastic, wait for others or have a standby, and are stopped with `--discard`.
    """

    def __init__(self, seed: int, folder: Path, *, late: bool, shared: bool) -> None:
        self.foreign_milli: dict[str, int] = {}  # by node
        self.strangers: dict[str, tuple[int, ...]] = {}  # slots, by node
        super().__init__(seed, folder, late=late, shared=shared)
        if self.rng.random() < 0.3:
            for machine in self.machines.values():
                machine.node = replace(machine.node, cpu_milli=4000, memory_mb=4000)
        for name, machine in self.machines.items():
            machine.node = replace(machine.node, client=f"client-{name}")

    def shared_spec(self, job_id: str, **changes: Any) -> wire.JobSpec:
        choose = self.rng.choice
        after = choose([(), (), (), ("one",), ("one", "two"), ("three",)])
        fields: dict[str, Any] = {
            "user": choose(["", "", "ann", "bob"]),
            "max_run_time_s": choose([None, None, None, 12.0, 40.0]),
            "slots_per_pod": choose([1, 1, 1, 2]),
            "after": () if job_id == "one" or job_id in after else after,
            "cpu_milli": choose([0, 0, 500]),
            "priority": choose([0, 0, 0, 1, 2]),
            "standby": choose([0, 0, 0, 0, 1]),
        }
        if fields["standby"]:
            fields["overlap"] = "auto"
        return super().shared_spec(job_id, **{**fields, **changes})

    def submit_spec(self, spec: wire.JobSpec) -> None:
        before = len(self.jobs)
        super().submit_spec(spec)
        for job in self.jobs[before:]:
            job.elastic = self.rng.random() > 0.1

    def report(self, machine: Machine, report: wire.NodeReport) -> None:
        name = report.node_id
        slots = tuple(
            wire.SlotUsage(index=slot, stranger="another program")
            for slot in self.strangers.get(name, ())
        )
        milli = self.foreign_milli.get(name)
        super().report(
            machine,
            replace(
                report,
                client=machine.node.client,
                foreign_cpu_milli=report.foreign_cpu_milli if milli is None else milli,
                slots=slots or report.slots,
            ),
        )

    def ask(self, event: Event) -> None:
        if isinstance(event, StopAsked) and self.rng.random() < 0.2:
            event = StopAsked(discard=True)
        super().ask(event)

    def request_something(self) -> None:
        if self.rng.random() < 0.3:
            self.disturb()
        else:
            super().request_something()

    def disturb(self) -> None:
        rng = self.rng
        name = rng.choice(list(self.machines))
        kind = rng.choice(("limit", "cores", "strangers", "full", "clock", "second client"))
        self.told.append(f"{self.now - 1e6:.1f} {kind} {name}")
        match kind:
            case "limit" if self.up:
                limit = wire.NodeLimit(slots=rng.choice([None, None, 0, 1, 2]))
                with contextlib.suppress(JobServerError), self.request():
                    self.service.limit_node(name, limit)
            case "cores":
                self.foreign_milli[name] = rng.choice([0, 0, 1000, 3900])
            case "strangers" if name != "c":
                self.strangers[name] = rng.choice([(), (), (0,), (1,)])
            case "full" if self.jobs:
                places = rng.choice([(), ("path",), ("a",), ("a", "b", "c", "path")])
                rng.choice(self.jobs).full = set(places)
            case "clock":
                self.set_ahead_s += rng.choice(_CLOCK_S)
                self.end_server(kill=rng.random() < 0.5)
                for _ in range(rng.randrange(4)):
                    self.round()
                self.start_server()
            case "second client" if self.up:
                self.second_client(self.machines[name])
        self.sync()

    def second_client(self, machine: Machine) -> None:
        """One more client registers for a node whose own one is heard: it is refused."""
        is_there = machine.client and machine.link and machine.seen_at > self.now - 1.0
        if is_there and machine.server_id == self.service.server_id:
            with pytest.raises(Conflict), self.request():
                self.service.register(replace(machine.node, client="another"))

    def heal(self) -> None:
        super().heal()
        self.foreign_milli = dict.fromkeys(self.machines, 0)
        self.strangers.clear()
        for name in self.machines:
            with contextlib.suppress(JobServerError), self.request():
                self.service.limit_node(name, wire.NodeLimit(slots=None))
        for job in self.jobs:
            job.full = set()
