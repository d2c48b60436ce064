"""compose.yaml: valid by compose's own schema, and each command one that our programs take."""

import functools
import importlib.resources
import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from distill_reader import discovery, serve
from job_client.__main__ import parse_args
from job_server.server.config import read_config
from tests.docker.compose import DOCKER, Service, services, variables
from tests.support import ROOT

SCRIPT = ROOT / "scripts" / "docker_resnet50.sh"


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_it_is_valid_by_the_schema_of_the_compose_specification(file: str):
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("check_jsonschema", reason="has the schema: pip install check-jsonschema")
    vendored = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((vendored / "compose-spec.json").read_text())
    document = yaml.safe_load((DOCKER / file).read_text())
    jsonschema.validate(document, schema)


def test_what_it_builds_from_is_there():
    for service in services({}).values():
        if "build" in service.settings:
            context = DOCKER / service.settings["build"]["context"]
            assert context.resolve() == ROOT
            assert (context / service.settings["build"]["dockerfile"]).exists()


def test_arguments_of_the_build_are_those_of_the_dockerfile():
    arguments = services({})["node1"].settings["build"]["args"]
    for name, value in arguments.items():
        assert f"ARG {name}={value}\n" in dockerfile().replace('"', "")


def dockerfile() -> str:
    return (DOCKER / "Dockerfile").read_text()


def test_every_variable_is_explained():
    known = (DOCKER / "README.md").read_text() + SCRIPT.read_text()
    explained = {name for name in all_variables() if name in known}
    assert all_variables() == explained


def all_variables() -> set[str]:
    return variables() | variables("compose.gpu.yaml")


def test_what_listens_beyond_the_host_has_the_token_and_every_port_is_the_hosts_own():
    for service in services({}).values():
        if "--bind" in service.command or "--server" in service.command:
            assert service.environment["EDL_TOKEN_FILE"] in service.mounts
        for port in service.settings.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_no_container_has_more_rights_than_it_needs():
    for service in services({}).values():
        assert service.settings["init"] is True
        assert service.settings["cap_drop"] == ["ALL"]
        assert service.settings["user"] == "10001:10001"


def test_nodes_share_what_is_mounted_by_choice_and_nothing_else():
    given = services({"PADDLE_EDL_FLEET_CHECKPOINT_PATH": "/ckpt", "EDL_DATA_DIR": "/d"})
    node1, node2 = given["node1"], given["node2"]
    assert node1.mounts["/checkpoint"] == "/ckpt"
    assert (node1.mounts["/state"], node2.mounts["/state"]) == ("/d/node1", "/d/node2")


def test_imagenet_is_mounted_where_the_nodes_are_told_that_it_is():
    without = services({})["node1"]
    assert without.environment["PADDLE_EDL_IMAGENET_PATH"] == ""
    given = services({"PADDLE_EDL_IMAGENET_PATH": "/data/in"})["node1"]
    assert given.mounts[given.environment["PADDLE_EDL_IMAGENET_PATH"]] == "/data/in"


# --- the commands, by the real entry point and the real parsers


