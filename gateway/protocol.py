"""`Protocol`: one client's connection, as uvicorn speaks HTTP/1.1, with what it leaves unbounded bounded.

    connected ─► head ─► body ─► answer ─┬─► head ...
                                         └─► closed: the body did not arrive whole, or another request came too early

uvicorn keeps whatever comes as a request's head (its URL and headers) until that is whole, waits for it without end,
and, while a second request waits for the first one's answer, does not notice that the client hangs up. It waits without
end, too, for a client to take an answer, even where it closes. Nothing here costs a request whose head arrives in one
piece, and whose client takes the answer, more than a few attributes. Checked with uvicorn 0.54.0.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.errors import HeadersTooLarge
from gateway.http.replies import CLOSE, error_reply
from gateway.snapshot import Gateway
from workers.api.errors import InvalidRequest, KvrelayError, RequestTooSlow
from workers.api.logs import REQUEST_ID_HEADER, new_request_id

UPGRADE = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)
AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: on, 0 s

log = structlog.get_logger()


class Alarm:
    """One call that is made after some time, unless it is stopped or set anew before."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def set(self, after_s: float, call: Callable[[], None]) -> None:
        self.stop()
        self._timer = self._loop.call_later(after_s, call)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Protocol(HttpToolsProtocol):
    """Refuses a head that is too large or too slow. Takes one request at a time: one that is sent before the last is
    answered goes unread, and the connection closes after that answer, so that the client knows to send it again. A
    client that takes nothing of what it was sent, for as long as a stall may last, has hung up in all but name.

    `body_left` in a request's state tells whether its body has yet to arrive.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._gateway: Gateway = config.app.state.gateway  # type: ignore[union-attr]
        self._head_is_open = True
        self._late_head, self._stall = Alarm(self.loop), Alarm(self.loop)
        self._is_deaf = False
        self._num_bytes = 0  # read since the head began, or since nothing more is heard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late_head.stop()
        self._stall.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_taking()

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._wait_for_taking()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._drop(len(data))
            return
        if self._may_be_head and b"pgrade" in data:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._may_be_head:
            self._wait_for_head(len(data))

    def on_message_begin(self) -> None:
        if self._is_answering:
            self._turn_deaf()
        self._head_is_open = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        self._head_is_open = False
        self._late_head.stop()
        if not self.flow.write_paused:
            self._stall.stop()  # the client is there; what is unsent now grows by another answer
        self.scope["state"]["body_left"] = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_deaf:
            self.scope["state"]["body_left"] = False
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering and not self.cycle.more_body:
            self._turn_deaf()  # what follows the request is none
        else:
            self._refuse(InvalidRequest(msg))

    @property
    def _may_be_head(self) -> bool:
        """Of a request: what comes next, or what has just come."""
        return self._head_is_open or self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _turn_deaf(self) -> None:
        """Goes on reading, to notice a hang-up."""
        self._is_deaf = True
        self._num_bytes = 0
        self.cycle.keep_alive = False

    def _drop(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._gateway.settings.limits.max_body_bytes:
            self.transport.close()

    def _wait_for_head(self, num_bytes: int) -> None:
        """The read in which a head begins is not counted, which may hold the end of the request before."""
        if self._is_deaf or self.transport.is_closing():
            return
        settings = self._gateway.settings
        if not self._late_head.is_set:
            self._num_bytes = 0
            self._late_head.set(settings.deadlines.body_s, self._head_is_late)
            return
        self._num_bytes += num_bytes
        if self._num_bytes > settings.limits.max_header_bytes:
            self._refuse(HeadersTooLarge(f"more than {settings.limits.max_header_bytes} bytes of URL and headers"))

    def _head_is_late(self) -> None:
        self._refuse(RequestTooSlow(f"the headers did not arrive within {self._gateway.settings.deadlines.body_s:g} s"))

    def _wait_for_taking(self) -> None:
        """Until the client takes more of what it was sent."""
        stall_s, unsent = self._gateway.settings.deadlines.client_stall_s, self.transport.get_write_buffer_size()
        self._stall.set(stall_s, lambda: self._look_whether_taken(unsent))

    def _look_whether_taken(self, unsent: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= unsent:
            # A reset, or the kernel would hold what is unsent for minutes more.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            self.transport.abort()
        elif left:
            self._wait_for_taking()

    def _refuse(self, error: KvrelayError) -> None:
        """Tells what is wrong, unless an answer has begun, and closes."""
        if self.transport.is_closing():
            return
        if not (self._is_answering and self.cycle.response_started):
            self.transport.write(_refusal(error))
            self._gateway.metrics.requests.labels("none", error.status).inc()
            log.info("request", status=error.status)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A head, and what follows it, without the offer to speak another protocol: that is passed over (RFC 9110, 7.8),
    where httptools would pass over the body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"\r\nx-upgrade", head) + end + rest


def _refusal(error: KvrelayError) -> bytes:
    """The reply, as it goes over the wire."""
    reply = error_reply(error, CLOSE | {REQUEST_ID_HEADER: new_request_id()})
    headers = b"".join(b"%b: %b\r\n" % header for header in reply.raw_headers)
    phrase = HTTPStatus(error.status).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (error.status, phrase, headers) + bytes(reply.body)
