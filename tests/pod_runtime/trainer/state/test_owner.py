"""Two trainings in one checkpoint folder: who may have it, who is told, who ends."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from job_server.api.command_line import keep_token
from job_server.api.wire import JobSpec
from pod_runtime import processes
from pod_runtime.trainer.errors import CheckpointError, InUseError
from pod_runtime.trainer.state import owner as owner_module
from pod_runtime.trainer.state.checkpoint import CheckpointId, CheckpointStore
from pod_runtime.trainer.state.checkpoint_writer import CheckpointWriter
from pod_runtime.trainer.state.owner import OWNER, Owner, job_holder, look_at, this_holder
from pod_runtime.trainer.state.owner_record import (
    STILL_S,
    Act,
    Facts,
    Holder,
    Record,
    ServerSays,
    State,
    decide,
)
from pod_runtime.trainer.state.storage import Storage, exclusive, open_storage
from tests.job_server.serving import running_server
from tests.pod_runtime.trainer.states import make_host_state
from tests.support import wait_until

ALONE = Holder(id="a", host="node-a", machine="m", pid=7, start_time=1)
JOB = replace(ALONE, id="j1@5.0", job="j1", server="http://127.0.0.1:1", submitted_at=5.0)
ME = Holder(id="b", host="node-b", machine="m", pid=8, start_time=2)
ELSEWHERE = Facts(process_lives=None, server=ServerSays.NOT_ASKED)
DEAD, ALIVE = replace(ELSEWHERE, process_lives=False), replace(ELSEWHERE, process_lives=True)
STILL = replace(ELSEWHERE, still_s=STILL_S)


def record(holder: Holder = ALONE, state: State = State.TRAINING, **more: Any) -> Record:
    return Record(run_id="r", holder=holder, state=state, stage=3, **more)


def server(says: ServerSays, facts: Facts = ELSEWHERE, *, local: bool = True) -> Facts:
    return replace(facts, server=says, server_is_local=local)


@pytest.mark.parametrize(
    ("found", "facts", "act"),
    [
        pytest.param(None, ELSEWHERE, Act.CLAIM, id="nobody yet"),
        pytest.param(record(ME), ALIVE, Act.CLAIM, id="its own"),
        pytest.param(record(state=State.OVER), ALIVE, Act.CLAIM, id="over, its script goes on"),
        pytest.param(record(), ALIVE, Act.REFUSE, id="its process is alive"),
        pytest.param(record(), DEAD, Act.CLAIM, id="its process is dead"),
        pytest.param(record(), ELSEWHERE, Act.WATCH, id="on another machine"),
        pytest.param(record(), replace(STILL, still_s=59.9), Act.WATCH, id="not yet a minute"),
        pytest.param(record(), STILL, Act.CLAIM, id="it stood still for a minute"),
        pytest.param(record(), replace(STILL, moved=True), Act.REFUSE, id="it moves"),
        pytest.param(record(JOB, State.STOPPING), ALIVE, Act.REFUSE, id="its state is written"),
        pytest.param(record(JOB, State.STOPPING), DEAD, Act.CLAIM, id="stopped"),
        pytest.param(
            record(JOB, State.STOPPING), server(ServerSays.LIVES, DEAD), Act.REFUSE, id="stopping"
        ),
        pytest.param(record(state=State.PAUSED), STILL, Act.REFUSE, id="paused"),
        pytest.param(record(state=State.PAUSED), DEAD, Act.REFUSE, id="paused, no process"),
        pytest.param(
            record(JOB, State.PAUSED), server(ServerSays.ENDED), Act.CLAIM, id="stopped as paused"
        ),
        pytest.param(
            record(JOB, State.PAUSED), server(ServerSays.AWAY, DEAD), Act.REFUSE, id="asleep"
        ),
        pytest.param(record(JOB), server(ServerSays.ENDED, DEAD), Act.CLAIM, id="failed"),
        pytest.param(record(JOB), server(ServerSays.LIVES, DEAD), Act.REFUSE, id="recovers"),
        pytest.param(record(JOB), server(ServerSays.LIVES, STILL), Act.REFUSE, id="queued"),
        pytest.param(record(JOB), server(ServerSays.UNKNOWN, DEAD), Act.WATCH, id="may recover"),
        pytest.param(
            record(JOB), server(ServerSays.AWAY, DEAD), Act.CLAIM, id="died with its server"
        ),
        pytest.param(
            record(JOB),
            server(ServerSays.AWAY, DEAD, local=False),
            Act.WATCH,
            id="its server is out of reach",
        ),
        pytest.param(
            record(JOB), server(ServerSays.FORGOT, DEAD), Act.CLAIM, id="its server began anew"
        ),
        pytest.param(
            record(JOB), server(ServerSays.FORGOT), Act.WATCH, id="another server at that address"
        ),
        pytest.param(record(JOB), server(ServerSays.AWAY, STILL), Act.CLAIM, id="gone for long"),
    ],
)
def test_who_may_have_the_folder(found, facts, act):
    decided, reason = decide(found, ME, facts, take_over=False)
    assert decided is act
    assert bool(reason) == (found is not None and found.holder is not ME)


@pytest.mark.parametrize("state", list(State))
def test_who_is_told_to_take_over_does_so_until_it_is_replaced_itself(state):
    assert decide(record(JOB, state), ME, ALIVE, take_over=True)[0] is Act.CLAIM
    again = record(JOB, state, replaced=(ME.id,))
    expected = Act.CLAIM if state is State.OVER else Act.REFUSE
    assert decide(again, ME, ALIVE, take_over=True)[0] is expected


# --- with real files ----------------------------------------------------------------------------


class Time:
    """A clock that only sleeping moves; what happens meanwhile is told to it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.meanwhile: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture(params=["local", "memory"])
