"""Nodes in network namespaces of this machine: own addresses, own loopback, a cable to pull.

    tests ── gateway ──┐
    node 1 ── cable ───┤ hub: a bridge in a namespace of its own, where no firewall of the host's
    node 2 ── cable ───┘      looks at what it forwards

Processes of two nodes see each other over TCP alone; abstract unix sockets do not cross. They share
the disk and the process ids of this machine, which the tests use and the programs must not.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.support import wait_until

_GATEWAY = 254  # the tests' own host number
_ETC = Path("/etc/netns")  # where `ip netns exec` finds files of a namespace's own
# Of networks. Two test runs at once do not collide, nor two workers, whose pids may be neighbours.
_numbers = itertools.count(16 * os.getpid())


def _subnet(number: int) -> str:
    """Return one of RFC 2544, which are meant for tests of networks, without the host's number."""
    return f"198.{18 + number // 254 % 2}.{number % 254 + 1}"


class Network:
    """Namespaces that are wired to one hub; gone, with all processes in them, after `close`.

    Args:
        nodes: how many; they are numbered from 1.
        names: host names of the first of them, which all nodes know.
    """

    def __init__(self, nodes: int, names: Sequence[str] = ()) -> None:
        used = _ip("-4", "-o", "address")  # of another test run, or left by one that was killed
        number = next(each for each in _numbers if f" {_subnet(each)}." not in used)
        self._tag = f"e{number % 0xFFFFF:05x}"  # a name of an interface has 15 characters at most
        self._subnet = _subnet(number)
        self._count = nodes
        try:
            _ip("netns", "add", self._hub)
            self._in(self._hub, "link", "add", "hub", "type", "bridge")
            self._in(self._hub, "link", "set", "hub", "up")
            self._plug(self._tag, None, _GATEWAY)
            for node in range(1, nodes + 1):
                _ip("netns", "add", self._name(node))
                self._write_hosts(node, names)
                self._in(self._name(node), "link", "set", "lo", "up")
                self._plug("eth0", self._name(node), node)
        except BaseException:
            self.close()
            raise

    def addr(self, node: int) -> str:
        """The address of a node, which the tests reach as well."""
        return f"{self._subnet}.{node}"

    def command(self, node: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` inside a node."""
        return ["ip", "netns", "exec", self._name(node), *argv]

    def cut(self, node: int) -> None:
        """Cut it off behind its cable: packets vanish, and neither side is told."""
        self._in(self._hub, "link", "set", f"port{node}", "nomaster")

    def heal(self, node: int) -> None:
        """Connect it again."""
        self._in(self._hub, "link", "set", f"port{node}", "master", "hub")

    def processes(self, node: int) -> list[psutil.Process]:
        """Every living process of a node."""
        found = []
        for pid in _ip("netns", "pids", self._name(node)).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, node: int) -> None:
        """SIGKILL every process of a node, as when its power goes."""

        def kill_all() -> bool:
            left = self.processes(node)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            return not left

        wait_until(kill_all, what=f"node {node} is dead")

    def suspend(self, node: int) -> list[psutil.Process]:
        """SIGSTOP every process of a node, as when its machine is frozen; return them."""
        stopped: dict[int, psutil.Process] = {}
        while more := [p for p in self.processes(node) if p.pid not in stopped]:
            for process in more:  # one may have been started by another just before that stopped
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
                stopped[process.pid] = process
        return list(stopped.values())

    def resume(self, stopped: Sequence[psutil.Process]) -> None:
        """Have them go on."""
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        """Kill what is left in the namespaces, and remove them; to be called once or more."""
        there = _ip("netns", "list").split()
        for node in range(1, self._count + 1):
            if self._name(node) in there:
                self.kill(node)
                _ip("netns", "del", self._name(node))
            shutil.rmtree(_ETC / self._name(node), ignore_errors=True)
        if self._hub in there:
            # At once, as its namespace goes later than its name, and takes the cables along then.
            with contextlib.suppress(NetworkError):
                _ip("link", "del", self._tag)
            _ip("netns", "del", self._hub)

    @property
    def _hub(self) -> str:
        return f"{self._tag}-hub"

    def _name(self, node: int) -> str:
        return f"{self._tag}-{node}"

    def _write_hosts(self, node: int, names: Sequence[str]) -> None:
        """Give the node an /etc/hosts, which `ip netns exec` puts in place of the machine's."""
        if names:
            lines = ["127.0.0.1 localhost"]
            lines += [f"{self.addr(number)} {name}" for number, name in enumerate(names, 1)]
            (_ETC / self._name(node)).mkdir(parents=True)
            (_ETC / self._name(node) / "hosts").write_text("\n".join(lines) + "\n")

    def _plug(self, interface: str, namespace: str | None, host: int) -> None:
        """Lay a cable from the hub to a new interface; namespace None: that of the tests."""
        port, end = f"port{host}", self._tag
        self._in(self._hub, "link", "add", port, "type", "veth", "peer", "name", end)
        self._in(self._hub, "link", "set", port, "master", "hub", "up")
        if namespace is None:
            self._in(self._hub, "link", "set", end, "netns", str(os.getpid()))
            run = _ip
        else:
            self._in(self._hub, "link", "set", end, "netns", namespace, "name", interface)
            run = functools.partial(self._in, namespace)
        run("addr", "add", f"{self._subnet}.{host}/24", "dev", interface)
        run("link", "set", interface, "up")

    def _in(self, namespace: str, *args: str) -> str:
        return _ip("-n", namespace, *args)


@functools.cache
def require_network_namespaces() -> None:
    """Skip the test where namespaces cannot be made, and say why."""
    if shutil.which("ip") is None:
        pytest.skip("needs network namespaces: no `ip` here (Debian: apt-get install iproute2)")
    try:
        Network(1).close()
    except NetworkError as error:
        pytest.skip(f"needs network namespaces, which only root may make: {error}")


class NetworkError(Exception):
    """`ip` refused; the text is its own."""


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout
