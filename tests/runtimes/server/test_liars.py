"""Peers that hold the token and lie: each loses its own connection, with one event; the run goes on to its result."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.assembly.run import make_join
from paceline.errors import UserError
from paceline.runs.arrival_log import read_arrivals
from paceline.runtimes.sharded.client import ShardedClient
from paceline.system.environment import package_version
from paceline.transports.frames import FrameKind
from paceline.transports.protocol import Timing
from paceline.transports.tcp_client import TcpClient
from paceline.transports.tls import Tls, worker_tls
from tests.support.served_runs import TOKEN, Liar, ServedRun, lying
from tests.support.waiting import until

pytestmark = pytest.mark.long  # left to `make test`

Lie = Callable[[Liar], Any]
VERSION = package_version("paceline")


def application(text: str | dict[str, Any]) -> Lie:
    return lambda liar: liar.send_fields(FrameKind.APPLY, text)


def hello(**fields: Any) -> Lie:
    def tell(liar: Liar) -> None:
        liar.apply()
        liar.hello(**fields)

    return tell


def raw_hello(text: str) -> Lie:
    def tell(liar: Liar) -> None:
        liar.apply()
        liar.send_fields(FrameKind.HELLO, text)

    return tell


def figures(text: str) -> Lie:
    def tell(liar: Liar) -> None:
        liar.apply()
        liar.hello()
        liar.send_fields(FrameKind.FIGURES, text)

    return tell


def push(samples: int = 4, **numbers: Any) -> Lie:
    def tell(liar: Liar) -> None:
        liar.apply()
        liar.hello()
        liar.read_frame()  # the first reply
        liar.push(samples, **numbers)

    return tell


def two_pushes_for_one_reply(liar: Liar) -> None:
    push()(liar)
    liar.read_frame()
    liar.push(4, 1, 1)
    liar.push(4, 7, 7)


REQUESTS: dict[str, Lie] = {
    "a list as a number": application({"again": True, "worker": [], "incarnation": 0}),
    "an object as a number": application({"version": VERSION, "worker": {"a": 1}}),
    "emoji as a version": application({"version": "\N{SNAKE}" * 2000}),
    "a number as a version": application({"version": 7}),
    "a list as a device": application({"version": VERSION, "device": []}),
    "true as a number": application({"version": VERSION, "worker": True}),
    "infinity as a number": application('{"again": true, "worker": Infinity}'),
    "a long number": application('{"again": true, "worker": %s}' % ("9" * 5000)),
    "deep nesting": application('{"worker": ' + "[" * 30_000),
    "a shard without an address": application({"shard": True, "version": VERSION, "pid": "x"}),
}
MESSAGES: dict[str, Lie] = {
    "infinite threads": raw_hello('{"quota": null, "threads": Infinity, "sizes": []}'),
    "2^40 threads": hello(threads=2**40),
    "no threads": hello(threads=0),
    "quota as text": hello(quota="all"),
    "negative quota": hello(quota=-1),
    "another quota": hello(quota=3),
    "quota beyond the log": hello(quota=2**32),
    "less state than the model": hello(sizes=[128, 2, None, None, 0]),
    "no state at all": hello(sizes=[128, 0, None, None, 0]),
    "sizes that are lists": hello(sizes=[[128], 12, None, None, 0]),
    "an own loop": hello(own_loop=True),
    "a hello without end": raw_hello('{"sizes": ' + '{"a":' * 20_000),
    "a figure of 10^400": figures('{"accuracy": 1%s}' % ("0" * 400)),
    "a figure that is a list": figures('{"accuracy": [1]}'),
    "a long name": figures('{"%s": 1}' % ("a" * 5000)),
    "no samples": push(0),
    "2^32 - 1 samples": push(2**32 - 1),
    "one sample more": push(5),
    "seconds that are no number": push(seconds=math.nan),
    "negative seconds": push(wall=-1.0),
    "infinite wait": push(waited=math.inf),
    "a weight that is no number": push(weight=math.nan),
    "an infinite weight": push(weight=math.inf),
    "a loss of minus infinity": push(loss=-math.inf),
    "a number of its own": push(seq=2**32 - 1),
    "an answer to another reply": push(seq=5, reply=5),
    "two pushes for one reply": two_pushes_for_one_reply,
}


def assert_finished(served: ServedRun, num_expelled: int) -> None:
    result = served.result()
    assert result is not None and result["status"] == "finished" and result["test_loss"] is not None
    assert len(served.events("expelled")) == num_expelled, served.events("expelled")
    assert all(row["worker"] == 0 and row["why"].isprintable() for row in served.events("expelled"))
    logged, _ = read_arrivals(served.run.folder.arrivals_file, served.run.config)
    assert all(record.samples <= 4 for record in logged if record.kind == "push")


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_is_none_ends_only_its_own_connection(tmp_path: Path, name: str, tls: Tls | None) -> None:
    with ServedRun(tmp_path, tls) as served:
        with lying(served) as liar:
            REQUESTS[name](liar)
        served.work_honestly()
    assert_finished(served, num_expelled=0)
    assert served.listener.num_refused == 1


@pytest.mark.parametrize("name", MESSAGES)
def test_a_worker_that_lies_is_expelled_and_the_run_goes_on(tmp_path: Path, name: str, tls: Tls | None) -> None:
    with ServedRun(tmp_path, tls) as served:
        with lying(served) as liar:
            MESSAGES[name](liar)
        served.work_honestly()
    assert_finished(served, num_expelled=1)
    assert sum("worker 0" in note and "lost" not in note for note in served.notes) == 1, served.notes


def test_all_of_them_one_after_another(tmp_path: Path, tls: Tls | None) -> None:
    with ServedRun(tmp_path, tls) as served:
        for lie in (*REQUESTS.values(), *MESSAGES.values()):
            with lying(served) as liar:
                lie(liar)
        served.work_honestly()
    assert_finished(served, num_expelled=len(MESSAGES))


def test_what_a_peer_calls_itself_reaches_nobody_raw(tmp_path: Path, tls: Tls | None) -> None:
    evil = "\x1b[2J\u202e\nworker 7 has won"
    with ServedRun(tmp_path, tls) as served:
        for fields in ({"version": evil}, {"version": VERSION, "device": evil}):
            with lying(served) as liar:
                liar.send_fields(FrameKind.APPLY, fields)
                kind, refusal = liar.read_frame()
                assert kind is FrameKind.REFUSED and refusal["reason"].isprintable()
        until(lambda: len(served.notes) >= 2, "two lines")
        served.work_honestly()
    assert_finished(served, num_expelled=0)
    assert all(note.isprintable() for note in served.notes), served.notes
    assert all(row["text"].isprintable() for row in served.events("turned_away"))


def test_metrics_of_a_worker_have_printable_names(tmp_path: Path) -> None:
    with ServedRun(tmp_path) as served:
        liar = Liar(served)
        liar.apply()
        liar.hello()
        liar.send_fields(FrameKind.FIGURES, {"acc\x1b[31m": 1.5})
        until(lambda: served.events("reported"), "the metric")
        liar.leave()
    assert [list(row["figures"]) for row in served.events("reported")] == [["acc\\x1b[31m"]]


def test_what_is_the_servers_own_fault_still_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is found while a valid push is applied: no worker is blamed for it."""
    with ServedRun(tmp_path) as served:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(served.host.log, "append", full)
        with lying(served) as liar:
            liar.apply()
            liar.hello()
    assert isinstance(served.error, UserError) and "no space is left" in str(served.error)
    assert not served.events("expelled")