def storage(request, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "ckpt")
    return open_storage(f"memory://{uuid.uuid4()}/ckpt")


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def training(storage, time):
    """Make trainings in one folder; by default each on a machine of its own."""
    made: list[Owner] = []

    def make(name: str, *, facts: Facts = ELSEWHERE, **more: Any) -> CheckpointStore:
        me = Holder(id=name, host=f"host-{name}", machine=name, pid=1, start_time=1)
        owner = Owner(
            storage, me, look=lambda _: facts, clock=lambda: time.now, sleep=time.sleep,
            beat_s=3600, **more,
        )  # fmt: skip
        owner.stage = 1
        made.append(owner)
        return CheckpointStore(storage, keep=2, owner=owner)

    yield make
    for each in made:
        each.close()


def owner_of(store: CheckpointStore) -> Owner:
    assert store.owner is not None
    return store.owner


def begin(store: CheckpointStore) -> str:
    """Start a training as the loop does; return its run."""
    found = store.continue_newest()
    owner = owner_of(store)
    owner.run_id = "" if found is None else found[0].status.run_id
    owner.run_id = owner.run_id or owner_module.new_run_id()
    return owner.run_id


def host_state(store: CheckpointStore, step: int, stage: int | None = None):
    made = make_host_state(stage=stage or owner_of(store).stage, step=step, fill=float(step))
    return replace(made, status=replace(made.status, run_id=owner_of(store).run_id))


def test_a_fresh_folder_belongs_to_who_comes_first_and_waits_for_nobody(training, storage, time):
    store = training("a")
    run = begin(store)
    owner_of(store).beat()
    said = json.loads(storage.read(OWNER))
    assert (said["run_id"], said["holder"]["host"], said["state"]) == (run, "host-a", "training")
    store.write(host_state(store, 1))
    manifest = json.loads(storage.read("stage_00000001/step_0000000001/manifest.json"))
    assert manifest["run_id"] == run
    assert time.now == 1000.0


def test_a_second_training_is_refused_before_its_first_step_while_the_first_one_trains(
    training, storage, time
):
    first = training("a")
    begin(first)

    def beat() -> None:
        if int(time.now) % 10 == 0:
            owner_of(first).beat()

    time.meanwhile = beat
    with pytest.raises(InUseError) as refused:
        begin(training("b"))
    text = str(refused.value)
    assert "of pid 1 on host-a, which trains, or is being stopped: it moves the counter" in text
    assert "this is pid 1 on host-b" in text
    assert "another checkpoint path" in text
    assert "--take_over" in text
    assert time.now <= 1011.0, "a holder that beats is seen with its next beat"
    first.write(host_state(first, 1))
    assert first.found() == [CheckpointId(1, 1)]


