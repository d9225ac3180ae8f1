"""Both ends of an encoded exchange: the server knows what a worker has, and nothing is lost for good."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.buffers import BufferSizes, WorkerBuffers, load_local_state, local_state_nbytes
from paceline.core.compression import Codecs
from paceline.core.messages import Disposition, Join, Leave, Push, Reply
from paceline.core.optimizers import Sgd
from paceline.core.policies import Async, Barrier, DropStale
from paceline.core.rules.plain import Plain
from paceline.core.schedules import Budget, Schedule, Training
from paceline.core.server import AppliedUpdate, Roster, Server, server_facts
from paceline.core.server import Exchange as ServerExchange
from paceline.core.worker import LocalWorker
from paceline.errors import ProtocolError
from paceline.interfaces import Batch, Policy, State, pack
from paceline.settings.codecs import build_codec

LOSSY = ("fp16", "bf16", "int8", "sign", "topk:0.1", "lowrank:2")
LAYOUT = pack([("matrix", (12, 9), True), ("bias", (7,), True)])
every_codec = pytest.mark.parametrize("name", LOSSY)


class Slopes:
    """A task whose gradients are a function of the batch; it writes down the weights it saw."""

    layout, state_size = LAYOUT, 0

    def __init__(self, poison: int | None = None) -> None:
        self.local_state: State = {}
        self.seen: list[Tensor] = []
        self._poison = poison

    def initial(self) -> Tensor:
        return slope(999)

    def bind(self, weights: Tensor, gradient: Tensor, state: Tensor) -> None:
        self._weights, self._gradient = weights, gradient

    def batch(self, number: int) -> Batch:
        return Batch(None, None, 2, number)

    def gradient(self, batch: Batch) -> float:
        self.seen.append(self._weights.clone())
        self._gradient.copy_(slope(batch.key))
        if batch.key == self._poison:
            self._gradient[LAYOUT.parameters[1].offset] = math.nan
        return 0.5


def slope(seed: int) -> Tensor:
    """Random numbers in the parameters, zeros in the gaps."""
    flat, generator = torch.zeros(LAYOUT.size), torch.Generator().manual_seed(seed)
    for view in LAYOUT.views(flat).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return flat


def codecs(push: str | None, pull: str | None) -> Codecs:
    built = [build_codec(name, LAYOUT) if name is not None else None for name in (push, pull)]
    return Codecs(built[0], built[1], key=lambda worker: 17 * worker)


class Exchange:
    """A server and seats, every message by hand."""

    def __init__(self, used: Codecs, workers: int = 2, policy: Policy | None = None, poison: int | None = None) -> None:
        budget = Budget(10**6, 10)
        training, roster = Training(budget, Schedule(0.1)), Roster(workers)
        rule, exchange = Plain(Sgd(0.5)), ServerExchange(used)
        self.server = Server(Slopes().initial(), rule, policy or Async(), training, roster, exchange)
        self.used, self.poison = used, poison
        self.tasks: dict[int, Slopes] = {}
        self.instances: dict[int, LocalWorker] = {}
        self._incarnations = [0] * workers
        for worker in range(workers):
            self.join(worker)

    def join(self, worker: int) -> None:
        self.tasks[worker] = task = Slopes(self.poison)
        join = Join(worker, self._incarnations[worker])
        self._incarnations[worker] += 1
        self.instances[worker] = LocalWorker(task, task, join, codecs=self.used)
        self.deliver(self.server.handle(join).replies)

    def leave(self, worker: int) -> None:
        self.deliver(self.server.handle(Leave(worker, self.instances.pop(worker).join.incarnation)).replies)

    def deliver(self, replies: tuple[Reply, ...]) -> None:
        for reply in replies:
            self.server.send_weights(reply, self.instances[reply.worker].memory)
            self.instances[reply.worker].pending = reply

    def compute(self, worker: int) -> Push:
        push = self.instances[worker].push()
        assert push is not None
        return push

    def push(self, worker: int) -> Disposition:
        outcome = self.server.handle(self.compute(worker))
        self.deliver(outcome.replies)
        return outcome.disposition


@settings(max_examples=60)
@given(name=st.sampled_from(LOSSY), turns=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=25))
def test_after_any_replies_a_worker_has_what_the_server_thinks_it_has(name: str, turns: list[tuple[int, bool]]) -> None:
    exchange = Exchange(codecs(None, name), workers=3)
    for worker, comes_anew in turns:
        if comes_anew:
            exchange.leave(worker)
            exchange.join(worker)
        differences = exchange.server.differences
        assert differences is not None
        has = differences.held[worker].clone()
        exchange.push(worker)
        assert torch.equal(exchange.tasks[worker].seen[-1], has)


@every_codec
def test_replies_bring_a_worker_to_weights_that_stand_still(name: str) -> None:
    exchange = Exchange(codecs(None, name), workers=1)
    exchange.push(0)
    wanted, memory = exchange.server.weights, exchange.instances[0].memory
    assert exchange.server.differences is not None
    distances = []
    for serial in range(2, 402):
        exchange.server.send_weights(Reply(0, 0, serial, 1, 1), memory)
        distances.append((exchange.server.differences.held[0] - wanted).abs().amax().item())
    assert distances[-1] < 1e-3 * max(distances[0], 0.1), distances[::40]


@every_codec
def test_the_first_reply_after_each_join_is_all_weights_and_the_bytes_are_counted(name: str) -> None:
    used = codecs(name, name)
    exchange = Exchange(used, workers=2)
    dense = 4 * LAYOUT.size
    assert exchange.server.bytes_pulled == 2 * dense
    pushed = pulled = 0
    for worker in (0, 1, 0):
        push = exchange.compute(worker)
        assert push.update.dtype == torch.uint8
        pushed += push.update.numel()
        exchange.deliver(exchange.server.handle(push).replies)
        pulled += exchange.instances[worker].memory.num_pulled
    exchange.leave(0)
    exchange.join(0)
    assert torch.equal(exchange.instances[0].memory.weights, exchange.server.weights)
    assert (exchange.server.bytes_pushed, exchange.server.bytes_pulled) == (pushed, 3 * dense + pulled)
    assert used.push is not None and 0 < pushed <= 3 * used.push.capacity < 3 * dense


@every_codec
def test_a_round_holds_every_push_as_it_was_decoded(name: str) -> None:
    """The mean of what each worker's own codec decodes to, though the codecs share their scratch."""
    exchange = Exchange(codecs(name, None), workers=3, policy=Barrier())
    before = exchange.server.weights.clone()
    memories = [exchange.used.push.start(17 * worker) for worker in range(3)] if exchange.used.push else []
    velocity = torch.zeros(LAYOUT.size)
    for number in range(3):
        decoded = [by_hand(name, slope(number), memory) for memory in memories]
        mean = (decoded[0] + decoded[1] + decoded[2]).div_(3)
        velocity = torch.addcmul(mean, velocity, torch.tensor(0.5))
        before.addcmul_(velocity, torch.tensor(0.1), value=-1.0)
        for worker in (2, 0, 1):
            exchange.push(worker)
        assert torch.equal(exchange.server.weights, before)


