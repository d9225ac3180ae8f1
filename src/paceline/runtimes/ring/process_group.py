"""A ring over torch.distributed: all-reduce of gradients between machines (Gloo, or NCCL on GPUs).

For `local:H`, one all-reduce of the flat vector follows the local steps. For `allreduce`, DistributedDataParallel
sends the gradient in buckets during backward.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.messages import Push
from paceline.errors import RunFailed, UserError, mismatched_keys
from paceline.runtimes.ring.shared_memory import NUM_FACTS, STOP, WEIGHT, RingRound, facts_of, push_from, timing_from
from paceline.settings.ranks import Rank
from paceline.system.strict_json import to_json
from paceline.transports.protocol import Timing

EXCHANGE_SECONDS = 600.0
ROLL_CALL_SECONDS = 120.0


class ProcessGroup:
    """The rendezvous of the ranks: wait for all, check that they agree, and later share the result."""

    def __init__(self, rank: Rank, patience: float = ROLL_CALL_SECONDS) -> None:
        self.rank, self._patience = rank, patience
        timeout, is_master = datetime.timedelta(seconds=patience), rank.leads and not rank.store_is_there
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                rank.address, rank.port, rank.size, is_master=is_master, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise UserError(
                f"rank {rank.number} cannot reach the first rank at {rank.address}:{rank.port} ({first_line(error)}): "
                "is it started, and is that the address of its machine?"
            ) from None
        self.store = dist.PrefixStore(f"paceline/{rank.attempt}", store)  # type: ignore[attr-defined]

    def open(self, identity: dict[str, Any], device: str) -> None:
        """Wait until every rank has come with the same settings, code and data; then create the process group."""
        self.store.set(f"here/{self.rank.number}", to_json(identity))
        self._await_all("here")
        there = [json.loads(self.store.get(f"here/{number}")) for number in range(self.rank.size)]
        self.store.set(f"looked/{self.rank.number}", "")
        self._await_all("looked")  # before a rank leaves and closes the store
        for number, theirs in enumerate(there):
            if wrong := mismatched_keys(identity, theirs):
                raise UserError(
                    f"rank {number} differs from rank {self.rank.number} in {' and '.join(wrong)}: give all ranks the "
                    "same settings, code and data"
                )
        backend, timeout = "nccl" if device == "cuda" else "gloo", datetime.timedelta(seconds=EXCHANGE_SECONDS)
        number, size = self.rank.number, self.rank.size
        dist.init_process_group(backend, store=self.store, rank=number, world_size=size, timeout=timeout)

    def _await_all(self, name: str) -> None:
        deadline, missing = time.monotonic() + self._patience, list(range(self.rank.size))
        while missing := [number for number in missing if not self._is_there(f"{name}/{number}")]:
            if time.monotonic() > deadline:
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
                raise UserError(
                    f"{ranks} of 0 to {self.rank.size - 1} did not come within {self._patience:g} s: start as many "
                    "processes as the launcher expects, and see on its machine what stopped it"
                )
            time.sleep(0.02)

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self.store.check([key]))
        except RuntimeError:  # the first rank has closed the store, because all had come
            if key.startswith("looked"):
                return True
            raise RunFailed(f"rank {self.rank.number}: the first rank ended before all had come") from None

    def tell(self, name: str, row: dict[str, Any]) -> None:
        """Publish `row`."""
        self.store.set(name, to_json(row))

    def hear(self, name: str) -> dict[str, Any]:
        """Wait for a row that another rank publishes."""
        self.store.set_timeout(datetime.timedelta(seconds=EXCHANGE_SECONDS))
        return dict(json.loads(self.store.get(name)))

    def wait_for(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Wait for a row that another rank publishes. Return None after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._is_there(name):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return dict(json.loads(self.store.get(name)))

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def first_line(error: BaseException) -> str:
    """The first line of torch's error, without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class ProcessGroupRing:
    """One rank of the ring. All pushes of a round get the mean of all ranks as their update."""

    def __init__(self, rank: Rank, size: int, state_size: int, device: torch.device) -> None:
        self.rank = rank
        self.gradient = torch.zeros(size, device=device)
        self.state = torch.zeros(state_size, device=device)
        self.overlapped = False  # whether the gradient is already exchanged during backward
        self.is_even = False
        """Whether gradients are already weighted by samples, so that the mean over ranks is unweighted."""
        self.average = self.gradient  # the mean of all gradients after an exchange
        self.by_codec: Callable[[], None] | None = None  # computes the mean with a codec; None for a plain all-reduce
        width = NUM_FACTS + -(-state_size // 2)  # running statistics follow, two floats per number
        self._beside = torch.zeros(rank.size, width, dtype=torch.float64, device=device)
        self._own = torch.zeros(width, dtype=torch.float64, device=device)
        self._states = self._beside[:, NUM_FACTS:].view(torch.float32)[:, :state_size]
        self._stop = False

    def mean(self, pushes: list[Push], samples: int) -> Tensor:
        """The server's mean of a round, which the exchange has already computed."""
        return self.average

    def ready(self) -> None:
        """Nothing to do: no other rank reads this memory."""

    def done(self) -> None:
        """Nothing to do: no other rank writes this memory."""

    def stop(self) -> None:
        """On the first rank: make the next round the last one, which is not applied."""
        self._stop = True

    def exchange(self, push: Push, timing: Timing) -> RingRound:
        """Exchange facts and running statistics, and compute the mean of all gradients in `average`."""
        self._own[:NUM_FACTS] = torch.tensor([*facts_of(push, timing), float(self._stop)], dtype=torch.float64)
        self._own[NUM_FACTS:].view(torch.float32)[: len(self.state)] = self.state
        dist.all_gather(list(self._beside.unbind(0)), self._own)
        rows = self._beside[:, :NUM_FACTS].tolist()
        if not self.overlapped:
            weights = [row[WEIGHT] or row[3] for row in rows]
            self._reduce(weights[self.rank.number] / sum(weights))
        pushes = [push_from(place, row, self.average, self._states[place]) for place, row in enumerate(rows)]
        return RingRound(pushes, [timing_from(row) for row in rows], [], any(row[STOP] for row in rows))

    def _reduce(self, share: float) -> None:
        """All-reduce the mean over samples, or weights, of which this rank has `share`."""
        if not self.is_even and share * self.rank.size != 1.0:
            self.gradient.mul_(share * self.rank.size)
        if self.by_codec is not None:
            self.by_codec()
        else:
            dist.all_reduce(self.gradient.div_(self.rank.size))


@contextmanager
def failing_on_lost_rank(rank: Rank, version: Callable[[], int]) -> Iterator[None]:
    """End this rank with one line if an exchange fails, in backward or after it."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL")):
            raise
        raise RunFailed(
            f"rank {rank.number} lost the others at update {version()} ({first_line(error)}): one of them ended, and "
            "its own output says why; what worker 0 has saved can be resumed"
        ) from None