def test_a_holder_that_stands_still_for_a_minute_is_replaced_and_that_is_said(
    training, time, caplog
):
    first = training("a")
    run = begin(first)
    first.write(host_state(first, 7))
    second = training("b")
    assert begin(second) == run
    assert 60.0 <= time.now - 1000.0 <= 62.0
    assert "may be alive: watching its counter" in caplog.text
    assert f"goes on with run {run} in " in caplog.text
    assert "from step 7, written 20" in caplog.text
    assert "pid 1 on host-a is gone: it has not moved its counter for 60 s" in caplog.text


def test_whose_counter_moves_late_is_seen_to_live(training, time):
    first = training("a")
    begin(first)

    def beat() -> None:
        if time.now == 1055.0:
            owner_of(first).beat()

    time.meanwhile = beat
    with pytest.raises(InUseError, match="moves the counter"):
        begin(training("b"))


@pytest.mark.parametrize("facts", [DEAD, ELSEWHERE], ids=["killed", "finished"])
def test_going_on_after_the_end_costs_no_wait_and_no_flag(training, time, facts, caplog):
    first = training("a")
    run = begin(first)
    first.write(host_state(first, 9))
    if facts is ELSEWHERE:
        owner_of(first).leave(State.OVER)
    second = training("b", facts=facts)
    assert begin(second) == run
    assert time.now == 1000.0
    assert f"goes on with run {run}" in caplog.text
    assert second.load_newest() is not None


def test_a_job_that_goes_on_by_itself_says_nothing_of_that(training, caplog):
    first = training("a")
    run = begin(first)
    first.write(host_state(first, 3))
    caplog.clear()
    assert begin(training("a")) == run
    assert "goes on" not in caplog.text


def test_who_was_replaced_writes_nothing_more_and_says_why(training, storage, caplog):
    first = training("a")
    begin(first)
    first.write(host_state(first, 1))
    second = training("b", take_over=True)
    owner_of(second).stage = first.highest_stage() + 1
    begin(second)
    second.write(host_state(second, 2))
    before = second.found(), storage.read(OWNER)
    with pytest.raises(InUseError, match=r"taken over by pid 1 on host-b, run .*pid 1 on host-a"):
        first.write(host_state(first, 3))
    owner_of(first).beat()
    owner_of(first).leave(State.OVER)
    assert (second.found(), storage.read(OWNER)) == before
    assert "host-b" in owner_of(first).replaced_by
    with pytest.raises(InUseError, match="is in use by run"):  # nor does it take it back
        begin(training("a", take_over=True, facts=ALIVE))


def test_a_checkpoint_that_was_begun_before_the_folder_was_lost_is_not_committed(training, storage):
    first, second = training("a"), training("b", take_over=True)
    begin(first)
    written = storage.write

    def write(path: str, chunks: Any) -> None:
        written(path, chunks)
        if path.endswith("train_status.json"):
            begin(second)

    storage.write = write
    with pytest.raises(InUseError):
        first.write(host_state(first, 5))
    assert second.load_newest() is None


def test_the_writer_of_a_replaced_training_does_not_try_again_for_ever(training, caplog):
    first = training("a")
    begin(first)
    begin(training("b", take_over=True))
    writer = CheckpointWriter(first)
    writer.start(host_state(first, 1))
    with pytest.raises(CheckpointError, match="taken over"):
        writer.finish()
    assert owner_of(first).replaced_by


