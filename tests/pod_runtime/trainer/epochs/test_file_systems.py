"""File systems: whatever speaks like one of Paddle's, and Hadoop's over HTTP, on a real socket."""

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from pod_runtime import HDFSClient, LocalFS
from pod_runtime.trainer.epochs.client_storage import Retry
from pod_runtime.trainer.epochs.epoch_store import EpochStore
from pod_runtime.trainer.epochs.file_systems import storage_for
from pod_runtime.trainer.errors import CheckpointError, UsageError
from pod_runtime.trainer.state.storage import LocalStorage, Storage
from tests.pod_runtime.trainer.states import make_host_state


class Client2:
    """An HDFSClient as Paddle 2 has it; "remote" is a folder, errors are its own."""

    class BrokenError(Exception):
        pass

    def __init__(self, root: Path) -> None:
        self.root = root
        self.broken = False

    def at(self, path: str) -> Path:
        if self.broken:
            raise Client2.BrokenError("name node is in safe mode")
        return self.root / path.lstrip("/")

    def is_exist(self, path):
        return self.at(path).exists()

    def is_dir(self, path):
        return self.at(path).is_dir()

    def ls_dir(self, path):
        names = list(self.at(path).iterdir())
        return [p.name for p in names if p.is_dir()], [p.name for p in names if p.is_file()]

    def mkdirs(self, path):
        self.at(path).mkdir(parents=True)

    def delete(self, path):
        target = self.at(path)
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    def upload(self, local_path, path):
        if self.at(path).exists():
            raise Client2.BrokenError("put: File exists")
        shutil.copy(local_path, self.at(path))

    def download(self, path, local_path):
        shutil.copy(self.at(path), local_path)

    def mv(self, source, target, overwrite=False):
        self.at(source).rename(self.at(target))

    def need_upload_download(self):
        return True


class Client18(Client2):
    """As Paddle 1.8 has it: one list of paths, and rename instead of mv."""

    mv = None  # type: ignore[assignment]

    def ls_dir(self, path):
        return [f"{path}/{entry.name}" for entry in self.at(path).iterdir()]

    def rename(self, source, target):
        self.at(source).rename(self.at(target))