def test_a_defect_of_the_server_is_not_blamed_on_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ServedRun(tmp_path) as served:

        def broken(*_: object) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(served.host.server, "handle", broken)
        with lying(served) as liar:
            liar.apply()
            liar.hello()
    assert isinstance(served.error, KeyError)
    assert not served.events("expelled")


def test_bytes_that_no_check_foresaw_are_still_their_senders_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.transports import tcp_server

    with ServedRun(tmp_path) as served:

        def unforeseen(*_: object) -> None:
            raise ZeroDivisionError("\x1b[31m")

        with monkeypatch.context() as patched:
            patched.setattr(tcp_server, "parse_sizes", unforeseen)
            with lying(served) as liar:
                liar.apply()
                liar.hello()
        served.work_honestly()
    assert_finished(served, num_expelled=1)
    assert "ZeroDivisionError" in served.events("expelled")[0]["why"]


def test_a_worker_that_is_expelled_tells_its_user_why(tmp_path: Path, tls: Tls | None) -> None:
    with ServedRun(tmp_path, tls) as served:
        first = TcpClient(served.listener.address, TOKEN, worker_tls() if tls else None, patience=20)
        client = ShardedClient(served.listener.address, lambda address, fingerprint: first, first)
        welcome = client.apply({"version": VERSION}, 20.0)
        instance = served.run.make_worker(make_join(served.run.config, served.run.work, 0, welcome["incarnation"]))
        instance.pending = client.hello(instance.join, instance.memory, served.facts)
        push = instance.push()
        assert push is not None
        with pytest.raises(UserError, match="worker 0 counted 5 samples in a batch of 4"):
            client.exchange(push._replace(samples=5), Timing(0.1, 0.1, 0.0))
        client.close()
        served.work_honestly()
    assert_finished(served, num_expelled=1)