@pytest.mark.parametrize(
    ("me", "says", "act"),
    [
        pytest.param(replace(JOB, submitted_at=9.0), ServerSays.FORGOT, Act.CLAIM, id="the next"),
        pytest.param(
            replace(JOB, submitted_at=9.0), ServerSays.UNKNOWN, Act.CLAIM, id="by a token"
        ),
        pytest.param(replace(JOB, submitted_at=9.0), ServerSays.AWAY, Act.CLAIM, id="away"),
        pytest.param(
            replace(JOB, submitted_at=4.0), ServerSays.FORGOT, Act.CLAIM, id="its clock went back"
        ),
        pytest.param(
            replace(JOB, submitted_at=2.0), ServerSays.FORGOT, Act.REFUSE, id="an earlier"
        ),
        pytest.param(replace(JOB, submitted_at=0.0), ServerSays.FORGOT, Act.REFUSE, id="not known"),
        pytest.param(
            replace(JOB, job="j2", submitted_at=9.0), ServerSays.FORGOT, Act.REFUSE, id="another"
        ),
        pytest.param(
            replace(JOB, server="http://h:1", submitted_at=9.0),
            ServerSays.FORGOT,
            Act.REFUSE,
            id="of another server",
        ),
        pytest.param(
            replace(JOB, host="h", submitted_at=9.0),
            ServerSays.FORGOT,
            Act.REFUSE,
            id="of another machine's 127.0.0.1",
        ),
        pytest.param(
            replace(JOB, submitted_at=9.0), ServerSays.LIVES, Act.REFUSE, id="both are there"
        ),
    ],
)
def test_the_place_of_a_paused_job_that_was_deleted_is_its_successors(
    me: Holder, says: ServerSays, act: Act
):
    me = replace(me, id=f"{me.job}@{me.submitted_at}")
    found = record(JOB, State.PAUSED, replaced=("j1@2.0",))
    assert decide(found, me, server(says, DEAD), take_over=False)[0] is act


def test_a_paused_training_keeps_its_place_until_it_goes_on_or_is_taken_over(training, time):
    first = training("a")
    run = begin(first)
    first.write(host_state(first, 4))
    owner_of(first).leave(State.PAUSED)
    with pytest.raises(InUseError, match="host-a, which is paused"):
        begin(training("b", facts=DEAD))
    assert time.now == 1000.0
    assert begin(training("a")) == run
    owner_of(first).leave(State.PAUSED)
    assert begin(training("b", take_over=True)) == run
    with pytest.raises(InUseError):
        begin(training("a", facts=ALIVE))


def test_a_training_that_is_being_stopped_is_seen_to_live_until_it_has_ended(training, time):
    first = training("a")
    run = begin(first)
    owner_of(first).leave(State.STOPPING)
    time.meanwhile = owner_of(first).beat
    with pytest.raises(InUseError, match="is being stopped: it moves the counter"):
        begin(training("b"))
    first.write(host_state(first, 6))  # as the job client does in the place of its trainers
    assert begin(training("b", facts=DEAD)) == run


def test_a_later_stage_of_the_same_training_moves_the_counter_and_the_older_one_does_not(
    training, storage
):
    old, new = training("a"), training("a")
    begin(old)
    owner_of(new).stage = 2
    owner_of(new).hold()
    wait_until(lambda: json.loads(storage.read(OWNER))["stage"] == 2)
    before = storage.read(OWNER)
    owner_of(old).beat()
    assert storage.read(OWNER) == before
    old.write(host_state(old, 1))  # parked, and not yet ended: it is the same training
    assert not owner_of(old).replaced_by


def goes_on_from_memory(store: CheckpointStore) -> CheckpointStore:
    """As rank 0 on another node does, whose folder may have been another's; without the thread."""
    owner_of(store).stage, owner_of(store).run_id = 5, "mine"
    owner_of(store).beat()
    return store


@pytest.mark.parametrize("facts", [DEAD, ELSEWHERE], ids=["killed", "gone with its machine"])
def test_a_folder_of_a_dead_training_is_taken_where_a_training_comes_by(training, time, facts):
    begin(training("old"))
    store = goes_on_from_memory(training("a", facts=facts))
    if facts is ELSEWHERE:
        time.now += 30
        with pytest.raises(CheckpointError, match="may be in use by another training"):
            store.write(host_state(store, 1))
        time.now += 30.5
    store.write(host_state(store, 2))
    assert store.found() == [CheckpointId(5, 2)]
    assert not owner_of(store).replaced_by


def test_a_folder_of_a_living_training_is_not_touched_where_a_training_comes_by(training, storage):
    begin(training("other"))
    before = storage.read(OWNER)
    store = goes_on_from_memory(training("a", facts=ALIVE))
    with pytest.raises(InUseError, match="is being stopped: its process is alive"):
        store.write(host_state(store, 1))
    assert storage.read(OWNER) == before


