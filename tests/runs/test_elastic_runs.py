"""Runs whose workers come and go, executed again; and requests that reach a run through its folder."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.core.messages import Resume
from paceline.errors import RunFailed
from paceline.runs.control_files import DrainAnswer, DrainRequest, pop_requests, request_drain
from paceline.runs.events import read_events
from paceline.runs.folder import RunFolder
from paceline.runs.recovery import rebuild
from tests.support.recorded_runs import Record, RecordedRun, assert_same, checkpoint_now, ignore, records_of
from tests.support.rings import long_but
from tests.support.waiting import until

pytestmark = pytest.mark.long  # left to `make test`

STRATEGIES = ["async", "sync", "backup:1", "bounded:1", "async-local:2"]


def comings_and_goings(run: RecordedRun) -> None:
    """Two begin, a third joins, the first is drained, the second is lost and comes back."""
    run.join_all()
    run.push_at_random(6)
    run.incarnations[2] = 0
    run.join(2)
    run.push_at_random(6)
    assert run.host.drain(0) is None
    run.push_at_random(6)
    run.leave(0)
    run.leave(1)
    run.push_at_random(3)
    run.join(1)


def deals_of(folder: RunFolder) -> list[list[int]]:
    return [row["members"] for row in read_events(folder.events_file) if row["kind"] == "deal"]


@pytest.mark.parametrize("codec", ["none", "topk:0.3"])
@pytest.mark.parametrize("strategy", long_but(["async"], STRATEGIES))
def test_a_run_whose_workers_come_and_go_replays_bit_for_bit(record: Record, strategy: str, codec: str) -> None:
    settings: dict[str, Any] = {"split": "labels", "epochs": 4.0, "momentum": 0.5, "codec": codec}
    run = record(1, strategy=strategy, workers=2, max_workers=4, **settings)
    comings_and_goings(run)
    run.push_at_random(4)
    checkpoint = checkpoint_now(run)
    run.run_to_the_end()
    assert deals_of(run.folder) == [[0, 1, 2], [1, 2], [2], [1, 2]]
    for start in (None, checkpoint):
        again = run.replay(checkpoint=start)
        again.feed(records_of(run, start.log_offset if start is not None else 0))
        assert again.mismatch is None
        assert_same(again.server, run.server)


def test_a_resumed_run_knows_its_deals_and_who_was_drained(record: Record) -> None:
    run = record(2, strategy="async", workers=2, max_workers=3, epochs=4.0)
    comings_and_goings(run)
    run.close()
    again = run.new_server()
    rebuild(again, run.make_worker, run.task, run.config, run.folder, ignore)
    assert_same(again, run.server)
    again.handle(Resume())
    assert again.pending_workers == [1]  # worker 0 was sent away, and 2 came by itself


def test_the_clock_of_a_run_whose_workers_were_all_drained_runs_when_one_comes_again(record: Record) -> None:
    run = record(strategy="async", workers=1, epochs=2.0)
    run.join_all()
    run.host.drain(0)
    run.push(0)
    run.leave(0)
    run.host.clock.halt()  # as when it was resumed
    run.host.handle(Resume())
    assert run.server.started and not run.server.finished
    stood_at = run.host.clock.now()
    assert run.host.clock.now() == stood_at
    run.join(0)
    assert run.host.clock.now() > stood_at and run.instances[0].pending is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_room_for_others_changes_nothing_while_nobody_comes(record: Record, strategy: str) -> None:
    runs = [
        record(3, strategy=strategy, workers=2, split="labels", codec="int8", max_workers=room, name=f"room {room}")
        for room in (None, 5)
    ]
    for run in runs:
        run.join_all()
        run.run_to_the_end()
    fixed, elastic = (run.server for run in runs)
    assert torch.equal(fixed.weights, elastic.weights) and torch.equal(fixed.evaluated, elastic.evaluated)
    assert deals_of(runs[1].folder) == []


def test_a_simulated_table_of_comings_and_goings_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.toml"
    rows = [("join", 2.5, 2), ("drain", 5.5, 0), ("join", 8.5, 0)]
    table.write_text("".join(f'[[fault]]\nkind = "{kind}"\nat = {at}\nworker = {w}\n' for kind, at, w in rows))
    where = ["--runs", str(tmp_path), "--dataset", "fashion-mnist-sample", "--score", "none", "--name", "it"]
    settings = ["--workers", "2", "--max-workers", "3", "--steps", "22", "--faults", str(table)]
    assert main(["simulate", *where, *settings]) == 0
    assert deals_of(RunFolder(tmp_path / "it")) == [[0, 1, 2], [1, 2], [0, 1, 2]]
    assert main(["replay", str(tmp_path / "it")]) == 0
    assert "identical to the run" in capsys.readouterr().out


def test_a_request_in_the_folder_reaches_the_host_and_is_answered(record: Record) -> None:
    run = record(strategy="async", workers=2, epochs=2.0)
    run.join_all()
    answers: list[DrainAnswer] = []
    with run.folder.locked():
        asking = threading.Thread(target=lambda: answers.append(request_drain(run.folder, (1, 7))))
        asking.start()

        def is_draining() -> bool:
            run.host.requests.look()
            return run.server.members[1].draining

        until(is_draining, "the drain")
        assert asking.is_alive(), "it is not answered before the worker has left"
        run.push(1)
        while asking.is_alive():
            run.host.requests.look()
    assert answers == [DrainAnswer({7: "it is not a worker of this run; these are: 0, 1"})]
    assert run.server.members[1].released and not list(run.folder.requests.iterdir())
    kinds = [row["kind"] for row in read_events(run.folder.events_file)]
    assert "worker_draining" in kinds
    run.leave(1)
    assert run.host.lost == []


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"drain": 3}', b'{"drain": ["x"]}', b'{"stop": []}', b"[" * 100_000, b"\xff\xfe"),
        *(b'{"drain": [%s]}' % worker for worker in (b"true", b"1.5", b"-1", b'"1"', b"1e400", b"NaN", b"9" * 4000)),
        b'{"drain": [1]}' + b" " * (1 << 20),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_no_request_is_taken_away(record: Record, content: bytes) -> None:
    run = record(strategy="async", workers=2)
    run.folder.requests.mkdir()
    (run.folder.requests / "1.ask").write_bytes(content)
    assert list(pop_requests(run.folder)) == [] and not list(run.folder.requests.iterdir())


@pytest.mark.parametrize("kind", ["pipe", "link", "socket", "folder"])
def test_a_request_that_is_no_regular_file_does_not_stop_the_run(record: Record, tmp_path: Path, kind: str) -> None:
    """A pipe would block the thread that owns the weights, and a link may lead to a file without end."""
    run = record(strategy="async", workers=2)
    run.folder.requests.mkdir()
    place = run.folder.requests / "1.ask"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        (tmp_path / "request").write_text('{"drain": [1]}')
        place.symlink_to(tmp_path / "request")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(run.folder.requests):
            listener.bind("1.ask")
    else:
        place.mkdir()
    found: list[DrainRequest] = []
    reading = threading.Thread(target=lambda: found.extend(pop_requests(run.folder)), daemon=True)
    reading.start()
    until(lambda: not reading.is_alive(), "the requests are read", seconds=10)
    assert found == [] and (kind == "folder" or not list(run.folder.requests.iterdir()))


def test_a_run_that_does_not_answer_is_said_to(record: Record) -> None:
    run = record(strategy="async", workers=2)
    with run.folder.locked(), pytest.raises(RunFailed, match="did not answer the request within"):
        request_drain(run.folder, (0,), timeout=0.1)
    with pytest.raises(RunFailed, match="ended before it answered the request"):
        request_drain(run.folder, (0,))
    assert not list(run.folder.requests.iterdir())
    run.close()
    assert main(["drain", str(run.folder.path), "0"]) == 2
