"""A file of hosts that workers are started on over ssh: its lines, the commands they become, and what a host lacks.

One host a line: `[user@]host [workers=N] [threads=N] [python=PATH] [dir=DIR] [data-dir=DIR] [port=N]`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError, unknown_name

LOCAL = "localhost"  # the one name that is reached without ssh
CONNECT_SECONDS = 10
SHAPE = "[user@]host [workers=N] [threads=N] [python=PATH] [dir=DIR] [data-dir=DIR] [port=N]"


@dataclass(frozen=True)
class HostLine:
    """One line of the file: where workers run, how many, and what they find there."""

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


KEYS: dict[str, Callable[[str], Any]] = {
    "workers": _count,
    "threads": _count,
    "python": _word,
    "dir": _word,
    "data-dir": _word,
    "port": _port,
}


def read_hosts(path: Path) -> list[HostLine]:
    """The hosts of a file, in its order; every mistake is one line that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no hosts file {path}: write one host a line, as in 'anna@node1 workers=2'") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"hosts file {path} cannot be read as text: {error}") from None
    return parse_hosts(text, str(path))


def parse_hosts(text: str, name: str = "hosts") -> list[HostLine]:
    """The hosts that `text` lists; blank lines and what follows a `#` do not count.

    >>> [(host.target, host.workers) for host in parse_hosts("node1 workers=2\\n# and\\nanna@node2")]
    [('node1', 2), ('anna@node2', 1)]
    """
    hosts: list[HostLine] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
            host = parse_line(words) if words else None
        except ValueError as error:
            message = f"{str(error).lower()}: close the quote, or leave it out"
            raise UserError(f"{name}, line {number}: {message}") from None
        except UserError as error:
            raise UserError(f"{name}, line {number}: {error}") from None
        if host is None:
            continue
        first = lines.setdefault(host.target, number)
        if first != number:
            raise UserError(
                f"{name}, line {number}: {host.target} is in line {first} already: write workers=N there for more"
            )
        hosts.append(host)
    if not hosts:
        raise UserError(f"{name} lists no host: write one a line, {SHAPE}")
    return hosts


def parse_line(words: list[str]) -> HostLine:
    """One host of its words."""
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
    """How many workers all hosts have together."""
    return sum(host.workers for host in hosts)


def remote_command(host: HostLine, arguments: list[str]) -> list[str]:
    """What runs `python ARGUMENTS` on a host, in its folder; it asks for no password and takes no unknown host key."""
    change = f"cd {_path(host.dir)} && " if host.dir is not None else ""
    script = f"{change}exec {_path(host.python)} {shlex.join(arguments)}"
    if host.is_here:
        return ["sh", "-c", script]
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "ServerAliveInterval=15"]
    port = ["-p", str(host.port)] if host.port is not None else []
    return ["ssh", "-T", *options, *port, host.target, f"sh -c {shlex.quote(script)}"]


def _path(path: str) -> str:
    """A path as a shell takes it; a leading ~ is still the home of whom ssh logs in."""
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + shlex.quote(path[1:]) if path != "~" else '"$HOME"'
    return shlex.quote(path)


def worker_arguments(
    host: HostLine, address: str, worker: int, threads: int, data_dir: str | None, more: list[str]
) -> list[str]:
    """What Python is told to run as worker number `worker`; its token comes over standard input, where no `ps` sees it.

    `more` are flags for every worker alike.
    """
    data_dir = host.data_dir or data_dir
    where = ["--data-dir", data_dir] if data_dir is not None else []
    own = ["worker", "--connect", address, "--worker", str(worker), "--threads", str(threads)]
    return ["-m", "paceline.cli.ssh_worker", *own, *where, *more]


def threads_of(host: HostLine, asked: int | None, cores: int) -> int:
    """Threads for each worker of a host: as its line says, as the run says, or its cores shared evenly."""
    return host.threads or asked or max(1, cores // host.workers)


UNREACHABLE = ("timed out", "No route to host", "Network is unreachable")


@dataclass(frozen=True)
class Requirements:
    """What this machine has and every host must have too; `data` is None for a task that brings its own."""

    paceline: str | None
    torch: str | None
    code: str
    data: dict[str, Any] | None
    task: dict[str, str] | None


def lack(host: HostLine, found: dict[str, Any], wanted: Requirements) -> str | None:
    """Why a host cannot take part, and what to do; None when it can."""
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
        return f"the task's file {wanted.task['file']} {state}: copy it to the same place"
    if wanted.data is not None:
        return _lack_of_data(found["data"], wanted.data)
    return None


def _lack_of_data(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    if found.get("error"):
        return f"no data: {found['error']} (or write data-dir=DIR on its line)"
    if found["sample"] and not wanted["sample"]:
        return (
            f"it has only the built-in sample of {wanted['name']}, this machine all of it: 'paceline data get "
            f"{wanted['name']}' there, or write data-dir=DIR on its line"
        )
    return None


def unreached(found: dict[str, Any]) -> str | None:
    """Why workers of a host would not get through to the server; None when they do."""
    if found["reach"] is None or found["reach"]["error"] is None:
        return None
    address = found["reach"]["address"]
    return (
        f"it cannot reach this machine at {address} ({found['reach']['error']}): open that port in the firewall, "
        "or name an address that it can reach with --listen HOST:PORT"
    )


def remarks(host: HostLine, found: dict[str, Any], wanted: Requirements, threads: int) -> list[str]:
    """What a user should know of a host that can take part."""
    lines = []
    if found["torch"] != wanted.torch:
        lines.append(f"torch {found['torch']}, here {wanted.torch}: a replay may differ in the last bits")
    if host.workers * threads > found["cores"]:
        asked = f"{host.workers} workers x {threads} threads"
        lines.append(f"{asked} on {found['cores']} cores will be slow: give fewer workers= or threads=")
    return lines


def why_ssh_failed(host: HostLine, code: int, said: str) -> str:
    """What to tell the user of a command that did not run on a host."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {code}"
    name, port = host.target.rpartition("@")[2], f"-p {host.port} " if host.port is not None else ""
    login, known = f"ssh {port}{host.target}", f"[{name}]:{host.port}" if port else name
    if code == 255 and not host.is_here:
        reasons = {
            "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed: find out why before you trust it, "
            f"then 'ssh-keygen -R {known}'",
            "Host key verification failed": f"its host key is not known here: '{login}' once by hand, and compare it",
            "Permission denied": f"it does not let you in without a password: 'ssh-copy-id {port}{host.target}'",
            "Could not resolve hostname": "no machine has this name: correct the hosts file",
            "Connection refused": "no ssh server listens there: start it, or give port=N",
            **{
                text: f"it cannot be reached within {CONNECT_SECONDS} s: is it on, and its name right?"
                for text in UNREACHABLE
            },
        }
        for text, reason in reasons.items():
            if text in said:
                return reason
        return f"ssh failed ({last}): try '{login}'"
    if code in (126, 127):
        return f"there is no Python at {host.python}: write python=PATH on its line"
    if "cd:" in said:
        return f"there is no folder {host.dir}: correct dir= on its line"
    return f"its check failed ({last})"
