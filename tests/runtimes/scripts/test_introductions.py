"""The start of own loops over TCP: who tells the model, and what becomes of workers that leave, lie or come twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import Interrupted, RunFailed, UserError
from paceline.runtimes.scripts.remote.client import LoopClient
from paceline.runtimes.scripts.serving import introductions
from paceline.runtimes.server import remote_service
from paceline.system.environment import package_version
from paceline.transports import tcp_client
from tests.support.served_loops import LAYOUT, TOKEN, LoopWorker, ServedLoops, in_thread
from tests.support.small_star import Wire
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(tcp_client, "MAX_PAUSE", 0.02)


def said_hello(served: ServedLoops, *workers: int) -> None:
    until(lambda: set(workers) <= set(served.introductions.hellos), "the hellos of workers")


def work_alone(worker: LoopWorker, **facts: Any) -> None:
    worker.hello(**facts)
    worker.push()
    worker.finish()


def train(*workers: LoopWorker) -> None:
    """Push once each, with other gradients, and finish together."""
    for worker in workers:
        worker.push(worker.number + 1.0)
    for thread in [in_thread(worker.finish) for worker in workers]:
        thread.join(20)


def test_worker_0_tells_the_model_although_worker_1_came_first(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2) as served:
        second = served.worker(1)
        second.memory.weights.fill_(7.0)
        waits = in_thread(second.hello)
        said_hello(served, 1)
        first = served.worker()
        assert first.number == 0
        first.memory.weights.fill_(3.0)
        first.hello()
        waits.join(20)
        assert second.memory.weights.tolist() == [3.0] * LAYOUT.size
        train(first, second)
        served.wait()
    assert served.error is None and served.result is not None and served.result["updates"] == 2


def test_a_worker_0_that_leaves_before_its_hello_frees_its_place(tmp_path: Path) -> None:
    with ServedLoops(tmp_path) as served:
        served.worker(0).client.close()
        until(lambda: not served.introductions.peers.by_worker, "the end of worker 0")
        work_alone(served.worker(0))
        served.wait()
    assert served.error is None and served.result is not None
    assert any("worker 0 has left: its script has ended" in note for note in served.notes)


def test_a_number_belongs_to_one_worker(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2) as served:
        first = served.worker(0)
        with pytest.raises(UserError, match="worker 0 is here already: leave --worker out"):
            served.worker(0)
        assert served.worker().number == 1
        first.client.close()


def test_a_worker_with_other_facts_is_expelled_and_another_takes_its_place(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2) as served:
        other = served.worker(1)
        refused: list[str] = []

        def say_hello() -> None:
            with pytest.raises(UserError) as error:
                other.hello(num_samples=99)
            refused.append(str(error.value))

        waits = in_thread(say_hello)
        said_hello(served, 1)
        first = served.worker(0)
        begins = in_thread(first.hello)
        waits.join(20)
        assert "worker 1 was refused: it differs from this run in num_samples" in refused[0]
        second = served.worker(1)
        second.hello()
        begins.join(20)
        train(first, second)
        served.wait()
    assert served.error is None and served.result is not None and served.result["status"] == "finished"


def test_a_run_that_is_stopped_before_it_began_tells_its_workers(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2) as served:
        second = served.worker(1)
        refused: list[str] = []

        def say_hello() -> None:
            with pytest.raises(UserError) as error:
                second.hello()
            refused.append(str(error.value))

        waits = in_thread(say_hello)
        said_hello(served, 1)
        served.line.stop("interrupted")
        waits.join(20)
    assert isinstance(served.error, Interrupted) and "interrupted, before a script had called" in str(served.error)
    assert "interrupted, before a script had called session.prepare" in refused[0]


def test_the_wait_for_workers_has_an_end(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, wait_seconds=0.01) as served:
        served.wait()
    assert isinstance(served.error, RunFailed) and "within 0.01 s" in str(served.error)


def test_a_worker_that_reconnects_before_the_run_began_keeps_its_place(tmp_path: Path) -> None:
    """Its hello was read, the connection broke, and it says hello again."""
    with ServedLoops(tmp_path, workers=2) as served, Wire(served.listener.address, []) as wire:
        second = served.worker(1, wire.address)
        waits = in_thread(second.hello)
        said_hello(served, 1)
        assert second.client._connection is not None
        second.client._connection.shut_down()
        until(lambda: wire.num_connections == 2, "a second connection")
        first = served.worker(0)
        begins = in_thread(first.hello)
        for one in (waits, begins):
            one.join(20)
        assert second.reply is not None and first.reply is not None
        train(first, second)
        served.wait()
    assert served.error is None and [kind for kind, *_ in served.log()].count(served.log()[0][0]) == 2  # joins


def test_in_a_resumed_run_the_next_worker_tells_the_model_if_the_first_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServedLoops(tmp_path, workers=2, first_incarnation=1) as served:
        gone = served.worker(1)
        monkeypatch.setattr(gone.client, "_initial", lambda memory: pytest.fail("it has left"))
        monkeypatch.setattr(gone.client, "_reply_or_wanted", lambda join: _until_closed())
        waits = in_thread(lambda: _ignoring(gone.hello))
        said_hello(served, 1)
        other = served.worker(0)
        begins = in_thread(lambda: _ignoring(other.hello))
        said_hello(served, 0, 1)
        assert served.introductions.initial is None
        gone.client.abandon()
        waits.join(20)
        served.introductions.peers.by_worker[1].last_heard = 0.0  # long ago
        until(lambda: served.introductions.initial is not None, "the model of worker 0")
        assert served.introductions.initial.worker == 0  # type: ignore[union-attr]
        second = served.worker(1)
        second.hello()
        begins.join(20)
        train(other, second)
        served.wait()
    assert served.error is None and served.result is not None


def _until_closed() -> Any:
    yield memoryview(bytearray(1 << 20))


def _ignoring(call: Callable[[], Any]) -> None:
    try:
        call()
    except UserError:
        return


def test_a_silent_worker_0_is_lost_and_another_comes_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introductions, "CEILING_SECONDS", 0.1)
    with ServedLoops(tmp_path) as served:
        silent = LoopClient(served.listener.address, TOKEN)
        silent.apply({"version": package_version("paceline"), "worker": 0}, beats=False)
        until(lambda: any("worker 0 was silent for" in note for note in served.notes), "the loss of worker 0")
        work_alone(served.worker(0))
        served.wait()
        silent.close()
    assert served.error is None and served.result is not None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes a silent worker for lost soon."""
    for name in ("FIRST_SECONDS", "FLOOR_SECONDS", "CEILING_SECONDS"):
        monkeypatch.setattr(remote_service, name, 2.5)  # heartbeats come every second


