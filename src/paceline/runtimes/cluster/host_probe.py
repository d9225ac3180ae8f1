"""Find what a host has: a program that ssh sends to a bare, perhaps old Python. It takes and prints JSON."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before anything is imported from the folder that ssh starts in; -P needs Python 3.11
    sys.path[:] = [path for path in sys.path if path]

import hashlib
import json
import os
import socket
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
    """Hash all source files under a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_paceline() -> dict[str, Any] | None:
    """The version, folder and code digest of the installed paceline, or None if there is none."""
    spec = find_spec("paceline")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return {"version": version_of("paceline"), "path": str(folder), "code": code_digest(folder)}


def find_data(wanted: dict[str, Any]) -> dict[str, Any]:
    """The folder of the data set, or why it is not found."""
    try:
        from paceline.data.datasets import locate

        location = locate(wanted["name"], Path(wanted["data_dir"]) if wanted["data_dir"] else None)
    except Exception as error:
        return {"error": str(error).partition("\n")[0]}
    return {"path": str(location.path), "sample": location.sample}


def find_file(path: str) -> str | None:
    """The digest of a file, or None if there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def reach(host: str | None, port: int) -> dict[str, Any]:
    """Try to connect to the asking machine: at `host` if given, else at the address that ssh came from."""
    host = host or os.environ.get("SSH_CONNECTION", "").partition(" ")[0] or "127.0.0.1"
    address, failure = f"[{host}]:{port}" if ":" in host else f"{host}:{port}", None
    try:
        socket.create_connection((host, port), REACH_SECONDS).close()
    except OSError as error:
        failure = error.strerror or str(error)
    return {"address": address, "error": failure}


def main(wanted: dict[str, Any]) -> None:
    """Look for everything in `wanted`, and print what is found."""
    paceline = find_paceline()
    found = {
        "python": sys.version.partition(" ")[0],
        "paceline": paceline,
        "torch": version_of("torch"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "data": find_data(wanted["data"]) if wanted["data"] and paceline else None,
        "task": find_file(wanted["task"]) if wanted["task"] else None,
        "reach": reach(*wanted["reach"]) if wanted["reach"] else None,
    }
    print(MARK + json.dumps(found, allow_nan=False), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
