"""Whole runs with codecs: as if encoded by hand, replayed to the bit, and resumed from any cut of their middle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cli.main import main
from paceline.core.messages import Push
from paceline.core.optimizers import Sgd
from paceline.errors import UserError
from paceline.interfaces import Codec, State
from paceline.randomness import mix64
from paceline.runs.arrival_log import read_arrivals
from paceline.runs.checkpoint import Checkpoint, newest_checkpoint, restore, take_checkpoint, write_checkpoint
from paceline.settings.codecs import build_codec
from tests.support.recorded_runs import Record, RecordedRun, assert_same, small_task
from tests.support.rings import long_but

PAIRS = [("int8", None), ("lowrank:1", "int8"), (None, "topk:0.1"), ("sign", "bf16"), ("topk:0.1", "lowrank:1")]
STRATEGIES = ["async", "sync", "backup:1", "bounded:1"]


def checkpoint_now(run: RecordedRun) -> Checkpoint:
    memories = {worker: instance.memory for worker, instance in run.instances.items()}
    return take_checkpoint(run.server, memories, run.host.log.nbytes, run.host.clock.now())


def deliver_out_of_step(run: RecordedRun, checkpoints: list[Checkpoint], seed: int) -> None:
    """Pushes are computed and delivered at different times, with cuts in between, until the run is over."""
    order, under_way = random.Random(seed), dict[int, Push]()
    while not run.server.finished:
        idle = [
            worker
            for worker, instance in run.instances.items()
            if instance.pending is not None and worker not in under_way
        ]
        if under_way and (not idle or order.random() < 0.5):
            run.host.handle(under_way.pop(order.choice(sorted(under_way))))
        else:
            worker = order.choice(idle)
            push = run.instances[worker].push()
            assert push is not None
            under_way[worker] = push
        if run.server.can_checkpoint and not run.server.finished:
            checkpoints.append(checkpoint_now(run))
    run.close()


@pytest.mark.parametrize(("codec", "pull_codec"), long_but([("int8", None)], PAIRS))
@pytest.mark.parametrize("strategy", long_but(["async", "backup:1"], STRATEGIES))
def test_a_replay_from_the_start_and_from_every_cut_ends_in_the_same_place(
    record: Record, strategy: str, codec: str | None, pull_codec: str | None
) -> None:
    run = record(strategy=strategy, workers=3, epochs=1.0, codec=codec, pull_codec=pull_codec)
    run.join_all()
    checkpoints: list[Checkpoint] = []
    deliver_out_of_step(run, checkpoints, seed=len(strategy))
    assert len(checkpoints) > 3 and (run.server.dropped > 3 or not strategy.startswith("backup"))
    records, _ = read_arrivals(run.folder.arrivals_file, run.config)
    again = run.replay()
    again.feed(records)
    assert again.mismatch is None
    assert_same(again.server, run.server)
    for checkpoint in checkpoints[:: max(1, len(checkpoints) // 8)]:
        write_checkpoint(run.folder.checkpoints, checkpoint)
        found, complaints = newest_checkpoint(run.folder.checkpoints)
        assert found is not None and not complaints
        tail = run.replay(checkpoint=found)
        tail.feed(read_arrivals(run.folder.arrivals_file, run.config, found.log_offset)[0])
        assert tail.mismatch is None
        assert_same(tail.server, run.server)


def test_a_cut_without_the_codecs_memory_would_not_do(record: Record) -> None:
    """So that the test above cannot pass by itself: the memory matters."""
    run = record(strategy="async", workers=2, epochs=1.0, codec="int8")
    run.join_all()
    checkpoints: list[Checkpoint] = []
    deliver_out_of_step(run, checkpoints, seed=1)
    checkpoint = checkpoints[len(checkpoints) // 2]
    local_state = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("local_state.")}
    assert local_state
    for tensor in local_state.values():
        tensor.zero_()
    tail = run.replay(checkpoint=checkpoint)
    tail.feed(read_arrivals(run.folder.arrivals_file, run.config, checkpoint.log_offset)[0])
    assert not torch.equal(tail.server.weights, run.server.weights)


class ByHand:
    """One worker's gradients, with its codec around them; nothing of the worker's own code."""

    def __init__(self, run: RecordedRun, worker: int, codec: Codec, pull_codec: Codec, weights: Tensor) -> None:
        self.task, self.codec, self.pull_codec = small_task(), codec, pull_codec
        self.weights, self.gradient = weights.clone(), torch.zeros_like(weights)
        self.task.bind(self.weights, self.gradient, torch.zeros(self.task.state_size))
        self.loader = self.task.loader(run.work.batches(worker, run.config), run.config.seed, worker)
        self.memory = codec.start(mix64(run.config.seed, worker))
        self.pull_state: State = pull_codec.start(mix64(run.config.seed, worker))

    def decoded(self, number: int) -> Tensor:
        self.task.gradient(self.loader.batch(number))
        return through(self.codec, self.gradient, self.memory)

    def pull(self, weights: Tensor) -> None:
        self.pull_state["error"].zero_()  # the difference holds it
        self.weights.add_(through(self.pull_codec, weights - self.weights, self.pull_state))


def through(codec: Codec, update: Tensor, memory: State) -> Tensor:
    out, found = torch.zeros(codec.capacity, dtype=torch.uint8), torch.empty_like(update)
    codec.decode(out[: codec.encode(update, memory, out)], found)
    return found


@pytest.mark.parametrize(("codec", "pull_codec"), [("int8", "lowrank:1"), ("lowrank:1", "int8"), ("sign", "fp16")])
def test_sync_is_one_loop_that_encodes_and_decodes_by_hand(record: Record, codec: str, pull_codec: str) -> None:
    run = record(strategy="sync", workers=2, codec=codec, pull_codec=pull_codec, momentum=0.9)
    weights, layout = run.server.weights.clone(), run.task.layout
    built = build_codec(codec, layout), build_codec(pull_codec, layout)
    workers = [ByHand(run, worker, *built, weights) for worker in range(2)]
    optimizer, lr = Sgd(0.9), torch.tensor(run.config.lr)
    state = optimizer.start(weights)
    run.join_all()
    for number in range(6):
        for worker in (1, 0):
            run.push(worker)
        updates = [worker.decoded(number) for worker in workers]
        optimizer.step(weights, state, (updates[0] + updates[1]).div_(2), lr)
        for hand in workers:
            hand.pull(weights)
        assert torch.equal(run.server.weights, weights)


def test_a_codec_called_none_is_no_codec(record: Record) -> None:
    run = record(strategy="sync", workers=2, codec="none", pull_codec="none")
    assert (run.config.codec, run.config.pull_codec) == (None, None)
    assert "codec =" not in (run.folder.path / "config.toml").read_text()


def test_a_checkpoint_of_another_codec_is_refused(record: Record) -> None:
    run = record(strategy="async", workers=2, codec="int8")
    run.join_all()
    run.push(0)
    checkpoint = checkpoint_now(run)
    other = record(strategy="async", workers=2, codec="sign", name="other")
    with pytest.raises(UserError, match="made with codecs int8 and none, but this run uses sign and none"):
        restore(other.server, checkpoint)


SMALL = ["--dataset", "fashion-mnist-sample", "--threads", "1", "--workers", "3", "--speeds", "lognormal:1s,.4"]


def simulated(folder: Path, name: str, *flags: str) -> dict[str, Any]:
    assert main(["simulate", *SMALL, "--runs", str(folder), "--name", name, *flags]) == 0
    result: dict[str, Any] = json.loads((folder / name / "result.json").read_text())
    return result


@pytest.mark.real
def test_times_alone_count_the_bytes_of_a_codec_as_a_run_with_gradients_does(tmp_path: Path) -> None:
    flags = [
        "--steps",
        "9",
        "--strategy",
        "async",
        "--link",
        "10mbit,1ms",
        "--codec",
        "int8",
        "--pull-codec",
        "lowrank:4",
    ]
    computed, timed = simulated(tmp_path, "a", *flags), simulated(tmp_path, "b", *flags, "--timing-only")
    plain = simulated(tmp_path, "c", *flags[:6], "--timing-only")
    for name in ("bytes_pushed", "bytes_pulled", "virtual_seconds", "updates"):
        assert computed[name] == timed[name], name
    assert 3.9 < plain["bytes_pushed"] / computed["bytes_pushed"] < 4.0
    assert plain["virtual_seconds"] > computed["virtual_seconds"]
    assert (computed["codec"], computed["pull_codec"], plain["codec"]) == ("int8", "lowrank:4", "none")


@pytest.mark.real
def test_a_simulated_server_that_dies_goes_on_as_if_the_log_had_been_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pushes are under way on the link when checkpoints are taken and when the server dies."""
    faults = tmp_path / "faults.toml"
    rows = ["kind = 'server'\nat = 9.3\nlasts = 1.0", "kind = 'lose'\nat = 3.0\nworker = 1\nmessage = 'reply'"]
    faults.write_text("".join(f"[[fault]]\n{row}\n" for row in rows))
    flags = ["--strategy", "async", "--steps", "40", "--link", "10mbit,300ms", "--faults", str(faults)]
    result = simulated(
        tmp_path, "a", *flags, "--checkpoint-every", "2.1", "--codec", "lowrank:2", "--pull-codec", "int8"
    )
    assert result["status"] == "finished"
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "a")]) == 0
    assert "identical to the run" in capsys.readouterr().out
