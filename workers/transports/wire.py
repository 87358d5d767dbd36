"""The byte stream between two workers. Both prove that they know the cluster secret, which is never sent.

    owner  ──► reader    magic, nonce
    reader ──► owner     magic, nonce, HMAC-SHA256(secret; "proof", both nonces)
    frames, both ways    kind, length │ payload │ code

A frame's code is a keyed BLAKE2b over its number in its direction, its kind, its length and its payload. The keys are
derived from the secret and both nonces, one for each direction. So a changed byte, a dropped, repeated or moved frame,
and a side without the secret are detected. The content is not encrypted.

Waits are bounded twice: each wait for the other side by `stall_s`, all of them together by `deadline`.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import socket
import struct
import time
from enum import IntEnum

from workers.api.errors import DeadlineExceeded, TransferCorrupted, TransferFailed

STALL_S = 5.0
NONCE_BYTES = 32
_MAGIC = b"KVRELAY-TCP/1\0\0\0"
_PROOF_BYTES = 32
_CODE_BYTES = 16
_FRAME = struct.Struct("<B3xI")
_NUMBER = struct.Struct("<Q")


class FrameKind(IntEnum):
    WELCOME = 1  # owner: what pool this is
    READ = 2  # reader: blocks and their expected generations
    BLOCKS = 3  # owner: the content of the next blocks
    FAILED = 4  # owner: an error; no more blocks follow


class Channel:
    """One end of a stream. `greet` or `answer` authenticates it. Not for two threads at once."""

    def __init__(self, sock: socket.socket, *, stall_s: float = STALL_S):
        self.deadline = math.inf  # of `time.monotonic()`
        self.stall_s = stall_s
        self._socket = sock
        self._buffer = bytearray()
        self._keys = {"send": b"", "receive": b""}
        self._numbers = {"send": 0, "receive": 0}

    def greet(self, secret: str) -> None:
        """Authenticate as the owner. Raises `TransferFailed` for a reader that does not know the secret."""
        ours = secrets.token_bytes(NONCE_BYTES)
        self._send(_MAGIC + ours)
        theirs = self._receive_greeting()
        proof = self._receive_exactly(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _keyed(secret, b"proof", ours + theirs)):
            raise TransferFailed("the reader does not know the cluster secret")
        self._agree(secret, ours + theirs, send=b"owner", receive=b"reader")

    def answer(self, secret: str) -> None:
        """Authenticate as the reader. An owner without the secret cannot code its first frame."""
        theirs = self._receive_greeting()
        ours = secrets.token_bytes(NONCE_BYTES)
        self._send(_MAGIC + ours + _keyed(secret, b"proof", theirs + ours))
        self._agree(secret, theirs + ours, send=b"reader", receive=b"owner")

    def send(self, kind: FrameKind, payload: bytes | memoryview) -> None:
        head = _FRAME.pack(kind, len(payload))
        self._send(head)
        self._send(payload)
        self._send(self._code("send", head, payload))

    def receive(self, max_bytes: int) -> tuple[FrameKind, memoryview]:
        """Return the next frame. Its payload is valid until the next call. Raises `TransferCorrupted` if it was changed
        on the way."""
        head = bytes(self._receive_exactly(_FRAME.size))
        kind, num_bytes = _FRAME.unpack(head)
        if num_bytes > max_bytes:
            raise TransferCorrupted(f"a frame of {num_bytes} bytes was announced; the limit is {max_bytes}")
        content = self._receive_exactly(num_bytes + _CODE_BYTES)
        payload, code = content[:num_bytes], content[num_bytes:]
        if not hmac.compare_digest(code, self._code("receive", head, payload)):
            raise TransferCorrupted(f"a frame of {num_bytes} bytes was changed on the way")
        return _kind(kind), payload

    def has_input(self) -> bool:
        """Return whether data has arrived, or the other side has closed the stream. Never blocks."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def interrupt(self) -> None:
        """End the stream from any thread. Waits on either side fail."""
        shut(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._socket.close()

    def _receive_greeting(self) -> bytes:
        if self._receive_exactly(len(_MAGIC)) != _MAGIC:
            raise TransferFailed("the other side does not use this protocol")
        return bytes(self._receive_exactly(NONCE_BYTES))

    def _agree(self, secret: str, nonces: bytes, *, send: bytes, receive: bytes) -> None:
        self._keys = {"send": _keyed(secret, send, nonces), "receive": _keyed(secret, receive, nonces)}

    def _code(self, direction: str, head: bytes, payload: bytes | memoryview) -> bytes:
        number, self._numbers[direction] = self._numbers[direction], self._numbers[direction] + 1
        code = hashlib.blake2b(_NUMBER.pack(number), digest_size=_CODE_BYTES, key=self._keys[direction])
        code.update(head)
        code.update(payload)
        return code.digest()

    def _send(self, content: bytes | memoryview) -> None:
        try:
            self._arm()
            self._socket.sendall(content)
        except OSError as error:
            raise self._failure(error) from error

    def _receive_exactly(self, num_bytes: int) -> memoryview:
        """Receive `num_bytes` into the channel's own buffer."""
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        whole = memoryview(self._buffer)[:num_bytes]
        at = 0
        while at < num_bytes:
            at += self._receive_some(whole[at:])
        return whole

    def _receive_some(self, room: memoryview) -> int:
        try:
            self._arm()
            num_bytes = self._socket.recv_into(room)
        except OSError as error:
            raise self._failure(error) from error
        if not num_bytes:
            raise TransferFailed("the other side has closed the stream")
        return num_bytes

    def _arm(self) -> None:
        """Set the timeout of the next call."""
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed while reading a stream of blocks")
        self._socket.settimeout(min(remaining_s, self.stall_s))

    def _failure(self, error: OSError) -> TransferFailed | DeadlineExceeded:
        if not isinstance(error, TimeoutError):
            return TransferFailed(f"the stream broke: {error.strerror or error}")
        if time.monotonic() >= self.deadline:
            return DeadlineExceeded("the deadline passed while reading a stream of blocks")
        return TransferFailed(f"the stream stalled for {self.stall_s:g} s")


def shut(sock: socket.socket, how: int) -> None:
    """Shut a socket down, unless it is already."""
    try:
        sock.shutdown(how)
    except OSError:
        pass


def _kind(number: int) -> FrameKind:
    try:
        return FrameKind(number)
    except ValueError as error:
        raise TransferFailed(f"received a frame of unknown kind {number}") from error


def _keyed(secret: str, purpose: bytes, nonces: bytes) -> bytes:
    if not secret:
        raise TransferFailed("a stream of blocks needs the cluster secret")
    return hmac.digest(secret.encode(), purpose + b"\0" + nonces, "sha256")
