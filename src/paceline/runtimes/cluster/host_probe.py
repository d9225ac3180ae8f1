"""What a host has: a program that is sent over ssh to a bare Python, so it needs nothing of ours and no new Python.

It is told what to look for in its one argument (JSON) and prints one line (JSON behind a mark).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MARK = "paceline-probe "
REACH_SECONDS = 5.0


def version_of(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        from importlib.metadata import version

        return version(package)
    except Exception:
        return None


def code_digest(folder: Path) -> str:
    """One number for all source files under a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_paceline() -> dict[str, Any] | None:
    """Its version, place and code; None where there is none."""
    spec = find_spec("paceline")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return {"version": version_of("paceline"), "path": str(folder), "code": code_digest(folder)}


def find_data(wanted: dict[str, Any]) -> dict[str, Any]:
    """Where the data set lies, or why it is not found."""
    try:
        from paceline.data.datasets import locate

        directory = Path(wanted["data_dir"]) if wanted["data_dir"] else None
        location = locate(wanted["name"], directory)
    except Exception as error:
        return {"error": str(error).partition("\n")[0]}
    return {"path": str(location.path), "sample": location.sample}


def find_file(path: str) -> str | None:
    """The digest of a file, or None where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def reach(host: str | None, port: int) -> dict[str, Any]:
    """Whether a connection to the machine that asks comes about; where no address is given, whence ssh came."""
    host = host or os.environ.get("SSH_CONNECTION", "").partition(" ")[0] or "127.0.0.1"
    address, failure = f"[{host}]:{port}" if ":" in host else f"{host}:{port}", None
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        failure = error.strerror or str(error)
    return {"address": address, "error": failure}


def main(asked: dict[str, Any]) -> None:
    """Look for what is asked, and print what is found."""
    paceline = find_paceline()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = {
        "python": sys.version.partition(" ")[0],
        "paceline": paceline,
        "torch": version_of("torch"),
        "cores": cores,
        "data": find_data(asked["data"]) if asked["data"] and paceline else None,
        "task": find_file(asked["task"]) if asked["task"] else None,
        "reach": reach(*asked["reach"]) if asked["reach"] else None,
    }
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
