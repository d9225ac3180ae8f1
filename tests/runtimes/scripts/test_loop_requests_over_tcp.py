"""Own loops over TCP in one process: cut at any byte they give the bits of an uncut run; liars are expelled."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import DiskError, Interrupted, ProtocolError, UserError
from paceline.runs.events import read_events
from paceline.runs.result import weights_sha256
from paceline.runtimes.server import remote_service, service
from paceline.transports import tcp_client
from tests.support.served_loops import LoopWorker, ServedLoops, in_thread
from tests.support.small_star import Wire
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(tcp_client, "MAX_PAUSE", 0.02)


def train(folder: Path, cuts: list[tuple[str, int]], **settings: Any) -> tuple[list[Tensor], list[Any], int]:
    """Two optimizers, an evaluation, their state and the final weights; also the log, and how many connections."""
    torch.manual_seed(1)
    maker, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    first, second = torch.optim.Adam(maker.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    with ServedLoops(folder, **settings) as served, Wire(served.listener.address, cuts) as wire:
        worker = served.worker(address=wire.address)
        session = worker.session()
        maker, critic, first, second = session.prepare(maker, critic, first, second)
        for step in range(3):
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            for optimizer in (first, second):
                optimizer.zero_grad()
                critic(maker(inputs)).square().sum().backward()
                optimizer.step()
            with session.eval_weights():
                critic(maker(inputs))
        state = first.state_dict()["state"]
        session.finish()
        worker.client.close()
        served.wait()
        assert served.error is None, served.error
    tensors = [*maker.state_dict().values(), *critic.state_dict().values(), state[0]["exp_avg"]]
    return [tensor.clone() for tensor in tensors], served.log(), wire.num_connections


@pytest.mark.parametrize("settings", [{}, {"codec": "int8"}], ids=["plain", "codec"])
def test_cut_connections_change_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The hello, the initial weights, pushes, evaluations and states are cut in the middle, on both ways."""
    tensors, log, num_connections = train(tmp_path / "whole", [], **settings)
    assert num_connections == 1
    cuts = [(way, 450 + 310 * number) for number in range(14) for way in ("up", "down")]
    again, log_again, num_again = train(tmp_path / "cut", cuts, **settings)
    assert num_again > 10
    assert all(map(torch.equal, tensors, again)) and log == log_again


def num_expelled(served: ServedLoops) -> int:
    return sum(row["kind"] == "expelled" for row in read_events(served.folder.events_file))


def ask_for_optimizer_200(liar: LoopWorker) -> None:
    liar.client.read_optimizer(200)


def push_for_optimizer_200(liar: LoopWorker) -> None:
    liar.push(optimizer=200)


def skip_a_number(liar: LoopWorker) -> None:
    liar.client._num_requests = 5
    liar.client.read_weights(final=False)


def be_nowhere(liar: LoopWorker) -> None:
    liar.memory.loop.fill_(math.nan)
    liar.push()


def be_far_away(liar: LoopWorker) -> None:
    liar.memory.loop.fill_(2.0**40)
    liar.push()


LIES = [ask_for_optimizer_200, push_for_optimizer_200, skip_a_number, be_nowhere, be_far_away]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("lie", LIES)
def test_a_loop_that_asks_for_what_does_not_exist_is_expelled_and_the_run_goes_on(
    tmp_path: Path, lie: Any, workers: int
) -> None:
    with ServedLoops(tmp_path, workers=workers) as served:
        liars = [served.worker(number) for number in range(workers)]
        for thread in [in_thread(liar.hello) for liar in liars]:
            thread.join(20)
        for liar in liars:
            with pytest.raises((UserError, ProtocolError)):
                lie(liar)
        until(lambda: num_expelled(served) == workers, lambda: f"{served.notes} {served.error}", 10)
        honest = served.worker(0)
        honest.hello()
        honest.push()
        honest.finish()
        served.wait()
    assert served.error is None and served.result is not None and served.result["updates"] == 1


def test_a_run_that_is_stopped_before_the_first_step_says_so(tmp_path: Path) -> None:
    with ServedLoops(tmp_path) as served:
        worker = served.worker()
        worker.hello()
        served.line.stop("interrupted")
        until(lambda: served.introductions.peers.by_worker, "the worker")
        worker.finish()
        served.wait()
    assert isinstance(served.error, Interrupted)
    assert str(served.error) == "interrupted, before the first step of a script: nothing was trained"