def command_line(service: Service, folder: Path) -> list[str]:
    """Return what the entry point runs for a service, without the Python before it."""
    echo = folder / "python"
    echo.write_text("#!/bin/bash\nprintf '%q ' \"$@\"\n")
    echo.chmod(0o755)
    token = folder / "token"
    token.write_text("correct-horse")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "EDL_"))}
    ours |= {"EDL_PYTHON": str(echo), "EDL_STATE_DIR": str(folder / "state"), "EDL_NO_GPU": "1"}
    ours |= {"EDL_TOKEN_FILE": str(token)}
    theirs = {k: v for k, v in service.environment.items() if k != "EDL_TOKEN_FILE"}
    done = subprocess.run(
        [DOCKER / "entry.sh", *service.command],
        env=ours | theirs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_the_server_gets_a_command_line_that_it_takes(tmp_path: Path):
    module, name, *args = command_line(services({})["job-server"], tmp_path)
    assert (module, name) == ("-m", "job_server")
    config = read_config(args, {"EDL_TOKEN": "correct-horse"})
    assert config.bind == "0.0.0.0"
    assert config.job is not None
    assert config.job.job_id == services({})["node1"].environment["PADDLE_JOB_ID"]
    assert config.job.max_pods == 4, "two nodes with two slots, one pod for each"


@pytest.mark.parametrize("node", ["node1", "node2"])
@pytest.mark.parametrize("arguments", ["", "--num_epochs 2 --lr 0.1"], ids=repr)
def test_a_node_gets_a_command_line_that_it_takes(tmp_path: Path, node: str, arguments: str):
    service = services({"EDL_RESNET50_ARGS": arguments})[node]
    _module, name, *args = command_line(service, tmp_path)
    assert name == "job_client"
    config = parse_args(args, service.environment | {"EDL_TOKEN_FILE": ""}, tmp_path)
    assert config.node_id == node
    assert config.server_url == "http://job-server:8180"
    assert config.script == "./train_pretrain.sh"
    assert " ".join(config.script_args) == arguments


def test_teacher_and_discovery_get_command_lines_that_lead_to_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = services({"EDL_TEACHER_SERVICE": "resnext"})
    for name in ("teacher", "discovery"):
        (tmp_path / name).mkdir()
    _m, name, *args = command_line(given["teacher"], tmp_path / "teacher")
    assert name == "distill_reader.serve"
    teacher = serve.parser().parse_args(args)
    assert teacher.service_name == "resnext"
    assert "/model" in given["teacher"].mounts

    _m, name, *args = command_line(given["discovery"], tmp_path / "discovery")
    assert name == "distill_reader.discovery"
    password = tmp_path / "password"
    password.write_text("pw")
    args = [arg.replace("/run/secrets/edl_token", str(password)) for arg in args]
    monkeypatch.setenv("EDL_TOKEN", "correct-horse")
    config = discovery.parse_config(discovery.parser().parse_args(args))
    assert teacher.register == f"discovery:{config.port}"
    assert teacher.advertise == "teacher", "a name that the students' containers know"
    assert given["discovery"].settings["ports"] == [f"127.0.0.1:7001:{config.port}"]
    assert "redis:6379" in str(config.redis[0])


def test_paths_of_the_image_in_commands_are_there():
    for service in services({}).values():
        for word in service.command:
            if word.startswith("/opt/edl/"):
                assert (ROOT / word.removeprefix("/opt/edl/")).exists(), word


# --- the script


@pytest.fixture
def docker(tmp_path: Path):
    """Run the script with a docker that notes its calls, and says `no` to the first word of $NO."""
    fake = tmp_path / "bin" / "docker"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/bash\necho "$*" >>"$CALLS"\nenv >"$CALLS.env"\n'
        'case "$*" in "${NO:-nothing}"*) exit 1 ;; esac\n'
    )
    fake.chmod(0o755)
    return functools.partial(_run_script, tmp_path)


