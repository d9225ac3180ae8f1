"""Runs the commands of Kubernetes manifests, as they are written, as processes of one machine.

All pods share a network and a file system of their own: the name of the Service is an address there, the volume and
/tmp are empty folders, and nothing else can be written.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import paceline
from tests.support.waiting import PATIENCE

MANIFESTS = Path(__file__).resolve().parents[2] / "examples/kubernetes"
SERVICE_ADDRESS = "10.77.0.1"
SETUP = """
set -e
ip link set lo up
ip address add "$1/32" dev lo
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs "$(dirname "$3")"
mkdir "$3"
mount -t tmpfs tmpfs /tmp
mount -o remount,bind,ro /
echo ready
exec sleep infinity
"""


def manifests() -> list[dict[str, Any]]:
    """All objects of the example, file by file."""
    files = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    return [found for file in files for found in yaml.safe_load_all((MANIFESTS / file).read_text())]


def named(kind: str, name: str) -> dict[str, Any]:
    """The object of this kind and name."""
    (found,) = [one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(job: str) -> dict[str, Any]:
    """The pod that a Job makes copies of."""
    pod: dict[str, Any] = named("Job", job)["spec"]["template"]["spec"]
    return pod


class Node:
    """A machine for pods; use it as a context manager so that no process of it outlives a test."""

    def __init__(self, tmp_path: Path, service: str, volume: str) -> None:
        hosts = tmp_path / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{SERVICE_ADDRESS} {service}\n")
        words = ("unshare", "--map-root-user", "--mount", "--net", "sh", "-c", SETUP, "sh")
        self._keeper = subprocess.Popen(
            [*words, SERVICE_ADDRESS, hosts, volume], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None
        self.is_ready = self._keeper.stdout.readline() == "ready\n"
        self._started: list[subprocess.Popen[str]] = []
        self.volume = Path(f"/proc/{self._keeper.pid}/root{volume}")

    def start(self, command: list[str], token: str) -> subprocess.Popen[str]:
        """Start a command of a container."""
        enter = ("nsenter", f"--target={self._keeper.pid}", "--user", "--preserve-credentials", "--mount", "--net")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        process = subprocess.Popen(
            [*enter, "--wd=/", *command],
            env={**os.environ, "PATH": path, "PACELINE_TOKEN": token, "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, command: list[str], token: str) -> int:
        """Run a command of a container to its end. Return its exit code."""
        process = self.start(command, token)
        process.communicate(timeout=PATIENCE)
        return process.returncode

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *details: object) -> None:
        for process in (*self._started, self._keeper):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


def can_make_nodes() -> bool:
    """Whether this machine has the commands for it, lets this user make namespaces, and is not run from /tmp itself."""
    tools = ("unshare", "nsenter", "ip", "mount", "openssl")
    ours = (sys.prefix, sys.base_prefix, paceline.__file__)
    if any(shutil.which(tool) is None for tool in tools) or any(Path(path).is_relative_to("/tmp") for path in ours):
        return False
    tried = subprocess.run(["unshare", "--map-root-user", "--mount", "--net", "true"], capture_output=True)
    return tried.returncode == 0