def test_a_stopped_run_is_saved_although_a_script_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose heartbeats go on would be waited for without end."""
    monkeypatch.setattr(service, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(remote_service, "STOP_SECONDS", 0.0)
    with ServedLoops(tmp_path) as served:
        hangs = served.worker()
        hangs.hello()
        hangs.push()
        served.line.stop("interrupted")
        served.wait()
        hangs.client.abandon()
    assert served.error is None and served.result is not None and served.result["updates"] == 1
    assert any("worker 0 has not ended its script" in note for note in served.notes)


def test_a_finished_run_is_saved_while_its_scripts_go_on(tmp_path: Path) -> None:
    """Killed from there on, it has lost nothing; what scripts report later is in the result too."""
    with ServedLoops(tmp_path, workers=2) as served:
        workers = [served.worker(0), served.worker(1)]
        for thread in [in_thread(worker.hello) for worker in workers]:
            thread.join(20)
        for worker in workers:
            worker.push(1.0 + worker.number)
        assert workers[0].client.read_weights(final=False) is not None and served.folder.result() is None
        for thread in [in_thread(partial(worker.client.read_weights, final=True)) for worker in workers]:
            thread.join(20)
        early = until(served.folder.result, "the result")
        assert early["status"] == "finished" and early["updates"] == 2
        assert early["weights_sha256"] == weights_sha256(load_file(served.folder.weights_file))
        workers[0].client.report({"accuracy": 0.5})
        for worker in workers:
            worker.client.close()
        served.wait()
    assert served.error is None and served.result == served.folder.result()
    assert served.result == {**early, "metrics": {"accuracy": 0.5}, "reported": {"0": {"accuracy": 0.5}}}


def test_a_worker_that_has_finished_waits_for_one_that_is_still_in_its_scripts_start(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2) as served:
        first, lost = served.worker(0), served.worker(1)
        for thread in [in_thread(first.hello), in_thread(lost.hello)]:
            thread.join(20)
        first.push(1.0)
        lost.client.close()
        until(lambda: list(served.introductions.peers.by_worker) == [0], "the end of worker 1")
        late = served.worker(1)
        ends = in_thread(first.finish)
        until(lambda: ("leave", 0, 1, 0) in served.log(), lambda: f"the end of worker 0's loop: {served.log()}", 10)
        assert ends.is_alive()
        late.hello()
        late.push(2.0)
        late.finish()
        ends.join(20)
        served.wait()
    assert served.error is None and served.result is not None and served.result["updates"] == 2


def test_workers_learn_why_their_script_cannot_be_trained(tmp_path: Path) -> None:
    with ServedLoops(tmp_path, workers=2, strategy="sync") as served:
        first, second = served.worker(0), served.worker(1)
        for thread in [in_thread(first.hello), in_thread(second.hello)]:
            thread.join(20)
        told: list[str] = []

        def push() -> None:
            with pytest.raises(UserError) as error:
                first.push(1.0)
            told.append(str(error.value))

        waits = in_thread(push)
        until(lambda: ("push", 0, 0, 10) in served.log(), "the first push")
        with pytest.raises(UserError, match="workers 0 and 1 pushed the same gradient first"):
            second.push(1.0)
        waits.join(20)
        served.wait()
    assert isinstance(served.error, UserError) and "pushed the same gradient first" in told[0]
    assert served.folder.is_unstarted(), "no update was made"


@pytest.mark.parametrize(("error", "is_told"), [(UserError("of the script"), True), (DiskError("full"), False)])
def test_workers_wait_for_a_server_whose_disk_is_full(tmp_path: Path, error: UserError, is_told: bool) -> None:
    """It can be resumed when there is room again."""
    with ServedLoops(tmp_path) as served:
        worker = served.worker()
        until(lambda: bool(served.introductions.peers.by_worker), "the worker's place")
        with pytest.raises(UserError), served.introductions._telling(UserError):
            raise error
        told: list[str] = []

        def say_hello() -> None:
            try:
                worker.hello()
            except UserError as refusal:
                told.append(str(refusal))

        in_thread(say_hello).join(20)
        worker.client.close()
    assert [text.endswith("of the script") for text in told] == [True] * is_told


@pytest.mark.parametrize("others", ["have work left", "have none"])
def test_a_run_that_needs_all_says_who_left_only_if_others_had_work_left(tmp_path: Path, others: str) -> None:
    with ServedLoops(tmp_path, workers=2, strategy="allreduce", split="full") as served:
        first, second = (served.worker(number) for number in (0, 1))
        joins = in_thread(first.hello)
        second.hello()
        joins.join(20)
        pushes = in_thread(first.push)
        second.push()
        pushes.join(20)
        ends = in_thread(first.finish)
        if others == "have work left":
            reply = second.push()  # before or after the other has left: it is never answered with weights
            assert reply is None or reply.finished
        second.finish()
        ends.join(20)
        served.wait()
    assert served.error is None and served.result is not None
    why = "a worker ended its loop (worker 0), and allreduce needs all"
    expected = why if others == "have work left" else "every worker ended its loop"
    assert (served.result["status"], served.result["reason"]) == ("finished", expected)
    assert served.result["updates"] == 1
