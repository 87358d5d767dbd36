"""`Protocol`: one client's connection, as uvicorn speaks HTTP/1.1, with bounds where uvicorn has none.

    connected ─► head ─► body ─► reply ─┬─► head ...
                                        └─► closed: the body did not arrive whole, or another request came too early

uvicorn buffers a request's head (its URL and headers) without a limit on size or time, does not notice a disconnect
while a second request waits for the first one's reply, and waits without end for a client to take a reply, even when it
closes. Costs a request whose head arrives in one piece, and whose client takes the reply, a few attribute look-ups.
Checked with uvicorn 0.54.0.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from workers.api.errors import InvalidRequest, KvrelayError, RequestTooSlow
from workers.api.http.edge import Edge, unread_scope
from workers.api.http.errors import HeadersTooLarge
from workers.api.http.replies import CLOSE, error_reply
from workers.api.logs import REQUEST_ID_HEADER, new_request_id

UPGRADE = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


class Alarm:
    """One call in the future; setting it again replaces the call."""

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
    """Bounds come from `app.state.edge`. Refuses a head that is too large or too slow. Serves one request at a time: a
    request sent before the last one is answered is ignored, and the connection closes after that answer, so that the
    client knows to send it again. A client that takes nothing of its reply for `stall_s` is disconnected.

    `body_left` in a request's state is true until its body has arrived.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._edge: Edge = config.app.state.edge  # type: ignore[union-attr]
        self._head_is_open = True
        self._late_head, self._stall = Alarm(self.loop), Alarm(self.loop)
        self._ignores_input = False
        self._num_bytes = 0  # received since the head began, or since input is ignored

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late_head.stop()
        self._stall.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_stall()

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            self._num_bytes += len(data)
            if self._num_bytes > self._edge.bounds.max_body_bytes:
                self.transport.close()
            return
        if self._may_be_head and b"pgrade" in data:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._may_be_head:
            self._bound_head(len(data))

    def on_message_begin(self) -> None:
        if self._is_answering:
            self._ignore_input()
        self._head_is_open = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._ignores_input:
            return
        self._head_is_open = False
        self._late_head.stop()
        if not self.flow.write_paused:
            self._stall.stop()  # the client is there; what is unsent now grows by another reply
        self.scope["state"]["body_left"] = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ignores_input:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignores_input:
            self.scope["state"]["body_left"] = False
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering and not self.cycle.more_body:
            self._ignore_input()  # what follows the request is not HTTP
        else:
            self._refuse(InvalidRequest(msg))

    @property
    def _may_be_head(self) -> bool:
        """Whether what arrives next, or has just arrived, may belong to a request's head."""
        return self._head_is_open or self.cycle is None or self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _ignore_input(self) -> None:
        """Keep receiving all the same, to notice a disconnect."""
        self._ignores_input = True
        self._num_bytes = 0
        self.cycle.keep_alive = False

    def _bound_head(self, num_bytes: int) -> None:
        """Does not count the data in which a head begins: it may hold the end of the request before."""
        if self._ignores_input or self.transport.is_closing():
            return
        bounds = self._edge.bounds
        if not self._late_head.is_set:
            late = RequestTooSlow(f"the headers did not arrive within {bounds.body_s:g} s")
            self._num_bytes = 0
            self._late_head.set(bounds.body_s, lambda: self._refuse(late))
            return
        self._num_bytes += num_bytes
        if self._num_bytes > bounds.max_header_bytes:
            self._refuse(HeadersTooLarge(f"more than {bounds.max_header_bytes} bytes of URL and headers"))

    def _watch_stall(self) -> None:
        """Check after `stall_s` that the client has taken some of what is unsent."""
        unsent = self.transport.get_write_buffer_size()
        self._stall.set(self._edge.bounds.stall_s, lambda: self._check_stall(unsent))

    def _check_stall(self, unsent: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= unsent:
            # Reset the connection: the kernel would keep what is unsent for minutes more.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.transport.abort()
        elif left:
            self._watch_stall()

    def _refuse(self, error: KvrelayError) -> None:
        """Reply with the error, unless a reply has begun, and close."""
        if self.transport.is_closing():
            return
        if not (self._is_answering and self.cycle.response_started):
            self.transport.write(_raw_reply(error))
            self._edge.record(unread_scope(), error.status, 0.0)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The data without an offer to switch protocols, which may be ignored (RFC 9110, 7.8); httptools would skip the
    body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"\r\nx-upgrade", head) + end + rest


def _raw_reply(error: KvrelayError) -> bytes:
    """The error reply as bytes on the wire."""
    reply = error_reply(error, CLOSE | {REQUEST_ID_HEADER: new_request_id()})
    headers = b"".join(b"%b: %b\r\n" % header for header in reply.raw_headers)
    phrase = HTTPStatus(error.status).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (error.status, phrase, headers) + bytes(reply.body)
