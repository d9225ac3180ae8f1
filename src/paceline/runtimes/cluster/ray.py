"""Server and workers as Ray actors: Ray places them and starts them again; weights and pushes go over our own TCP.

A server that comes back goes on from the run's folder at the same address; a worker comes back as a new incarnation.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, from_dict, to_dict
from paceline.data.datasets import resolve_dataset
from paceline.errors import PacelineError, RunFailed, UserError
from paceline.reports.console import Console
from paceline.runs.folder import ALL_GONE, RunFolder, free_name, require_survivors
from paceline.runtimes.cluster.serve import (
    Listening,
    ListenOptions,
    join_server,
    refuse_restarts,
    require_star,
    serve,
    serve_again,
)
from paceline.settings.resolve import resolve
from paceline.system.signals import stop_signals
from paceline.transports.auth import TOKEN_VARIABLE, ConnectOptions, make_token

MAX_RESTARTS = 10
PLACING_SECONDS = 60.0
START_SECONDS = 300.0
LOOK_SECONDS = 0.25
MAX_ROWS = 1000


class RelayConsole(Console):
    """A console whose rows are kept for the command that started the run."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.rows: deque[dict[str, Any]] = deque(maxlen=MAX_ROWS)

    def report(self, row: dict[str, Any]) -> None:
        """One row from the run."""
        self.rows.append(row)

    def note(self, text: str) -> None:
        """One line that stays."""
        self.rows.append({"kind": "note", "text": text})

    def take(self) -> list[dict[str, Any]]:
        """What has come since."""
        return [self.rows.popleft() for _ in range(len(self.rows))]


class ServerActor:
    """Serves one run; started again after a kill, it goes on from the run's folder."""

    def __init__(self, config: dict[str, Any], listen: str, token: str, tls: bool) -> None:
        os.environ[TOKEN_VARIABLE] = token
        self._config, self._listen, self._tls = from_dict(config), listen, tls
        self._relay = RelayConsole()
        self._opened: Listening | None = None
        self._stop_reason: str | None = None

    def serve(self) -> dict[str, Any]:
        """Until the run has ended; what came of it, or why it could not."""
        folder = RunFolder(Path(self._config.runs) / str(self._config.name))
        try:
            if folder.arrivals_file.exists():
                serve_again(folder.path, ListenOptions(tls=self._tls), self._relay, tell=self._open)
            else:
                folder.discard_unstarted()
                serve(self._config, ListenOptions(self._listen, tls=self._tls), self._relay, self._open)
        except PacelineError as error:
            return {"failed": str(error), "code": error.exit_code}
        return {}

    def _open(self, opened: Listening) -> None:
        self._opened = opened
        if self._stop_reason is not None:
            opened.stop(self._stop_reason)

    def look(self) -> dict[str, Any]:
        """Where it serves, once it does, and what there is to show."""
        address = self._opened.address if self._opened is not None else None
        return {"address": address, "rows": self._relay.take(), "pid": os.getpid()}

    def stop(self, reason: str) -> None:
        """End the run at the next safe moment."""
        self._stop_reason = reason
        if self._opened is not None:
            self._opened.stop(reason)


class WorkerActor:
    """One worker, wherever Ray puts it."""

    def __init__(self, token: str) -> None:
        os.environ[TOKEN_VARIABLE] = token

    def work(self, connect: str, tls: bool, data_dir: str | None, threads: int, worker: int) -> str | None:
        """Until training is over; else why not."""
        try:
            visitor = ConnectOptions(connect, tls=tls, data_dir=data_dir, threads=threads, worker=worker)
            over = join_server(visitor, Console(quiet=True))
        except PacelineError as error:
            return str(error)
        return None if over else f"the server at {connect} is gone"

    def pid(self) -> int:
        """Of the process it is in."""
        return os.getpid()


def require_ray() -> Any:
    """The package, or one line that says what to install."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs ray, which is not installed: pip install 'paceline[ray]'") from None
    return ray


def train_on_ray(config: RunConfig, console: Console, tls: bool = False) -> tuple[RunFolder, dict[str, Any]]:
    """Serve on this node, work where Ray finds room; the run's folder is here, as ever."""
    asked = config.threads
    config = resolve(replace(config, threads=config.threads or 1))
    require_star(config)
    refuse_restarts(config)
    resolve_dataset(config)  # data that is not here is known before anything is started
    ray = require_ray()
    if asked is None:
        console.note("each worker is given 1 CPU: --threads N for more")
    name = config.name or free_name(config)
    folder = RunFolder(Path(config.runs) / name)
    config = replace(config, name=name, runs=str(Path(config.runs).absolute()))
    if folder.path.exists():
        raise UserError(f"{folder.path} exists already: choose another --name, or remove it")
    with _cluster(ray) as address, _room(ray, config, address) as group:
        actors = RayActors(ray, config, address, group, console, tls)
        actors.start()
        answer = actors.follow()
    if "failed" in answer:
        raise _failure(answer)
    result = folder.result()
    if result is None:
        raise RunFailed(f"{folder.path} holds no result although its server finished: was it removed?")
    require_survivors(result, folder)
    return folder, result


