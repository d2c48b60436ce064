"""What the controller says of itself, and where."""

import socket
import urllib.request

import pytest

from k8s_controller.metrics import Metrics, serve


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