def test_who_was_replaced_does_not_go_on_from_memory_though_the_other_one_is_dead(training):
    first = training("a")
    begin(first)
    begin(training("b", take_over=True))
    again = goes_on_from_memory(training("a", facts=DEAD))
    assert "taken over by pid 1 on host-b" in owner_of(again).replaced_by


def test_a_stage_above_that_of_the_one_before_is_wanted(training):
    first = training("a")
    owner_of(first).stage = 4
    begin(first)  # and dies before its first checkpoint, amid writing it perhaps
    assert training("b").highest_stage() == 4
    assert training("a").highest_stage() == 0


@pytest.mark.parametrize("run_id", ["", "theirs"])
def test_retention_removes_what_is_of_this_run_or_of_none(training, storage, run_id):
    others = CheckpointStore(storage)
    for step in (1, 2, 3):
        foreign = make_host_state(stage=1, step=step)
        others.write(replace(foreign, status=replace(foreign.status, run_id=run_id)))
    store = training("a")
    begin(store)
    owner_of(store).run_id, owner_of(store).stage = "mine", 2
    for step in (4, 5, 6):
        store.write(host_state(store, step))
    kept = [each.step for each in store.found()]
    assert kept == ([5, 6] if run_id == "" else [1, 2, 3, 5, 6])


def test_a_checkpoint_of_the_version_before_belongs_to_who_goes_on_with_it(training, storage):
    CheckpointStore(storage).write(make_host_state(stage=1, step=8))
    store = training("a")
    found = store.continue_newest()
    assert found is not None
    assert found[0].status.run_id == owner_of(store).run_id != ""


