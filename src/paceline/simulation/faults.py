"""What each kind of fault does to a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.messages import Drain
from paceline.settings.fault_table import Fault
from paceline.simulation.simulator import Simulation, Worker


def inject(cluster: Simulation, fault: Fault) -> None:
    """Apply one fault to a simulated cluster, now."""
    if fault.kind == "server":
        if not cluster.wire.is_down:
            cluster.stop_server()
            cluster.agenda.at(cluster.agenda.now + fault.lasts, _restart_server, cluster)
        return
    assert fault.worker is not None, "a table that was checked names a worker"
    KINDS[fault.kind](cluster, cluster.workers[fault.worker], fault)


def _restart_server(cluster: Simulation) -> None:
    cluster.restart_server()


def _crash(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    if worker.seat is None:
        return
    cluster.go(worker)
    cluster.give_up(worker, fault.noticed_after or 0.0)
    if fault.restart_after is not None:
        cluster.agenda.at(cluster.agenda.now + fault.restart_after, cluster.come, worker)


def _slow(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    """Steps that begin meanwhile take longer."""
    worker.slow_until, worker.factor = cluster.agenda.now + fault.lasts, fault.factor


def _pause(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    worker.paused_until = max(worker.paused_until, cluster.agenda.now + fault.lasts)
    if worker.step_began is not None:
        worker.owed += fault.lasts


def _go_astray(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    cluster.wire.lines[worker.number].astray[fault.message].append(fault)


def _cut(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    """No message passes; a worker that was given up meanwhile comes back as another incarnation."""
    line, heals = cluster.wire.lines[worker.number], cluster.agenda.now + fault.lasts
    line.cut_until = max(line.cut_until, heals)
    if fault.noticed_after is not None and fault.noticed_after < fault.lasts and worker.seat is not None:
        cluster.give_up(worker, fault.noticed_after)
        cluster.agenda.at(heals, _come_back, (cluster, worker, worker.life))


def _come_back(given_up: tuple[Simulation, Worker, int]) -> None:
    cluster, worker, life = given_up
    if worker.life == life:
        cluster.go(worker)
        cluster.come(worker)


def _join(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    """Somebody new, or somebody who was lost or drained and is wanted again."""
    if worker.seat is None:
        worker.done = False
        cluster.come(worker)


def _drain(cluster: Simulation, worker: Worker, fault: Fault) -> None:
    cluster.ask(Drain(worker.number))


KINDS: dict[str, Callable[[Simulation, Worker, Fault], None]] = {
    "crash": _crash,
    "slow": _slow,
    "pause": _pause,
    "lose": _go_astray,
    "duplicate": _go_astray,
    "reorder": _go_astray,
    "cut": _cut,
    "join": _join,
    "drain": _drain,
}
