"""Hosts over ssh: probe all of them at once, start their workers, forward their output, and end them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.errors import Diverged, Interrupted, UserError
from paceline.runtimes.cluster import host_probe
from paceline.runtimes.cluster.hosts_file import (
    CONNECT_SECONDS,
    HostLine,
    Requirements,
    lack,
    remarks,
    remote_command,
    threads_of,
    unreached,
    why_ssh_failed,
    worker_arguments,
)
from paceline.system.strict_json import to_json

PROBE_SECONDS = CONNECT_SECONDS + 20.0
GRACE_SECONDS = 5.0
TETHER_SECONDS = 8.0
Note = Callable[[str], None]
Endpoint = tuple[str | None, int]


@dataclass(frozen=True)
class CheckedHost:
    """A host that can take part, with the address at which its workers find the server."""

    host: HostLine
    address: str
    threads: int


def look_at(hosts: list[HostLine], questions: list[dict[str, Any]]) -> list[dict[str, Any] | str]:
    """Probe every host, all at once. Return for each what it has, or why the probe failed."""
    source = Path(host_probe.__file__).read_text(encoding="utf-8")
    started = [_start_probe(host, question) for host, question in zip(hosts, questions, strict=True)]
    deadline = time.monotonic() + PROBE_SECONDS
    try:
        return [_read_probe(host, probe, source, deadline) for host, probe in zip(hosts, started, strict=True)]
    finally:
        for probe in started:
            if probe is not None and probe.poll() is None:
                probe.kill()
                probe.communicate()


def _start(host: HostLine, arguments: list[str], stderr: int) -> subprocess.Popen[str]:
    """Start Python on a host, in a new session: Ctrl-C is for the server, which ends workers when all is saved."""
    command, pipe = remote_command(host, arguments), subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, errors="replace", start_new_session=True
    )


def _start_probe(host: HostLine, question: dict[str, Any]) -> subprocess.Popen[str] | None:
    with contextlib.suppress(FileNotFoundError):
        return _start(host, ["-", to_json(question)], subprocess.PIPE)
    return None


def _read_probe(
    host: HostLine, probe: subprocess.Popen[str] | None, source: str, deadline: float
) -> dict[str, Any] | str:
    if probe is None:
        return "there is no ssh on this machine: install an OpenSSH client"
    try:
        output, errors = probe.communicate(source, timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"it did not answer within {PROBE_SECONDS:g} s: is it half-dead, or very busy?"
    for line in output.splitlines():
        if line.startswith(host_probe.MARK):
            return dict(json.loads(line.removeprefix(host_probe.MARK)))
    return why_ssh_failed(host, probe.returncode, errors)


def _question(host: HostLine, wanted: Requirements, data_dir: str | None, listen: Endpoint) -> dict[str, Any]:
    address, port = listen
    data = {"name": wanted.data["name"], "data_dir": host.data_dir or data_dir} if wanted.data is not None else None
    task = wanted.task["file"] if wanted.task is not None else None
    return {"data": data, "task": task, "reach": ["127.0.0.1" if host.is_here else address, port]}


def check_hosts(
    hosts: list[HostLine], wanted: Requirements, config: RunConfig, threads: int | None, listen: Endpoint, note: Note
) -> tuple[list[CheckedHost], list[str]]:
    """Return the hosts that can take part, and one line for each that cannot.

    `listen` is where this machine listens meanwhile. Its address is None for the one that ssh came from.
    """
    ready, failures = [], []
    questions = [_question(host, wanted, config.data_dir, listen) for host in hosts]
    for host, found in zip(hosts, look_at(hosts, questions), strict=True):
        why = found if isinstance(found, str) else lack(host, found, wanted) or unreached(found)
        if isinstance(found, str) or why is not None:
            failures.append(f"{host.target}: {why}")
            continue
        each = threads_of(host, threads, found["cores"])
        for remark in remarks(host, found, wanted, each):
            note(f"{host.target}: {remark}")
        ready.append(CheckedHost(host, found["reach"]["address"], each))
    return ready, failures


def settle(ready: list[CheckedHost], failures: list[str], skip_failed: bool, note: Note) -> list[CheckedHost]:
    """Show every failure. Raise UserError if there is one, unless failed hosts may be skipped."""
    for failure in failures:
        note(failure)
    if not ready:
        raise UserError("none of the hosts can take part: see the lines above")
    if failures and not skip_failed:
        some = "1 host" if len(failures) == 1 else f"{len(failures)} hosts"
        what = f"{some} of {len(ready) + len(failures)} cannot take part (see above), nothing was started"
        raise UserError(f"{what}: mend, or leave out with --skip-failed")
    return ready


class RemoteWorkers:
    """The workers of all hosts. Each ends if its standard input is closed."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._processes: list[tuple[str, subprocess.Popen[str]]] = []
        self._threads: list[threading.Thread] = []

    def start(
        self, ready: list[CheckedHost], token: str, data_dir: str | None, more: list[str], all_gone: Callable[[], None]
    ) -> None:
        """Start all workers, numbered in the order of the hosts. The token goes over standard input.

        `all_gone` is called when all workers have ended and at least one of them failed.
        """
        places = [place for place in ready for _ in range(place.host.workers)]
        for worker, place in enumerate(places):
            host = place.host
            arguments = worker_arguments(host, place.address, worker, place.threads, data_dir, more)
            process = _start(host, arguments, subprocess.STDOUT)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{token}\n")
                process.stdin.flush()
            name = f"{host.target}, worker {worker}"
            self._processes.append((name, process))
            self._threads.append(threading.Thread(target=self._pass_on, args=(name, process), daemon=True))
        self._threads.append(threading.Thread(target=self._watch, args=(all_gone,), daemon=True))
        for thread in self._threads:
            thread.start()

    def _pass_on(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._note(f"[{name}] {line.rstrip()}")
        told = Diverged.exit_code, Interrupted.exit_code  # its last line says why
        if (code := process.wait()) and code not in told:
            how = "the connection was lost" if code == 255 else f"exit code {code}"
            self._note(f"[{name}] ended ({how})")

    def _watch(self, all_gone: Callable[[], None]) -> None:
        if any([process.wait() for _, process in self._processes]):
            all_gone()

    def close(self, grace: float = GRACE_SECONDS) -> None:
        """Wait `grace` seconds for the workers to end, then close their pipes, then end their ssh."""
        steps = ((grace, _let_go), (TETHER_SECONDS, subprocess.Popen.terminate), (1.0, subprocess.Popen.kill))
        for seconds, action in steps:
            if self._ended_within(seconds):
                break
            for _, process in self._processes:
                if process.poll() is None:
                    action(process)
        for _, process in self._processes:
            process.wait()
            _let_go(process)
        for thread in self._threads:
            thread.join(1.0)

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for _, process in self._processes):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
