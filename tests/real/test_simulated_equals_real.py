"""A simulated `sync` run has the weights of the real one, bit for bit, whatever its speeds and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import replays, result_of, run, simulate

FLAGS = ["--dataset", "fashion-mnist-sample", "--threads", "1", "--strategy", "sync", "--steps", "8"]
FLAGS += ["--score", "test"]


@pytest.mark.parametrize(("model", "workers", "optimizer"), [("lenet5", 3, "sgd"), ("cnn", 2, "adam")])
def test_simulated_sync_equals_real_sync(tmp_path: Path, model: str, workers: int, optimizer: str) -> None:
    flags = [*FLAGS, "--model", model, "--workers", str(workers), "--optimizer", optimizer, "--runs", str(tmp_path)]
    run("train", *flags, "--name", "real", cwd=tmp_path)
    cluster = ["--speeds", "lognormal:1s,1", "--link", "1gbit,1ms"]
    simulate(*flags, "--name", "simulated", *cluster)
    real, simulated = result_of(tmp_path / "real"), result_of(tmp_path / "simulated")
    assert simulated["weights_sha256"] == real["weights_sha256"]
    assert simulated["test_accuracy"] == real["test_accuracy"]


NORMED = """
import torch
import torch.nn.functional as F
from torch import nn
import paceline

def make():
    torch.manual_seed(4)
    train, test = torch.randn(400, 1, 8, 8) * 3 + 1, torch.randn(40, 1, 8, 8) * 3 + 1
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
    answers = [(images.mean((1, 2, 3)) > 1).long() for images in (train, test)]
    return paceline.Task(net, F.cross_entropy, (train, answers[0]), (test, answers[1]))
"""


def test_statistics_of_norm_layers_are_the_same_on_a_star_a_ring_simulated_and_replayed(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    flags = ["--task", str(tmp_path / "normed.py:make"), "--threads", "1", "--workers", "2", "--runs", str(tmp_path)]
    flags += ["--steps", "6", "--batch-size", "16", "--lr", "0.05", "--average", "on", "--snapshots", "1"]
    for path in ("star", "ring"):
        done = run("train", *flags, "--strategy", "local:2", "--path", path, "--name", path, cwd=tmp_path)
        assert done.process.returncode == 0, done.err
    simulate(*flags, "--strategy", "local:2", "--name", "simulated", "--speeds", "lognormal:1s,1")
    star, ring, simulated = (result_of(tmp_path / name) for name in ("star", "ring", "simulated"))
    for name in ("weights_sha256", "test_loss", "live_test_loss"):
        assert star[name] == ring[name] == simulated[name]
    assert star["weights"] == "averaged"
    assert replays(tmp_path / "ring")
