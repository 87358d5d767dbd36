"""URLs of the configuration, taken apart alike by every Python: patch releases differ in the brackets that `urlsplit`
lets pass, and it knows of one host only. And where servers listen, over IPv4 or IPv6."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

MAX_PORT = 65_535
ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # every address, and by which we reach ourselves
PORTS = {"http": 80, "https": 443}
URL = re.compile(r"(?P<scheme>[^:/?#]+)://(?:(?P<credentials>[^/?#]*)@)?(?P<hosts>[^/?#]*)(?P<rest>.*)", re.DOTALL)
HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s\[\]:]+))(?::(?P<port>.*))?", re.DOTALL)


@dataclass(frozen=True)
class UrlParts:
    """`credentials` as USER:PASSWORD, as they stand in the URL; `rest` begins with the path."""

    scheme: str
    credentials: str | None
    hosts: str
    rest: str

    @property
    def url(self) -> str:
        credentials = "" if self.credentials is None else f"{self.credentials}@"
        return f"{self.scheme}://{credentials}{self.hosts}{self.rest}"


def parts_of(url: str) -> UrlParts:
    """Raises `ValueError` for what is no URL with an authority."""
    found = URL.fullmatch(url)
    if found is None:
        raise ValueError("needs the form SCHEME://HOST")
    return UrlParts(**found.groupdict())


def scheme_of(url: str) -> str:
    """What stands before ://, or all where nothing does."""
    return url.partition("://")[0]


def address_of(host: str, default_port: int) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT or [IPV6]:PORT. Raises `ValueError`, which repeats nothing: a password that was
    not quoted may be taken for a host."""
    found = HOST.fullmatch(host)
    if found is None:
        raise ValueError("needs a host, as HOST, HOST:PORT or [IPV6]:PORT")
    port = found["port"] or str(default_port)
    if not (port.isascii() and port.isdecimal()) or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"needs a port of 1 to {MAX_PORT}")
    return found["v6"] or found["name"], int(port)


def http_address(url: str) -> tuple[str, int]:
    """Where it leads. Raises `ValueError` for what is no http:// or https:// URL."""
    scheme = scheme_of(url)
    if scheme not in PORTS or re.search(r"\s", url):
        raise ValueError("needs an http:// or https:// URL")
    return address_of(parts_of(url).hosts, PORTS[scheme])


def http_url(host: str, port: int) -> str:
    """Where a server that listens there is reached from this machine."""
    reached = ANY_HOST.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """A server's socket; `::` is every address of IPv4 as well, and port 0 a free one. Raises `OSError`."""
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family_of(host), backlog=backlog, dualstack_ipv6=both)


def _of_http(url: str) -> str:
    """The URL without a slash at its end."""
    http_address(url)
    return url.rstrip("/")


HttpUrl = Annotated[str, AfterValidator(_of_http)]
