"""The original launcher's flags: what is passed on, what has no effect, what is refused."""

import pytest

from paddle_edl.collective import launch

POD = {"PADDLE_JOBSERVER": "http://127.0.0.1:1"}


@pytest.fixture
def passed_on(monkeypatch) -> list[list[str]]:
    """Command lines that `pod_runtime.launch` got."""
    calls: list[list[str]] = []

    def record(argv: list[str], _environ: object) -> int:
        calls.append(argv)
        return 0

    monkeypatch.setattr(launch, "launch", record)
    return calls


def test_what_the_originals_experiment_passed_reaches_our_launcher(passed_on):
    script = ["./train_with_fleet.py", "--model=ResNet50", "--log_dir", "the script's own"]
    assert launch.main(["--log_dir", "log", "--log_level", "10", *script], POD) == 0
    assert passed_on == [["--log_dir", "log", "--log_level", "10", *script]]


def test_the_options_are_printed_unless_told_otherwise(passed_on, capsys):
    launch.main(["train.py"], POD)
    assert "launch: log_level: 20" in capsys.readouterr().err
    launch.main(["--print_config", "False", "train.py"], POD)
    assert capsys.readouterr().err == ""


SAID_ELSEWHERE = [
    pytest.param(["--cluster_node_ips", "10.0.0.1,10.0.0.2"], id="nodes"),
    pytest.param(["--node_ip", "10.0.0.1"], id="this node"),
    pytest.param(["--started_port", "6170"], id="ports"),
    pytest.param(["--selected_gpus", "0,1"], id="GPUs"),
    pytest.param(["--use_paddlecloud"], id="PaddleCloud"),
]


@pytest.mark.parametrize("flag", SAID_ELSEWHERE)
def test_what_the_job_server_says_has_no_effect_in_a_pod_and_is_named(passed_on, capsys, flag):
    assert launch.main([*flag, "train.py"], POD) == 0
    assert f"{flag[0]}: without effect: the job server says" in capsys.readouterr().err
    assert passed_on == [["--log_dir", "log", "--log_level", "20", "train.py"]]


@pytest.mark.parametrize("flag", SAID_ELSEWHERE)
def test_outside_of_a_pod_it_is_refused_with_the_remedy(passed_on, capsys, flag):
    assert launch.main([*flag, "train.py"], {}) == 2
    assert f"{flag[0]}: outside of a pod" in capsys.readouterr().err
    assert passed_on == []


def test_where_checkpoints_are_is_the_scripts_own_argument(passed_on, capsys):
    launch.main(["--hdfs_name", "hdfs://h:1", "--hdfs_path", "/c", "train.py"], POD)
    said = capsys.readouterr().err
    assert "--hdfs_name: without effect" in said
    assert "--hdfs_path: without effect" in said
    assert "--hdfs_ugi: without" not in said