class WebHdfs(BaseHTTPRequestHandler):
    """As much of WebHDFS as a name node and a data node in one need for checkpoints."""

    root: Path
    refusals: int = 0  # so many requests are answered with an error first
    users: set[str]

    def do_GET(self) -> None:
        op, path, query = self.parsed()
        if op == "REFUSED":
            self.fail("StandbyException", 403)
        elif not path.exists():
            self.fail("FileNotFoundException", 404)
        elif op == "GETFILESTATUS":
            self.answer({"FileStatus": self.status(path)})
        elif op == "LISTSTATUS":
            entries = sorted(path.iterdir()) if path.is_dir() else [path]
            statuses = [self.status(each) | {"pathSuffix": each.name} for each in entries]
            self.answer({"FileStatuses": {"FileStatus": statuses}})
        else:
            start = int(query.get("offset", ["0"])[0])
            length = int(query.get("length", [str(path.stat().st_size)])[0])
            self.reply(200, path.read_bytes()[start : start + length])

    def do_PUT(self) -> None:
        op, path, query = self.parsed()
        if op == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self.answer({"boolean": True})
        elif op == "RENAME":
            path.rename(self.root / query["destination"][0].lstrip("/"))
            self.answer({"boolean": True})
        elif "data" not in query:
            self.reply(307, b"", Location=f"http://{self.headers['Host']}{self.path}&data=1")
        else:
            path.write_bytes(self.body)
            self.reply(201, b"")

    def do_POST(self) -> None:
        _op, path, query = self.parsed()
        if "data" not in query:
            self.reply(307, b"", Location=f"http://{self.headers['Host']}{self.path}&data=1")
            return
        with path.open("ab") as file:
            file.write(self.body)
        self.reply(200, b"")

    def do_DELETE(self) -> None:
        _op, path, _query = self.parsed()
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        self.answer({"boolean": True})

    def parsed(self) -> tuple[str, Path, dict[str, list[str]]]:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        type(self).users.update(query.get("user.name", []))
        if type(self).refusals > 0:
            type(self).refusals -= 1
            query["op"] = ["REFUSED"]
        path = self.root / parts.path.removeprefix("/webhdfs/v1").lstrip("/")
        return query["op"][0], path, query

    def status(self, path: Path) -> dict[str, object]:
        kind = "DIRECTORY" if path.is_dir() else "FILE"
        return {"type": kind, "length": path.stat().st_size, "pathSuffix": ""}

    def fail(self, kind: str, code: int) -> None:
        text = json.dumps({"RemoteException": {"exception": kind, "message": f"{kind}: no"}})
        self.reply(code, text.encode())

    def answer(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode())

    def reply(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Node:
    """A running WebHDFS."""

    def __init__(self, root: Path) -> None:
        self.handler: Any = type(
            "Handler", (WebHdfs,), {"root": root, "refusals": 0, "users": set()}
        )
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.name = f"webhdfs://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    root = tmp_path / "hdfs"
    root.mkdir()
    node = Node(root)
    yield node
    node.close()


@pytest.fixture(params=["paddle 2", "paddle 1.8", "webhdfs"])
def storage(request, tmp_path: Path) -> Storage:
    if request.param == "webhdfs":
        client = HDFSClient(request.getfixturevalue("node").name, "me,secret", 2000, 10)
        return storage_for("/user/me/ckpt", client)
    kind = Client2 if request.param == "paddle 2" else Client18
    return storage_for("/user/me/ckpt", kind(tmp_path / "remote"))


def save(store: EpochStore, epoch: int, stage: int = 1) -> None:
    host_state = make_host_state(fill=float(epoch))
    status = {"epoch": epoch}
    store.write(
        stage=stage,
        epoch=epoch,
        step=0,
        layout=host_state.layout,
        data=host_state.data,
        status=status,
        keep=2,
    )


def newest(store: EpochStore) -> int | None:
    found = store.load_newest()
    if found is None:
        return None
    epoch: int = found.status["epoch"]
    assert bytes(found.data) == bytes(make_host_state(fill=float(epoch)).data)
    return epoch


def test_checkpoints_are_written_read_and_cleaned_up(storage):
    store = EpochStore(storage)
    assert newest(store) is None
    for epoch in range(4):
        save(store, epoch)
    assert newest(store) == 3
    assert [place.epoch for place in store.found()] == [2, 3]
    storage.remove(f"{store.found()[-1].folder}/manifest.json")
    assert newest(store) == 2
    assert store.highest_stage() == 1


def test_a_manifest_appears_whole_and_may_be_written_again(storage):
    storage.commit("a/b", b"one")
    storage.commit("a/b", b"two")
    assert storage.read("a/b") == b"two"
    assert storage.files("a") == ["b"]
    with pytest.raises(FileNotFoundError):
        storage.read("a/c")


def test_errors_of_a_client_are_told_with_what_was_tried(tmp_path):
    client = Client2(tmp_path)
    client.broken = True
    with pytest.raises(OSError, match=r"Client2:/x: is_exist .*name node is in safe mode"):
        storage_for("/x", client).folders("")


def test_hdfs_calls_that_fail_for_a_while_are_repeated(node, caplog):
    client = HDFSClient(node.name, "me", time_out=20_000, sleep_inter=10)
    client.mkdirs("/a")
    node.handler.refusals = 2
    assert client.list_dirs("/") == ["a"]
    assert caplog.text.count("tried again") == 2
    assert node.handler.users == {"me"}


def test_hdfs_calls_that_keep_failing_are_given_up_after_the_time_out():
    client = HDFSClient("webhdfs://127.0.0.1:9", "me", time_out=50, sleep_inter=10)
    with pytest.raises(OSError, match="refused"):
        client.is_dir("/a")
    with pytest.raises(OSError, match="refused"):
        storage_for("/ckpt", client).folders("")


def test_what_cannot_pass_is_not_repeated():
    tries = []

    def forbidden() -> None:
        tries.append(1)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        Retry(100.0, 100.0)(forbidden)
    assert len(tries) == 1


@pytest.mark.parametrize("make", ["local", "webhdfs"])
def test_the_methods_of_paddles_classes_do_what_they_say(make, tmp_path, request):
    fs: LocalFS | HDFSClient
    if make == "local":
        fs, root = LocalFS(), str(tmp_path / "fs")
    else:
        fs, root = HDFSClient(request.getfixturevalue("node").name), "/fs"
    assert fs.ls_dir(root) == ([], [])
    fs.mkdirs(f"{root}/folder")
    fs.mkdirs(f"{root}/folder")
    local = tmp_path / "local"
    local.write_text("text")
    fs.upload(str(local), f"{root}/file")
    assert fs.cat(f"{root}/file") == "text"
    assert fs.ls_dir(root) == (["folder"], ["file"])
    assert fs.list_dirs(root) == ["folder"]
    assert (fs.is_dir(f"{root}/folder"), fs.is_file(f"{root}/folder")) == (True, False)
    assert (fs.is_exist(f"{root}/file"), fs.is_exist(f"{root}/none")) == (True, False)
    fs.touch(f"{root}/empty")
    with pytest.raises(FileExistsError):
        fs.touch(f"{root}/empty", exist_ok=False)
    with pytest.raises(FileExistsError):
        fs.mv(f"{root}/file", f"{root}/empty")
    fs.mv(f"{root}/file", f"{root}/empty", overwrite=True)
    fs.rename(f"{root}/empty", f"{root}/moved")
    fs.download(f"{root}/moved", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "text"
    fs.delete(f"{root}/folder")
    fs.delete(f"{root}/none")
    assert fs.ls_dir(root) == ([], ["moved"])
    assert fs.need_upload_download() is (make == "webhdfs")


def test_paddles_own_local_fs_means_local_files(tmp_path):
    pytest.importorskip("paddle")
    from paddle.distributed.fleet.utils import LocalFS as Paddles

    assert isinstance(storage_for(tmp_path, Paddles()), LocalStorage)


def test_a_url_may_stand_in_either_place(tmp_path):
    storage_for("memory://one/run").write("a", [b"1"])
    assert storage_for("/one/run", "memory://").read("a") == b"1"
    assert storage_for("run", "memory://one").read("a") == b"1"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("afs://x:1",), "hdfs_name: expected hdfs://HOST:PORT or webhdfs://HOST:PORT"),
        (("hdfs://",), "hdfs_name: expected"),
        (("hdfs://x:port",), "hdfs_name: expected"),
        (("hdfs://x", "", -1), "time_out: expected milliseconds"),
        (("hdfs://x", "", 1, float("nan")), "sleep_inter: expected milliseconds"),
    ],
)
def test_a_wrong_hdfs_client_is_refused(args, says):
    with pytest.raises(UsageError, match=says):
        HDFSClient(*args)


