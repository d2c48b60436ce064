"""Which errors end a job, at once or when they come again, and which only the budgets count."""

import errno
from dataclasses import replace
from typing import Any

import pytest

from job_server.api.codec import WireError, decode, encode
from job_server.api.failure_policy import FailedProcess
from job_server.api.wire import JobState, Order, PodReport, RaisedError, ReportKind, TrainerError
from job_server.training.core.accounting import count_failure
from job_server.training.core.faults import Failure, fault_of, find_lasting, judge, normal
from job_server.training.core.job import Cause, CauseKind, Fault
from tests.job_server.world import World, records, tell, trains, world

WHO = "rank 1 (pod_1_0)"


def raised(*types: str, text: str = "sad", number: int | None = None) -> RaisedError:
    return RaisedError(types=(*types, "Exception", "object"), text=text, errno=number, at="t.py:7")


def error(*chain: RaisedError, step: int | None = 20) -> TrainerError:
    return TrainerError(chain=chain, where="t.py:7", step=step)


def found(
    code: int | None, said: TrainerError | None, words: str, of: FailedProcess
) -> Fault | None:
    failure = Failure(of=of, code=code, error=said, words=words)
    return fault_of(WHO, failure, judge((), failure))


def verdict(*chain: RaisedError) -> str:
    """Say "at once", "twice" or "never"."""
    fault = found(1, error(*chain), "", FailedProcess.TRAINER)
    if fault is None:
        return "never"
    return "at once" if fault.at_once else "twice"


ERRORS = "pod_runtime.trainer.errors"
USAGE = ("pod_runtime.trainer.errors.UsageError", "pod_runtime.trainer.errors.ElasticError")
PADDLE_CUDA = "(External) CUDA error(700), an illegal memory access was encountered."
SHAPES = "(InvalidArgument) The shapes are [5, 11] and [15, 11]. [Hint: Expected 5 == 15]"


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([raised("SyntaxError")], "at once"),
        ([raised("IndentationError", "SyntaxError")], "at once"),
        ([raised("ModuleNotFoundError", "ImportError", text="No module named 'cv2'")], "at once"),
        ([raised("ImportError", text="libcudnn.so.9: cannot open shared object")], "at once"),
        ([raised(*USAGE, text="epochs: expected 1 or more, got 0")], "at once"),
        ([raised("distill_reader.errors.UsageError", "ValueError")], "at once"),
        ([raised(f"{ERRORS}.InUseError", f"{ERRORS}.CheckpointError", text="in use")], "at once"),
        ([replace(raised("SyntaxError"), at="<string>:1")], "twice"),
        ([raised("RuntimeError", text="boom")], "twice"),
        ([raised("ValueError", text=SHAPES)], "twice"),
        ([raised("AssertionError", text="")], "twice"),
        ([raised("SystemExit", text="no data folder at data/train")], "twice"),
        ([raised("FileNotFoundError", "OSError", number=errno.ENOENT)], "twice"),
        ([raised("FileNotFoundError", "OSError", text="no images")], "twice"),
        ([raised("PermissionError", "OSError", number=errno.EACCES)], "twice"),
        ([raised("pod_runtime.trainer.errors.StateError")], "twice"),
        ([raised("OSError", number=errno.ENOSPC)], "never"),
        ([raised("OSError", number=errno.EIO)], "never"),
        ([raised("OSError", number=errno.ESTALE)], "never"),
        ([raised("OSError", number=errno.EAGAIN)], "never"),
        ([raised("OSError", number=errno.EADDRINUSE)], "never"),
        ([raised("TimeoutError", "OSError", number=errno.ETIMEDOUT)], "never"),
        ([raised("ConnectionResetError", "ConnectionError", "OSError", number=104)], "never"),
        ([raised("socket.gaierror", "OSError", number=-3)], "never"),
        ([raised("requests.exceptions.ConnectionError", "OSError")], "never"),
        ([raised("subprocess.TimeoutExpired")], "never"),
        ([raised("urllib3.exceptions.MaxRetryError")], "never"),
        ([raised("OSError", text=PADDLE_CUDA)], "never"),
        ([raised("RuntimeError", text="CUDA error: device-side assert triggered")], "never"),
        ([raised("RuntimeError", text="NCCL error in: net.cc:12")], "never"),
        ([raised("RuntimeError", text="uncorrectable ECC error encountered")], "never"),
        ([raised("torch.OutOfMemoryError", "RuntimeError")], "never"),
        ([raised("MemoryError", text="(ResourceExhausted) Out of memory on GPU 0")], "never"),
        ([raised("SystemError", text="DataLoader worker (pid 7) exited unexpectedly")], "never"),
        ([raised("RuntimeError", text="[gloo] Connection closed by peer")], "never"),
        ([raised("pod_runtime.trainer.errors.PeerLost")], "never"),
        ([raised("distill_reader.errors.NoTeacher")], "never"),
        ([raised("ValueError"), raised("TimeoutError", "OSError")], "never"),
        ([raised("ImportError"), raised("OSError", number=errno.ESTALE)], "never"),
        ([raised("ValueError"), raised("KeyError")], "twice"),
    ],
)
def test_an_error_is_final_at_once_or_the_second_time_or_never(chain, expected):
    assert verdict(*chain) == expected


