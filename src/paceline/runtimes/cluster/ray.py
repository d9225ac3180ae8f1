"""Server and workers as Ray actors: Ray places and restarts them, and weights and pushes go over our own TCP."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, to_dict
from paceline.data.datasets import resolve_dataset
from paceline.errors import RunFailed, UserError
from paceline.reports.console import Console
from paceline.runs.folder import ALL_GONE, RunFolder, free_name, require_survivors
from paceline.runtimes.cluster import serve as network
from paceline.runtimes.cluster.ray_actors import ActorStart, ServerActor, WorkerActor
from paceline.runtimes.cluster.ray_placement import SERVER_CPUS, WorkerResources, placement
from paceline.runtimes.cluster.serve import Outcome
from paceline.runtimes.scripts.launch import settings_of_script
from paceline.settings.resolve import resolve
from paceline.system.signals import stop_signals
from paceline.transports.auth import TOKEN_VARIABLE, ConnectOptions, make_token, wants_tls

MAX_RESTARTS = 10
START_SECONDS = 300.0
LOOK_SECONDS = 0.25
ENDING_SECONDS = 10.0  # after the end of training: how long the workers' processes may take to end


def require_ray() -> Any:
    """Import ray, without its usage reports. Raise UserError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs ray, which is not installed: pip install 'paceline[ray]'") from None
    return ray


def train_on_ray(
    config: RunConfig,
    console: Console,
    tls: bool | None = None,
    gpus_per_worker: float | None = None,
    command: list[str] | None = None,
) -> Outcome:
    """Serve on this node, which keeps the run's folder, and work on nodes that Ray chooses.

    The workers run `command` if it is given: a script has the same path on every node.
    """
    given_threads = config.threads
    config = replace(config, threads=config.threads or 1)
    if command is None:
        config = resolve(config)
        resolve_dataset(config)  # missing data is found before a process is started
    else:
        resolved = settings_of_script(config, command)[0]
        config, command = replace(config, workers=resolved.workers), [str(Path(command[0]).absolute()), *command[1:]]
    each = _resources(config, gpus_per_worker, is_script=command is not None)
    network.require_star(config if command is None else resolved, may_restart=False)
    ray = require_ray()
    if given_threads is None:
        console.note("each worker is given 1 CPU: --threads N for more")
    name = config.name or free_name(config)
    folder = RunFolder(Path(config.runs) / name)
    config = replace(config, name=name, runs=str(Path(config.runs).absolute()))
    if folder.path.exists():
        raise UserError(f"{folder.path} exists already: choose another --name, or remove it")
    with _cluster(ray) as address, placement(ray, config.workers or 1, each, address) as group:
        actors = RayActors(ray, config, each, address, group, console, tls, command)
        actors.start()
        answer = actors.follow()
    if "failed" in answer:
        error = RunFailed(answer["failed"])
        error.exit_code = answer["code"]
        raise error
    result = folder.result()
    if result is None:
        raise RunFailed(f"{folder.path} holds no result although its server finished: was it removed?")
    require_survivors(result, folder)
    return folder, result


def _resources(config: RunConfig, gpus_per_worker: float | None, is_script: bool) -> WorkerResources:
    """What each worker gets. Raise UserError if the run cannot have workers on GPUs."""
    if config.device != "cpu":
        what = f"--device {config.device}: under --engine ray each worker gets a GPU, or a part of one, from Ray"
        raise UserError(f"{what}; write --gpus-per-worker 1 instead")
    if gpus_per_worker == 0.0:
        raise UserError("--gpus-per-worker 0 is a worker without a GPU: leave it out")
    each = WorkerResources(config.threads or 1, gpus_per_worker or 0.0)
    if each.gpus and config.recovery == "log" and not is_script:
        what = f"--gpus-per-worker {each.gpus:g}: after a crash the server cannot recompute a GPU's pushes bit for bit"
        raise UserError(f"{what}; add --recovery checkpoint")
    return each


@contextlib.contextmanager
def _cluster(ray: Any) -> Iterator[str]:
    """Connect to the cluster of RAY_ADDRESS or of this machine, or start one. Yield this node's address."""
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        what = "--engine ray keeps the run's folder on a node of the cluster"
        raise UserError(f"{what}: start it there ('ray job submit'), not through ray://")
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(log_to_driver=False, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"Ray cannot be reached ({error}): see 'ray status', or correct RAY_ADDRESS") from None
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        if ours:
            ray.shutdown()


