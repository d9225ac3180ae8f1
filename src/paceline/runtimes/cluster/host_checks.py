"""What a host must have before a worker is started on it, and what to tell the user of one that has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.runtimes.cluster.hosts_file import CONNECT_SECONDS, HostLine

UNREACHABLE = ("timed out", "No route to host", "Network is unreachable")


@dataclass(frozen=True)
class Wanted:
    """What this machine has and every host must have too; `data` is None for a task that brings its own."""

    paceline: str | None
    torch: str | None
    code: str
    data: dict[str, Any] | None
    task: dict[str, str] | None


def lack(host: HostLine, found: dict[str, Any], wanted: Wanted) -> str | None:
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


def remarks(host: HostLine, found: dict[str, Any], wanted: Wanted, threads: int) -> list[str]:
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
