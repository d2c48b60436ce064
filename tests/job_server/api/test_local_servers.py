"""The list by which a user's commands find the job servers that run on this machine."""

import json
import os
import socket
from pathlib import Path

import pytest

from job_server.api import local_servers as local_servers_module
from job_server.api.local_servers import find_server, listed, local_servers
from tests.job_server.serving import ServerProcess, running_server
from tests.support import wait_until

URL = "http://127.0.0.1:8180"


@pytest.fixture
def environ(tmp_path):
    """Of a user who has logged in."""
    (tmp_path / "runtime").mkdir()
    return {"XDG_RUNTIME_DIR": str(tmp_path / "runtime"), "HOME": str(tmp_path / "home")}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_server_is_listed_while_it_lives_and_only_its_user_may_look(environ, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct-horse\n")
    with listed(URL, token_file=token, folder=tmp_path, environ=environ):
        (server,) = local_servers(environ)
        assert (server.url, server.token()) == (URL, "correct-horse")
        (path,) = files(tmp_path / "runtime")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert "correct-horse" not in path.read_text()
        assert find_server("http://localhost:8180", environ) == server
        assert find_server("http://127.0.0.1:8181", environ) is None
        assert find_server("http://[", environ) is None
    assert local_servers(environ) == []
    assert files(tmp_path / "runtime") == []


def test_without_a_runtime_folder_the_users_cache_has_the_list(environ, tmp_path):
    missing = {**environ, "XDG_RUNTIME_DIR": str(tmp_path / "logged_out")}
    with listed(URL, token_file=None, folder=tmp_path, environ=missing):
        assert files(tmp_path / "home" / ".cache" / "edl" / "servers")
        assert not (tmp_path / "logged_out").exists()
        # A shell of a later log-in has a runtime folder, and looks in both.
        assert [server.url for server in local_servers(environ)] == [URL]


def test_a_program_that_nobody_logged_in_for_finds_the_server_of_a_log_in(tmp_path, monkeypatch):
    runtime = tmp_path / "user" / str(os.geteuid())
    runtime.mkdir(parents=True)
    monkeypatch.setattr(local_servers_module, "_LOG_INS", tmp_path / "user")
    logged_in = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path / "home")}
    by_cron = {"HOME": str(tmp_path / "home")}  # or after `su -`
    with listed(URL, token_file=None, folder=tmp_path, environ=logged_in):
        assert [server.url for server in local_servers(by_cron)] == [URL]
    with listed(URL, token_file=None, folder=tmp_path, environ=by_cron):
        assert [server.url for server in local_servers(logged_in)] == [URL]


def test_a_service_that_is_told_of_no_home_has_the_list_where_its_users_commands_look(
    environ, tmp_path, monkeypatch
):
    monkeypatch.setattr(local_servers_module, "_LOG_INS", tmp_path / "no user")
    monkeypatch.setattr(local_servers_module, "_known_home", lambda: environ["HOME"])
    with listed(URL, token_file=None, folder=tmp_path, environ={}):
        assert [server.url for server in local_servers(environ)] == [URL]
        assert [server.url for server in local_servers({})] == [URL]


def test_a_list_that_others_may_write_is_not_believed(environ, tmp_path):
    with listed("http://127.0.0.1:1", token_file=None, folder=tmp_path, environ=environ):
        open_to_others = tmp_path / "runtime" / "edl" / "servers"
        open_to_others.chmod(0o777)
        assert local_servers(environ) == []
        with listed(URL, token_file=None, folder=tmp_path, environ=environ):
            assert [server.url for server in local_servers(environ)] == [URL]
            assert files(tmp_path / "home")


def test_a_server_that_no_list_takes_runs_all_the_same_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(local_servers_module, "_LOG_INS", tmp_path / "no user")
    monkeypatch.setattr(local_servers_module, "_known_home", lambda: None)
    (tmp_path / "home").write_text("not a folder")
    for environ in ({}, {"HOME": str(tmp_path / "home")}):
        caplog.clear()
        with listed(URL, token_file=None, folder=tmp_path, environ=environ):
            assert local_servers(environ) == []
        assert "finds this server only by --server" in caplog.text


def test_what_servers_of_other_machines_and_versions_wrote_is_left_alone(environ, tmp_path):
    folder = tmp_path / "runtime" / "edl" / "servers"
    with listed(URL, token_file=None, folder=tmp_path, environ=environ):
        elsewhere = folder / "elsewhere.json"
        elsewhere.write_text(json.dumps({"url": URL, "host": socket.gethostname() + "2"}))
        newer = folder / "newer.json"
        newer.write_text(json.dumps({"url": URL, "host": socket.gethostname(), "new": 1}))
        (folder / "torn.json").write_text("{")
        assert len(local_servers(environ)) == 1
        assert elsewhere.exists()
        assert not newer.exists(), "nobody holds its lock"


@pytest.mark.full
def test_a_killed_server_is_forgotten_and_its_successor_found(environ, tmp_path):
    flags = ("--no_job", "--bind", "127.0.0.1")
    server = ServerProcess(tmp_path, list(flags), env=environ)
    server.start()
    try:
        assert find_server(server.url, environ) is not None
        server.kill()
        assert local_servers(environ) == []
        assert files(tmp_path / "runtime") == []
        server.start()
        wait_until(lambda: find_server(server.url, environ) is not None)
    finally:
        server.stop()
    assert local_servers(environ) == []


@pytest.mark.full
def test_a_list_that_was_removed_is_made_again(environ, tmp_path):
    with running_server(tmp_path, "--no_job", **environ) as server:
        wait_until(lambda: find_server(server.url, environ) is not None)
        (path,) = files(tmp_path / "runtime")
        path.unlink()
        path.parent.rmdir()
        assert local_servers(environ) == []
        wait_until(lambda: find_server(server.url, environ) is not None, what="listed again")


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_list_of_another_user_is_not_believed(environ, tmp_path):
    with listed(URL, token_file=None, folder=tmp_path, environ=environ):
        os.chown(tmp_path / "runtime" / "edl" / "servers", 65534, 65534)
        assert local_servers(environ) == []
