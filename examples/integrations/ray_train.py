"""Ray Train places the processes and Paceline trains: `python examples/integrations/ray_train.py async`.

Of three processes, the first serves and two are workers. The program's file must be at the same path on every node.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer
from torch import nn

import paceline


def build() -> paceline.Task:
    """Points inside a circle, and those outside."""
    torch.manual_seed(0)
    points = torch.rand(3000, 2) * 4 - 2
    labels = (points.norm(dim=1) < 1.5).long()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    parts = (points[:2500], labels[:2500]), (points[2500:], labels[2500:])
    return paceline.Task(model, nn.functional.cross_entropy, train=parts[0], test=parts[1])


def here() -> list[Any]:
    """An address of this machine with a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return [ray.util.get_node_ip_address(), probe.getsockname()[1]]


def loop(config: dict[str, Any]) -> None:
    """One process of Ray Train: it becomes a rank of Paceline's run."""
    context = ray.train.get_context()
    address, port = broadcast_from_rank_zero(here() if context.get_world_rank() == 0 else None)
    os.environ |= {
        "RANK": str(context.get_world_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    result = paceline.train(config.pop("task"), **config, quiet=True)
    ray.train.report({"test_accuracy": result["test_accuracy"], "updates": result["updates"]})


if __name__ == "__main__":
    strategy = sys.argv[1] if len(sys.argv) > 1 else "async"
    settings = {"strategy": strategy, "epochs": 8, "batch_size": 20, "optimizer": "adam", "lr": 2e-3, "threads": 1}
    places = {
        "task": f"{Path(__file__).resolve()}:build",
        "runs": str(Path("runs").resolve()),
        "name": f"ray-{strategy}",
    }
    trainer = TorchTrainer(
        loop,
        train_loop_config=settings | places,
        scaling_config=ScalingConfig(num_workers=3, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=str(Path("runs").resolve() / "ray")),
    )
    trainer.fit()
    result = json.loads(Path(places["runs"], places["name"], "result.json").read_text())
    print(f"test accuracy {result['test_accuracy']:.1f} % after {result['updates']} updates")
