"""A simulated `sync` run has the weights of the real one, bit for bit, whatever its speeds and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import result_of, run, simulate

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
