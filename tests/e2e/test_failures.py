"""Each rule about failures, each fault of a GPU, and starts that do not end: in real processes.

The trainers are toys, which start in no time; all else is as users have it.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from job_server.api.failure_policy import default_policy
from job_server.api.wire import JobState
from tests.e2e.folders import Folders
from tests.nvml.pynvml import healthy
from tests.support import wait_until

FAULTS: dict[str, dict[str, Any]] = {  # as the rules name them, and as the driver shows them
    "gpu_lost": {"lost": True},
    "ecc_uncorrected": {"set": {"ecc_uncorrected": 3}},
    "rows_remap_failed": {"set": {"rows": [0, 1, 0, 1]}},
    "recovery_reset": {"set": {"recovery": 1}},
    "recovery_reboot": {"set": {"recovery": 2}},
    "recovery_drain_reset": {"set": {"recovery": 4}},
    "nvml_hangs": {"hangs": True},
}
HARMLESS: dict[str, dict[str, Any]] = {
    "xid_31": {"xid": 31},
    "rows_remap_pending": {"set": {"rows": [0, 1, 1, 0]}},
    "pages_pending": {"set": {"rows": None, "pages": [1, 0, 1]}},
}


def test_each_fault_of_a_gpu_is_told_by_its_client_and_judged_by_the_server(tmp_path: Path) -> None:
    grave = {name for rule in default_policy() if "gpu_lost" in rule.event for name in rule.event}
    xids = {name: {"xid": int(name[4:])} for name in sorted(grave) if name.startswith("xid_")}
    assert grave - xids.keys() - FAULTS.keys() == {"recovery_*"}
    # The one that never answers keeps the client from reading the others: it is the last.
    table = {**HARMLESS, **xids, **FAULTS}
    begin, hang = tmp_path / "begin", tmp_path / "hang"
    faults = [
        {"gpu": gpu, "when": str(hang if "hangs" in fault else begin), **fault}
        for gpu, fault in enumerate(table.values())
    ]
    nvml = {"gpus": [healthy(gpu) for gpu in range(len(table))], "faults": faults}
    cluster = Folders(tmp_path / "c", nvml=nvml)
    try:
        cluster.start_server()
        cluster.start_client()
        wait_until(cluster._healthy, what="the server answers")
        wait_until(lambda: cluster.api().nodes(), what="the node is there")

        def in_quarantine() -> dict[int, str]:
            (node,) = cluster.api().nodes()
            return {each.slot: each.name for each in node.quarantines}

        def told() -> set[str]:
            slots = cluster.api().nodes()[0].report.get("slots", ())
            return {fault["name"] for slot in slots for fault in slot["faults"]}

        assert in_quarantine() == {}
        begin.touch()
        expected = {gpu: name for gpu, name in enumerate(table) if name not in HARMLESS}
        hangs = expected.popitem()
        wait_until(lambda: in_quarantine() == expected, 120, "all are in quarantine")
        assert told() >= HARMLESS.keys()
        (node,) = cluster.api().nodes()
        assert {each.index for each in node.node.slots if each.usable} == {0, 1, 2, hangs[0]}
        hang.touch()
        wait_until(lambda: in_quarantine() == {**expected, hangs[0]: hangs[1]}, 120, "it hangs")
    finally:
        hang.unlink(missing_ok=True)
        cluster.stop()


# A toy does these one after the other, each after some steps; what the server says of each.
RESTARTS = (
    ("raise RuntimeError('CUDA out of memory. Tried to allocate')", "CUDA out of memory"),
    (
        "raise type('OutOfMemoryError', (RuntimeError,), {'__module__': 'torch'})('it is full')",
        "(CUDA out of memory): ",
    ),
    ("raise RuntimeError('uncorrectable ECC error')", "(ECC error of the GPU): "),
    ("raise RuntimeError('NCCL operation has timed out')", "(NCCL timeout): "),
    ("raise OSError(28, 'No space left on device')", "No space left on device"),
    ("raise FileNotFoundError(2, 'No such file', '/data')", "FileNotFoundError: "),
    ("raise OSError(22, 'Invalid argument')", "Invalid argument"),
    ("import no_such_module", "ModuleNotFoundError: "),  # by exec: made of data
    ("raise type('ReadTimeout', (Exception,), {})('late')", "ReadTimeout: late"),
    ("raise RuntimeError('the socket was closed')", "the socket was closed"),
    ("raise ValueError('odd')", "ValueError: odd"),
    (
        "print('can\\'t open file \\'/x\\': [Errno 5]', file=sys.stderr); sys.stderr.flush(); "
        "os._exit(2)",
        "(its script cannot be read now)",
    ),
    ("os._exit(3)", "exited with 3"),
    ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
)


def test_what_may_pass_is_tried_again_and_named(folders: Folders) -> None:
    script = folders.folder / "script"
    script.write_text("".join(f"{line}\n" for line, _ in RESTARTS))
    folders.write("passes", f"{{toy}} --snapshot --script {script}")
    folders.add("passes", max_restarts_without_progress=100, max_failures=None)
    status = folders.wait_state("passes", JobState.SUCCEEDED, JobState.FAILED)
    assert status.state is JobState.SUCCEEDED, status.reason
    said = [text for text in folders.said("passes") if " is over: rank 0 (pod_" in text]
    assert len(said) == status.failures == len(RESTARTS), said
    for text, (line, words) in zip(said, RESTARTS, strict=True):
        assert words in text, (line, text)


ENDS = {  # name: (what its pods run, its Python script, what its reason says, its stages)
    "asks": ("{fail}", "raise SystemExit(78)", "it asks not to be started again", 1),
    "wrong_arguments": ("{fail}", "raise SystemExit(2)", "wrong arguments", 1),
    "import": ("{fail}", "import no_such_module", "No module named 'no_such_module'", 1),
    "file": ("{fail}", "open('/no/such/file')", "it has come twice", 2),
    "errno": ("{fail}", "raise OSError(22, 'odd')", "it has come twice", 2),
    "pod_asks": ("exit 78", "", "it asks not to be started again", 1),
    "pod_arguments": ("exit 2", "", "it has come twice", 2),
    "pod_143": ("exit 143", "", "preempted more than 0 times (max_preemptions)", 1),
    "pod_sigterm": ("kill -TERM $$", "", "preempted more than 0 times (max_preemptions)", 1),
}


def test_what_cannot_pass_ends_the_job_with_its_reason(folders: Folders) -> None:
    for name, (line, script, _, _) in ENDS.items():
        folders.write(name, line, script)
        folders.add(name, max_preemptions=0)
    for name, (_, _, words, stages) in ENDS.items():
        status = folders.wait_state(name, JobState.FAILED, JobState.SUCCEEDED)
        assert status.state is JobState.FAILED
        assert words in status.reason, name
        assert len(status.stages) == stages, (name, status.reason)


@pytest.mark.heavy
def test_5_6_starts_that_do_not_end_are_called_off_and_tried_again(folders: Folders) -> None:
    """Of docs/supervision.md: trainers that start for ever, and package scripts that do not end."""
    go, again = folders.folder / "go", folders.folder / "again"
    again.touch()
    only_first = f'until [ "$2" = pod_0_0 ] || [ -e {go} ]; do sleep 0.1; done'
    folders.write("first", f"{{toy}} --start_when {go}")
    folders.write("start", f"{{toy}} --start_when {again}")
    folders.write("trainer", f"[ $EDL_POD_ID = pod_0_0 ] || set -- --start_when {go}; {{toy}} $@")
    folders.write("package", "{toy}", package=f"{only_first}; mkdir -p $EDL_POD_FOLDER")
    folders.add("first")
    folders.add("start", prepare_timeout_s=2, max_restarts_without_progress=100)
    for name in ("trainer", "package"):
        folders.add(name, pods=1, max_pods=2, prepare_timeout_s=6)
    for name in ("start", "trainer", "package"):
        folders.wait_step(name)
    again.unlink()
    folders.api().kill("start", rank=0)
    for name in ("trainer", "package"):
        folders.api().resize(name, 2)
    for name in ("trainer", "package"):
        said = folders.wait_said(name, "abandoned: not ready within 6 s: ")
        assert "pod_1_0" in said
        status = folders.of(name)
        assert (status.stage, status.failures) == (1, 0)
        wait_until(functools.partial(folders.has_pods, name, 1), 120, "the pod is released")
        folders.wait_step(name, status.step)
    wait_until(lambda: not folders.find("package.sh"), what="its script is ended")
    folders.wait_said("start", "not loaded within 10 s: pod_0_0")
    again.touch()
    folders.wait_step("start", folders.of("start").step)
    # Of a first start nobody knows yet whether the script has the loop: it is said.
    folders.wait_said("first", "warning: no trainer has called the elastic loop")
    go.touch()
    folders.wait_step("first")
