"""Stories with GPUs that fail, nodes that are drained or short, and slow trainers: `SickStory`."""

import contextlib
import random
from dataclasses import replace
from pathlib import Path

from job_server.api import wire
from job_server.api.errors import JobServerError, NotFound, StoreTrouble
from job_server.api.failure_policy import FailureRule, Then
from job_server.api.wire import PodReport, ReportKind
from job_server.jobs.events import LauncherReported
from tests.job_server.rough_stories import RoughStory
from tests.job_server.stories import Machine, Submission

_FAULTS = ("gpu_lost", "ecc_uncorrected", "xid_31")  # fatal, grave, harmless
_WHY = "its client was asked to end"


class SickStory(RoughStory):
    """As `RoughStory`, and what quarantine, draining, shortage and failure policies are for.

    These have random numbers of their own: the same seed makes the same of all else.
    """

    def __init__(self, seed: int, folder: Path, *, late: bool, shared: bool) -> None:
        self.ills = random.Random(seed)
        self.faults: dict[tuple[str, int], wire.SlotFault] = {}  # by node and slot
        self.draining: set[str] = set()  # nodes whose client was asked to end
        self.short: set[str] = set()  # nodes with hardly any memory left
        super().__init__(seed, folder, late=late, shared=shared)

    def submit_spec(self, spec: wire.JobSpec) -> None:
        choose = self.ills.choice
        then = choose([None, None, None, *Then])
        policy = () if then is None else (FailureRule(then=then, signal=("SIGKILL",)),)
        super().submit_spec(
            replace(
                spec,
                failure_policy=policy,
                hang_policy=choose(wire.HANG_POLICIES),
                straggler_policy="say" if spec.share else choose(wire.STRAGGLER_POLICIES),
            )
        )

    def report(self, machine: Machine, report: wire.NodeReport) -> None:
        name = report.node_id
        slots = tuple(
            wire.SlotUsage(index=slot, faults=(fault,))
            for (node_id, slot), fault in self.faults.items()
            if node_id == name
        )
        used_mb = 63_900 if name in self.short else 10_000
        load = wire.NodeLoad(memory_used_mb=used_mb, memory_total_mb=64_000)
        draining = _WHY if name in self.draining else ""
        super().report(machine, replace(report, slots=slots, load=load, draining=draining))

    def happen(self) -> None:
        if self.ills.random() < 0.4:
            self.fall_ill()
        super().happen()

    def fall_ill(self) -> None:
        ills = self.ills
        name = ills.choice(list(self.machines))
        slot = ills.randrange(len(self.machines[name].node.slots))
        kind = ills.choice(("drain", "client", "fault", "quarantine", "short", "trainer"))
        self.told.append(f"{self.now - 1e6:.1f} {kind} {name} {slot}")
        match kind:
            case "drain":
                self.limit(name, drain=ills.random() < 0.6)
            case "client":
                self.draining ^= {name}
            case "fault" if self.faults.pop((name, slot), None) is None:
                fault = ills.choice(_FAULTS)
                self.faults[name, slot] = wire.SlotFault(name=fault, text=fault)
            case "quarantine":
                self.order_slot(name, slot, take_back=ills.random() < 0.4)
            case "short":
                self.short ^= {name}
            case "trainer" if self.jobs:
                self.slow_down(ills.choice(self.jobs))
        self.sync()

    def limit(self, name: str, *, drain: bool) -> None:
        if self.up:
            limit = wire.NodeLimit(slots=0 if drain else None, drain=drain)
            with contextlib.suppress(NotFound, StoreTrouble), self.request():
                self.service.limit_node(name, limit)

    def order_slot(self, name: str, slot: int, *, take_back: bool) -> None:
        if self.up:
            order = wire.SlotOrder(slot=slot, take_back=take_back)
            with contextlib.suppress(JobServerError), self.request():
                self.service.order_slot(name, order)

    def slow_down(self, job: Submission) -> None:
        """Have a trainer hang, go on, or make the others wait."""
        stage, ills = job.job.active, self.ills
        if stage is None:
            return
        member = ills.choice(stage.members)
        rank = ills.choice(member.pod.ranks)
        report = PodReport(kind=ReportKind.HUNG, stage=stage.stage, rank=rank, reason="in a step")
        if ills.random() < 0.5:
            report = replace(report, hung_s=ills.choice([0.0, 5.0]))
        else:
            paces = tuple(
                wire.RankPace(
                    rank=each, steps=30, samples=240, window_s=2.0, reading_s=0.1, saving_s=0.1,
                    computing_s=1.8 if each == rank else 0.4, exchanging_s=0.0,
                )
                for each in range(stage.trainers)
            )  # fmt: skip
            step = job.job.progress.step
            report = PodReport(
                kind=ReportKind.PROGRESS, stage=stage.stage, step=step, elastic=True, paces=paces
            )
        for _, pod, launcher in job.launchers():
            if pod.pod_id == member.pod.pod_id and launcher.run is not None:
                job.send(LauncherReported(pod.pod_id, report))

    def heal(self) -> None:
        self.faults.clear()
        self.draining.clear()
        self.short.clear()
        super().heal()
        for known in self.service.node_statuses():
            for held in known.quarantines:
                self.order_slot(known.node.node_id, held.slot, take_back=True)
        self.sync()
