"""A client without any right to be there, which goes through the handshake step by step and ends it as it likes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Iterator

from paceline.transports.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, PROOF_NBYTES, ClientHandshake
from paceline.transports.connection import parse_address
from paceline.transports.frames import MAX_APPLY, FrameKind, fields_frame
from paceline.transports.tls import Tls, fingerprint, worker_tls

_PROVING = ("challenged", "within the proof", "proved", "within the request")
PHASES = {
    False: ("before it is accepted", "accepted", *_PROVING),
    True: ("before it is accepted", "bytes sent early", "within the TLS handshake", "encrypted", *_PROVING),
}
"""Of a connection without and with TLS."""
SILENT = (
    "before it is accepted",
    "accepted",
    "bytes sent early",
    "within the TLS handshake",
    "encrypted",
    "challenged",
)
"""The phases before it has sent a byte of the proof."""
ENDS = ("reset", "close", "half-close")


class Stranger:
    """One connection; `serve` lets the server read what was sent. Over TLS it shakes hands by itself."""

    def __init__(self, address: str, tls: Tls | None, token: bytes, serve: Callable[[], object]) -> None:
        self.sock = socket.create_connection(parse_address(address), timeout=5)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._token, self._serve = token, serve
        self._tls: ssl.SSLObject | None = None
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        if tls is not None:
            self._tls = worker_tls().context.wrap_bio(self._in, self._out)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        """Send, encrypted over TLS, and let the server read."""
        if self._tls is not None:
            self._tls.write(data)
            data = self._out.read()
        self.sock.sendall(data)
        self._serve()

    def receive(self, nbytes: int) -> bytes:
        """Receive exactly so many bytes."""
        if self._tls is None:
            return self.sock.recv(nbytes, socket.MSG_WAITALL)
        found = b""
        while len(found) < nbytes:
            try:
                found += self._tls.read(nbytes - len(found))
            except ssl.SSLWantReadError:
                self._in.write(self.sock.recv(1 << 16))
        return found

    def phases(self) -> Iterator[str]:
        """Name each phase of an honest handshake when it is reached; the request itself is complete after the last."""
        yield "before it is accepted"
        binding = b""
        if self._tls is None:
            self._serve()
            yield "accepted"
        else:
            yield from self._shake_hands(self._tls)
            binding = fingerprint(self._tls.getpeercert(binary_form=True) or b"").encode()
        proof = ClientHandshake(self._token, binding)
        answer = proof.answer(self.receive(CHALLENGE_NBYTES))
        yield "challenged"
        self.send(answer[: ANSWER_NBYTES // 2])
        yield "within the proof"
        self.send(answer[ANSWER_NBYTES // 2 :])
        proof.check(self.receive(PROOF_NBYTES))
        yield "proved"
        request = fields_frame(FrameKind.APPLY, {"worker": 3}, MAX_APPLY)
        self.send(request[:9])
        yield "within the request"
        self.send(request[9:])

    def _shake_hands(self, tls: ssl.SSLObject) -> Iterator[str]:
        hello = self._flight(tls)
        self.sock.sendall(hello[:50])
        yield "bytes sent early"
        self._serve()
        yield "within the TLS handshake"
        self.sock.sendall(hello[50:])
        self._serve()
        while True:
            self._in.write(self.sock.recv(1 << 16))
            if flight := self._flight(tls):
                break
        self.sock.sendall(flight)
        self._serve()
        yield "encrypted"

    def _flight(self, tls: ssl.SSLObject) -> bytes:
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        return self._out.read()

    def end(self, how: str) -> None:
        """Reset the connection, close it, or close only the direction to the server."""
        if how == "half-close":
            self.sock.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()
