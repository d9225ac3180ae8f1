"""The supervisor of a run on one machine: start the server and n workers, watch them, import no torch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from paceline.config import RunConfig, is_script, to_dict
from paceline.errors import SERVER_GONE, Interrupted, error_of_child
from paceline.interfaces import Report
from paceline.runs.folder import RAISED, RunFolder
from paceline.runtimes.local.failures import COMPLAINT, WorkerFailures, lost_server
from paceline.runtimes.local.fault_injection import FaultInjector
from paceline.runtimes.local.fork_server import ForkServer, receive_row, request
from paceline.runtimes.local.process_plan import ProcessPlan
from paceline.runtimes.local.restart import WorkerRestarts
from paceline.runtimes.local.worker_output import WorkerOutput
from paceline.settings.fault_table import Fault, never_fired
from paceline.settings.preprocessing import split_of
from paceline.system.signals import INTERRUPTED, TERMINATED, InterruptCounter, handle_signals
from paceline.system.strict_json import to_json
from paceline.system.terminal import seconds_text

ABSENT_SECONDS = 30.0  # after which the user is told that the server is not there yet
ENDING_SECONDS = 3.0
GOING_SECONDS = 2.0  # between the end of a killed server's connections to its workers and of that to its supervisor
BEHIND_SECONDS = 0.05  # until the user's terminal is looked at again, which takes no more output


class Supervisor:
    """Starts the processes of one run and watches them until it ends."""

    def __init__(
        self,
        forks: ForkServer,
        config: RunConfig,
        folder: RunFolder,
        processes: ProcessPlan,
        report: Report,
        restarts: WorkerRestarts,
        output: WorkerOutput | None = None,
    ) -> None:
        """`output` reads what workers print; None: they write to the standard output and error of this process."""
        self._forks, self._config, self._folder, self._report = forks, config, folder, report
        self._restarts, self._output = restarts, output
        self._failures = WorkerFailures()
        self._processes = processes
        self._common = {"config": to_dict(config), "folder": str(folder.path), **processes.spec}
        self._incarnations = dict.fromkeys(range(processes.first_worker, config.workers or 1), processes.incarnation)
        self._injector = FaultInjector(processes.faults, self._tell_fault, self._start_by_table)
        self._control, self._server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._names: dict[int, str] = {}
        self._numbers = {f"worker {worker}": worker for worker in self._incarnations}
        self._running: set[int] = set()
        self._dropped: set[int] = set()  # process ids of workers that the server has dropped
        self._raised: dict[int, dict[str, Any]] = {}  # the exceptions that ended processes, by process id
        self._returned: set[int] = set()  # process ids of those that ended as they should
        self._finished = self._server_is_silent = self._is_over = False  # over: training ended, or was told to stop
        self._stages: set[str] = set()  # of the server: it is "serving", it is "ending" the users' own loops
        self._name_at: float | None = time.monotonic() + ABSENT_SECONDS  # when to say that the server is not there yet

    def start(self) -> None:
        """Start the server and all workers. Each worker has its own connection to the server."""
        own = {"name": "server", "incarnation": self._processes.incarnation}
        self._start_process(self._processes.server_role, own, self._server_end)
        for worker in self._incarnations:
            self._start_worker(worker)
        for fault in self._processes.faults:
            if fault.kind == "join":  # the server waits for it even if no worker is left
                self._order({"kind": "expected", "worker": fault.worker})

    def close(self) -> None:
        """Close the connection to the server; a notebook goes on after a run that failed."""
        self._control.close()

    def _start_worker(self, worker: int) -> None:
        server_side, worker_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {"name": f"worker {worker}", "worker": worker, "incarnation": self._incarnations[worker]}
        self._start_process(self._processes.worker_role, own, worker_side, self._output)
        self._order({"kind": "worker", **own}, [server_side.fileno()])
        server_side.close()

    def _start_process(
        self, role: str, own: dict[str, Any], end: socket.socket, output: WorkerOutput | None = None
    ) -> None:
        """Ask the fork server for a process that gets `end`, which this process closes, and writes to `output`."""
        pipes = output.open(own["worker"]) if output is not None else []
        packet = request(role, {**self._common, **own}, has_output=bool(pipes))
        self._send(self._forks.socket, packet, [end.fileno(), *self._processes.fds, *pipes])
        end.close()
        for pipe in pipes:
            os.close(pipe)

    def _start_by_table(self, worker: int) -> None:
        """Start a new incarnation of a worker, or a new worker, as the table of faults asks."""
        if worker in self._incarnations:
            self._report({"kind": "note", "text": f"worker {worker} returns"})
        self._restart(worker)

    def _restart(self, worker: int) -> None:
        back = worker in self._incarnations
        self._incarnations[worker] = self._incarnations[worker] + 1 if back else self._processes.incarnation
        self._numbers[f"worker {worker}"] = worker
        self._start_worker(worker)

    def _tell_fault(self, fault: Fault, text: str, returns: bool) -> None:
        """Report a fault here and to the server, which then waits for a worker that will return."""
        self._report({"kind": "note", "text": text})
        self._order({"kind": "fault", "fault": asdict(fault), "returns": returns})

    def _order(self, order: dict[str, Any], fds: list[int] | None = None) -> None:
        self._send(self._control, to_json(order).encode(), fds)

    def _send(self, line: socket.socket, packet: bytes, fds: list[int] | None = None) -> None:
        """Send without blocking. While the socket is full, read incoming messages, so that no deadlock can occur."""
        while True:
            try:
                socket.send_fds(line, [packet], fds or [], socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                readable, _, _ = select.select([self._forks.socket, self._control], [line], [])
                self._listen(readable)
            except (BrokenPipeError, ConnectionResetError):
                return  # the fork server reports a dead process, its closed socket a dead fork server

    def _listen(self, readable: list[socket.socket]) -> None:
        if self._forks.socket in readable:
            self._hear_forks()
        if self._control in readable:
            self._hear_server_out()  # what a process did may have made us read it already

    def follow(self) -> None:
        """Watch the run until it ends. The result is in the run folder. RunFailed if a worker's code has failed."""
        with self._signals(), contextlib.closing(self._injector):
            while not self._finished:
                self._wait(self._injector.timeout())
                self._injector.act()
                if self._failures:
                    self._end_for_failure()
            deadline = time.monotonic() + ENDING_SECONDS
            self._server_is_silent = True
            while self._running and time.monotonic() < deadline:
                self._wait(0.2)
        self._failures.end(self._folder, self._report)

    def _wait(self, seconds: float | None) -> None:
        """Wait for what other processes say, at most so long, and take it."""
        lines: list[Any] = [self._forks.socket] if self._server_is_silent else [self._forks.socket, self._control]
        if "serving" in self._stages:
            self._name_at = None
        limits = [seconds, self._failures.seconds_left, *([] if self._name_at is None else [self._seconds_to_name()])]
        if self._output is not None:
            behind = self._output.is_behind()
            lines += [] if behind else [self._output]
            limits += [BEHIND_SECONDS] if behind else []
        readable = select.select(lines, [], [], min((one for one in limits if one is not None), default=None))[0]
        if self._output is not None and self._output in readable:
            self._output.read()
        self._listen(readable)
        if "serving" not in self._stages and self._name_at is not None and not self._seconds_to_name():
            self._name_at = None
            what = f"the server is not ready after {seconds_text(ABSENT_SECONDS)}"
            self._report({"kind": "note", "text": f"{what}: it still builds the task, or goes through its log"})

    def _seconds_to_name(self) -> float:
        return max(0.0, (self._name_at or 0.0) - time.monotonic())

    def _note_exception(self, notice: dict[str, Any]) -> None:
        """A process has raised an exception: a mistake, which ends the run unless it is told to keep going."""
        name = self._names.get(notice["pid"], "a process")
        self._raised[notice["pid"]] = notice
        worker = self._numbers.get(name, 0 if self._processes.first_worker else None)
        if name in self._numbers and self._config.keep_going:
            if notice["traceback"]:
                self._report({"kind": "output", "stream": "stderr", "text": notice["traceback"].rstrip()})
            return
        where = f"worker {worker} of {self._config.workers or 1}" if worker is not None else "the server"
        if name in self._numbers and self._failures.is_late(notice):
            return self._failures.add_late(where, notice)
        if not self._failures:
            what = RAISED if notice["kind"] != COMPLAINT else ""
            self._order({"kind": "stop", "reason": f"{what}{where}: {notice['text']}"})
        self._failures.add(where, notice)
        if self._output is not None and worker is not None:
            self._output.show_only(worker)

    def _end_for_failure(self) -> None:
        """After a moment for workers that fail in the same way, show the exception; then end the other workers."""
        workers = {pid for pid in self._running if self._names[pid] in self._numbers}
        if not self._failures.is_told and (not workers or not self._failures.seconds_left):
            self._failures.tell(self._report)
        self._finished |= self._server_is_silent and self._failures.is_told
        if self._failures.is_told and (self._is_over or self._finished):
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _hear_server(self) -> None:
        row = receive_row(self._control, socket.MSG_DONTWAIT)
        if row is None:
            self._server_is_silent = True  # the fork server will report how it ended
        elif row["kind"] == "failed":
            self._finished = True  # before the notices below are read: processes end because of it
            while select.select([self._forks.socket], [], [], 0.0)[0]:  # the cause may be a worker's exception
                self._hear_forks()
            if not self._failures:
                raise error_of_child(row["text"], row["code"])
        elif row["kind"] == "finished":
            self._finished = True
        elif row["kind"] in ("serving", "ending"):
            self._stages.add(row["kind"])
        elif row["kind"] == "drop":
            self._kill_dropped(row["worker"], row["incarnation"])
        elif row["kind"] == "clock":
            self._is_over |= not row["runs"]
            left = self._injector.set_clock(row["now"], row["runs"])
            for text in never_fired(left, self._config.faults, row["now"]):
                self._report({"kind": "note", "text": text})
        else:
            if row["kind"] == "progress":
                self._injector.correct(row["now"])
            self._report(row)

    def _kill_dropped(self, worker: int, incarnation: int) -> None:
        """Kill the process of a worker that the server has dropped: it hangs, and the run goes on without it."""
        for pid in self._running if self._incarnations[worker] == incarnation else ():
            if self._names[pid] == f"worker {worker}":
                self._dropped.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _hear_server_out(self) -> None:
        """Read everything the server has sent so far, because a later message of another process may depend on it."""
        with contextlib.suppress(BlockingIOError):
            while not self._server_is_silent:
                self._hear_server()

    def _await_end_of_server(self) -> None:
        """Give a server that was killed the time to go: the system may close its connections to workers first."""
        deadline = time.monotonic() + GOING_SECONDS
        while not self._server_is_silent and not self._finished and time.monotonic() < deadline:
            if select.select([self._control], [], [], 0.1)[0]:
                self._hear_server_out()

    def _hear_forks(self) -> None:
        notice = self._forks.notice()
        if notice is None:
            raise lost_server("the process that starts workers was killed", self._folder, self._config)
        if notice["kind"] == "started":
            self._names[notice["pid"]] = notice["name"]
            self._running.add(notice["pid"])
            if notice["name"] in self._numbers:
                self._injector.started(self._numbers[notice["name"]], notice["pid"])
            elif self._processes.first_worker:
                self._injector.started(0, notice["pid"])
        elif notice["kind"] == COMPLAINT:
            self._note_complaint(notice)
        elif notice["kind"] == "raised":
            self._note_exception(notice)
        elif notice["kind"] == "returned":
            self._returned.add(notice["pid"])
        else:
            self._note_end(notice)

    def _note_complaint(self, notice: dict[str, Any]) -> None:
        """A process has ended with an error of ours; a mistake in a script ends the run as its exceptions do."""
        self._hear_server_out()
        if notice["text"] == SERVER_GONE:
            self._await_end_of_server()
        name = self._names.get(notice["pid"], "a process")
        if self._finished:
            is_late = notice["text"] == SERVER_GONE or self._was_restarted(name)
        else:
            is_late = self._server_is_silent  # it was killed: the fork server will report its end
        if is_late:
            return
        if notice["is_mistake"] and is_script(self._config):
            self._note_exception({**notice, "traceback": ""})
        elif not self._failures:
            is_task = self._config.task is not None and not is_script(self._config)
            in_all = is_task and not self._folder.has_log  # every process builds the task alike
            text = notice["text"] if in_all else f"{name}: {notice['text']}"
            raise error_of_child(text, notice["code"])

    def _note_end(self, notice: dict[str, Any]) -> None:
        name = self._names.get(notice["pid"], "a process")
        self._running.discard(notice["pid"])
        if self._output is not None and name in self._numbers:
            self._output.read_out(self._numbers[name])
        by_table = self._injector.ended(notice["pid"])
        if self._failures:
            return
        if notice["status"] and name in self._numbers and not by_table and notice["pid"] not in self._dropped:
            self._hear_server_out()
            if "ending" in self._stages and not self._config.keep_going:
                where = f"worker {self._numbers[name]} of {self._config.workers or 1}"
                self._failures.add(where, {**notice, "text": f"{notice['how']} after its training", "traceback": ""})
                return
        if name == "server" and not self._finished:
            self._hear_server_out()
            if not self._finished:
                keeper = "the server process" if not self._processes.first_worker else "the process of worker 0"
                raise lost_server(f"{keeper} ended ({notice['how']})", self._folder, self._config)
        elif not self._finished:
            self._note_worker_end(name, notice, by_table)

    def _note_worker_end(self, name: str, notice: dict[str, Any], by_table: tuple[str, ...]) -> None:
        """Start a killed worker again if `--restart-workers` allows it; else tell the user and the server."""
        pid, status = notice["pid"], notice["status"]
        raised = self._raised.get(pid)
        how = ", ".join([notice["how"], *([raised["text"]] if raised is not None else []), *by_table])
        worker = self._numbers.get(name)
        self._hear_server_out()  # it may have dropped this worker, or ended the training
        is_lost = worker is not None and not (by_table or pid in self._dropped or self._is_over or self._finished)
        granted = self._restarts.grant(status) if is_lost else None
        if granted is not None and worker is not None:
            self._report({"kind": "note", "text": f"{name} was lost ({how}): it is started again ({granted})"})
            self._restart(worker)
            return
        if self._config.restart_workers and worker is not None and "to come back" not in by_table:
            self._order({"kind": "gone", "worker": worker, "incarnation": self._incarnations[worker]})
        is_told = self._finished or self._failures.is_late(raised) or (pid in self._dropped and self._is_over)
        if not is_told and (status or (pid not in self._returned and "ending" not in self._stages)):
            left = sum(self._names[pid] != "server" for pid in self._running) + self._processes.first_worker
            goes_on = f"the run goes on with {left}{self._without_data(by_table)}" if left else "no worker is left"
            self._report({"kind": "note", "text": f"{name} was lost ({how}): {goes_on}"})

    def _without_data(self, by_table: tuple[str, ...]) -> str:
        is_divided = split_of(self._config).kind != "full" and self._config.max_workers is None
        return ", without its part of the data" if is_divided and not by_table else ""

    def _was_restarted(self, name: str) -> bool:
        worker = self._numbers.get(name)
        return worker is not None and self._incarnations[worker] > self._processes.incarnation

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ask the server to stop on Ctrl-C or SIGTERM. A second Ctrl-C does not wait for it."""
        interrupts, heard = InterruptCounter(), set[int]()

        def stop(number: int, frame: object) -> None:
            if number == signal.SIGINT and interrupts.is_again():
                raise KeyboardInterrupt
            if number in heard:
                return
            heard.add(number)
            if "serving" not in self._stages:
                trained = not self._folder.is_unstarted()
                end = self._folder.resume_hint(self._config) if trained else "nothing was trained"
                raise Interrupted(f"interrupted, before training {'went on' if trained else 'began'}: {end}")
            reason = INTERRUPTED if number == signal.SIGINT else TERMINATED
            self._is_over = True
            self._failures.stop_by_user()
            if self._folder.has_log or not is_script(self._config):  # else there is nothing to save
                self._report({"kind": "stopping", "reason": reason})
            self._order({"kind": "stop", "reason": reason})

        with handle_signals(stop):
            yield
