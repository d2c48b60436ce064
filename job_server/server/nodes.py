"""Registered nodes. The engine's lock guards all calls."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from job_server.api import wire
from job_server.api.errors import Conflict, NotFound
from job_server.cluster.placement import Cluster, NodeView
from job_server.server.polls import Topic

LOST_AFTER_HEARTBEATS = 4.0
FORGET_AFTER_S = 3600.0  # a node without pods that is silent for so long is forgotten

Plan = tuple[wire.NodePod, ...]
Held = Mapping[str, frozenset[int]]  # slots by node id, or ports by address


@dataclass(slots=True)
class KnownNode:
    node: wire.Node
    seen_at: float
    plan: Topic[Plan]
    report: wire.NodeReport | None = None  # None: none since it registered


class NodeRegistry:
    """Registered nodes, by id."""

    def __init__(self, heartbeat_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.nodes: dict[str, KnownNode] = {}

    def get(self, node_id: str) -> KnownNode:
        """Raise NotFound unless the node is registered."""
        known = self.nodes.get(node_id)
        if known is None:
            raise NotFound(f"node {node_id[:100]!r} is not registered; register it")
        return known

    def is_alive(self, known: KnownNode, now: float) -> bool:
        return now - known.seen_at <= LOST_AFTER_HEARTBEATS * self.heartbeat_s

    def check_ports(self, node: wire.Node, now: float) -> None:
        """Raise Conflict if another live node on the same address uses ports of `node`'s range."""
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
                    "give one of the two another --port_range"
                )

    def cluster(self, slots: Iterable[Held], ports: Iterable[Held]) -> Cluster:
        """Return the nodes as placement sees them, given what other jobs hold on them."""
        slots, ports = tuple(slots), tuple(ports)
        nothing: frozenset[int] = frozenset()
        return Cluster(
            nodes=tuple(
                NodeView(
                    node=known.node,
                    seen_at=known.seen_at,
                    taken=nothing.union(*(held.get(node_id, nothing) for held in slots)),
                    ports_taken=nothing.union(
                        *(held.get(known.node.addr, nothing) for held in ports)
                    ),
                    strangers=_strangers(known.report),
                    memory_used=_memory_used(known.report),
                )
                for node_id, known in self.nodes.items()
            ),
            heartbeat_s=self.heartbeat_s,
        )

    def forgettable(self, now: float) -> list[str]:
        return [
            node_id
            for node_id, known in self.nodes.items()
            if now - known.seen_at > FORGET_AFTER_S and not known.plan.value
        ]

    def note_report(self, node_id: str, report: wire.NodeReport, now: float) -> bool:
        """Store a heartbeat; return whether placement may change with it.

        Raises:
            NotFound: the node is not registered.
        """
        known = self.get(node_id)
        changed = not self.is_alive(known, now) or _strangers(known.report) != _strangers(report)
        known.seen_at, known.report = now, report
        return changed

    def statuses(self, now: float) -> list[wire.NodeStatus]:
        return [
            wire.NodeStatus(
                node=known.node,
                alive=self.is_alive(known, now),
                last_seen_at=known.seen_at,
                report={} if known.report is None else wire.encode(known.report),
            )
            for known in self.nodes.values()
        ]


def _strangers(report: wire.NodeReport | None) -> dict[int, str]:
    if report is None:
        return {}
    return {usage.index: usage.stranger for usage in report.slots if usage.stranger}


def _memory_used(report: wire.NodeReport | None) -> dict[int, int]:
    if report is None:
        return {}
    return {usage.index: usage.memory_used_bytes for usage in report.slots}
