"""Registered nodes. The engine's lock guards all calls."""

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from job_server.api import wire
from job_server.api.addresses import address_facing, is_loopback
from job_server.api.errors import Conflict, Forbidden, NotFound
from job_server.cluster.placement import SILENT_HEARTBEATS, Cluster, NodeView
from job_server.cluster.quarantine import effective, judge, recent_faults
from job_server.cluster.shortage import Gauge, read_gauges, shortage
from job_server.server.hearing import Hearing
from job_server.server.polls import Topic

logger = logging.getLogger(__name__)

SMOOTHED_S = 10.0  # over which foreign load is averaged
UNKNOWN_S = 60.0  # a load that was not reported for so long is not known any more
LOAD_STEP = 0.05  # of a node's capacity: foreign load that differs by less is the same
NODES_PER_S = 500  # whose heartbeats one server hears with half a core, beside their launchers'
BY_OPERATOR = "an operator asked for it (`edl drain`)"
RECENT_S = 60.0  # a fault of a slot may explain what happens there for so long
FORGET_AFTER_S = 3600.0  # a node without pods that is silent for so long is forgotten

Plan = tuple[wire.NodePod, ...]
Held = Mapping[str, frozenset[int]]  # slots by node id, or ports by address


@dataclass(slots=True)
class SmoothedLoad:
    """What processes that are no pods' use of a node. Short peaks must not move trainers."""

    used: int = 0  # what counts
    mean: float = 0.0  # of the last seconds
    at: float | None = None  # of the last report; None: none yet

    def note(self, reported: int | None, capacity: int, now: float) -> None:
        if reported is None:
            if self.at is not None and now - self.at > UNKNOWN_S:
                self.used, self.at = 0, None
            return
        if self.at is None:
            self.mean = self.used = reported
        else:
            weight = 1.0 - math.exp(-max(now - self.at, 0.0) / SMOOTHED_S)
            self.mean += weight * (reported - self.mean)
        self.at = now
        if abs(self.mean - self.used) > LOAD_STEP * capacity:
            self.used = round(self.mean)


@dataclass(slots=True)
class KnownNode:
    node: wire.Node
    seen_at: float
    added_at: float  # when it registered first
    plan: Topic[Plan]
    report: wire.NodeReport | None = None  # None: none since then
    asked_at: float = 0.0  # when the launchers of its pods were last asked whether they live
    changed: int = 0  # the registry's count of changes as this node changed last
    cpu: SmoothedLoad = field(default_factory=SmoothedLoad)
    memory: SmoothedLoad = field(default_factory=SmoothedLoad)
    quarantines: dict[int, wire.Quarantine] = field(default_factory=dict)  # by slot
    gauges: dict[str, Gauge] = field(default_factory=dict)  # of memory and disk
    facing: str = ""  # of one on the loopback: where other machines' nodes reach it; "": nowhere
    drained: bool = False  # by an operator
    drains: int = 0  # how often one has drained it since the server began
    newest_ms: int = 0  # when its client sent the newest report, by its clock; 0: none yet

    @property
    def effective(self) -> wire.Node:
        """The node as it is to be used."""
        return effective(
            replace(self.node, addr=self.facing) if self.facing else self.node,
            tuple(self.quarantines.values()),
            shortage=shortage(self.gauges),
            draining=self.draining,
        )

    @property
    def draining(self) -> str:
        """Why the pods of all jobs leave the node; "": they do not."""
        said = "" if self.report is None else self.report.draining
        return said or (BY_OPERATOR if self.drained else "")

    def slot(self, index: int) -> wire.Slot:
        """Raise NotFound unless the node has it."""
        found = next((slot for slot in self.node.slots if slot.index == index), None)
        if found is None:
            have = ", ".join(str(slot.index) for slot in self.node.slots)
            raise NotFound(f"slot: node {self.node.node_id!r} has no slot {index}; it has {have}")
        return found

    def usage(self, index: int) -> wire.SlotUsage | None:
        """Return what its client said last of a slot; None: nothing yet."""
        slots = () if self.report is None else self.report.slots
        return next((usage for usage in slots if usage.index == index), None)