def test_two_that_start_together_in_an_empty_folder_do_not_both_begin(tmp_path):
    storage, begun, refused = open_storage(tmp_path / "ckpt"), [], []
    start = threading.Barrier(6)

    def run(name: str) -> None:
        me = Holder(id=name, host=name, machine=name, pid=1, start_time=1)
        owner = Owner(storage, me, look=lambda _: ALIVE, beat_s=3600)
        start.wait()
        try:
            CheckpointStore(storage, owner=owner).continue_newest()
            begun.append(name)
        except InUseError:
            refused.append(name)
        finally:
            owner.close()

    threads = [threading.Thread(target=run, args=(f"t{n}",)) for n in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(begun) == 1, (begun, refused)
    assert len(refused) == 5


def test_a_worker_that_is_forked_amid_it_keeps_nobody_out(tmp_path):
    storage = open_storage(tmp_path)
    with exclusive(storage):
        links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
        held = [fd for fd, link in links.items() if Path(link).resolve() == tmp_path]
        inherited = os.dup(held[0])
    mine = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for fd in (mine, inherited):
        os.close(fd)


def test_where_nothing_is_exclusive_the_later_of_two_claims_holds(training, storage):
    first, second = training("a"), training("b")
    replaced = False
    written = storage.commit

    def commit(path: str, content: bytes) -> None:
        nonlocal replaced
        written(path, content)
        if path == OWNER and not replaced:  # the other one had found the folder empty, too
            replaced = True
            written(OWNER, content.replace(b"host-a", b"host-b").replace(b'"a"', b'"b"'))

    storage.commit = commit
    with pytest.raises(InUseError, match="taken over by pid 1 on host-b"):
        begin(first)
    begin(second)


def test_a_disk_that_is_full_ends_no_training_and_gives_nothing_away(training, storage, caplog):
    store = training("a")
    begin(store)
    written = storage.commit

    def full(path: str, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage.commit = full
    for _ in range(3):
        owner_of(store).beat()
    assert caplog.text.count("others may think that this training has ended") == 1
    assert not owner_of(store).replaced_by
    with pytest.raises(CheckpointError, match="not written: No space left"):
        store.write(host_state(store, 1))
    storage.commit = written
    store.write(host_state(store, 2))
    assert store.found() == [CheckpointId(1, 2)]


def test_a_finished_training_can_be_looked_at_where_nothing_can_be_written(
    training, storage, caplog, monkeypatch
):
    first = training("a")
    begin(first)
    first.write(host_state(first, 5))

    def refuse(path: str, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(storage, "commit", refuse)
    second = training("b", facts=DEAD)
    assert second.continue_newest() is not None
    assert "owner.json cannot be written: Read-only" in caplog.text
    owner_of(second).beat()
    assert not owner_of(second).replaced_by, "who was there before is no reason to end"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": 3}'])
def test_what_is_no_record_is_refused_with_the_remedy_and_mended_by_its_holder(
    training, storage, content
):
    store = training("a")
    begin(store)
    storage.commit(OWNER, content)
    with pytest.raises(CheckpointError, match=r"owner.json is damaged: .*; remove it if no other"):
        begin(training("b"))
    owner_of(store).beat()
    assert json.loads(storage.read(OWNER))["holder"]["id"] == "a"


# --- what this machine knows --------------------------------------------------------------------


def test_a_process_of_this_machine_is_seen_to_live_and_to_die():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = processes.start_time(child.pid)
    assert started is not None
    theirs = replace(this_holder(plan=None, server=""), pid=child.pid, start_time=started)
    assert look_at(theirs).process_lives is True
    assert look_at(replace(theirs, start_time=started + 1)).process_lives is False
    assert look_at(replace(theirs, machine="another boot")).process_lives is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert look_at(theirs).process_lives is False
    assert child.stdin is not None
    child.stdin.close()


def test_a_job_is_one_holder_through_all_of_its_processes():
    first, second = (job_holder("j1", at, "http://h:1") for at in (5.25, 5.5))
    assert first.id == job_holder("j1", 5.25, "http://other:2").id != second.id
    old = job_holder("j1", 0.0, "http://h:1")  # a server of the version before
    assert old.id != job_holder("j1", 0.0, "http://h:2").id


def test_a_server_that_is_away_is_told_from_none():
    assert look_at(ALONE).server is ServerSays.NOT_ASKED
    facts = look_at(JOB)
    assert (facts.server, facts.server_is_local) == (ServerSays.AWAY, True)
    assert not look_at(replace(JOB, server="http://[bad")).server_is_local


@pytest.mark.parametrize("token", [None, "correct-horse"])
def test_a_job_server_is_asked_whether_the_job_goes_on(tmp_path, token):
    flags = ["--no_job"]
    if token is not None:  # as `edl run` and the start scripts make one, and no trainer gets it
        keep_token(tmp_path / "token", token)
        flags += ["--token_file", str(tmp_path / "token")]
    with running_server(tmp_path, *flags) as server, server.api(token) as api:
        job = api.submit(JobSpec(job_id="j1"))
        theirs = replace(JOB, server=server.url, submitted_at=job.submitted_at)
        assert look_at(theirs).server is ServerSays.LIVES, "it waits for a node"
        assert look_at(replace(theirs, submitted_at=1.0)).server is ServerSays.FORGOT
        assert look_at(replace(theirs, job="j2")).server is ServerSays.FORGOT
        api.stop("j1")
        wait_until(lambda: look_at(theirs).server is ServerSays.ENDED)


SCRIPT = """
import os
import sys
from pod_runtime.trainer.state.checkpoint import CheckpointStore
from pod_runtime.trainer.state.owner import Owner, this_holder
from pod_runtime.trainer.state.storage import open_storage
storage = open_storage(sys.argv[1])
owner = Owner(storage, this_holder(plan=None, server=""))
CheckpointStore(storage, owner=owner).continue_newest()
print("begun", flush=True)
if not os.fork():
    sys.exit()  # a worker of the script, say
os.wait()
assert owner.read().state.value == "training"
input()
"""


def test_scripts_alone_see_each_others_end(tmp_path):
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = start()
    assert first.stdout is not None
    assert first.stdout.readline() == "begun\n"
    second = start()
    _out, err = second.communicate()
    assert "its process is alive" in err
    first.kill()
    first.communicate()
    third = start()  # at once: its process is gone
    out, err = third.communicate("\n")
    assert (out, third.returncode) == ("begun\n", 0), err
    said = json.loads((tmp_path / OWNER).read_text())
    assert (said["state"], said["holder"]["pid"]) == ("over", third.pid)
