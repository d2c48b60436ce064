"""Connections to Paddle's store, as far as this process owns them."""

import os
import socket

import pytest

pytest.importorskip("paddle", reason="looks at Paddle's store")

from paddle.base import core

from pod_runtime.trainer.frameworks.paddle.store import prompt_store


def no_delay(*connections: socket.socket) -> list[bool]:
    return [bool(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for each in connections]


def test_only_the_stores_connections_are_hurried_and_only_for_a_while(monkeypatch):
    monkeypatch.delattr(core, "create_or_get_global_tcp_store")
    with socket.create_server(("127.0.0.1", 0)) as store, socket.create_server(("", 0)) as other:
        host, port = store.getsockname()
        mine = socket.create_connection((host, port))
        theirs = store.accept()[0]
        apart = socket.create_connection(other.getsockname())
        with mine, theirs, apart:
            before = sorted(os.listdir("/proc/self/fd"))
            with prompt_store(f"{host}:{port}"):
                assert no_delay(mine, theirs, apart) == [True, True, False]
            assert no_delay(mine, theirs, apart) == [False, False, False]
            assert sorted(os.listdir("/proc/self/fd")) == before, "what was looked at stays open"