def by_hand(name: str, update: Tensor, memory: State) -> Tensor:
    codec, decoded = build_codec(name, LAYOUT), torch.empty(LAYOUT.size)
    out = torch.zeros(codec.capacity, dtype=torch.uint8)
    codec.decode(out[: codec.encode(update, memory, out)], decoded)
    return decoded


DROPPING = {"backup": lambda: Barrier(spare=1), "ringmaster": lambda: DropStale(2)}


@every_codec
@pytest.mark.parametrize("policy", DROPPING)
def test_a_dropped_push_is_made_again_to_the_byte(name: str, policy: str) -> None:
    """The gradient depends on the batch alone here, so a batch that is computed again gives the same payload."""
    exchange = Exchange(codecs(name, None), workers=3, policy=DROPPING[policy]())
    for turn in range(4):
        for worker in (0, 1, 0, 1):
            exchange.push(worker)
        late = exchange.compute(2)
        payload = late.update.clone()
        outcome = exchange.server.handle(late)
        assert outcome.disposition == Disposition.DROPPED
        exchange.deliver(outcome.replies)
        for worker in (0, 1, 0, 1):
            exchange.push(worker)
        again = exchange.compute(2)
        assert torch.equal(again.update, payload), "a second push of the same batch sends something else"
        exchange.deliver(exchange.server.handle(again).replies)
        for worker in (2, 0, 1):  # now it is in time
            exchange.push(worker)
        assert exchange.server.members[2].accepted == turn + 1


