"""A ring whose processes a launcher started, on one machine or several. Rank 0 keeps the run folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.assembly.preflight import provenance, startup_warnings
from paceline.assembly.task import identity_of, make_task, prepare_device, weights_check
from paceline.config import RunConfig, to_dict
from paceline.core.driver import BareDriver
from paceline.core.worker import LocalWorker
from paceline.data.datasets import Dataset, Location, load
from paceline.interfaces import Loader, Report
from paceline.object_store.mirroring import mirrored_to_store
from paceline.randomness import mix64
from paceline.runs.folder import RunFolder, new_folder
from paceline.runtimes.ring.compression import compress, exchange_of, travels_whole
from paceline.runtimes.ring.ddp import SampleWeightedLoader, make_parallel
from paceline.runtimes.ring.process_group import ProcessGroup, ProcessGroupRing, failing_on_lost_rank
from paceline.runtimes.ring.replica import Replica, RingWorker
from paceline.runtimes.server.host import Host
from paceline.runtimes.server.runtime import LocalRuntime
from paceline.settings.codecs import build_codec, codec_of
from paceline.settings.ranks import Rank
from paceline.settings.strategies import strategy_of
from paceline.system.environment import package_version
from paceline.system.memory import keep_freed_memory
from paceline.system.signals import stop_signals
from paceline.tasks.given_weights import read_given

OWN = ("threads", "data_dir", "name", "runs", "weights")  # settings that may differ between ranks


def train_as_rank(
    config: RunConfig, rank: Rank, location: Location | None, report: Report
) -> tuple[RunFolder, dict[str, Any]]:
    """Train as one of the processes that a launcher started; only rank 0 keeps a folder and reports."""
    dataset = load(location) if location is not None else None
    meeting = ProcessGroup(rank)
    with contextlib.closing(meeting), stop_signals(report) as reasons:
        if not rank.leads:
            result = RankWorker(config, rank, dataset, meeting).follow()
            return RunFolder(Path(result["folder"])), result
        with new_folder(config) as folder, mirrored_to_store(folder, config, report):
            member = RankWorker(config, rank, dataset, meeting)
            for line in startup_warnings(config, location):
                report({"kind": "note", "text": line})
            facts = {**provenance(config, location), "folder": str(folder.path)}
            return folder, member.lead(folder, report, facts, lambda: reasons[0] if reasons else None)


class RankWorker:
    """One rank's part in a run."""

    def __init__(self, config: RunConfig, rank: Rank, dataset: Dataset | None, meeting: ProcessGroup) -> None:
        keep_freed_memory()
        self.config, self.rank, self.meeting = config, rank, meeting
        device = prepare_device(config)
        if device.type == "cuda":
            torch.cuda.set_device(rank.local)
            device = torch.device("cuda", rank.local)
        task = make_task(config, dataset, read_given(config)).to(device)
        facts = {**_identity(config), **identity_of(task), "weights": weights_check(task)}  # each rank steps its own
        meeting.open(facts, config.device)
        self.ring = ProcessGroupRing(rank, task.layout.size, task.state_size, device)
        nbytes = build_codec(config.codec or "none", task.layout, device).ring_nbytes(rank.size)
        self.place = RingWorker(config, task, rank.number, 0, (self.ring.mean, nbytes))
        self.instance = self._instance()

    def _instance(self) -> LocalWorker:
        """Build this rank's worker. DDP averages gradients during backward, or the ring averages pushes after it."""
        config, task, ring = self.config, self.place.task, self.ring
        is_local, key = strategy_of(config).is_local, mix64(config.seed, self.rank.number)
        ring.is_even = not is_local

        def weighted(loader: Loader) -> Loader:
            return SampleWeightedLoader(loader, task, self.place.work, config, self.rank.number)

        instance = self.place.instance(ring, weighted if ring.is_even else None)
        if is_local or travels_whole(config.codec):
            if config.codec is not None:
                is_lowrank = codec_of(config.codec).name == "lowrank"
                adds = task.flat.accumulates = is_lowrank and not is_local and config.device == "cpu"
                ring.average, ring.by_codec = exchange_of(config.codec, task.layout, key, ring.gradient, adds)
            return instance
        ring.overlapped = True
        parallel = make_parallel(task)
        if config.codec is not None:
            compress(parallel, config.codec, key)
        return instance

    def lead(
        self, folder: RunFolder, report: Report, facts: dict[str, Any], stopped: Callable[[], str | None]
    ) -> dict[str, Any]:
        """On rank 0: train with the others, keep the run folder, and publish the result."""
        place, runtime = self.place, LocalRuntime(self.place.put, way="waiting")
        host = Host(place.server, place.task, place.work, self.config, folder, report, runtime, 0.0, facts)
        replica = Replica(place, host, self.instance, self.ring, host.timings)
        replica.start()

        def stopping() -> bool:
            if (reason := stopped()) is not None:
                host.stop(reason)
            host.check_time_limit()
            return host.server.finished

        with failing_on_lost_rank(self.rank, lambda: host.server.version):
            replica.run(stopping)
            if host.stop_reason is not None:
                self.ring.stop()
                replica.final_exchange()
        result = host.finish()
        host.close()
        self.meeting.tell("result", result)
        return result

    def follow(self) -> dict[str, Any]:
        """On other ranks: train, then wait for the result of rank 0."""
        server = self.place.server
        replica = Replica(self.place, BareDriver(server, self.place.put), self.instance, self.ring, None)
        replica.start()
        with failing_on_lost_rank(self.rank, lambda: server.version):
            replica.run()
            return self.meeting.hear("result")


def _identity(config: RunConfig) -> dict[str, Any]:
    """What ranks must agree on besides the data: versions, and all settings except those of a machine."""
    settings = {name: value for name, value in to_dict(config).items() if name not in OWN}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str, allow_nan=False).encode()).hexdigest()
    return {"version": package_version("paceline"), "torch": torch.__version__, "settings": digest[:16]}