def lose_second(served: ServedLoops) -> LoopWorker:
    """Let two loops make a step each, and the second worker fall silent without a word. Return the first."""
    first, second = served.worker(0), served.worker(1)
    for thread in [in_thread(worker.hello) for worker in (first, second)]:
        thread.join(20)
    first.push(1.0)
    second.push(2.0)
    second.client._closed.set()  # no heartbeat, no reconnect
    second.client._drop()
    until(lambda: any("worker 1 was silent for" in note for note in served.notes), "the loss of worker 1")
    return first


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_loops_that_have_ended_wait_for_one_that_was_lost_and_comes_back(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2) as served:
        first = lose_second(served)
        ends = in_thread(first.finish)
        served.worker(1).client.close()  # it reconnects, learns that it is forgotten, and its script starts again
        again = served.worker(1)
        again.hello()
        assert ends.is_alive(), "the run has not ended without it"
        again.push(3.0)
        again.finish()
        ends.join(20)
        served.wait()
    assert served.error is None and served.result is not None and served.result["updates"] == 3


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_worker_that_does_not_come_back_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_service, "RETURN_SECONDS", 0.5)
    with ServedLoops(tmp_path, workers=2) as served:
        lose_second(served).finish()
        served.wait()
    assert served.error is None and served.result is not None and served.result["updates"] == 2
    assert served.result["lost_workers"] == [1]


