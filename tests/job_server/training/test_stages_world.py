"""Any sequence of events leaves a job that can go on, or has ended with a reason."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from job_server.api import wire
from job_server.api.failure_policy import FailureRule, Then
from job_server.api.wire import JobSpec, JobState, PodStagePhase, ScriptKind, ScriptSpec
from job_server.jobs.events import KillAsked, PauseAsked, ResizeAsked, ResumeAsked, StopAsked
from job_server.training import machine, views
from tests.job_server.world import Launcher, SimNode, SimPod, World, node

pytestmark = pytest.mark.full  # hundreds of histories

Pick = Callable[[int], int]


def client(world: World, n: int) -> None:
    sims = list(world.nodes.values())
    world.client_acts(sims[n % len(sims)])


def clients(world: World, n: int) -> None:
    for sim in world.nodes.values():
        world.client_acts(sim)


def launcher_of(world: World, n: int) -> tuple[SimNode, SimPod, Launcher] | None:
    found = world.launchers()
    return found[n % len(found)] if found else None


def launcher(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        world.launcher_acts(*found)


def launchers(world: World, n: int) -> None:
    for found in world.launchers():
        world.launcher_acts(*found)


def deliver(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None and found[0].link:
        world.deliver(found[2])


def deliver_all(world: World, n: int) -> None:
    for sim, _, who in world.launchers():
        while who.outbox and sim.link and world.up and not who.hangs:
            world.deliver(who)


def overtake(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None and found[0].link:
        world.deliver(found[2], overtake=True)


def repeat(world: World, n: int) -> None:
    if world.old:
        world.send(world.old[n % len(world.old)])


def train(world: World, n: int) -> None:
    for _ in range(1 + n % 4):
        world.train()
    world.leave_done()


def rounds(world: World, n: int) -> None:
    world.rounds(1 + n % 8)


def a_while(world: World, n: int) -> None:
    world.pass_time([0.1, 0.7, 3.0, 20.0, 130.0][n % 5])


def to_deadline(world: World, n: int) -> None:
    deadline = machine.next_deadline(world.job, world.now, world.cluster)
    if deadline is not None:
        world.pass_time(deadline - world.now)


def kill_trainer(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        world.kill_trainer(found[1], found[2])


def kill_prepared(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        world.kill_prepared(found[2])


def refuse_join(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[2].refuses = True


def no_longer_joins(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[2].joins = False


def kill_launcher(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[1].end(code=137)


def terminate_pod(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[1].end(signal=15)


def kill_shim(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[1].snapshot = None
        found[1].end()


def ports_fail(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[2].ports_fail = True


def hang(world: World, n: int) -> None:
    if (found := launcher_of(world, n)) is not None:
        found[2].hangs = True


def script_fails(world: World, n: int) -> None:
    world.script_fails = 1


def kill_client(world: World, n: int) -> None:
    sims = list(world.nodes.values())
    sims[n % len(sims)].client ^= True


def client_leaves(world: World, n: int) -> None:
    sims = list(world.nodes.values())
    world.client_leaves(sims[n % len(sims)])


def cut_link(world: World, n: int) -> None:
    sims = list(world.nodes.values())
    sims[n % len(sims)].link ^= True


def power(world: World, n: int) -> None:
    sims = list(world.nodes.values())
    sim = sims[n % len(sims)]
    if sim.client or sim.link:
        world.power_off(sim)
    else:
        world.power_on(sim)


def server(world: World, n: int) -> None:
    if world.up:
        world.stop_server()
    else:
        world.start_server()


def restart_server(world: World, n: int) -> None:
    world.stop_server()
    world.start_server()


def resize(world: World, n: int) -> None:
    world.ask(ResizeAsked(wire.Resize(pods=1 + n % 5)))


def pause(world: World, n: int) -> None:
    world.ask(PauseAsked())


def resume(world: World, n: int) -> None:
    world.ask(ResumeAsked())


def stop(world: World, n: int) -> None:
    if n % 4 == 0:  # rarely: little is to be seen after it
        world.ask(StopAsked())


def stop_at_once(world: World, n: int) -> None:
    if n % 4 == 0:
        world.ask(StopAsked(discard=True))


def fill_disks(world: World, n: int) -> None:
    world.full = [{"path"}, {"a"}, {"path", "a", "b"}, set()][n % 4]
    world.stuck = n == 19


def quarantine(world: World, n: int) -> None:
    world.quarantine("ab"[n % 2], n // 2 % 2, "XID 79" if n % 5 else "", fatal=n % 3 == 0)


def kill(world: World, n: int) -> None:
    pods = [pod.pod_id for pod in world.job.pods] or ["pod_9_9"]
    by_rank = wire.Kill(rank=n % 5)
    world.ask(KillAsked(by_rank if n % 2 else wire.Kill(pod_id=pods[n % len(pods)])))


USUAL = (
    client, clients, launcher, launchers, deliver, deliver_all, overtake, repeat, train, rounds,
    a_while, to_deadline,
)  # fmt: skip
TROUBLE = (
    kill_trainer, kill_prepared, refuse_join, no_longer_joins, kill_launcher, terminate_pod,
    kill_shim, ports_fail, hang, script_fails, kill_client, client_leaves, cut_link, power,
    server, restart_server, resize, pause, resume, stop, stop_at_once, fill_disks, kill, quarantine,
)  # fmt: skip
ACTIONS = st.tuples(
    st.one_of(st.sampled_from(USUAL), st.just(rounds), st.sampled_from(TROUBLE)),
    st.integers(0, 19),
)


def make_world(
    *,
    elastic: bool,
    min_pods: int,
    scripted: bool,
    failures: int,
    overlap: str = "auto",
    standby: int = 0,
    stop_after_s: float | None = None,
    then: Then = Then.RESTART,
) -> World:
    script = ScriptSpec(kind=ScriptKind.ALTERNATE if scripted else ScriptKind.NONE, interval_s=6.0)
    spec = JobSpec(
        job_id="job",
        min_pods=min_pods,
        max_pods=4,
        overlap=overlap,
        standby=0 if overlap in ("off", "join") else standby,
        pods=3,
        expected_nodes=2,
        script=script,
        max_restarts_without_progress=failures,
        prepare_timeout_s=10.0,
        grace_s=5.0,
        failure_policy=() if then is Then.RESTART else (FailureRule(then=then),),
    )
    nodes = (node("a", stop_after_s=stop_after_s), node("b", stop_after_s=stop_after_s))
    return World(spec, nodes, elastic=elastic)


def worlds(*, min_pods: list[int]) -> st.SearchStrategy[World]:
    """Return jobs of every kind, none of which has begun."""
    return st.builds(
        make_world,
        elastic=st.booleans(),
        overlap=st.sampled_from(["auto", "off", "join", "join"]),
        standby=st.sampled_from([0, 1, 2]),
        min_pods=st.sampled_from(min_pods),
        scripted=st.booleans(),
        failures=st.sampled_from([2, 50]),
        then=st.sampled_from(
            [Then.RESTART, Then.RESTART, Then.RESTART_ELSEWHERE, Then.QUARANTINE, Then.IGNORE]
        ),
    )


def finish(world: World) -> None:
    """From now on the world is honest: the job must come to an end, and nothing may be left."""
    world.heal()
    for _ in range(12):
        if world.job.state is JobState.PAUSED:
            world.ask(ResumeAsked())
        world.rounds(100)
        if world.job.state.ended:
            break
    log = "\n".join(world.reasons[-40:])
    assert world.job.state.ended, f"{world.job.state}: {world.job}\n{log}"
    trouble = (" is over: ", " exited with ", "ended by signal", "is gone", "not parked", "loaded")
    crashed = [line for line in world.reasons if any(word in line for word in trouble)]
    if world.elastic and not crashed:
        assert world.job.lineage.redone_steps == 0, f"a change cost steps\n{log}"
    if world.job.state is JobState.SUCCEEDED:
        assert world.durable == world.total_steps, log
    world.rounds(10)
    world.check_json()
    left = [pod for sim in world.nodes.values() for pod in sim.pods.values()]
    assert not left, f"left behind: {left}"
    assert not world.job.pods
    assert not views.slots_held(world.job)
    parked = [who for _, _, who in world.launchers() if who.run is not None]
    assert not [who for who in parked if who.run and who.run.phase is PodStagePhase.PARKED]


def play(world: World, actions: list[tuple[Callable[[World, int], None], int]]) -> None:
    for action, n in actions:
        action(world, n)
    finish(world)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(worlds(min_pods=[1, 1, 2]), st.lists(ACTIONS, max_size=60))
def test_whatever_happens_the_job_comes_to_an_end_once_the_world_is_honest(world, actions):
    play(world, actions)


# A client that dies at the very moment when its node is cut off stops nothing, and nobody can know.
FENCED = st.tuples(
    st.one_of(
        st.sampled_from(USUAL),
        st.just(rounds),
        st.sampled_from([action for action in TROUBLE if action is not kill_client]),
        st.sampled_from([cut_link, a_while]),
    ),
    st.integers(0, 19),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(
    st.builds(
        make_world,
        elastic=st.booleans(),
        stop_after_s=st.sampled_from([2.0, 5.0, 15.0]),
        min_pods=st.just(1),
        scripted=st.just(False),
        failures=st.just(50),
    ),
    st.lists(FENCED, max_size=60),
)
def test_the_same_holds_where_clients_stop_pods_that_are_cut_off(world, actions):
    play(world, actions)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds(min_pods=[1, 2, 3]), st.lists(ACTIONS, min_size=30, max_size=200))
def test_the_same_holds_in_long_histories(world, actions):
    play(world, actions)
