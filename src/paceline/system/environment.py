"""Describe the machine, the package versions and the git state, for the result of a run."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.system.cpu import cores


def package_version(name: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if the name is unknown."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_name() -> str:
    """Return a name that is unique to this machine and the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def git_state() -> dict[str, Any] | None:
    """Return the commit of the current folder and whether tracked files changed; None outside a repository."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=2, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(git("status", "--porcelain", "--untracked-files=no"))}


def environment() -> dict[str, Any]:
    """Return versions and machine as JSON values."""
    return {
        "paceline": package_version("paceline"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
    }
