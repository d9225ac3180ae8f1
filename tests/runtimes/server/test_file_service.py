"""A run seen over the network: a copy of its folder that grows with it, and of which strangers see nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.analysis.status import read_status
from paceline.config import RunConfig
from paceline.errors import RunFailed, UserError
from paceline.reports.status_table import format_status
from paceline.reports.watch.mirror import GROWING, Mirror
from paceline.reports.watch.remote import is_served, mirrored, status_reader
from paceline.runs.events import EventLog, read_events
from paceline.runs.folder import RunFolder
from paceline.runtimes.server.file_service import MAX_OBSERVERS, FileService
from paceline.transports.auth import ConnectOptions
from paceline.transports.file_client import FileClient
from paceline.transports.frames import MAX_PIECE
from paceline.transports.listener import Listener

TOKEN = b"the token of a run"


class Served:
    """A run's folder, and a thread that lets observers in."""

    def __init__(self, runs: Path) -> None:
        self.folder = RunFolder.create(RunConfig(strategy="async", workers=2, runs=str(runs), name="it"))
        self.listener = Listener("127.0.0.1:0", TOKEN)
        self.address, self.observers = self.listener.address, FileService(self.folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._let_in)
        self._thread.start()

    def _let_in(self) -> None:
        while not self._stop.is_set():
            select.select([self.listener], [], [], 0.02)
            for applicant in self.listener.serve():
                self.observers.admit(applicant)

    def write(self, *rows: dict[str, object]) -> None:
        with EventLog(self.folder.events_file) as log:
            for row in rows:
                log.write(**row)  # type: ignore[arg-type]

    def observer(self) -> FileClient:
        return FileClient(self.address, TOKEN)

    def close(self) -> None:
        """Let no observer in any more; may be called twice."""
        self._stop.set()
        self._thread.join()
        self.listener.close()
        self.observers.end(0.0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with contextlib.closing(Served(tmp_path / "runs")) as found:
        yield found


@pytest.fixture
def mirror(served: Served, tmp_path: Path) -> Iterator[Mirror]:
    (tmp_path / "copy").mkdir()
    with contextlib.closing(Mirror(served.observer, tmp_path / "copy")) as found:
        yield found


def progress(now: float) -> dict[str, object]:
    return {"kind": "progress", "now": now, "fraction": now / 100, "updates": int(now), "rate": 5.0}


def same(mirror: Mirror, folder: RunFolder) -> bool:
    names = [path.name for path in folder.path.iterdir()]
    return all((mirror.folder.path / name).read_bytes() == (folder.path / name).read_bytes() for name in names)


def test_a_copy_grows_with_the_run_and_stands_as_it_does(served: Served, mirror: Mirror) -> None:
    served.write({"kind": "run_started", "now": 0.0}, progress(10.0))
    served.folder.arrivals_file.write_bytes(bytes(range(256)))
    with served.folder.locked():
        assert mirror.refresh() and same(mirror, served.folder)
        assert not mirror.refresh()
        served.write(progress(20.0))
        assert mirror.refresh() and same(mirror, served.folder)
        here, there = (read_status(folder.path) for folder in (served.folder, mirror.folder))
        quiet = here.quiet_seconds, there.quiet_seconds
        assert there == dataclasses.replace(here, run=there.run, quiet_seconds=quiet[1]) and here.status == "running"
        assert abs((quiet[0] or 0.0) - (quiet[1] or 0.0)) < 5.0
    served.folder.write_result({"status": "stopped", "reason": "interrupted", "updates": 20, "train_seconds": 20.0})
    assert mirror.refresh() and read_status(mirror.folder.path).status == "stopped"
    served.folder.result_file.unlink()  # the run goes on
    assert mirror.refresh() and read_status(mirror.folder.path).status == "running"
    served.folder.update_config(dataclasses.replace(served.folder.config(), workers=3))
    assert mirror.refresh() and mirror.folder.config().workers == 3


def test_a_file_of_many_pieces_and_one_that_became_shorter(served: Served, mirror: Mirror) -> None:
    log = served.folder.arrivals_file
    log.write_bytes(bytes(range(251)) * (3 * MAX_PIECE // 251))
    mirror.refresh()
    assert same(mirror, served.folder)
    log.write_bytes(b"cut off, and gone on")
    mirror.refresh()
    assert same(mirror, served.folder)


def test_of_a_long_run_the_status_fetches_the_last_events_alone(served: Served, tmp_path: Path) -> None:
    served.write({"kind": "run_started", "now": 0.0}, *(progress(float(now)) for now in range(50)))
    (tmp_path / "copy").mkdir()
    with contextlib.closing(Mirror(served.observer, tmp_path / "copy", 300, GROWING[-1:])) as mirror:
        mirror.refresh()
        copied = list(read_events(mirror.folder.events_file))
        assert 1 < len(copied) < 6 and copied == list(read_events(served.folder.events_file))[-len(copied) :]


def test_the_status_of_a_served_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN.decode())
    served.write({"kind": "run_started", "now": 0.0}, progress(10.0))
    with status_reader(served.address) as look:
        found = look()
    assert (found.run, found.status, found.updates) == (f"{served.folder.path} at {served.address}", "running", 10)
    assert is_served(served.address) and not is_served(str(served.folder.path)) and not is_served("nowhere")


def test_nothing_but_the_files_that_are_shown_is_handed_out(served: Served) -> None:
    served.folder.token_file.write_bytes(TOKEN)
    for name in ("token", "../it/config.toml", "/etc/passwd", "checkpoints", ""):
        with contextlib.closing(served.observer()) as observer, pytest.raises(ConnectionError):
            observer.read(name)
    for offset, most in ((0, MAX_PIECE + 1), (0, -1), ("0", 1)):
        with contextlib.closing(served.observer()) as observer, pytest.raises(ConnectionError):
            observer.read("config.toml", offset, most)  # type: ignore[arg-type]
    with contextlib.closing(served.observer()) as observer:
        assert observer.read("result.json") is None
        piece = observer.read("config.toml", -4, 3)
        assert piece is not None and piece.data == served.folder.config_file.read_bytes()[-4:-1]


def test_after_the_end_observers_see_the_result_and_are_sent_away(served: Served, mirror: Mirror) -> None:
    served.write({"kind": "run_started", "now": 0.0})
    mirror.refresh()
    served.folder.write_result({"status": "finished", "reason": None, "updates": 1, "train_seconds": 1.0})
    ending = threading.Thread(target=served.observers.end, args=(60.0,))
    ending.start()
    mirror.refresh()
    ending.join(30)
    assert not ending.is_alive() and read_status(mirror.folder.path).status == "finished"
    served.close()
    with pytest.raises(RunFailed, match=r"no longer answers .*has ended there, or its server was killed"):
        mirror.refresh()
    assert not mirror.folder.is_locked()


def test_another_run_at_the_same_address_is_not_mixed_in(served: Served, mirror: Mirror) -> None:
    mirror.refresh()
    mirror._observer._connection.shut_down()
    assert not mirror.refresh()  # the same run, found again
    mirror._observer._connection.shut_down()
    mirror.run = "runs/before"
    with pytest.raises(RunFailed, match="it now serves"):
        mirror.refresh()


def test_only_so_many_look_at_once(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_OBSERVERS):
            stack.enter_context(contextlib.closing(served.observer()))
        with pytest.raises(UserError, match="observers watch this run already"):
            served.observer()


def test_who_cannot_look_is_told_why(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no token for .*: give RUN/token by --token-file or PACELINE_TOKEN"):
        with status_reader(served.address):
            pass
    monkeypatch.setenv("PACELINE_TOKEN", "of another run altogether")
    with pytest.raises(UserError, match="does not accept our token: give the one in RUN/token"):
        with status_reader(served.address):
            pass
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        greeting = threading.Thread(target=_greet_as_ssh, args=(other,))
        greeting.start()
        with pytest.raises(UserError, match="is not a Paceline server"):
            with mirrored(ConnectOptions(address)):
                pass
        greeting.join()
    with pytest.raises(UserError, match=r"cannot be reached \(Connection refused\)"):
        with status_reader(address):
            pass
    with pytest.raises(UserError, match="is a folder"):
        with status_reader(str(tmp_path), tls=True):
            pass


def _greet_as_ssh(other: socket.socket) -> None:
    with other.accept()[0] as connection:
        connection.sendall(b"SSH-2.0-OpenSSH_9.6" + 40 * b" ")


def test_a_row_says_how_often_data_was_dealt(served: Served) -> None:
    workers = {"worker": [0], "state": ["draining"], "steps": [1], "pushes": [1], "staleness": [0.0], "ago": [0.1]}
    served.write({"kind": "run_started", "now": 0.0}, {"kind": "workers", "now": 1.0, "deal": 2, **workers})
    found = read_status(served.folder.path)
    assert found.deals == 2 and found.workers[0].state == "draining"
    assert "data reassigned 2 times" in format_status(found, 200)