class RayActors:
    """The actors of one run, followed to its end."""

    def __init__(
        self,
        ray: Any,
        config: RunConfig,
        each: WorkerResources,
        address: str,
        group: Any,
        console: Console,
        tls: bool | None,
        command: list[str] | None,
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._config, self._each, self._console = ray, config, each, console
        self._script = command[0] if command is not None else None
        self._tls = wants_tls(tls, f"{address}:0")
        start = ActorStart(os.environ.get(TOKEN_VARIABLE) or make_token().decode(), str(Path.cwd()))
        place = PlacementGroupSchedulingStrategy
        lives = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
        worker_lives = {**lives, "num_cpus": each.bundle["CPU"], "num_gpus": each.gpus}
        server_class = ray.remote(**lives, num_cpus=SERVER_CPUS, max_concurrency=3)(ServerActor)
        worker_class = ray.remote(**worker_lives, max_concurrency=2)(WorkerActor)
        server_options = server_class.options(scheduling_strategy=place(group, 0))
        self.server = server_options.remote(start, to_dict(config), f"{address}:0", self._tls, command)
        self.workers = [
            worker_class.options(scheduling_strategy=place(group, 1 + worker)).remote(start)
            for worker in range(config.workers or 1)
        ]
        self._ended = self.server.serve.remote()
        self._works: dict[Any, int] = {}
        self._looks: dict[int, Any] = {}

    def start(self) -> None:
        """Wait until the server listens, then start all workers."""
        deadline = time.monotonic() + START_SECONDS
        address = None
        while address is None:
            if self._has_ended():
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"the server did not listen within {START_SECONDS:g} s: see Ray's logs")
            address = self._look()
        each, data_dir = self._each, self._config.data_dir
        device = each.device if self._script is None else "cpu"  # a script chooses its device itself
        options = ConnectOptions(address, tls=self._tls, data_dir=data_dir, threads=each.threads, device=device)
        options = replace(options, script=self._script)
        for worker, actor in enumerate(self.workers):
            self._works[actor.work.remote(replace(options, worker=worker))] = worker

    def follow(self) -> dict[str, Any]:
        """Show the server's rows until the run has ended. Return the server's answer."""
        stopping = False
        with stop_signals(self._console.report) as reasons:
            while not self._has_ended():
                if reasons and not stopping:
                    stopping = self._stop(reasons[0])
                self._look()
                self._hear_workers()
            deadline = time.monotonic() + ENDING_SECONDS
            while self._works and time.monotonic() < deadline:
                self._ray.wait(list(self._works), timeout=LOOK_SECONDS)
                self._hear_workers()
        self._look()
        try:
            answer: dict[str, Any] = self._ray.get(self._ended)
        except self._ray.exceptions.RayError as error:
            what = f"the server's actor died {MAX_RESTARTS + 1} times or for good ({_first_line(error)})"
            run = Path(self._config.runs) / str(self._config.name)
            raise RunFailed(f"{what}: 'paceline resume {run}' goes on on one machine") from None
        return answer

    def _has_ended(self) -> bool:
        return bool(self._ray.wait([self._ended], timeout=LOOK_SECONDS)[0])

    def _look(self) -> str | None:
        """Show the server's rows. Return its address, or None if it does not listen."""
        try:
            found = self._ray.get(self.server.look.options(max_task_retries=0).remote(), timeout=5.0)
        except self._ray.exceptions.RayError:
            return None
        for row in found["rows"]:
            self._console.report(row)
        address: str | None = found["address"]
        return address

    def _hear_workers(self) -> None:
        """Note what scripts write, and each worker that ended before training was over. If the last one does, end."""
        if not self._works:
            return
        done, _ = self._ray.wait(list(self._works), num_returns=len(self._works), timeout=0.0)
        for worker in self._works.values() if self._script is not None else ():
            self._hear_script(worker)
        for work in done:
            worker = self._works.pop(work)
            try:
                why = self._ray.get(work)
            except self._ray.exceptions.RayError as error:
                why = f"its actor died for good ({_first_line(error)})"
            if self._script is not None:
                self._hear_script(worker, to_end=True)
            if why is not None:
                self._console.note(f"worker {worker} ended: {why}")
                if not self._works:
                    self._stop(ALL_GONE)

    def _hear_script(self, worker: int, to_end: bool = False) -> None:
        """Note the lines that a worker's script has written, and ask for the next ones."""
        for seconds in (5.0, 5.0) if to_end else (0.0,):
            look = self._looks.pop(worker, None) or self.workers[worker].look.options(max_task_retries=0).remote()
            if not self._ray.wait([look], timeout=seconds)[0]:
                self._looks[worker] = look  # it comes later, or its actor is being restarted
                return
            with contextlib.suppress(self._ray.exceptions.RayError):
                for line in self._ray.get(look):
                    self._console.note(f"[worker {worker}] {line}")

    def _stop(self, reason: str) -> bool:
        """Ask the server to end the run. Return whether it got the message."""
        try:
            self._ray.get(self.server.stop.options(max_task_retries=0).remote(reason), timeout=5.0)
        except self._ray.exceptions.RayError:
            return False
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