def _failure(answer: dict[str, Any]) -> PacelineError:
    error = RunFailed(answer["failed"])
    error.exit_code = answer["code"]
    return error


@contextlib.contextmanager
def _cluster(ray: Any) -> Iterator[str]:
    """Ray's cluster (RAY_ADDRESS, or one that runs here, or a new one on this machine): this node's address."""
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise UserError(
            "--engine ray keeps the run's folder on a node of the cluster: start it there ('ray job submit'), "
            "not through ray://"
        )
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


@contextlib.contextmanager
def _room(ray: Any, config: RunConfig, address: str) -> Iterator[Any]:
    """A place for the server on this node, and one for each worker, spread over nodes."""
    threads, workers = config.threads or 1, config.workers or 1
    bundles = [{"CPU": 1.0, f"node:{address}": 0.001}, *({"CPU": float(threads)} for _ in range(workers))]
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    try:
        if not group.wait(PLACING_SECONDS):
            raise UserError(
                f"Ray found no room within {PLACING_SECONDS:g} s for a server (1 CPU, on this node) and {workers} "
                f"workers of {threads} CPU: ask for fewer --workers or --threads, or see 'ray status'"
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


class RayActors:
    """The actors of one run, followed to its end."""

    def __init__(self, ray: Any, config: RunConfig, address: str, group: Any, console: Console, tls: bool) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._config, self._console, self._tls = ray, config, console, tls
        self._token = os.environ.get(TOKEN_VARIABLE) or make_token().decode()
        place = PlacementGroupSchedulingStrategy
        lives = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
        server_class = ray.remote(**lives, max_concurrency=3)(ServerActor)
        worker_class = ray.remote(**lives, max_concurrency=2)(WorkerActor)
        self.server = server_class.options(num_cpus=1, scheduling_strategy=place(group, 0)).remote(
            to_dict(config), f"{address}:0", self._token, tls
        )
        threads = config.threads or 1
        self.workers = [
            worker_class.options(num_cpus=threads, scheduling_strategy=place(group, 1 + worker)).remote(self._token)
            for worker in range(config.workers or 1)
        ]
        self._ended = self.server.serve.remote()
        self._works: dict[Any, int] = {}

    def start(self) -> None:
        """Wait until the server listens, then let everybody work."""
        deadline = time.monotonic() + START_SECONDS
        address = None
        while address is None:
            if self._has_ended():
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"the server did not listen within {START_SECONDS:g} s: see Ray's logs")
            address = self._look()
        config, threads = self._config, self._config.threads or 1
        for worker, actor in enumerate(self.workers):
            work = actor.work.remote(address, self._tls, config.data_dir, threads, worker)
            self._works[work] = worker

    def follow(self) -> dict[str, Any]:
        """Until the server says that the run has ended; shows what it tells on the way."""
        told = False
        with stop_signals(self._console.report) as reasons:
            while not self._has_ended():
                if reasons and not told:
                    told = self._stop(reasons[0])
                self._look()
                self._hear_workers()
        self._look()
        try:
            answer: dict[str, Any] = self._ray.get(self._ended)
        except self._ray.exceptions.RayError as error:
            raise RunFailed(
                f"the server's actor died {MAX_RESTARTS + 1} times or for good ({_first_line(error)}): "
                f"'paceline resume {Path(self._config.runs) / str(self._config.name)}' goes on on one machine"
            ) from None
        return answer

    def _has_ended(self) -> bool:
        return bool(self._ray.wait([self._ended], timeout=LOOK_SECONDS)[0])

    def _look(self) -> str | None:
        """Show what the server has to show; where it listens, None while it does not."""
        try:
            found = self._ray.get(self.server.look.options(max_task_retries=0).remote(), timeout=5.0)
        except self._ray.exceptions.RayError:
            return None
        for row in found["rows"]:
            self._console.report(row)
        address: str | None = found["address"]
        return address

    def _hear_workers(self) -> None:
        """Say of every worker that ended before training was over; when all have, so has the run."""
        if not self._works:
            return
        done, _ = self._ray.wait(list(self._works), num_returns=len(self._works), timeout=0.0)
        for work in done:
            worker = self._works.pop(work)
            try:
                why = self._ray.get(work)
            except self._ray.exceptions.RayError as error:
                why = f"its actor died for good ({_first_line(error)})"
            if why is not None:
                self._console.note(f"worker {worker} ended: {why}")
                if not self._works:
                    self._stop(ALL_GONE)

    def _stop(self, reason: str) -> bool:
        """Ask the server to end the run; whether it has heard."""
        try:
            self._ray.get(self.server.stop.options(max_task_retries=0).remote(reason), timeout=5.0)
        except self._ray.exceptions.RayError:
            return False
        return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
