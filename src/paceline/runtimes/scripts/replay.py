"""Replay a user's script: start the server and the scripts that it asks for, and receive the outcome, without torch."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

from paceline.config import to_dict
from paceline.errors import RunFailed, error_of_child
from paceline.interfaces import Report
from paceline.runs.recording import Recording, ScriptCall
from paceline.runtimes.local.fork_server import ForkServer, receive_row, request
from paceline.runtimes.local.supervisor import ENDING_SECONDS
from paceline.system.strict_json import to_json


def replay_script(recording: Recording, call: ScriptCall, report: Report) -> dict[str, Any]:
    """Run the script again on as many workers, with pushes applied in the recorded order. Return the outcome."""
    with ForkServer() as forks:
        processes = ReplayProcesses(forks, recording, call, report)
        processes.start()
        return processes.follow()


class ReplayProcesses:
    """The processes of one replay."""

    def __init__(self, forks: ForkServer, recording: Recording, call: ScriptCall, report: Report) -> None:
        self._forks, self._report = forks, report
        self._control, self._server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = str(recording.output) if recording.output is not None else None
        wanted = {"folder": str(recording.folder.path), "until": recording.until, "output": output}
        started = {"script": call.command, "cwd": call.cwd, "replay": True}
        self._spec = {"config": to_dict(recording.config), **wanted, **started}
        self._names: dict[int, str] = {}
        self._outcome: dict[str, Any] | None = None

    def start(self) -> None:
        """Start the server, which then asks for the scripts."""
        packet = request("replay server", {**self._spec, "name": "server"})
        socket.send_fds(self._forks.socket, [packet], [self._server_end.fileno()])
        self._server_end.close()

    def follow(self) -> dict[str, Any]:
        """Wait for the server's outcome, then a few seconds for the scripts to end."""
        while self._outcome is None:
            readable, _, _ = select.select([self._forks.socket, self._control], [], [])
            if self._control in readable:  # first: what the server said before it ended
                self._hear_server()
            elif self._forks.socket in readable:
                self._hear_forks()
        deadline = time.monotonic() + ENDING_SECONDS
        while self._names and time.monotonic() < deadline:
            if select.select([self._forks.socket], [], [], 0.2)[0]:
                self._hear_forks()
        return self._outcome

    def _hear_server(self) -> None:
        row = receive_row(self._control)
        if row is None:
            raise RunFailed("the server of the replay was lost: see the lines above; the run itself is as it was")
        match row["kind"]:
            case "failed":
                raise error_of_child(row["text"], row["code"])
            case "start":
                self._start_script(row["worker"], row["incarnation"])
            case "replayed":
                self._outcome = row["outcome"]
            case _:
                self._report(row)

    def _start_script(self, worker: int, incarnation: int) -> None:
        server_side, worker_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"name": f"worker {worker}", "worker": worker, "incarnation": incarnation}
        socket.send_fds(self._forks.socket, [request("script", {**self._spec, **own})], [worker_side.fileno()])
        socket.send_fds(self._control, [to_json({"kind": "worker", **own}).encode()], [server_side.fileno()])
        server_side.close()
        worker_side.close()

    def _hear_forks(self) -> None:
        notice = self._forks.notice()
        if notice is None:
            raise RunFailed("the process that starts workers was killed: the run itself is as it was")
        if notice["kind"] == "started":
            self._names[notice["pid"]] = notice["name"]
        elif notice["kind"] == "raised":
            self._report({"kind": "note", "text": f"{self._names.get(notice['pid'], 'a process')}: {notice['text']}"})
        elif notice["kind"] == "ended":
            name = self._names.pop(notice["pid"], "a process")
            if notice["status"] and self._outcome is None:
                self._report({"kind": "note", "text": f"{name} ended ({notice['how']})"})
