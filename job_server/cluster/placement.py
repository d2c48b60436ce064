"""Place new pods on slots of nodes, and assign ports to stages. Pure."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from job_server.api.codec import Message
from job_server.api.wire import JobSpec, Node, PlanPod, Slot

SILENT_HEARTBEATS = 4  # a node or launcher not heard for so many heartbeats counts as silent


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A registered node as one job sees it."""

    node: Node
    seen_at: float  # seconds, the clock of `now`: its client's last heartbeat
    taken: frozenset[int] = frozenset()  # slots that other jobs hold
    ports_taken: frozenset[int] = frozenset()  # ports that other jobs use on its address
    strangers: Mapping[int, str] = field(default_factory=dict)  # slot -> what else runs on it
    memory_used: Mapping[int, int] = field(default_factory=dict)  # slot -> bytes, of GPUs
    # Slot -> names of faults just heard of.
    faults: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    shortage: str = ""  # of what it is short: it gets no new pods
    sound: frozenset[int] = field(init=False, repr=False, compare=False)  # slots to stay on

    def __post_init__(self) -> None:
        sound = frozenset(slot.index for slot in self.node.slots if not slot.quarantine)
        object.__setattr__(self, "sound", sound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All registered nodes, in the order in which they are to be filled."""

    nodes: tuple[NodeView, ...] = ()
    heartbeat_s: float = 1.0
    late_s: float = 0.0  # how late the server hears what is sent to it
    promised: int = 0  # pods for which teachers are about to leave slots; see `reservations`
    by_id: Mapping[str, NodeView] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {view.node.node_id: view for view in self.nodes})

    @property
    def silence_s(self) -> float:
        """How long a node or launcher may be silent before it counts as lost."""
        return SILENT_HEARTBEATS * self.heartbeat_s + self.late_s


class Site(Message, frozen=True, kw_only=True):
    """Where a pod stands."""

    node_id: str
    addr: str
    slots: tuple[int, ...]
    port_low: int
    port_high: int


def gather(pairs: Iterable[tuple[str, Iterable[int]]]) -> dict[str, frozenset[int]]:
    """Return all numbers of each name, as slots of a node or ports of an address."""
    found: dict[str, set[int]] = {}
    for name, numbers in pairs:
        found.setdefault(name, set()).update(numbers)
    return {name: frozenset(numbers) for name, numbers in found.items()}


def find_node(cluster: Cluster, node_id: str) -> NodeView | None:
    """Return the view of a node, None where it is not registered."""
    return cluster.by_id.get(node_id)


def serves(spec: JobSpec, node: Node) -> bool:
    """Say whether the node's client was started with what it takes to run this job."""
    return is_meant_for(spec, node) and (node.gives_args or not spec.args)


def is_meant_for(spec: JobSpec, node: Node) -> bool:
    """Say whether the node has the job's script, whatever the version of its client."""
    if node.job_id is not None:
        return node.job_id == spec.job_id
    return spec.folder is not None and spec.folder in node.folders


def why_unserved(spec: JobSpec, nodes: Iterable[Node]) -> str:
    """Say why none of the nodes can run the job."""
    old = [node.node_id for node in nodes if is_meant_for(spec, node) and not serves(spec, node)]
    if old:
        return (
            f"the job clients of {_names(old)} are of a version that gives no args; "
            "start them again with this one"
        )
    if spec.folder is None:
        return f"no job client serves this job; start one with PADDLE_JOB_ID={spec.job_id}"
    return f"no job client has the folder {spec.folder!r} in its --jobs_dir"


def is_alive(view: NodeView, now: float, cluster: Cluster) -> bool:
    return now < view.seen_at + cluster.silence_s


def serving_nodes(spec: JobSpec, cluster: Cluster, now: float) -> tuple[NodeView, ...]:
    """Return the nodes that could start a pod of this job now, whatever is free on them."""
    return tuple(
        view for view in cluster.nodes if serves(spec, view.node) and is_alive(view, now, cluster)
    )


def place(
    spec: JobSpec,
    cluster: Cluster,
    now: float,
    *,
    count: int,
    held: Mapping[str, frozenset[int]],
    leaving: Mapping[str, frozenset[int]],
    avoid: Mapping[str, frozenset[int]] | None = None,
    first: str = "",
) -> tuple[Site, ...]:
    """Return sites for up to `count` new pods; fewer where not so many slots can be had.

    Nodes are filled in order, a pod's slots are all on one node. Pods that stay are not an
    argument but for their slots: they stay where they are.

    Args:
        held: node -> slots that pods of this job keep.
        leaving: node -> slots of this job's pods that are on their way out. They are used only
            when nothing else is free: the client starts a pod there once they are released.
        avoid: node -> slots that are used only when nothing else can be had at all.
        first: the node that is filled before the others, if it is there.
    """
    nodes = sorted(serving_nodes(spec, cluster, now), key=lambda view: view.node.node_id != first)
    sites: list[Site] = []
    used: dict[str, frozenset[int]] = dict(held)
    avoid = {} if avoid is None else avoid
    nothing: frozenset[int] = frozenset()
    # Slots that are taken, and are left out for now: a slot may be both.
    for later in ((leaving, avoid), (avoid,), ()) if avoid else ((leaving,), ()):
        for view in nodes:
            node = view.node
            barred = used.get(node.node_id, nothing)
            barred = barred.union(*(slots.get(node.node_id, nothing) for slots in later))
            free = [index for index in usable_slots(view) if index not in barred]
            while len(sites) < count and len(free) >= spec.slots_per_pod:
                slots, free = tuple(free[: spec.slots_per_pod]), free[spec.slots_per_pod :]
                sites.append(
                    Site(
                        node_id=node.node_id,
                        addr=node.addr,
                        slots=slots,
                        port_low=node.port_low,
                        port_high=node.port_high,
                    )
                )
                used[node.node_id] = used.get(node.node_id, frozenset()) | set(slots)
    return tuple(sites)


def usable_slots(view: NodeView) -> list[int]:
    """Return the slots of a node that this job may use, lowest first."""
    return sorted(
        slot.index
        for slot in view.node.slots
        if slot.usable and slot.index not in view.taken and slot.index not in view.strangers
    )


def slots_to_leave(cluster: Cluster, site: Site | PlanPod) -> dict[int, Slot]:
    """Return those of a pod's slots that it is to leave, by index: they are in quarantine, or its
    node has registered again without them.
    """
    view = find_node(cluster, site.node_id)
    if view is None or view.sound.issuperset(site.slots):
        return {}
    slots = {slot.index: slot for slot in view.node.slots}
    return {
        index: slots.get(index) or _gone(index, view.node)
        for index in site.slots
        if index not in view.sound
    }


def _gone(index: int, node: Node) -> Slot:
    kind, why = node.slots[0].kind, "not there any more: its client has registered without it"
    return Slot(index=index, kind=kind, usable=False, reason=why, quarantine=why)


def slots_to_shun(cluster: Cluster, site: Site) -> dict[int, Slot]:
    """As `slots_to_leave`, without those that are sound: a pod may begin again on them."""
    found = slots_to_leave(cluster, site)
    return {index: slot for index, slot in found.items() if not slot.drained}


def explain_shortage(
    spec: JobSpec, cluster: Cluster, now: float, *, wanted: int, placeable: int
) -> str:
    """Say in one line why only `placeable` of `wanted` pods find a place."""
    nodes = serving_nodes(spec, cluster, now)
    if not nodes:
        silent = [view.node.node_id for view in cluster.nodes if serves(spec, view.node)]
        if silent:
            return f"the clients of {_names(silent)} are silent"
        return why_unserved(spec, (view.node for view in cluster.nodes))
    parts = []
    for view in nodes:
        broken = [slot for slot in view.node.slots if not slot.usable]
        notes = [
            f"slot {slot.index} unusable ({slot.reason or 'no reason given'})" for slot in broken
        ]
        if view.taken:
            notes.append(f"{len(view.taken)} taken by other jobs")
        notes += [f"slot {slot} used by {who}" for slot, who in sorted(view.strangers.items())]
        text = f"{view.node.node_id} has {len(view.node.slots)} slots"
        parts.append(text + (f", {', '.join(notes)}" if notes else ""))
    each = "" if spec.slots_per_pod == 1 else f" of {spec.slots_per_pod} slots each"
    return f"only {placeable} of {wanted} pods{each} find a place: {'; '.join(parts)}"


def deal_ports(
    sites: Sequence[Site],
    cluster: Cluster,
    *,
    avoid: Mapping[str, frozenset[int]],
    last_ports: Mapping[str, int],
) -> tuple[tuple[int, ...], ...]:
    """Return one port per slot of every site, from its node's range.

    Ports rotate through the range, so that one which a dying process still holds is met late.

    Args:
        avoid: address -> ports of this job's other stages.
        last_ports: node -> the port that was dealt last there.
    """
    taken: dict[str, set[int]] = {addr: set(ports) for addr, ports in avoid.items()}
    for view in cluster.nodes:
        taken.setdefault(view.node.addr, set()).update(view.ports_taken)
    dealt_now: dict[str, set[int]] = {}  # address -> ports of the stage that is being made
    last = dict(last_ports)
    answer = []
    for site in sites:
        own = dealt_now.setdefault(site.addr, set())
        busy = taken.get(site.addr, set())
        start = last.get(site.node_id, site.port_high) + 1
        span = site.port_high - site.port_low + 1
        first = site.port_low + (start - site.port_low) % span
        ring = (*range(first, site.port_high + 1), *range(site.port_low, first))
        # Registration gives a node two ports per slot, so the clean ports suffice, but for
        # strays of abandoned attempts; those are rather used again than refused.
        clean = (port for port in ring if port not in busy and port not in own)
        strays = (port for port in ring if port in busy and port not in own)
        ports = list(itertools.islice(itertools.chain(clean, strays), len(site.slots)))
        own.update(ports)
        if ports:
            last[site.node_id] = ports[-1]
        answer.append(tuple(ports))
    return tuple(answer)


def _names(items: Sequence[str]) -> str:
    shown = ", ".join(items[:5])
    return shown if len(items) <= 5 else f"{shown} and {len(items) - 5} more"
