"""Two test hosts on one machine: network namespaces joined by a link of 1 Gbit/s, one pinned core each. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

RATE = "1gbit"
BURST = "256kb"
QUEUE = "20ms"


@dataclass(frozen=True)
class Host:
    """A network namespace with an address on the link, and the core its processes are pinned to."""

    name: str
    address: str
    interface: str
    core: int

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.name, "taskset", "-c", str(self.core), *words]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process there: one thread, and the network interface to use."""
        local_state = {"GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **local_state}


def why_not() -> str | None:
    """Return why test hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "test hosts need root (network namespaces)"
    missing = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if missing:
        return f"test hosts need {' and '.join(missing)}"
    return None if len(os.sched_getaffinity(0)) >= 2 else "two test hosts need two cores"


def cannot_measure() -> bool:
    """Return whether test hosts cannot be made here, and print why."""
    reason = why_not()
    if reason is not None:
        print(f"cannot measure here: {reason}")
    return reason is not None


@contextlib.contextmanager
def two_hosts(rate: str = RATE) -> Iterator[tuple[Host, Host]]:
    """Set up both hosts, and remove them on exit, also after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tag = uuid.uuid4().hex[:6]
    cores = sorted(os.sched_getaffinity(0))[:2]
    hosts = tuple(Host(f"pace-{tag}-{n}", f"10.77.0.{n + 1}", f"pv{tag}{n}", cores[n]) for n in range(2))
    first, second = hosts
    try:
        for host in hosts:
            _do("ip", "netns", "add", host.name)
        _do("ip", "link", "add", first.interface, "netns", first.name, "type", "veth",
            "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for host in hosts:
            inside = ("ip", "netns", "exec", host.name)
            _do(*inside, "ip", "addr", "add", f"{host.address}/24", "dev", host.interface)
            _do(*inside, "ip", "link", "set", host.interface, "up")
            _do(*inside, "ip", "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
            _do(*inside, "tc", "qdisc", "add", "dev", host.interface, *shape)
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