@pytest.mark.parametrize(
    ("code", "at_once"), [(2, True), (1, None), (3, None), (-9, None), (-11, None), (None, None)]
)
def test_of_what_was_not_raised_only_a_wrong_command_line_is_final(code, at_once):
    fault = found(code, None, "t.py: error: --lr is required", FailedProcess.TRAINER)
    assert (None if fault is None else fault.at_once) is at_once
    if fault is not None:
        assert fault.text == "exited with 2: t.py: error: --lr is required"


@pytest.mark.parametrize(
    ("words", "is_final"),
    [
        ("python: can't open file '/nfs/t.py': [Errno 2] No such file or directory", True),
        ("python: can't open file '/nfs/t.py': [Errno 5] Input/output error", False),
        ("python: can't open file '/nfs/t.py': [Errno 116] Stale file handle", False),
        ("t.py: error: argument --lr: invalid float value: '[Errno'", True),
    ],
)
def test_a_script_that_cannot_be_read_just_now_is_no_wrong_command_line(words, is_final):
    assert (found(2, None, words, FailedProcess.TRAINER) is not None) == is_final
    assert (found(2, None, words, FailedProcess.POD) is not None) == is_final


def test_the_text_begins_with_the_file_and_line_and_is_one_line():
    said = error(raised("a.b.MyError", text="one\n  two"))
    fault = found(1, said, "", FailedProcess.TRAINER)
    assert fault is not None
    assert fault.text == "t.py:7: MyError: one two"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("<A object at 0x7f12ab>", "<A object at 0x55dead>", True),
        ("worker (pid 71) is odd", "worker (pid 1234) is odd", True),
        ("/x/pod_0_0/a.npy", "/x/pod_2_-1_3/a.npy", False),
        ("/x/pods/pod_0_0/a.npy", "/x/pods/pod_1_0_1/a.npy", True),
        ("cannot parse /tmp/tmpab12cd34/x", "cannot parse /tmp/tmpzz98yx76/x", True),
        ("sample 17 is broken", "sample 18 is broken", False),
        ("loss is nan at step 20", "loss is nan at step 21", False),
    ],
)
def test_addresses_pids_pods_and_temporary_names_make_no_other_error(one, other, same):
    assert (normal(one) == normal(other)) is same


def fault(text: str = "t.py:7: ValueError: sad", **fields: Any) -> Fault:
    return Fault(who=WHO, text=text, mark=text, **fields)


def test_any_rank_that_fails_as_one_failed_before_is_enough():
    before = (fault("a"), fault("b"))
    assert "has come twice" in find_lasting((fault("c"), fault("b")), before, of_change=False)
    assert find_lasting((fault("c"),), before, of_change=False) == ""
    assert find_lasting((), before, of_change=False) == ""


def test_a_change_that_fails_for_good_leaves_the_pods_before_it_their_try():
    bad = fault(at_once=True)
    assert find_lasting((bad,), (), of_change=True) == ""
    assert "it would come again" in find_lasting((bad,), (), of_change=False)
    assert "has come twice" in find_lasting((bad,), (bad,), of_change=True)


def test_without_the_loop_an_error_after_healthy_minutes_is_another_one():
    plain = world().job
    cause = Cause(kind=CauseKind.FAILURE, text="x", at=0.0, faults=(fault(),))
    first = count_failure(plain, cause, 0.0, ran_s=100.0)
    assert count_failure(replace(plain, budget=first.budget), cause, 0.0, ran_s=100.0).give_up == ""
    assert (
        "has come twice"
        in count_failure(replace(plain, budget=first.budget), cause, 0.0, ran_s=1.0).give_up
    )


# --- in a job -------------------------------------------------------------------------------------


def fails(made: World, stage: int, said: TrainerError | None, *, rank: int = 0, **more: Any):
    pod_id = f"pod_{rank}_0"
    more = {"code": 1, "reason": "" if said is None else str(said), **more}
    tell(made, pod_id, ReportKind.FAILED, stage, rank=rank, error=said, **more)


