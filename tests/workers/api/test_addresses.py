"""Listening and connecting over IPv4 and IPv6."""

from __future__ import annotations

import socket

import pytest

from tests.serving import has_ipv6
from workers.api.addresses import ANY_HOST, http_address, http_url, listen

V6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
HOSTS = ("127.0.0.1", "localhost", "", "0.0.0.0", pytest.param("::1", marks=V6), pytest.param("::", marks=V6))


@pytest.mark.parametrize("host", HOSTS)
def test_listener_is_reached_by_its_url(host: str) -> None:
    with listen(host, 0, backlog=1) as listener:
        port = listener.getsockname()[1]
        reached = http_address(http_url(host, port))
        assert reached[1] == port and reached[0] not in ANY_HOST
        with socket.create_connection(reached, timeout=5):
            listener.accept()[0].close()


@V6
@pytest.mark.parametrize("by", ["127.0.0.1", "::1"])
def test_wildcard_ipv6_includes_ipv4(by: str) -> None:
    with listen("::", 0, backlog=1) as listener:
        socket.create_connection((by, listener.getsockname()[1]), timeout=5).close()
