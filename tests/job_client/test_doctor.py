"""What the doctor says of machines, good and bad; and of this one."""

import importlib.util
import json
from pathlib import Path

import pytest

from job_client import doctor
from job_client.devices.gpus import GpuSlots
from job_client.doctor import Severity
from tests.nvml.pynvml import Machine, healthy

GIB = doctor.GIB
OK, WARN, FAIL = Severity.OK, Severity.WARN, Severity.FAIL
WORKS = {"version": "3.3.1", "cuda": True, "cuda_version": "12.6", "gpus": 1, "product": 64.0**3}
MISSING = {"missing": "no module"}


@pytest.mark.parametrize(
    ("answer", "capabilities", "verdict", "text"),
    [
        ({"version": "3.3.1", "cuda": False, "product": 64.0**3}, [], OK, "on the CPU"),
        ({"version": "3.3.1", "cuda": False, "product": 64.0**3}, [(8, 0)], WARN, "CPU only"),
        (WORKS, [(9, 0)], OK, "computes on 1 GPUs"),
        ({**WORKS, "gpus": 0}, [(8, 0)], FAIL, "sees no GPU"),
        ({**WORKS, "product": 0.0}, [(8, 0)], FAIL, "wrong product"),
        ({"version": "2.6.2", "cuda": True, "error": "x\nno kernel image"}, [(10, 0)], FAIL,
         "may not run on this card's compute capability 10.0"),
        ({"error": "it ended with code -11: no output"}, [], FAIL, "code -11"),
    ],
)  # fmt: skip
def test_what_is_said_of_paddle(answer, capabilities, verdict, text):
    (finding,) = doctor.judge_frameworks({"Paddle": answer, "PyTorch": MISSING}, capabilities)
    assert finding.what == "Paddle"
    assert finding.verdict is verdict
    assert text in f"{finding.found} {finding.remedy}"


TORCH = {"version": "2.13.0", "cuda": False, "product": 64.0**3}


@pytest.mark.parametrize(
    ("answer", "capabilities", "verdict", "text"),
    [
        (TORCH, [], OK, "2.13.0, on the CPU"),
        (TORCH, [(9, 0)], WARN, f"for CPU only, though there are GPUs {doctor.TORCH_INSTALL_PAGE}"),
        ({"version": "2.13.0", "error": "x"}, [(9, 0)], FAIL, "2.13.0 does not compute: x"),
    ],
)
def test_pytorch_alone_is_enough_and_judged_by_itself(answer, capabilities, verdict, text):
    (finding,) = doctor.judge_frameworks({"Paddle": MISSING, "PyTorch": answer}, capabilities)
    assert finding.what == "PyTorch"
    assert finding.verdict is verdict
    said = f"{finding.found} {finding.remedy}".replace("install the build for your CUDA from ", "")
    assert text in said