LIES: dict[str, dict[str, Any]] = {
    "a layout of rows that are none": {"layout": [["weight"]]},
    "a layout of another size": {"layout": [["weight", [1 << 40], 0, True]]},
    "a shape that is text": {"layout": [["weight", "23", 0, True]]},
    "state that its buffers lack": {"state_layout": [["mean", [3], 0, True]]},
    "numbers that its buffers lack": {"numbers": 5},
    "a setting of the run's files": {"settings": {"mirror": "s3://elsewhere/runs"}},
    "a setting that does not exist": {"settings": {"shoe_size": 44}},
    "settings of another type": {"settings": {"lr": "fast"}},
    "an optimizer's setting of the run's files": {
        "optimizers": [{"class": {}, "settings": {"track": "evil.py:build"}, "loop": {}}]
    },
    "an optimizer without a loop": {"optimizers": [{"class": {}, "settings": {}, "loop": {}}]},
    "an optimizer without a class": {
        "optimizers": [{"class": {}, "settings": {}, "loop": {"places": 0, "numbers": [], "groups": []}}]
    },
    "epochs that are text": {"epochs": "two"},
    "a skew that is a list": {"skew": []},
    "a note that is an object": {"notes": [{}]},
    "sources that are lists": {"sources": {"weight": []}},
    "the state of an optimizer that is none": {"used": {"x": torch.ones(1)}},
    "the state of optimizer 10^9": {"used": {"999999999/0.step": torch.ones(1)}},
}


@pytest.mark.parametrize("lie", LIES)
def test_who_tells_a_model_that_cannot_be_is_expelled_and_the_run_waits_for_another(tmp_path: Path, lie: str) -> None:
    with ServedLoops(tmp_path) as served:
        with pytest.raises(UserError):
            served.worker(0).hello(**LIES[lie])
        until(lambda: not served.introductions.peers.by_worker, "the end of the liar", 10)
        assert served.error is None and any("worker 0" in note or "that is" in note for note in served.notes)
        work_alone(served.worker(0))
        served.wait()
    assert served.error is None and served.result is not None and served.result["updates"] == 1
    assert served.folder.config().mirror is None and served.folder.config().track is None


@pytest.mark.parametrize(
    "weights", [torch.zeros(3), torch.zeros(LAYOUT.size, dtype=torch.float64), torch.zeros(2, LAYOUT.size // 2)]
)
def test_initial_weights_of_another_shape_or_type_are_refused(tmp_path: Path, weights: torch.Tensor) -> None:
    with ServedLoops(tmp_path) as served:
        liar = served.worker(0)
        honest, liar.memory.weights = liar.memory.weights, weights
        sizes = liar.memory.sizes
        assert sizes.weights == honest.numel()
        with pytest.raises(UserError, match="initial tensors without the weights of its model"):
            liar.hello()
        until(lambda: not served.introductions.peers.by_worker, "the end of the liar", 10)
        work_alone(served.worker(0))
        served.wait()
    assert served.error is None


def test_names_of_frozen_tensors_are_only_names(tmp_path: Path) -> None:
    """They are keys of a safetensors file, wherever they would lead as paths."""
    with ServedLoops(tmp_path) as served:
        work_alone(served.worker(0), frozen={"../../escaped": torch.ones(2), "/tmp/absolute": torch.ones(1)})
        served.wait()
    assert served.error is None and served.folder.frozen_file.is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_hello_that_asks_for_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    with ServedLoops(tmp_path) as served:
        liar = served.worker(0)
        liar.memory.sizes = liar.memory.sizes._replace(weights=1 << 45)
        with pytest.raises(UserError, match="they may take half of that"):
            liar.hello()
        work_alone(served.worker(0))
        served.wait()
    assert served.error is None
