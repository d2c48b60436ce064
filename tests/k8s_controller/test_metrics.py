"""What the controller says of itself, and where."""

import socket
import subprocess
import sys
import urllib.request

import pytest

from k8s_controller.metrics import Metrics, serve
from tests.support import ROOT


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_probes_are_answered_by_ipv4_and_by_ipv6(host: str):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    server = serve(Metrics(), "", 0)
    try:
        url = f"http://{host}:{server.server_address[1]}/healthz"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.read() == b"ok\n"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("args", [(), ("--probe_address=no.such.host.invalid",)])
def test_a_place_where_it_cannot_listen_is_named(tmp_path, args: tuple[str, ...]):
    config = tmp_path / "config"
    config.write_text(
        "current-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: http://127.0.0.1:9}}]\n"
        "users: [{name: a, user: {}}]\n"
    )
    with socket.create_server(("", 0)) as taken:
        port = f"--liveness_port={taken.getsockname()[1]}"
        command = [sys.executable, "-m", "k8s_controller", f"--kubeconfig={config}", port, *args]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "--liveness_port: " in line
    assert all(arg.partition("=")[2] in line for arg in args)


def test_a_counter_that_has_become_large_counts_on_by_ones():
    metrics = Metrics()
    metrics._counts["passes"] = 1_234_566  # of some weeks
    metrics.took(123_456.25)
    lines = metrics.text().splitlines()
    assert "edl_controller_passes_total 1234567" in lines
    assert "edl_controller_pass_seconds_total 123456.25" in lines
    assert "edl_controller_leader 0" in lines