def test_paddles_form_of_the_client_is_taken():
    configs = {"fs.default.name": "hdfs://name:54310", "hadoop.job.ugi": "me,secret"}
    assert HDFSClient("/opt/hadoop", configs).name == "hdfs://name:54310"


def test_hdfs_without_pyarrow_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with pytest.raises(CheckpointError, match=r"pip install pyarrow.*webhdfs://HOST:9870"):
        storage_for("/ckpt", HDFSClient("hdfs://name:8020", time_out=0))


def test_a_url_with_local_files_is_refused():
    with pytest.raises(UsageError, match="fs: LocalFS cannot reach s3://bucket/x; leave fs out"):
        storage_for("s3://bucket/x", LocalFS())


def test_a_scheme_that_nothing_understands_is_refused():
    with pytest.raises(CheckpointError, match="cannot be opened"):
        storage_for("nosuch://x")


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        ("checkpoint", True),
        ("./a/../checkpoint", True),
        ("{here}/checkpoint", True),
        ("../checkpoint", False),
        ("{here}.1/checkpoint", False),
        ("/shared/pod_0_0/trainers/run/checkpoint", False),  # left by an earlier job
        ("memory://checkpoint", False),
    ],
)
@pytest.mark.parametrize("is_own", [False, True], ids=["as edl run has it", "of the pod"])
def test_checkpoints_do_not_go_to_the_folder_of_one_pod(
    tmp_path, monkeypatch, path, is_refused, is_own
):
    here = tmp_path / "pod_0_0"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("EDL_POD_FOLDER", str(here if is_own else tmp_path / "pods" / "pod_0_0"))
    if is_refused and is_own:
        with pytest.raises(UsageError, match=r"checkpoint: .* is in .*pod_0_0, .* absolute path"):
            storage_for(path.format(here=here))
    else:
        storage_for(path.format(here=here))
