"""The live page: a small HTTP server that shows runs in a browser while they go on, and to Prometheus as `/metrics`.

A page holds everything known when it was asked for; after that server-sent events bring each run that has changed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.cookies
import ipaddress
import json
import socket
import sys
import threading
import time
import traceback
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.errors import UserError
from paceline.reports.html import LiveFeed, render
from paceline.reports.watch.prometheus import CONTENT_TYPE, exposition
from paceline.reports.watch.sources import Follower

PORT = 7223
"""Where it listens unless told otherwise; the letters of PACE on a telephone."""
PORTS_TRIED = 100
KEEP_ALIVE_SECONDS = 10.0
RETRY_MILLISECONDS = 1000
STALLED_SECONDS = 10.0
"""A browser that takes nothing for so long is let go; it comes back by itself."""
MOST_CONNECTIONS = 100
GUESS_SECONDS = 0.5
"""What a wrong token costs whoever tries it."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Listens from the moment it is made; `serve_forever` answers, a thread for each connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, follower: Follower, host: str, port: int, token: str | None = None) -> None:
        self.follower = follower
        self.token = token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.port: int = self.server_address[1]

    @property
    def cookie(self) -> str:
        """Its name; cookies of one host are shared by all its ports."""
        return f"paceline-watch-{self.port}"

    def stop(self) -> None:
        """From another thread: answer nobody any more."""
        self.follower.close()
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Without asking the network for our own name, as the library's does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is nobody's mistake; of ours the question, which may hold the token, is not told."""
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    """One connection: one question."""

    server: LiveServer
    timeout = STALLED_SECONDS
    server_version, sys_version = "paceline", ""

    def log_message(self, *arguments: Any) -> None:
        """Nothing is logged: an address may hold the token."""

    def do_GET(self) -> None:
        path, _, rest = self.path.partition("?")
        query = urllib.parse.parse_qs(rest)
        if not self._may_enter(path, query):
            return
        match path:
            case "/":
                self._page()
            case "/events":
                self._events(self.headers.get("Last-Event-ID") or query.get("after", [""])[0])
            case "/metrics":
                runs = [standing.status for standing in self.server.follower.source.standings()]
                self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(runs))
            case "/favicon.ico":
                self._answer(HTTPStatus.NO_CONTENT, "image/x-icon", "")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there are only /, /events and /metrics here\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _may_enter(self, path: str, query: dict[str, list[str]]) -> bool:
        """Whoever knows the token; without one, whoever asks this machine by its own name (no page from elsewhere)."""
        token = self.server.token
        if token is None:
            if _is_here(self.headers.get("Host", "")):
                return True
            text = "this page is for its own machine: open it as http://127.0.0.1, or give --listen and a token\n"
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", text)
            return False
        if "token" in query and _same(query["token"][0], token):
            self._let_in(path, token)
            return False
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if _same(bearer, token) or _same(self._pass(), pass_for(token)):
            return True
        time.sleep(GUESS_SECONDS)
        text = "this page needs its token: open the address that 'paceline watch' printed\n"
        self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", text)
        return False

    def _pass(self) -> str:
        with contextlib.suppress(http.cookies.CookieError):
            found = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            return found.value if found is not None else ""
        return ""

    def _let_in(self, path: str, token: str) -> None:
        """The token goes out of the address bar, and a cookie made from it stays."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", path)
        cookie = f"{self.server.cookie}={pass_for(token)}; Path=/; HttpOnly; SameSite=Strict"
        self.send_header("Set-Cookie", cookie)
        self._end("text/plain", 0)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self._end(kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _end(self, kind: str, length: int | None) -> None:
        self.send_header("Content-Type", kind if "charset" in kind else f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def _page(self) -> None:
        follower = self.server.follower
        follower.look()
        number, digests = follower.now()
        feed = LiveFeed(f"/events?after={follower.life}-{number}")
        self._answer(HTTPStatus.OK, "text/html", render(json.loads(digests), feed))

    def _events(self, after: str) -> None:
        """An event for whatever has changed, until the browser goes; for one that knows nothing yet, all there is."""
        follower = self.server.follower
        number = last_seen(after, follower.life)
        self.send_response(HTTPStatus.OK)
        self._end("text/event-stream", None)
        if self.command == "HEAD":
            return
        self.wfile.write(b"retry: %d\n\n" % RETRY_MILLISECONDS)
        with follower.watched():
            while not follower.closed:
                found = follower.after(number, KEEP_ALIVE_SECONDS)
                if found is None:
                    self.wfile.write(b":\n\n")
                    continue
                self.wfile.write(event(f"{follower.life}-{found[0]}", found[1], b"" if number else b"all"))
                number = found[0]


def event(identity: str, data: bytes, kind: bytes = b"") -> bytes:
    """One server-sent event; one of kind `all` is all there is, another what has changed.

    >>> event("ab-3", b"[1]"), event("ab-3", b"[]", b"all")
    (b'id: ab-3\\ndata: [1]\\n\\n', b'event: all\\nid: ab-3\\ndata: []\\n\\n')
    """
    named = b"event: %s\n" % kind if kind else b""
    return named + b"id: %s\ndata: %s\n\n" % (identity.encode(), data.replace(b"\n", b"\ndata: "))


def last_seen(identity: str, life: str) -> int:
    """The number of the last event that a browser has; 0 where it had that from another life of the server.

    >>> last_seen("ab-3", "ab"), last_seen("ab-3", "cd"), last_seen("", "ab"), last_seen("ab-x", "ab")
    (3, 0, 0, 0)
    """
    before, _, number = identity.partition("-")
    return int(number) if before == life and number.isdecimal() and len(number) < 16 else 0


def pass_for(token: str) -> str:
    """What a browser keeps instead of the token."""
    return hmac.digest(token.encode(), b"paceline watch", "sha256").hex()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _is_here(host: str) -> bool:
    """Whether the name in a Host header is this machine's own, so that no other site's page can ask by a name of its.

    >>> [_is_here(host) for host in ("127.0.0.1:7223", "localhost", "[::1]:80", "127.evil.example:7223", "[", "")]
    [True, True, True, False, False, False]
    """
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def open_server(follower: Follower, host: str, port: int, token: str | None) -> LiveServer:
    """Listening at `port`, or where that is taken at the next free one; `port` of what comes back says which."""
    for candidate in [port] if port == 0 else range(port, min(port + PORTS_TRIED, 65536)):
        try:
            return LiveServer(follower, host, candidate, token)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise UserError(f"--listen {host}:{port}: cannot listen there ({error.strerror})") from None
    raise UserError(f"--listen {host}:{port}: this and the next {PORTS_TRIED} ports are in use: give another")
