"""A file of hosts to start workers on over ssh: its lines, the commands they become, and what a host lacks."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError, unknown_name

LOCAL = "localhost"  # the only name that needs no ssh
CONNECT_SECONDS = 10
UNREACHABLE = ("timed out", "No route to host", "Network is unreachable")
SHAPE = "[user@]host [workers=N] [threads=N] [python=PATH] [dir=DIR] [data-dir=DIR] [port=N]"


@dataclass(frozen=True)
class HostLine:
    """One line of the file: the host, its number of workers, and what they use there."""

    target: str  # as ssh takes it: `host` or `user@host`
    workers: int = 1
    threads: int | None = None
    python: str = sys.executable
    dir: str | None = None
    data_dir: str | None = None
    port: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine: its workers are started without ssh."""
        return self.target == LOCAL


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError("must be a whole number of at least 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise UserError("must be a port, 1 to 65535")
    return int(text)


def _word(text: str) -> str:
    if not text:
        raise UserError("must not be empty")
    return text


KEYS = {"workers": _count, "threads": _count, "python": _word, "dir": _word, "data-dir": _word, "port": _port}


def read_hosts(path: Path) -> list[HostLine]:
    """The hosts of a file, in its order. Raise UserError, with the file and the line, for a mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no hosts file {path}: write one host a line, as in 'anna@node1 workers=2'") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hosts file {path} cannot be read as text: {error}") from None
    return parse_hosts(text, str(path))


def parse_hosts(text: str, name: str = "hosts") -> list[HostLine]:
    """The hosts that `text` lists. Blank lines and comments (`#`) are skipped.

    >>> [(host.target, host.workers) for host in parse_hosts("node1 workers=2\\n# and\\nanna@node2")]
    [('node1', 2), ('anna@node2', 1)]
    """
    hosts: list[HostLine] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            if not words:
                continue
            host = parse_line(words)
            first = lines.setdefault(host.target, number)
            if first != number:
                raise UserError(f"{host.target} is in line {first} already: write workers=N there for more")
        except ValueError as error:
            raise UserError(f"{name}, line {number}: {str(error).lower()}: close the quote, or leave it out") from None
        except UserError as error:
            raise UserError(f"{name}, line {number}: {error}") from None
        hosts.append(host)
    if not hosts:
        raise UserError(f"{name} lists no host: write one a line, {SHAPE}")
    return hosts


def parse_line(words: list[str]) -> HostLine:
    """The host that the words of a line describe."""
    target, *settings = words
    user, at, host = target.rpartition("@")
    if "=" in target or not host or (at and not user) or target.startswith("-") or host.startswith("-"):
        raise UserError(f"'{target}' is no host: write {SHAPE}")
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"'{setting}' is no setting: write NAME=VALUE, as in workers=2, and one host a line")
        if key not in KEYS:
            raise unknown_name("setting", key, KEYS)
        name = key.replace("-", "_")
        if name in values:
            raise UserError(f"{key} is set twice: leave one out")
        try:
            values[name] = KEYS[key](value)
        except UserError as error:
            raise UserError(f"{key}={value}: {error}") from None
    return HostLine(target, **values)


def num_workers(hosts: list[HostLine]) -> int:
    """The number of workers of all hosts."""
    return sum(host.workers for host in hosts)


def remote_command(host: HostLine, arguments: list[str]) -> list[str]:
    """The command that runs `python ARGUMENTS` in a host's folder. It never asks for a password or a host key."""
    change = f"cd {_path(host.dir)} && " if host.dir is not None else ""
    script = f"{change}exec {_path(host.python)} {shlex.join(arguments)}"
    if host.is_here:
        return ["sh", "-c", script]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=15"]
    port = ["-p", str(host.port)] if host.port is not None else []
    return ["ssh", "-T", *options, *port, host.target, f"sh -c {shlex.quote(script)}"]


def _path(path: str) -> str:
    """Quote a path for a shell. A leading ~ stays the home folder of the user on that host."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + shlex.quote(path[1:]) if path != "~" else '"$HOME"'
    return shlex.quote(path)


def worker_arguments(
    host: HostLine, address: str, worker: int, threads: int, data_dir: str | None, more: list[str]
) -> list[str]:
    """Python's arguments for one worker, with the flags `more`. Standard input brings the token, hidden from `ps`."""
    data_dir = host.data_dir or data_dir
    where = ["--data-dir", data_dir] if data_dir is not None else []
    own = ["worker", "--connect", address, "--worker", str(worker), "--threads", str(threads)]
    return ["-P", "-m", "paceline.cli.ssh_worker", *own, *where, *more]


def threads_of(host: HostLine, asked: int | None, cores: int) -> int:
    """Threads for each worker of a host: from its line, from the run, or its cores shared evenly."""
    return host.threads or asked or max(1, cores // host.workers)


@dataclass(frozen=True)
class Requirements:
    """What this machine has and every host must have too. `data` is None for a task that brings its own."""

    paceline: str | None
    torch: str | None
    code: str
    data: dict[str, Any] | None
    task: dict[str, str] | None


def lack(host: HostLine, found: dict[str, Any], wanted: Requirements) -> str | None:
    """Why a host cannot take part, and what to do, or None if it can."""
    if found["paceline"] is None:
        return f"{host.python} there has no paceline: install it, or write python=PATH on its line"
    if found["paceline"]["version"] != wanted.paceline:
        return f"it has paceline {found['paceline']['version']}, this machine {wanted.paceline}: install the same"
    if found["paceline"]["code"] != wanted.code:
        return f"its paceline ({found['paceline']['path']}) is other code than this machine's: copy the same there"
    if found["torch"] is None:
        return f"{host.python} there has no torch: install torch {wanted.torch}"
    if wanted.task is not None and found["task"] != wanted.task["digest"]:
        state = "is not there" if found["task"] is None else "differs from the one here"
        return f"the {wanted.task['kind']} {wanted.task['file']} {state}: copy it to the same place"
    if wanted.data is not None and found["data"].get("error"):
        return f"no data: {found['data']['error']} (or write data-dir=DIR on its line)"
    if wanted.data is not None and found["data"]["sample"] and not wanted.data["sample"]:
        what = f"it has only the built-in sample of {wanted.data['name']}, this machine all of it"
        return f"{what}: 'paceline data get {wanted.data['name']}' there, or write data-dir=DIR on its line"
    return None


def unreached(found: dict[str, Any]) -> str | None:
    """Why the workers of a host cannot reach the server, or None if they can."""
    if found["reach"] is None or found["reach"]["error"] is None:
        return None
    what = f"it cannot reach this machine at {found['reach']['address']} ({found['reach']['error']})"
    return f"{what}: open that port in the firewall, or name an address that it can reach with --listen HOST:PORT"


def remarks(host: HostLine, found: dict[str, Any], wanted: Requirements, threads: int) -> list[str]:
    """Warnings about a host that can take part."""
    lines = []
    if found["torch"] != wanted.torch:
        lines.append(f"torch {found['torch']}, here {wanted.torch}: a replay may differ in the last bits")
    if host.workers * threads > found["cores"]:
        load = f"{host.workers} workers x {threads} threads on {found['cores']} cores"
        lines.append(f"{load} will be slow: give fewer workers= or threads=")
    return lines


def why_ssh_failed(host: HostLine, code: int, said: str) -> str:
    """Why a command did not run on a host, and what to do."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {code}"
    name, port = host.target.rpartition("@")[2], f"-p {host.port} " if host.port is not None else ""
    login, known = f"ssh {port}{host.target}", f"[{name}]:{host.port}" if port else name
    if code == 255 and not host.is_here:
        changed = f"its host key has changed: find out why before you trust it, then 'ssh-keygen -R {known}'"
        silent = f"it cannot be reached within {CONNECT_SECONDS} s: is it on, and its name right?"
        reasons = {
            "REMOTE HOST IDENTIFICATION HAS CHANGED": changed,
            "Host key verification failed": f"its host key is not known here: '{login}' once by hand, and compare it",
            "Permission denied": f"it does not let you in without a password: 'ssh-copy-id {port}{host.target}'",
            "Could not resolve hostname": "no machine has this name: correct the hosts file",
            "Connection refused": "no ssh server listens there: start it, or give port=N",
            **dict.fromkeys(UNREACHABLE, silent),
        }
        return next((why for text, why in reasons.items() if text in said), f"ssh failed ({last}): try '{login}'")
    if code in (126, 127):
        return f"there is no Python at {host.python}: write python=PATH on its line"
    if "cd:" in said:
        return f"there is no folder {host.dir}: correct dir= on its line"
    return f"its check failed ({last})"
