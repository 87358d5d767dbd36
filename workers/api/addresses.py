"""HTTP URLs of the configuration, and the sockets that servers listen on, over IPv4 or IPv6."""

from __future__ import annotations

import re
import socket
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ValidationError
from pydantic_core import MultiHostUrl, Url

ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # wildcard addresses, and the loopback of each

U = TypeVar("U", Url, MultiHostUrl)


def parse_url(kind: type[U], text: str) -> U:
    """Parse with pydantic. Raises `ValueError`, which never repeats the URL: it may hold a password."""
    try:
        url = kind(text)
    except ValidationError as error:
        message = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise ValueError(message.replace("Input should be", "must be")) from None
    ports = [url.port] if isinstance(url, Url) else [host["port"] for host in url.hosts()]
    if 0 in ports:
        raise ValueError("the port must be between 1 and 65535")
    return url


def _parse_http(text: str) -> Url:
    if not re.match(r"https?://[^\s/]", text) or re.search(r"\s", text):
        raise ValueError("must be an http:// or https:// URL")
    return parse_url(Url, text)


HttpUrl = Annotated[str, AfterValidator(lambda text: str(_parse_http(text)).rstrip("/"))]


def http_address(url: str) -> tuple[str, int]:
    """Return the host and port of an HTTP URL. Raises `ValueError`."""
    parsed = _parse_http(url)
    assert parsed.host is not None and parsed.port is not None  # pydantic fills in the default port
    return parsed.host.strip("[]"), parsed.port


def http_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on `host`."""
    reachable = ANY_HOST.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Open a server's socket. The host `::` covers IPv4 too; port 0 picks a free one. Raises `OSError`."""
    dual_stack = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family_of(host), backlog=backlog, dualstack_ipv6=dual_stack)
