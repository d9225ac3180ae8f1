"""The HTTP server of the live page and of `/metrics`; server-sent events bring each run that changed to the page."""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.cookies
import io
import ipaddress
import json
import socket
import sys
import time
import traceback
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.errors import UserError
from paceline.reports.html import LiveFeed, render
from paceline.reports.watch import connections
from paceline.reports.watch.connections import MAX_HEAD_NBYTES, ConnectionTable, HeadReader
from paceline.reports.watch.prometheus import CONTENT_TYPE, exposition
from paceline.reports.watch.sources import RunFollower

PORT = 7223  # default port: the letters PACE on a telephone
PORTS_TRIED = 100
KEEP_ALIVE_SECONDS = 10.0
RETRY_MILLISECONDS = 1000
STALLED_SECONDS = 10.0  # A browser that reads nothing for this long is disconnected; it reconnects by itself
WRONG_TOKEN_SECONDS = 0.5  # delay of the answer to a wrong token
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveServer(ThreadingHTTPServer):
    """Listens as soon as it is created; `serve_forever` answers, with one thread per connection."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, follower: RunFollower, host: str, port: int, token: str | None = None) -> None:
        self.follower, self.token = follower, token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connections = ConnectionTable()
        super().__init__((host, port), _Handler)
        self.port: int = self.server_address[1]

    @property
    def cookie(self) -> str:
        """Name of the cookie; it has the port, because all ports of a host share cookies."""
        return f"paceline-watch-{self.port}"

    def stop(self) -> None:
        """Stop answering; to be called from another thread."""
        self.follower.close()
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without the DNS lookup of the library's version."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.admit(request, str(client_address[0])):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a closed connection; print other errors without the request, which may hold the token."""
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request per connection."""

    server: LiveServer
    server_version, sys_version = "paceline", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(HeadReader(self.connection, connections.HEAD_SECONDS, MAX_HEAD_NBYTES))

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: a URL may hold the token."""

    def do_GET(self) -> None:
        self.server.connections.set_busy(self.connection)
        self.connection.settimeout(STALLED_SECONDS)
        path, _, rest = self.path.partition("?")
        query = urllib.parse.parse_qs(rest)
        if not self._is_allowed(path, query):
            return
        match path:
            case "/":
                self._page()
            case "/events":
                self._events(self.headers.get("Last-Event-ID") or query.get("after", [""])[0])
            case "/metrics":
                runs = [snapshot.status for snapshot in self.server.follower.source.run_snapshots()]
                self._answer(HTTPStatus.OK, CONTENT_TYPE, exposition(runs))
            case "/favicon.ico":
                self._answer(HTTPStatus.NO_CONTENT, "image/x-icon", "")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not found: only /, /events and /metrics exist\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _is_allowed(self, path: str, query: dict[str, list[str]]) -> bool:
        """Require the token; without one, require a local Host header, so that no foreign page can ask."""
        token = self.server.token
        if token is None:
            if _is_local(self.headers.get("Host", "")):
                return True
            text = "this page is local: open it as http://127.0.0.1, or start it with --listen and a token\n"
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", text)
            return False
        if "token" in query and _same(query["token"][0], token):
            self._set_cookie(path, token)
            return False
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if _same(bearer, token) or _same(self._cookie_value(), cookie_value(token)):
            return True
        time.sleep(WRONG_TOKEN_SECONDS)
        text = "wrong or missing token: open the address that 'paceline watch' printed\n"
        self._answer(HTTPStatus.UNAUTHORIZED, "text/plain", text)
        return False

    def _cookie_value(self) -> str:
        with contextlib.suppress(http.cookies.CookieError):
            found = http.cookies.SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            return found.value if found is not None else ""
        return ""

    def _set_cookie(self, path: str, token: str) -> None:
        """Redirect to a URL without the token, and set a cookie derived from it."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", path)
        cookie = f"{self.server.cookie}={cookie_value(token)}; Path=/; HttpOnly; SameSite=Strict"
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
        follower.poll()
        number, digests = follower.now()
        feed = LiveFeed(f"/events?after={follower.instance}-{number}")
        self._answer(HTTPStatus.OK, "text/html", render(json.loads(digests), feed))

    def _events(self, after: str) -> None:
        """Send an event per change until the browser disconnects; a new browser first gets everything."""
        follower = self.server.follower
        number = last_seen(after, follower.instance)
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
                self.wfile.write(event(f"{follower.instance}-{found[0]}", found[1], b"" if number else b"all"))
                number = found[0]


def event(identity: str, data: bytes, kind: bytes = b"") -> bytes:
    """Return one server-sent event; kind `all` replaces everything, the default updates what changed.

    >>> event("ab-3", b"[1]"), event("ab-3", b"[]", b"all")
    (b'id: ab-3\\ndata: [1]\\n\\n', b'event: all\\nid: ab-3\\ndata: []\\n\\n')
    """
    named = b"event: %s\n" % kind if kind else b""
    return named + b"id: %s\ndata: %s\n\n" % (identity.encode(), data.replace(b"\n", b"\ndata: "))


def last_seen(identity: str, instance: str) -> int:
    """Return the number of the last event a browser has; 0 if it came from another server instance.

    >>> last_seen("ab-3", "ab"), last_seen("ab-3", "cd"), last_seen("", "ab"), last_seen("ab-x", "ab")
    (3, 0, 0, 0)
    """
    before, _, number = identity.partition("-")
    return int(number) if before == instance and number.isdecimal() and len(number) < 16 else 0


def cookie_value(token: str) -> str:
    """Return the cookie that stands for the token."""
    return hmac.digest(token.encode(), b"paceline watch", "sha256").hex()


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _is_local(host: str) -> bool:
    """Return whether a Host header names this machine, which blocks DNS rebinding by other sites.

    >>> [_is_local(host) for host in ("127.0.0.1:7223", "localhost", "[::1]:80", "127.evil.example:7223", "[", "")]
    [True, True, True, False, False, False]
    """
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def open_server(follower: RunFollower, host: str, port: int, token: str | None) -> LiveServer:
    """Listen at `port`, or at the next free one if it is taken; the result's `port` says which."""
    for candidate in [port] if port == 0 else range(port, min(port + PORTS_TRIED, 65536)):
        try:
            return LiveServer(follower, host, candidate, token)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise UserError(f"--listen {host}:{port}: cannot listen there ({error.strerror})") from None
    raise UserError(f"--listen {host}:{port}: this and the next {PORTS_TRIED} ports are in use: give another port")
