"""What a run was made with: machine, versions, git state. Kept in its result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def package_version(name: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's own name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_name() -> str:
    """The same for all processes of one machine, in whatever container, and for no other machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def git_state() -> dict[str, Any] | None:
    """The commit of the current folder and whether its tree differs from it; None outside a repository."""

    def ask(*arguments: str) -> str | None:
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    return (
        None
        if commit is None
        else {"commit": commit, "changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    )


def environment() -> dict[str, Any]:
    """Versions and machine, as JSON values."""
    return {
        "paceline": package_version("paceline"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