@settings(max_examples=60)
@given(
    name=st.sampled_from(LOSSY),
    policy=st.sampled_from(sorted(DROPPING)),
    turns=st.lists(st.integers(0, 2), min_size=20, max_size=60),
)
def test_what_counts_and_what_is_left_out_add_up_to_the_gradients_that_count(
    name: str, policy: str, turns: list[int]
) -> None:
    """Pushes that the policy drops take nothing out of a worker's error feedback."""
    exchange = Exchange(codecs(name, None), workers=3, policy=DROPPING[policy]())
    applied, gradients = torch.zeros(3, LAYOUT.size), torch.zeros(3, LAYOUT.size)

    def note(update: AppliedUpdate) -> None:
        for push in update.pushes:
            applied[push.worker] += push.update

    exchange.server.on_update = note
    for choice in turns:
        ready = [worker for worker, instance in exchange.instances.items() if instance.pending is not None]
        exchange.push(ready[choice % len(ready)])
    for worker, instance in exchange.instances.items():
        member = exchange.server.members[worker]
        for number in range(member.accepted + (worker in exchange.server.held)):
            gradients[worker] += slope(number)
        if worker in exchange.server.held:
            applied[worker] += exchange.server.held[worker].update
        memory = exchange.used.push.start() if exchange.used.push is not None else {}
        load_local_state(memory, instance.memory.saved_state(member.saved))
        torch.testing.assert_close(applied[worker] + memory["error"], gradients[worker], rtol=1e-4, atol=1e-3)


def test_memory_of_a_push_that_left_serves_others_and_nobody_elses_is_touched() -> None:
    exchange = Exchange(codecs("fp16", None), workers=4, policy=Barrier())
    for worker in (0, 1):
        exchange.push(worker)
    exchange.leave(0)
    exchange.push(2)
    held = {worker: push.update.clone() for worker, push in exchange.server.held.items()}
    assert set(held) == {1, 2}
    assert torch.equal(held[1], held[2])  # the same batch, the same numbers
    exchange.push(3)
    assert exchange.server.version == 1
    addresses = set()
    for _ in range(3):
        for worker in (1, 2, 3):
            push = exchange.compute(worker)
            outcome = exchange.server.handle(push)
            addresses |= {push.update.data_ptr() for push in exchange.server.held.values()}
            exchange.deliver(outcome.replies)
    assert len(addresses) <= 3


@every_codec
@pytest.mark.parametrize("policy", [Async, Barrier])
def test_a_gradient_with_a_nan_ends_the_run_and_is_not_applied(name: str, policy: type[Policy]) -> None:
    exchange = Exchange(codecs(name, name), workers=2, policy=policy(), poison=1)
    for worker in (0, 1):
        assert exchange.push(worker) == Disposition.TAKEN
    before = exchange.server.weights.clone()
    verdicts = [exchange.push(worker) for worker in (0, 1) if not exchange.server.finished]
    assert verdicts[-1] in (Disposition.REJECTED, Disposition.TAKEN)
    assert exchange.server.divergence is not None
    assert torch.equal(exchange.server.weights, before)


def test_bytes_that_are_no_push_are_the_workers_fault_and_change_nothing() -> None:
    exchange = Exchange(codecs("int8", None), workers=2)
    exchange.push(0)
    push, facts, weights = exchange.compute(0), server_facts(exchange.server), exchange.server.weights.clone()
    with pytest.raises(ProtocolError, match="expected"):
        exchange.server.handle(push._replace(update=push.update[:-1]))
    assert server_facts(exchange.server) == facts
    assert torch.equal(exchange.server.weights, weights)
    assert exchange.server.handle(push).disposition == Disposition.TAKEN


def test_the_state_of_the_last_push_taken_can_be_read_while_the_next_is_made() -> None:
    memory = WorkerBuffers.private(BufferSizes(4, local_state=12))
    local_state = {"a": torch.tensor([1, 2], dtype=torch.int32), "b": torch.tensor(0.5)}
    assert local_state_nbytes(local_state) == 12
    for seq in range(5):
        local_state["a"] += 1
        memory.save_state(local_state, seq)
        if seq:
            found = {"a": torch.zeros(2, dtype=torch.int32), "b": torch.tensor(0.0)}
            load_local_state(found, memory.saved_state(seq - 1))
            assert found["a"].tolist() == [1 + seq, 2 + seq]
            assert found["b"].item() == 0.5
