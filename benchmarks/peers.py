"""Peers to compare with: other ways to train LeNet5 on a few processes of one machine.

`python peers.py KIND RANK WORKERS SECONDS RENDEZVOUS` runs one process of one peer, with one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loops import (
    LR,
    MODELS,
    MOMENTUM,
    Body,
    LeNet5,
    Shuffled,
    answer_with_steps,
    plain_step,
    timed_together,
    times_of_steps,
)
from processes import DROPPED_STEPS, LEAST_STEPS
from torch import Tensor, nn

KINDS = ("ddp", "ddp-cnn", "rpc", "ray")
CALIBRATION_STEPS = 30


def rate(kind: str, workers: int, seconds: float) -> float:
    """Return the samples per second of `workers` processes that train one model by `kind`."""
    servers = 1 if kind == "rpc" else 0
    with tempfile.TemporaryDirectory() as folder:
        here, meeting = str(Path(__file__).resolve()), str(Path(folder) / "rendezvous")
        if kind == "ray":
            return timed_together([[sys.executable, here, kind, "0", str(workers), str(seconds), meeting]])
        ranks = range(workers + servers)
        commands = [[sys.executable, here, kind, str(rank), str(workers), str(seconds), meeting] for rank in ranks]
        return timed_together(commands, silent=servers)


def ddp(rank: int, workers: int, seconds: float, meeting: str, model: str = "lenet5") -> None:
    """Train with DistributedDataParallel on Gloo; every process makes the same number of steps."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    step = plain_step(DistributedDataParallel(MODELS[model]()))
    data, begun = Shuffled(), 0.0
    for number in range(2 * CALIBRATION_STEPS):
        if number == CALIBRATION_STEPS:
            begun = time.monotonic()
        step(*data.batch(number))
    taken = torch.tensor([time.monotonic() - begun])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    answer_with_steps(step, seconds, num_steps=max(LEAST_STEPS, round(CALIBRATION_STEPS * seconds / taken.item())))
    dist.destroy_process_group()


class ParameterServer:
    """One model behind a lock: takes a gradient, returns the new weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parameters = list(LeNet5().parameters())
        self._optimizer = torch.optim.SGD(self.parameters, lr=LR, momentum=MOMENTUM)
        self._lock = threading.Lock()

    def exchange(self, gradients: list[Tensor]) -> list[Tensor]:
        """Apply one push and return a copy of the weights."""
        with self._lock:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            return [parameter.detach().clone() for parameter in self.parameters]


SERVER: ParameterServer | None = None


def exchange_here(gradients: list[Tensor]) -> list[Tensor]:
    """Exchange on rank 0, called by workers over RPC."""
    assert SERVER is not None
    return SERVER.exchange(gradients)


def pushing_step(exchange: Callable[[list[Tensor]], list[Tensor]]) -> Body:
    """Return the step of a parameter server's worker: send the gradient of one batch, load the new weights."""
    model = LeNet5()

    def step(images: Tensor, labels: Tensor) -> None:
        model.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        weights = exchange([_gradient(parameter) for parameter in model.parameters()])
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)

    return step


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def rpc(rank: int, workers: int, seconds: float, meeting: str) -> None:
    """Train with a parameter server on torch RPC: rank 0 serves, the others push gradients and pull weights."""
    import torch.distributed.rpc as torch_rpc

    global SERVER
    SERVER = ParameterServer() if rank == 0 else None
    options = torch_rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=60)
    name = "server" if rank == 0 else f"worker{rank}"
    torch_rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)
    if rank > 0:
        step = pushing_step(lambda gradients: torch_rpc.rpc_sync("server", exchange_here, args=(gradients,)))
        answer_with_steps(step, seconds)
    torch_rpc.shutdown()


class Trainer:
    """A worker of the Ray server, as an actor so that it can warm up before the measurement."""

    def __init__(self, server: Any) -> None:
        import ray as engine

        torch.set_num_threads(1)
        self._step = pushing_step(lambda gradients: engine.get(server.exchange.remote(gradients)))
        self._data = Shuffled()

    def warm_up(self) -> None:
        for number in range(DROPPED_STEPS):
            self._step(*self._data.batch(number))

    def train(self, seconds: float) -> list[float]:
        return times_of_steps(self._step, self._data, seconds)


def ray(rank: int, workers: int, seconds: float, meeting: str) -> None:
    """Train with a Ray actor as server and actors as workers; print the times of all."""
    import ray as engine

    engine.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)
    server = engine.remote(ParameterServer).remote()
    trainers = [engine.remote(Trainer).remote(server) for _ in range(workers)]
    engine.get([trainer.warm_up.remote() for trainer in trainers])
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(engine.get([trainer.train.remote(seconds) for trainer in trainers]), allow_nan=False), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"ddp": ddp, "ddp-cnn": partial(ddp, model="cnn"), "rpc": rpc, "ray": ray}[sys.argv[1]](
        int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    )