def _run_script(
    folder: Path, *args: str, **env: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PADDLE_", "EDL_"))}
    ours |= {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "EDL_DATA_DIR": str(folder / "data"),
        "EDL_TOKEN_FILE": str(folder / "secrets" / "token"),
    }
    done = subprocess.run(
        ["bash", SCRIPT, *args], env=ours | env, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_up_makes_token_and_folders_and_starts_the_experiment(docker, tmp_path: Path):
    done, calls = docker()
    assert done.returncode == 0, done.stderr
    assert f"compose --file {DOCKER}/compose.yaml --profile resnet50 up --detach" in calls
    assert "It runs." in done.stderr
    token = tmp_path / "secrets" / "token"
    assert len(token.read_text()) == 48
    assert token.stat().st_mode & 0o777 == 0o600
    made = token.read_text()
    assert {each.name for each in (tmp_path / "data").iterdir()} == {
        "job-server", "node1", "node2", "mnist", "teacher", "discovery", "empty", "checkpoint",
    }  # fmt: skip
    docker("up")
    assert token.read_text() == made


def test_a_job_that_has_ended_is_not_said_to_run(docker, tmp_path: Path):
    program = tmp_path / "bin" / "docker"
    program.write_text(
        program.read_text()
        + 'case "$*" in *"edl status"*) echo \'{"state": "SUCCEEDED"}\' ;; esac\n'
    )
    done, _calls = docker()
    assert "It runs" not in done.stderr
    assert f"To begin afresh: {SCRIPT} stop, then remove {tmp_path}/data" in done.stderr


def test_teachers_start_with_a_model_that_is_there(docker, tmp_path: Path):
    done, calls = docker("--profile", "teachers")
    assert done.returncode == 2
    assert f"no folder {tmp_path}/data/mnist/mnist_distill/mnist_cnn_model" in done.stderr
    assert not [call for call in calls if "--detach" in call]

    (tmp_path / "model").mkdir()
    done, calls = docker("up", "--profile=teachers", EDL_TEACHER_MODEL="model")
    assert done.returncode == 0, done.stderr
    assert calls[-1].endswith("--profile teachers up --detach")
    assert f"EDL_TEACHER_MODEL={tmp_path}/model" in (tmp_path / "calls.env").read_text()


def test_compose_is_run_for_the_stack_with_what_it_is_given(docker):
    done, calls = docker("--profile", "mnist", "compose", "run", "--rm", "mnist", "ls", "a b")
    assert done.returncode == 0, done.stderr
    assert calls[-1].endswith("--profile mnist run --rm mnist ls a b")


def test_who_waits_for_whom_ends_at_one_that_waits_for_nobody():
    given = services({})
    for name in given:
        seen: list[str] = []
        while (wanted := given[name].settings.get("depends_on", {})) and name not in seen:
            seen.append(name)
            ((name, how),) = wanted.items()
            assert how == {"condition": "service_healthy"}
    assert given["teacher"].settings["depends_on"].keys() == {"discovery"}


def test_what_has_no_end_comes_back_after_a_crash():
    restarts = {name: service.settings["restart"] for name, service in services({}).items()}
    assert restarts.pop("mnist") == "no"
    assert set(restarts.values()) == {"unless-stopped"}


def test_folders_that_are_mounted_follow_the_one_that_the_user_names():
    for service in services({"EDL_DATA_DIR": "/d"}).values():
        for inside, outside in service.mounts.items():
            assert outside.startswith("/d/") or inside.startswith("/run/secrets/")


def test_relative_paths_are_those_of_the_caller(docker, tmp_path: Path):
    (tmp_path / "images").mkdir()
    done, _calls = docker(
        "config", PADDLE_EDL_IMAGENET_PATH="images", PADDLE_EDL_FLEET_CHECKPOINT_PATH="ckpt"
    )
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "calls.env").read_text().splitlines()
    assert f"PADDLE_EDL_IMAGENET_PATH={tmp_path}/images" in seen
    assert f"PADDLE_EDL_FLEET_CHECKPOINT_PATH={tmp_path}/ckpt" in seen


@pytest.mark.parametrize(
    ("args", "env", "code", "text"),
    [
        pytest.param(["up"], {"NO": "compose version"}, 1, "no compose plugin", id="no compose"),
        pytest.param(["up"], {"NO": "info"}, 1, "does not reach its engine", id="no engine"),
        pytest.param(["fly"], {}, 2, "unknown argument 'fly'", id="no such command"),
        pytest.param(["--profile"], {}, 2, "resnet50, mnist or teachers, got ''", id="no profile"),
        pytest.param(["--profile", "x"], {}, 2, "or teachers, got 'x'", id="no such profile"),
        pytest.param(["up", "compose", "ps"], {}, 2, "one command at a", id="two, by compose"),
        pytest.param(["up", "logs"], {}, 2, "one command at a time", id="two commands"),
        pytest.param(
            [], {"PADDLE_EDL_IMAGENET_PATH": "/no/such"}, 2, "no folder /no/such", id="no data"
        ),
        pytest.param(
            [], {"PADDLE_EDL_FLEET_CHECKPOINT_PATH": "s3://b/c"}, 2, "s3://b/c is a URL", id="a URL"
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(docker, args, env, code, text):
    done, calls = docker(*args, **env)
    assert done.returncode == code
    assert text in done.stderr
    assert not [call for call in calls if "--detach" in call]


def test_without_docker_it_says_what_to_do(tmp_path: Path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(Path("/usr/bin") / name)
    done = subprocess.run(
        ["/usr/bin/bash", SCRIPT], env={"PATH": str(tools)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No docker here" in done.stderr


def test_gpus_are_given_by_a_second_file(docker):
    _done, calls = docker("--gpu", "config")
    assert f"--file {DOCKER}/compose.gpu.yaml" in calls[-1]
