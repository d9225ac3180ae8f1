"""The live page's server over real sockets: what a browser gets first, later and again, and who gets nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.reports.watch import connections
from paceline.reports.watch import server as live
from paceline.reports.watch import sources as watched
from paceline.reports.watch.server import LiveServer, cookie_value, open_server
from paceline.reports.watch.sources import FolderSource, RunFollower
from paceline.runs.folder import RunFolder
from tests.support.made_up_runs import log_events, progress, result_of, whole_run
from tests.support.prometheus_text import parse
from tests.support.waiting import until

PATIENCE = 30.0
Answer = tuple[int, dict[str, str], str]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE_SECONDS", "MIN_POLL_SECONDS", "MAX_POLL_SECONDS"):
        monkeypatch.setattr(watched, name, 0.001)
    monkeypatch.setattr(watched, "MAX_CPU_SHARE", 1000.0)
    monkeypatch.setattr(live, "WRONG_TOKEN_SECONDS", 0.0)


@contextlib.contextmanager
def serving(folder: RunFolder, token: str | None = None, port: int = 0) -> Iterator[LiveServer]:
    server = open_server(RunFollower(FolderSource(folder.path)), "127.0.0.1", port, token)
    thread = threading.Thread(target=lambda: server.serve_forever(0.01))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)


def ask(server: LiveServer, path: str, **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
    connection.close()
    return found


class Stream:
    """Server-sent events as a browser reads them."""

    def __init__(self, server: LiveServer, path: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        self._connection.request("GET", path, headers=headers)
        self._response = self._connection.getresponse()
        assert self._response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        self.last = self.kind = ""
        self.retry = 0

    def next(self) -> list[dict[str, Any]]:
        data: list[str] = []
        self.kind = "message"
        while True:
            line = self._response.readline().decode()
            assert line.endswith("\n"), "the stream has ended"
            name, _, value = line.rstrip("\n").partition(": ")
            if name == "id":
                self.last = value
            elif name == "event":
                self.kind = value
            elif name == "retry":
                self.retry = int(value)
            elif name == "data":
                data.append(value)
            elif not name and data:
                found: list[dict[str, Any]] = json.loads("\n".join(data))
                return found

    def close(self) -> None:
        self._connection.close()


def feed_of(page: str) -> str:
    found = re.search(r'"(/events\?after=[^"]+)"', page)
    assert found is not None
    return found[1]


def test_a_page_holds_all_and_events_bring_what_comes_after(tmp_path: Path) -> None:
    folder = whole_run(tmp_path, end=False)
    with serving(folder) as server, folder.locked():
        status, headers, page = ask(server, "/")
        assert status == 200 and str(folder.path) in page
        assert "connect-src 'self'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"
        stream = Stream(server, feed_of(page))
        log_events(folder, progress(5.0, 1600, 0.6))
        (later,) = stream.next()
        assert later["figures"]["samples"] == 1600 and stream.retry > 0
        stream.close()

        log_events(folder, progress(6.0, 1920, 0.7))
        back = Stream(server, feed_of(page), **{"Last-Event-ID": stream.last})
        (missed,) = back.next()
        assert missed["figures"]["samples"] == 1920, "a browser that comes back gets what it missed"
        assert back.kind == "message"
        late = Stream(server, "/events")
        (whole,) = late.next()
        assert whole["figures"]["samples"] == 1920, "one that knows nothing gets everything"
        assert late.kind == "all"

        folder.write_result(result_of(folder))
        for each in (back, late):
            assert each.next()[0]["status"] == "finished"
            each.close()


def test_after_a_restart_of_the_server_a_page_gets_everything_again(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    with serving(folder) as server:
        before = feed_of(ask(server, "/")[2])
        port = server.port
    with serving(folder, port=port) as server:
        assert server.port == port
        stream = Stream(server, before)
        assert [digest["name"] for digest in stream.next()] == ["run"]
        assert stream.kind == "all"
        stream.close()


def test_without_a_token_only_this_machine_by_its_own_name_may_ask(tmp_path: Path) -> None:
    with serving(whole_run(tmp_path)) as server:
        assert ask(server, "/", Host="localhost:1")[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""):
            for path in ("/", "/events", "/metrics"):
                status, _, text = ask(server, path, Host=host)
                assert status == 403 and text.startswith("this page is local")


def test_with_a_token_nobody_enters_without_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(whole_run(tmp_path), token="secret") as server:
        for path, headers in (
            ("/", {}),
            ("/events", {}),
            ("/metrics", {"Authorization": "Bearer guess"}),
            ("/?token=guess", {}),
            ("/", {"Cookie": f"{server.cookie}=guess"}),
            ("/", {"Cookie": "\x07=;"}),
        ):
            status, _, text = ask(server, path, **headers)
            assert status == 401 and "missing token" in text, path
        status, headers, _ = ask(server, "/?token=secret")
        assert (status, headers["location"]) == (303, "/"), "the token leaves the address bar"
        assert "HttpOnly" in headers["set-cookie"] and "secret" not in headers["set-cookie"]
        status, _, page = ask(server, "/", Cookie=headers["set-cookie"].partition(";")[0])
        assert status == 200 and "secret" not in page and cookie_value("secret") not in page
        assert ask(server, "/metrics", Authorization="Bearer secret")[0] == 200
    assert "secret" not in "".join(capfd.readouterr())


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whole_run(tmp_path)
    with serving(folder) as first, serving(folder, port=first.port) as second:
        assert second.port > first.port
        monkeypatch.setattr(live, "PORTS_TRIED", 1)
        with pytest.raises(UserError, match="ports are in use: give another"):
            open_server(first.follower, "127.0.0.1", first.port, None)
    with pytest.raises(UserError, match="cannot listen there"):
        open_server(first.follower, "203.0.113.7", 7223, None)


def test_metrics_and_what_is_not_there(tmp_path: Path) -> None:
    with serving(whole_run(tmp_path)) as server:
        status, headers, text = ask(server, "/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        assert any(name == "paceline_updates_total" and value == 40 for name, _, value in parse(text))
        assert ask(server, "/favicon.ico")[0] == 204
        assert {ask(server, path)[0] for path in ("/../etc/passwd", "//evil.example/")} == {404}
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as stranger:
            stranger.sendall(b"GET http://[::1 HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.0 404 ")
        assert ask(server, f"/events?after={server.follower.instance}-{'9' * 5000}", Host="x")[0] == 403


def test_so_many_browsers_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    with serving(whole_run(tmp_path)) as server:
        streams = [Stream(server, "/events") for _ in range(2)]
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(server, "/")
        for stream in streams:
            assert stream.next()
            stream.close()


def is_closed(stranger: socket.socket) -> bool:
    """Whether the other end has closed; else send one byte more."""
    stranger.setblocking(False)
    try:
        stranger.send(b"x")
        return stranger.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_the_head_of_a_request_has_one_deadline_however_its_bytes_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with serving(whole_run(tmp_path)) as server, socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\nX: ")
        until(lambda: is_closed(stranger), "the end of a connection that sends a byte now and then", 5.0)
        assert ask(server, "/")[0] == 200


def test_the_head_of_a_request_is_bounded(tmp_path: Path) -> None:
    with serving(whole_run(tmp_path)) as server, socket.create_connection(("127.0.0.1", server.port)) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(
                b"GET / HTTP/1.0\r\nHost: localhost\r\n" + b"X: y\r\n" * 10 + b"Y: " + b"z" * 60_000 + b"\r\n\r\n"
            )
            assert not stranger.recv(100).startswith(b"HTTP/1.0 200")


def test_idle_connections_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    with serving(whole_run(tmp_path)) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), PATIENCE) for _ in range(5)]
        assert ask(server, "/")[0] == 200
        assert idle[0].recv(1) == b"", "the oldest was closed"
        for one in idle:
            one.close()


def test_every_address_has_its_share() -> None:
    """One with many connections loses an idle one to a newcomer, never one of those that have few."""
    ends = [socket.socketpair() for _ in range(8)]
    ours = [end for end, _ in ends]
    table = connections.ConnectionTable(most=5, most_per_address=4)
    assert all(table.admit(end, "10.0.0.1") for end in ours[:4])
    assert table.admit(ours[4], "10.0.0.2")
    table.set_busy(ours[0])
    assert table.admit(ours[5], "10.0.0.3"), "in place of the oldest idle one of 10.0.0.1"
    assert [end.recv(1, socket.MSG_DONTWAIT) for end in ours[1:2]] == [b""]
    for end in ours[2:6]:
        table.set_busy(end)
    assert table.admit(ours[6], "10.0.0.4"), "of the address with most, even if none is idle"
    assert ours[0].recv(1, socket.MSG_DONTWAIT) == b""
    table.set_busy(ours[6])
    assert not table.admit(ours[7], "10.0.0.1"), "nobody has more than it would have"
    table.release(ours[4])
    assert table.admit(ours[7], "10.0.0.1")
    for pair in ends:
        for end in pair:
            end.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist: give a run folder as in runs/NAME"),
        (["."], ". is not a run folder and contains none: give runs/NAME, or a folder of runs"),
        (["run", "--listen", "7223"], "address '7223': write HOST:PORT"),
        (["run", "--terminal", "--open"], "--open is for the page, which --terminal does without"),
        (["run", "--page-token", "nowhere"], "token file nowhere cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        whole_run(tmp_path)
    assert main(["watch", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("where", ["127.0.0.1", "0.0.0.0"])
def test_the_verb_says_where_it_is_and_ends_with_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    def interrupted(server: LiveServer) -> None:
        raise KeyboardInterrupt

    opened: list[str] = []
    forwarding: list[tuple[int, str]] = []

    def open_browser(url: str) -> None:
        opened.append(url)
        if url.startswith("file://"):
            page = Path(url.removeprefix("file://"))
            forwarding.append((page.stat().st_mode & 0o777, page.read_text()))
            assert page.parent.stat().st_mode & 0o077 == 0

    monkeypatch.setattr(LiveServer, "serve_forever", interrupted)
    monkeypatch.setattr("webbrowser.open", open_browser)
    folder = whole_run(tmp_path)
    with socket.create_server((where, 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(folder.path), "--open", "--listen", f"{where}:{port}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"port {port} is in use: this is at \d+", said[0])
    address = said[1].removeprefix(f"watching {folder.path}: ")
    assert ("?token=" in address) == (where == "0.0.0.0") == ("it is not encrypted" in said[2])
    if where == "127.0.0.1":
        assert opened == [address]
        return
    assert "token" not in opened[0], "every user can read the command line of the browser"
    ((mode, text),) = forwarding
    assert mode == 0o600 and f'url={address}"' in text
    assert not Path(opened[0].removeprefix("file://")).exists()


def test_a_token_of_ones_own_is_kept_for_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LiveServer, "serve_forever", lambda server: None)
    (tmp_path / "token").write_text("my-token-for-pages\n")
    (tmp_path / "token").chmod(0o600)
    path = str(whole_run(tmp_path).path)
    assert main(["watch", path, "--page-token", str(tmp_path / "token"), "--listen", "127.0.0.1:0"]) == 0
    assert "/?token=my-token-for-pages" in capsys.readouterr().out
