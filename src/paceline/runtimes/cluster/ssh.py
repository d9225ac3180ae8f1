"""Hosts over ssh: looks at all of them at once, starts their workers, passes on what they say, and sees them end."""

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

from paceline.errors import UserError
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

PROBE_SECONDS = CONNECT_SECONDS + 20.0
GRACE_SECONDS = 5.0
TETHER_SECONDS = 8.0
Note = Callable[[str], None]


@dataclass(frozen=True)
class CheckedHost:
    """A host that can take part, with the address at which its workers find the server."""

    host: HostLine
    address: str
    threads: int


@dataclass(frozen=True)
class ProbeResult:
    """What came of looking at a host: what it has, or why nothing is known."""

    found: dict[str, Any] | None
    failure: str | None


def look_at(
    hosts: list[HostLine], questions: list[dict[str, Any]], seconds: float = PROBE_SECONDS
) -> list[ProbeResult]:
    """Ask every host its question, all at once."""
    source = Path(host_probe.__file__).read_text(encoding="utf-8")
    started = [_start_probe(host, asked) for host, asked in zip(hosts, questions, strict=True)]
    deadline = time.monotonic() + seconds
    try:
        return [_hear(host, probe, source, deadline) for host, probe in zip(hosts, started, strict=True)]
    finally:
        for probe in started:
            if probe is not None and probe.poll() is None:
                probe.kill()
                probe.communicate()


def _start_probe(host: HostLine, asked: dict[str, Any]) -> subprocess.Popen[str] | None:
    pipe = subprocess.PIPE
    command = remote_command(host, ["-", json.dumps(asked)])
    with contextlib.suppress(FileNotFoundError):
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    return None


def _hear(host: HostLine, probe: subprocess.Popen[str] | None, source: str, deadline: float) -> ProbeResult:
    if probe is None:
        return ProbeResult(None, "there is no ssh on this machine: install an OpenSSH client")
    try:
        said, complained = probe.communicate(source, timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return ProbeResult(None, f"it did not answer within {PROBE_SECONDS:g} s: is it half-dead, or very busy?")
    for line in said.splitlines():
        if line.startswith(host_probe.MARK):
            return ProbeResult(json.loads(line[len(host_probe.MARK) :]), None)
    return ProbeResult(None, why_ssh_failed(host, probe.returncode, complained))


def question(
    host: HostLine, wanted: Requirements, data_dir: str | None, listen: tuple[str | None, int]
) -> dict[str, Any]:
    """What a host is asked; `listen` is where this machine listens meanwhile, its address None for whence ssh came."""
    address, port = listen
    data = {"name": wanted.data["name"], "data_dir": host.data_dir or data_dir} if wanted.data is not None else None
    task = wanted.task["file"] if wanted.task is not None else None
    return {"data": data, "task": task, "reach": ["127.0.0.1" if host.is_here else address, port]}


def check_hosts(
    hosts: list[HostLine],
    wanted: Requirements,
    data_dir: str | None,
    threads: int | None,
    listen: tuple[str | None, int],
    note: Note,
) -> tuple[list[CheckedHost], list[str]]:
    """Those that can take part, and one line for each that cannot."""
    ready, failures = [], []
    for host, looked in zip(
        hosts, look_at(hosts, [question(host, wanted, data_dir, listen) for host in hosts]), strict=True
    ):
        found = looked.found
        why = looked.failure if found is None else lack(host, found, wanted) or unreached(found)
        if found is None or why is not None:
            failures.append(f"{host.target}: {why}")
            continue
        each = threads_of(host, threads, found["cores"])
        for remark in remarks(host, found, wanted, each):
            note(f"{host.target}: {remark}")
        ready.append(CheckedHost(host, found["reach"]["address"], each))
    return ready, failures


def settle(ready: list[CheckedHost], failures: list[str], skip_failed: bool, note: Note) -> list[CheckedHost]:
    """Every host that fails is a line; one is enough to start nothing, unless those may be left out."""
    for failure in failures:
        note(failure)
    if not ready:
        raise UserError("none of the hosts can take part: see the lines above")
    if failures and not skip_failed:
        some = "1 host" if len(failures) == 1 else f"{len(failures)} hosts"
        raise UserError(
            f"{some} of {len(ready) + len(failures)} cannot take part (see above), nothing was started: mend, or leave "
            "out with --skip-failed"
        )
    return ready


class RemoteWorkers:
    """The workers of all hosts, each at the end of a pipe whose closing ends it."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._processes: list[tuple[str, subprocess.Popen[str]]] = []
        self._threads: list[threading.Thread] = []

    def start(
        self, ready: list[CheckedHost], token: str, data_dir: str | None, more: list[str], all_gone: Callable[[], None]
    ) -> None:
        """Start all workers, numbered in the order of the hosts; the token goes over standard input.

        `all_gone` is called when everybody has ended and somebody not because training was over.
        """
        places = [place for place in ready for _ in range(place.host.workers)]
        for worker, place in enumerate(places):
            host = place.host
            arguments = worker_arguments(host, place.address, worker, place.threads, data_dir, more)
            process = subprocess.Popen(
                remote_command(host, arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the server first: it lets workers go when all is saved
            )
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
        code = process.wait()
        if code:
            how = "the connection was lost" if code == 255 else f"exit code {code}"
            self._note(f"[{name}] ended ({how})")

    def _watch(self, all_gone: Callable[[], None]) -> None:
        codes = [process.wait() for _, process in self._processes]
        if any(codes):
            all_gone()

    def close(self, grace: float = GRACE_SECONDS) -> None:
        """See everybody end: by itself within `grace`, else because its pipe closes, else with its ssh."""
        for seconds, action in ((grace, _let_go), (TETHER_SECONDS, _terminate), (1.0, _kill)):
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


def _terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
