"""Apply the faults of a fault table to a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.messages import Drain
from paceline.settings.fault_table import Fault
from paceline.simulation.simulator import SimulatedWorker, Simulation


def inject(cluster: Simulation, fault: Fault) -> None:
    """Apply one fault to a simulated cluster at the current virtual time."""
    if fault.kind == "server":
        if not cluster.network.server_down:
            cluster.stop_server()
            cluster.queue.at(cluster.queue.now + fault.lasts, lambda cluster: cluster.restart_server(), cluster)
        return
    assert fault.worker is not None, "a checked fault table names a worker"
    KINDS[fault.kind](cluster, cluster.workers[fault.worker], fault)


def _crash(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    if worker.instance is None:
        return
    cluster.end_worker(worker)
    cluster.report_loss(worker, fault.noticed_after or 0.0)
    if fault.restart_after is not None:
        cluster.queue.at(cluster.queue.now + fault.restart_after, cluster.start_worker, worker)


def _slow(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    """Lengthen the steps that begin while the fault lasts."""
    worker.slow_until, worker.factor = cluster.queue.now + fault.lasts, fault.factor


def _pause(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    worker.paused_until = max(worker.paused_until, cluster.queue.now + fault.lasts)
    if worker.step_began is not None:
        worker.pause_left += fault.lasts


def _affect_message(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    cluster.network.links[worker.number].message_faults[fault.message].append(fault)


def _disconnect(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    """Block all messages; a worker that the server dropped meanwhile returns as a new incarnation."""
    link, heals = cluster.network.links[worker.number], cluster.queue.now + fault.lasts
    link.down_until = max(link.down_until, heals)
    if fault.noticed_after is not None and fault.noticed_after < fault.lasts and worker.instance is not None:
        cluster.report_loss(worker, fault.noticed_after)
        cluster.queue.at(heals, _reconnect, (cluster, worker, worker.life))


def _reconnect(lost: tuple[Simulation, SimulatedWorker, int]) -> None:
    cluster, worker, life = lost
    if worker.life == life:
        cluster.end_worker(worker)
        cluster.start_worker(worker)


def _join(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    """Start a new worker, or restart one that was lost or drained."""
    if worker.instance is None:
        worker.done = False
        cluster.start_worker(worker)


def _drain(cluster: Simulation, worker: SimulatedWorker, fault: Fault) -> None:
    cluster.send_to_server(Drain(worker.number))


KINDS: dict[str, Callable[[Simulation, SimulatedWorker, Fault], None]] = {
    "crash": _crash,
    "slow": _slow,
    "pause": _pause,
    **dict.fromkeys(("lose", "duplicate", "reorder"), _affect_message),
    "cut": _disconnect,
    "join": _join,
    "drain": _drain,
}
