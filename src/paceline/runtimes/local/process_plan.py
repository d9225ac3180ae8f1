"""What the supervisor gives to the processes of a run on one machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.settings.fault_table import Fault


@dataclass(frozen=True)
class ProcessPlan:
    """What the processes of a run get: their roles, a spec of JSON values, and descriptors.

    `faults` are injected into them. Workers before `first_worker` are part of the process that keeps the run folder.
    """

    spec: dict[str, Any]
    fds: list[int]
    incarnation: int = 0
    server_role: str = "server"
    worker_role: str = "worker"
    faults: tuple[Fault, ...] = ()
    first_worker: int = 0

    def in_ring(self) -> ProcessPlan:
        """The same without a server: worker 0 keeps the run folder, every worker updates a copy of the weights."""
        return replace(self, server_role="ring host", worker_role="ring worker", first_worker=1)

    def again(self, incarnation: int, now: float) -> ProcessPlan:
        """The same for a resumed run, at `now` on its clock, with the faults that are still due."""
        faults = tuple(fault for fault in self.faults if fault.at > now)
        return replace(self, spec={**self.spec, "resume": True}, incarnation=incarnation, faults=faults)