def test_an_error_that_cannot_go_away_takes_one_stage():
    made = trains(world())
    fails(made, 1, error(raised("ModuleNotFoundError", "ImportError", text="No module 'x'")))
    made.run_until(JobState.FAILED)
    assert made.job.reason.startswith("FAILED: t.py:7: ModuleNotFoundError: No module 'x'; rank 0")
    assert len(records(made)) == 1
    assert made.job.budget.failures == 1


def test_the_same_error_at_the_same_step_takes_two_stages_whichever_rank_speaks_first():
    made = trains(world())
    boom = raised("RuntimeError", text="boom")
    fails(made, 1, error(boom))
    trains(made)
    fails(made, 2, error(replace(boom, text="another")), rank=1)
    fails(made, 2, error(boom), rank=0)
    made.run_until(JobState.FAILED)
    reason = "FAILED: t.py:7: RuntimeError: boom; rank 0 (pod_0_0), not tried again: it has come "
    assert made.job.reason.startswith(reason + "twice at step 20; step ")
    assert len(records(made)) == 2


@pytest.mark.parametrize(
    "second",
    [
        error(raised("RuntimeError", text="boom"), step=21),
        error(raised("RuntimeError", text="boom at last")),
        error(raised("ValueError", text="boom")),
        error(replace(raised("RuntimeError", text="boom"), at="t.py:8")),
        error(raised("RuntimeError", text="boom"), raised("TimeoutError")),
        None,
    ],
)
def test_another_error_or_step_is_tried_again(second):
    made = trains(world())
    fails(made, 1, error(raised("RuntimeError", text="boom")))
    trains(made)
    fails(made, 2, second)
    trains(made)
    assert made.active.stage == 3


def test_an_error_in_trainers_prepared_for_a_change_costs_only_the_change():
    made = trains(world(overlap="on"))
    made.resize(3)
    made.round()
    assert made.preparing.stage == 2
    fails(made, 2, error(raised("SyntaxError"), step=None))
    trains(made)
    assert made.job.budget.failures == 0
    assert records(made)[1].outcome.startswith("abandoned: rank 0")


def test_a_change_that_fails_twice_the_same_way_does_not_end_the_job_that_trained_in_between():
    made = trains(world())
    broken = raised("ModuleNotFoundError", "ImportError", text="No module 'x'")
    for _ in range(2):
        made.resize(3)
        made.run_to(Order.START)
        pod_id, said = made.preparing.pod_ids[-1], error(broken, step=None)
        tell(made, pod_id, ReportKind.FAILED, made.preparing.stage, rank=2, code=1, error=said)
        made.rounds(4)
        trains(made)
    assert made.job.state is JobState.RUNNING
    assert made.job.budget.failures == 2


def test_an_error_before_the_loop_is_compared_only_where_no_step_was_made_since():
    odd = error(raised("ValueError", text="the list of files is empty"), step=None)
    made = trains(world())
    for stage in (1, 2, 3):
        fails(made, stage, odd)
        trains(made)
    assert made.active.stage == 4


def test_victims_and_requested_kills_are_no_faults():
    made = trains(world())
    boom = error(raised("RuntimeError", text="boom"))
    fails(made, 1, boom, peer_lost=True)
    assert made.active.over is not None
    assert made.active.over.faults == ()


def test_a_report_of_a_launcher_without_errors_is_read_and_one_with_goes_over_the_wire():
    said = error(raised("RuntimeError", text="boom"))
    report = PodReport(kind=ReportKind.FAILED, stage=1, error=said)
    assert decode(PodReport, encode(report)) == report
    old = encode(report)
    del old["error"]
    assert decode(PodReport, old).error is None
    with pytest.raises(WireError, match="chain: expected 1 to 100 errors, got 0"):
        TrainerError(chain=())
    with pytest.raises(WireError, match="types: expected the class"):
        RaisedError(types=())
    with pytest.raises(WireError, match="text: at most 4096"):
        RaisedError(types=("ValueError",), text="x" * 5000)


def test_of_a_long_text_the_remedy_is_shown_where_it_is_one_of_edls_own():
    long = "no. " * 200
    assert str(
        error(raised("pod_runtime.trainer.errors.UsageError", text=f"{long}Do it."))
    ).endswith("no. Do it.")
    assert len(str(error(raised("builtins.ValueError", text=long)))) < 400


def test_a_pod_that_ends_with_2_twice_is_not_started_a_third_time():
    made = world(pods=1)
    for _ in range(100):
        made.round()
        for sim in made.nodes["a"].pods.values():
            if sim.launcher is not None and not made.job.state.ended:
                sim.end(code=2)
    assert made.job.state is JobState.FAILED
    assert made.job.budget.failures == 2
    assert "exited with 2; pod pod_0_0_1, not tried again: it has come twice" in made.job.reason
