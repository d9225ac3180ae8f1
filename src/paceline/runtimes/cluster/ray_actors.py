"""The processes of a run on Ray: a server, and workers that train or run a user's script."""

from __future__ import annotations

import os
import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import from_dict
from paceline.errors import Diverged, Interrupted, PacelineError
from paceline.reports.console import Console
from paceline.runs.folder import RunFolder
from paceline.runtimes.cluster import join
from paceline.runtimes.cluster import serve as network
from paceline.runtimes.cluster.credentials import ListenOptions
from paceline.runtimes.cluster.serve import Listening
from paceline.transports.auth import TOKEN_VARIABLE, ConnectOptions

MAX_ROWS = 1000


@dataclass(frozen=True)
class ActorStart:
    """What every process of a run on Ray begins with."""

    token: str
    folder: str  # where the user started the run: files are named relative to it

    def apply(self) -> None:
        """Set up this process; on a node without that folder it stays where Ray has started it."""
        os.environ[TOKEN_VARIABLE] = self.token
        if Path(self.folder).is_dir():
            os.chdir(self.folder)


class RelayConsole(Console):
    """A console that keeps its rows for the command that started the run."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)

    def report(self, row: dict[str, Any]) -> None:
        """Keep one row of the run."""
        self.rows.append(row)

    def note(self, text: str) -> None:
        """Keep one line of text."""
        self.rows.append({"kind": "note", "text": text})

    def take(self) -> list[dict[str, Any]]:
        """Remove and return all rows."""
        return [self.rows.popleft() for _ in range(len(self.rows))]


class ServerActor:
    """Serves one run. If Ray restarts it, it resumes from the run's folder, at the same address."""

    def __init__(
        self, start: ActorStart, config: dict[str, Any], listen: str, tls: bool, command: list[str] | None
    ) -> None:
        start.apply()
        self._config, self._listen, self._tls, self._command = from_dict(config), listen, tls, command
        self._relay = RelayConsole()
        self._opened: Listening | None = None
        self._stop_reason: str | None = None

    def serve(self) -> dict[str, Any]:
        """Serve until the run has ended. Return the error, if any."""
        folder = RunFolder(Path(self._config.runs) / str(self._config.name))
        try:
            if folder.arrivals_file.exists():
                network.serve_again(folder.path, ListenOptions(tls=self._tls), self._relay, tell=self._open)
            else:
                folder.discard_unstarted()
                options = ListenOptions(self._listen, tls=self._tls)
                network.serve(self._config, options, self._relay, self._open, self._command)
        except PacelineError as error:
            return {"failed": str(error), "code": error.exit_code}
        return {}

    def _open(self, opened: Listening) -> None:
        self._opened = opened
        if self._stop_reason is not None:
            opened.stop(self._stop_reason)

    def look(self) -> dict[str, Any]:
        """Return the server's address, if it listens, and the rows to show."""
        address = self._opened.address if self._opened is not None else None
        return {"address": address, "rows": self._relay.take(), "pid": os.getpid()}

    def stop(self, reason: str) -> None:
        """End the run at the next safe moment."""
        self._stop_reason = reason
        if self._opened is not None:
            self._opened.stop(reason)


class WorkerActor:
    """One worker, on any node. If Ray restarts it, it joins as a new incarnation."""

    def __init__(self, start: ActorStart) -> None:
        start.apply()
        self._relay = RelayConsole()

    def work(self, options: ConnectOptions) -> str | None:
        """Work until training is over. Return the reason if the worker ends before that."""
        try:
            if options.script is not None:
                return self._work_in_process(options)
            over = join.join_server(options, Console(quiet=True))
        except (Diverged, Interrupted):  # of which the server tells
            return None
        except PacelineError as error:
            return str(error)
        return None if over else f"the server at {options.connect} is gone"

    def _work_in_process(self, options: ConnectOptions) -> str | None:
        """Run the script in a process, which starts itself again if the server does not know it any more."""
        last = ""

        def pass_on(line: str) -> None:
            nonlocal last
            last = line or last
            self._relay.note(line)

        code = join.script_worker(options).run(options.worker, pass_on)
        if code < 0:  # killed: Ray starts this actor again, and counts how often
            os.kill(os.getpid(), signal.SIGKILL)
        return f"its script failed (exit code {code}): {last}" if code else None

    def look(self) -> list[str]:
        """Return the lines that the script has written since the last look."""
        return [row["text"] for row in self._relay.take()]
