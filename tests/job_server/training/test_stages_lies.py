"""Whatever is told, true or not, the state machine neither raises nor loses its footing."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from job_server.api import wire
from job_server.api.wire import LAUNCHER_PHASES, PodPhase, ReportKind, SnapshotRef
from job_server.jobs.events import (
    KillAsked,
    LauncherAttached,
    LauncherReported,
    NodeReported,
    NodesChanged,
    PauseAsked,
    ResizeAsked,
    ResumeAsked,
    RunTimeStatic,
    ServerRestarted,
    StopAsked,
    Tick,
)
from job_server.training import views
from tests.job_server.world import World, trains, world

pytestmark = pytest.mark.full  # hundreds of histories

PODS = st.sampled_from(["pod_0_0", "pod_1_0", "pod_2_0", "pod_0_0_1", "pod_2_1", "pod_9_9"])
STAGES = st.integers(0, 6)
STEPS = st.integers(0, 60)
SNAPSHOTS = st.none() | st.builds(SnapshotRef, stage=STAGES, step=STEPS)
REPORTS = st.builds(
    wire.PodReport,
    kind=st.sampled_from(ReportKind),
    stage=STAGES,
    attempt=st.integers(0, 2),
    step=STEPS,
    snapshot=SNAPSHOTS,
    rank=st.none() | st.integers(0, 9),
    code=st.none() | st.integers(-15, 3),
    peer_lost=st.booleans(),
    elastic=st.booleans(),
    highest_stage=st.integers(0, 9),
)
ATTACHES = st.builds(
    wire.Attach,
    pod_id=PODS,
    node_id=st.sampled_from(["a", "b", "c"]),
    pid=st.just(1),
    highest_stage=st.integers(0, 9),
    stage=STAGES,
    attempt=st.integers(0, 2),
    phase=st.sampled_from(LAUNCHER_PHASES),
    step=STEPS,
    snapshot=SNAPSHOTS,
    elastic=st.booleans(),
    done=st.booleans(),
    failure=st.none() | REPORTS,
)
STATES = st.builds(
    wire.PodState,
    pod_id=PODS,
    job_id=st.just("job"),
    phase=st.sampled_from(PodPhase),
    exit_code=st.none() | st.sampled_from([0, 1, 137, 143]),
    signal=st.none() | st.sampled_from([9, 15]),
)
EVENTS = st.one_of(
    st.builds(LauncherReported, PODS, REPORTS),
    st.builds(LauncherReported, PODS, REPORTS),
    st.builds(LauncherAttached, ATTACHES),
    st.builds(
        NodeReported,
        st.sampled_from(["a", "b", "c"]),
        st.lists(STATES, max_size=3).map(tuple),
    ),
    st.builds(ResizeAsked, st.builds(wire.Resize, pods=st.integers(1, 5))),
    st.builds(
        ResizeAsked,
        st.builds(wire.Resize, pods=st.integers(1, 4), assume_dead=st.just(True)),
    ),
    st.sampled_from([PauseAsked(), ResumeAsked(), ServerRestarted()]),
    st.sampled_from([Tick(), NodesChanged(), RunTimeStatic(5.0)]),
    st.builds(KillAsked, st.builds(wire.Kill, rank=st.integers(0, 4))),
    st.builds(KillAsked, st.builds(wire.Kill, pod_id=PODS)),
)


def look(made: World) -> None:
    """Ask everything that can be asked."""
    job = made.job
    for pod_id in ("pod_0_0", "pod_9_9", *(pod.pod_id for pod in job.pods)):
        view = views.pod_orders(job).get(pod_id)
        assert view is None or all(plan.world_size > 0 for plan in view.plans)
    for name in ("a", "b", "c"):
        views.node_pods(job).get(name, ())
    views.ports_held(job)
    views.running_pods(job)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    elastic=st.booleans(),
    started=st.booleans(),
    events=st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.3, 2.0, 30.0, 200.0])), max_size=40),
)
def test_no_message_makes_the_state_machine_stumble(elastic, started, events):
    made = world(elastic=elastic, pods=3)
    if started:
        trains(made)
    made.clients_lie = True
    for event, seconds in events:
        made.ask(event)
        look(made)
        made.pass_time(seconds)
        look(made)
    made.check_json()
    made.ask(StopAsked())
    for sim in made.nodes.values():
        sim.pods.clear()
    made.rounds(60, 5.0)
    assert made.job.state.ended, made.job.state