def test_both_frameworks_are_judged_where_both_are():
    found = doctor.judge_frameworks({"Paddle": WORKS, "PyTorch": TORCH}, [])
    assert [(each.what, each.verdict) for each in found] == [("Paddle", OK), ("PyTorch", OK)]


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [([], "pip install 'edl[paddle]' or 'edl[torch]'"), ([(8, 0)], doctor.TORCH_INSTALL_PAGE)],
)
def test_without_any_framework_it_says_how_to_get_one(capabilities, text):
    answers = {"Paddle": MISSING, "PyTorch": MISSING}
    (finding,) = doctor.judge_frameworks(answers, capabilities)
    assert (finding.what, finding.verdict) == ("framework", FAIL)
    assert text in finding.remedy


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (doctor.judge_python((3, 10, 9)), FAIL),
        (doctor.judge_python((3, 11, 0)), OK),
        (doctor.judge_shared_memory(None, 0), FAIL),
        (doctor.judge_shared_memory(64 << 20, 64 << 20), WARN),
        (doctor.judge_shared_memory(8 * GIB, 8 * GIB), OK),
        (doctor.judge_disk(Path("/x"), 100 << 20, 100 * GIB), FAIL),
        (doctor.judge_disk(Path("/x"), 5 * GIB, 100 * GIB), WARN),
        (doctor.judge_disk(Path("/x"), 50 * GIB, 100 * GIB), OK),
        (doctor.judge_ports((20000, 21999), (32768, 60999), []), OK),
        (doctor.judge_ports((20000, 21999), (32768, 60999), [20001]), WARN),
        (doctor.judge_ports((20000, 20009), (32768, 60999), list(range(20000, 20009))), FAIL),
        (doctor.judge_ports((40000, 41999), (32768, 60999), []), WARN),
        (doctor.judge_file_limit(256, 4096), FAIL),
        (doctor.judge_file_limit(1024, 4096), WARN),
        (doctor.judge_file_limit(65536, 65536), OK),
        (doctor.judge_memory(4 * GIB, GIB // 2, 2), FAIL),
        (doctor.judge_memory(64 * GIB, 4 * GIB, 64), WARN),
        (doctor.judge_memory(64 * GIB, 60 * GIB, 8), OK),
    ],
)
def test_what_is_said_of_the_machine(finding, verdict):
    assert finding.verdict is verdict
    assert bool(finding.remedy) == (verdict is not OK)


def test_a_folder_that_cannot_be_looked_at_is_told(tmp_path):
    (finding,) = doctor.look_at_disk(tmp_path / (300 * "x"))
    assert (finding.verdict, finding.found) == (FAIL, "File name too long")


def test_in_a_container_the_memory_is_what_its_group_has_left(tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "self" / "mountinfo").write_text(
        f"30 22 0:26 / {tmp_path} ro - cgroup2 cgroup2 rw\n"
    )
    (finding,) = doctor.look_at_memory(tmp_path)
    assert finding.found.startswith("64.0 GiB, 60.0 available")

    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB + GIB // 2}\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (finding,) = doctor.look_at_memory(tmp_path)
    assert finding.verdict is FAIL
    assert finding.found == "2.0 GiB, 0.5 available, 1 cores"


def test_a_gpu_in_use_is_shown_with_who_is_on_it():
    import os

    gpus = GpuSlots(
        Machine(healthy(0, pids=(os.getpid(),)), healthy(1)), None, lambda _pid: False, True
    )
    driver, first, second = doctor.look_at_gpus(gpus)
    assert driver.found == "570.1"
    assert first.verdict is WARN
    assert f"pid {os.getpid()}" in first.found
    assert second.verdict is OK


def test_this_machine_is_examined_without_a_crash(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "ask_frameworks", lambda: {"PyTorch": TORCH})
    code = doctor.main(["--json", "--log_dir", str(tmp_path / "a" / "b")])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == int(any(each["verdict"] == "fail" for each in findings))
    assert {"Python", "memory", "/dev/shm", "trainers' ports"} <= {f["what"] for f in findings}


def test_the_exit_code_is_1_when_something_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "ask_frameworks", lambda: {"Paddle": MISSING})
    assert doctor.main(["--log_dir", str(tmp_path)]) == 1
    assert "fail  framework" in capsys.readouterr().out


def test_a_wrong_port_range_is_a_wrong_command_line(capsys):
    assert doctor.main(["--port_range", "many"]) == 2
    assert "--port_range" in capsys.readouterr().err


@pytest.mark.full
def test_each_framework_is_asked_in_a_process_of_its_own():
    answers = doctor.ask_frameworks()
    assert set(answers) == {"Paddle", "PyTorch"}
    for name, module in (("Paddle", "paddle"), ("PyTorch", "torch")):
        if importlib.util.find_spec(module) is None:
            assert "missing" in answers[name]
        elif answers[name].get("gpus") != 0:  # else it is for CUDA, and this machine has no GPU
            assert answers[name]["product"] == 64.0**3