@dataclass(slots=True)
class ClusterMemo:
    """The nodes as one job saw them last: what did not change since is not made again."""

    cluster: Cluster = field(default_factory=Cluster)
    held: int = -1  # as given to NodeRegistry.cluster
    members: int = -1  # the registry's counts, as they were then
    changes: int = -1


class NodeRegistry:
    """Registered nodes, by id."""

    def __init__(self, heartbeat_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.hearing = Hearing(heartbeat_s)
        self.nodes: dict[str, KnownNode] = {}
        self.limits: dict[str, int] = {}  # node -> slots for shared jobs, registered or not
        self.drained: set[str] = set()  # nodes, by an operator; registered or not
        # node -> slot -> quarantine, in force or remembered; registered or not
        self.quarantines: dict[str, dict[int, wire.Quarantine]] = {}
        self._members = 0  # how often nodes have registered or left
        self._changes = 0  # ... and reported

    def get(self, node_id: str, client: str | None = None) -> KnownNode:
        """Raise NotFound unless the node is registered, and not by another client than that."""
        known = self.nodes.get(node_id)
        if known is None:
            raise NotFound(
                f"node {node_id[:100]!r} is not registered: its job client does not run, or has "
                f"not reached this server; `edl nodes` lists those that have"
            )
        if not is_same_client(client or "", known.node.client):
            raise taken_over(node_id)
        return known

    def is_alive(self, known: KnownNode, now: float) -> bool:
        silence_s = SILENT_HEARTBEATS * self.heartbeat_s + self.hearing.late_s
        return now < known.seen_at + silence_s

    def is_mute(self, known: KnownNode, now: float) -> bool:
        """Return whether its client should have reported by now, and never has: it registers, dies
        and is started again, say.
        """
        silence_s = SILENT_HEARTBEATS * self.heartbeat_s + self.hearing.late_s
        return known.report is None and now >= known.added_at + silence_s

    def put(self, known: KnownNode) -> None:
        """Add a node, or enter that it has registered again."""
        self.nodes[known.node.node_id] = known
        known.quarantines = self.quarantines.setdefault(known.node.node_id, {})
        known.drained = known.node.node_id in self.drained
        known.facing = ""  # it may have come with another address
        self._face_others()
        self._members += 1

    def remove(self, node_id: str) -> KnownNode:
        self._members += 1
        known = self.nodes.pop(node_id)
        self._face_others()
        return known

    def _face_others(self) -> None:
        """Find out where other machines reach the nodes of this one.

        A client that was told of its server at the loopback knows no other address of its own.
        """
        here = [each for each in self.nodes.values() if is_loopback(each.node.addr)]
        if not here:
            return
        addresses = (each.node.addr for each in self.nodes.values())
        facing, other = "", next((each for each in addresses if not is_loopback(each)), None)
        if other is not None:
            with contextlib.suppress(OSError):  # a name, which may take long to look up
                facing = address_facing(other, 9, socket.AI_NUMERICHOST)
        for known in here:
            known.facing = facing

    def judged(self, known: KnownNode, now: float) -> Iterator[tuple[int, wire.Quarantine | None]]:
        """Yield the slots whose quarantine is another after the newest report, and that."""
        for usage in () if known.report is None else known.report.slots:
            before = known.quarantines.get(usage.index)
            if before is None and not usage.faults:
                continue
            slot = next((each for each in known.node.slots if each.index == usage.index), None)
            if slot is None:
                continue
            after = judge(before, slot, usage, now)
            if after != before:
                yield usage.index, after

    def drain(self, node_id: str, drained: bool) -> None:
        """Enter that an operator has a registered node drained, or uses it again."""
        (self.drained.add if drained else self.drained.discard)(node_id)
        self.nodes[node_id].drained = drained
        self._members += 1

    def enter_quarantine(self, node_id: str, slot: int, quarantine: wire.Quarantine | None) -> None:
        """Enter the quarantine of a slot; None: nothing is to be remembered."""
        slots = self.quarantines.setdefault(node_id, {})
        if quarantine is None:
            slots.pop(slot, None)
        else:
            slots[slot] = quarantine
        self._members += 1

    def check(self, node: wire.Node, now: float) -> None:
        """Refuse a node that takes what a live one has.

        Raises:
            Conflict: another client has its id, or uses its ports on the same address.
        """
        same = self.nodes.get(node.node_id)
        heard = same is not None and same.report is not None and self.is_alive(same, now)
        if same is not None and heard and not is_same_client(node.client, same.node.client):
            raise Conflict(
                f"node_id: {node.node_id!r} is the node of another job client, at "
                f"{same.node.addr}; give one of the two another --node_id. One that was killed "
                f"counts as gone after {SILENT_HEARTBEATS * self.heartbeat_s:g} s"
            )
        for known in self.nodes.values():
            other = known.node
            if (
                other.node_id != node.node_id
                and other.addr == node.addr
                and other.port_low <= node.port_high
                and node.port_low <= other.port_high
                and self.is_alive(known, now)
            ):
                raise Conflict(
                    f"port_low: {node.port_low}-{node.port_high} overlaps "
                    f"{other.port_low}-{other.port_high} of node {other.node_id!r} on {node.addr}; "
                    "give one of the two another --port_range, or auto"
                )

    def check_room(self, node: wire.Node, now: float) -> None:
        """Raise Forbidden if the server cannot hear one more node as often as it is to."""
        most = max(1, math.floor(NODES_PER_S * self.heartbeat_s))
        others = (known for node_id, known in self.nodes.items() if node_id != node.node_id)
        if sum(self.is_alive(known, now) for known in others) >= most:
            raise Forbidden(
                f"node_id: {node.node_id!r} would be one more than the {most} nodes that this "
                f"server hears every {self.heartbeat_s:g} s; start it with a larger "
                "--heartbeat_s, or a second server"
            )

    def cluster(
        self, memo: ClusterMemo, held: int, others: Callable[[], tuple[list[Held], list[Held]]]
    ) -> Cluster:
        """Return the nodes as placement sees them.

        Args:
            memo: what the last call for the same job has left.
            held: another number where what other jobs hold may have changed.
            others: returns the slots and the ports that each other job holds.
        """
        before, nodes = memo.cluster, memo.cluster.nodes
        if (memo.held, memo.members) != (held, self._members):
            slots, ports = others()
            nodes = tuple(_view(known, slots, ports) for known in self.nodes.values())
        elif memo.changes != self._changes:
            nodes = tuple(
                view if known.changed <= memo.changes else _refreshed(view, known)
                for view, known in zip(nodes, self.nodes.values(), strict=True)
            )
        memo.held, memo.members, memo.changes = held, self._members, self._changes
        late_s = self.hearing.late_s
        limits = (self.heartbeat_s, late_s)
        if nodes is not before.nodes or (before.heartbeat_s, before.late_s) != limits:
            memo.cluster = Cluster(nodes=nodes, heartbeat_s=self.heartbeat_s, late_s=late_s)
        return memo.cluster

    def forgettable(self, now: float) -> list[str]:
        return [
            node_id
            for node_id, known in self.nodes.items()
            if now - known.seen_at > FORGET_AFTER_S and not known.plan.value
        ]

    def is_late(self, node_id: str, report: wire.NodeReport) -> bool:
        """Whether a newer report of the same client was there first: this one says what was."""
        known = self.nodes.get(node_id)
        if known is None or not is_same_client(report.client, known.node.client):
            return False  # another's clock says nothing of it
        return 0 < report.sent_ms < known.newest_ms

    def note_report(self, node_id: str, report: wire.NodeReport, now: float) -> bool:
        """Store a heartbeat; return whether placement may change with it.

        Raises:
            NotFound: the node is not registered, or now is that of another client.
        """
        known = self.get(node_id, report.client)
        drains = report.draining != ("" if known.report is None else known.report.draining)
        self._members += drains
        changed = (
            not self.is_alive(known, now)
            or known.report is None
            or drains
            or _strangers(known.report) != _strangers(report)
        )
        changed |= self._read_gauges(known, report, now)
        known.cpu.note(report.foreign_cpu_milli, known.node.cpu_milli, now)
        known.memory.note(report.foreign_memory_mb, known.node.memory_mb, now)
        self._changes += 1
        known.newest_ms = report.sent_ms
        known.seen_at, known.report, known.changed = now, report, self._changes
        return changed

    def _read_gauges(self, known: KnownNode, report: wire.NodeReport, now: float) -> bool:
        """Enter what is free of memory and disk; return whether the node is short is news."""
        if report.load is None:
            return False
        before = shortage(known.gauges)
        known.gauges = read_gauges(known.gauges, report.load, now)
        after = shortage(known.gauges)
        if after == before:
            return False
        self._members += 1
        name = known.node.node_id
        if after:
            logger.warning("node %s gets no new pods: %s", name, after)
        else:
            logger.info("node %s has enough memory and disk again", name)
        return True

    def statuses(self, now: float) -> list[wire.NodeStatus]:
        return [self.status(known, now) for known in self.nodes.values()]

    def status(self, known: KnownNode, now: float) -> wire.NodeStatus:
        return wire.NodeStatus(
            node=known.effective,
            alive=self.is_alive(known, now),
            last_seen_at=known.seen_at,
            report={} if known.report is None else wire.encode(known.report),
            limit=self.limits.get(known.node.node_id),
            shortage=shortage(known.gauges),
            quarantines=tuple(q for q in known.quarantines.values() if q.ended_at is None),
            draining=known.draining,
            drains=known.drains,
        )


def _view(known: KnownNode, slots: Sequence[Held] = (), ports: Sequence[Held] = ()) -> NodeView:
    nothing: frozenset[int] = frozenset()
    node = known.effective
    return NodeView(
        node=node,
        seen_at=known.seen_at,
        taken=nothing.union(*(held.get(node.node_id, nothing) for held in slots)),
        ports_taken=nothing.union(*(held.get(node.addr, nothing) for held in ports)),
        strangers=_strangers(known.report),
        memory_used=_memory_used(known.report),
        faults=_faults(known.report),
        shortage=shortage(known.gauges),
    )


def _refreshed(view: NodeView, known: KnownNode) -> NodeView:
    return replace(
        view,
        seen_at=known.seen_at,
        strangers=_strangers(known.report),
        memory_used=_memory_used(known.report),
        faults=_faults(known.report),
    )


def taken_over(node_id: str) -> NotFound:
    """Say to a client that its node is another's: two would run the same pods."""
    return NotFound(f"node {node_id[:100]!r} was taken over by another client; register it")


def is_same_client(one: str, other: str) -> bool:
    """Whether these may be one. A client of the version before says less of itself, or nothing."""
    return one.startswith(other) or other.startswith(one)


def _strangers(report: wire.NodeReport | None) -> dict[int, str]:
    if report is None:
        return {}
    return {usage.index: usage.stranger for usage in report.slots if usage.stranger}


def _memory_used(report: wire.NodeReport | None) -> dict[int, int]:
    if report is None:
        return {}
    return {usage.index: usage.memory_used_bytes for usage in report.slots}


def _faults(report: wire.NodeReport | None) -> dict[int, tuple[str, ...]]:
    return {} if report is None else recent_faults(report.slots, RECENT_S)
