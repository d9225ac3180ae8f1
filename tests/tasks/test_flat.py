"""Any torch module as flat vectors: tied, frozen, unused and sparse parameters, and buffers that ride as state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.tasks.flat import FlatModule, sharing_parameters
from paceline.tasks.supervised import SupervisedTask


def bound(flat: FlatModule) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh memories with the module bound to them."""
    weights, gradient = flat.initial(), torch.full((flat.layout.size,), torch.nan)
    state = torch.zeros(flat.state_size)
    flat.bind(weights, gradient, state)
    return weights, gradient, state


def backward(flat: FlatModule, loss: Tensor) -> None:
    """One batch as a worker computes it."""
    flat.clear()
    loss.backward()
    flat.collect()


class Tied(nn.Module):
    """An embedding and an output layer that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.output = nn.Linear(4, 7)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


class Normed(nn.Module):
    """A batch norm between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(inputs))))


def test_a_tied_parameter_is_laid_out_once_and_gets_the_gradient_of_both_uses() -> None:
    torch.manual_seed(0)
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    flat = FlatModule(model)
    assert [parameter.name for parameter in flat.layout.parameters] == ["embedding.weight", "output.bias"]
    _, gradient, _ = bound(flat)
    assert model.output.weight is model.embedding.weight
    tokens, targets = torch.tensor([1, 2, 1]), torch.tensor([2, 3, 4])
    backward(flat, F.cross_entropy(model(tokens), targets))
    F.cross_entropy(plain(tokens), targets).backward()
    assert torch.equal(flat.layout.views(gradient)["embedding.weight"], plain.embedding.weight.grad)


def test_the_state_dict_of_a_tied_model_loads_into_a_plain_one() -> None:
    flat = FlatModule(Tied())
    weights, _, _ = bound(flat)
    trained = weights + 1.0
    fresh = Tied()
    fresh.load_state_dict(flat.state_dict(trained, None))
    assert torch.equal(fresh.output.weight, flat.layout.views(trained)["embedding.weight"])
    weights.copy_(trained)
    assert torch.equal(fresh(torch.tensor([1, 5])), flat.module(torch.tensor([1, 5])))


def test_a_frozen_parameter_is_not_laid_out_but_is_saved() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    flat = FlatModule(model)
    assert [parameter.name for parameter in flat.layout.parameters] == ["1.weight", "1.bias"]
    weights, gradient, _ = bound(flat)
    backward(flat, model(torch.randn(5, 3)).sum())
    assert torch.isfinite(flat.layout.views(gradient)["1.weight"]).all()
    saved = flat.state_dict(weights, None)
    assert torch.equal(saved["0.weight"], model[0].weight)
    assert set(saved) == set(model.state_dict())


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to train"):
        FlatModule(nn.Linear(2, 2).requires_grad_(False))


def test_an_unused_parameter_has_a_zero_gradient_even_after_it_was_used() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "sometimes": nn.Linear(3, 1)})
    flat = FlatModule(model)
    _, gradient, _ = bound(flat)
    inputs = torch.ones(2, 3)
    backward(flat, (model["used"](inputs) + model["sometimes"](inputs)).sum())
    views = flat.layout.views(gradient)
    assert views["sometimes.weight"].tolist() == [[2.0, 2.0, 2.0]]
    backward(flat, model["used"](inputs).sum())
    assert views["used.weight"].tolist() == [[2.0, 2.0, 2.0]]
    assert views["sometimes.weight"].tolist() == [[0.0, 0.0, 0.0]]


def test_gradients_do_not_add_up_between_batches() -> None:
    model = nn.Linear(3, 1)
    flat = FlatModule(model)
    _, gradient, _ = bound(flat)
    for _ in range(3):
        backward(flat, model(torch.ones(2, 3)).sum())
        assert flat.layout.views(gradient)["bias"].tolist() == [2.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_survives_the_zero_grad_of_a_user(set_to_none: bool) -> None:
    model = nn.Linear(3, 1)
    flat = FlatModule(model)
    _, gradient, _ = bound(flat)
    backward(flat, 5 * model(torch.ones(2, 3)).sum())
    for _ in range(2):
        flat.clear()
        model.zero_grad(set_to_none=set_to_none)
        model(torch.ones(2, 3)).sum().backward()
        flat.collect()
        assert flat.layout.views(gradient)["weight"].tolist() == [[2.0, 2.0, 2.0]]


def test_a_sparse_gradient_that_was_unhooked_is_brought_in_too() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    flat = FlatModule(model)
    _, gradient, _ = bound(flat)
    flat.clear()
    model.zero_grad()
    model(torch.tensor([3, 3])).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    flat.collect()
    assert flat.layout.views(gradient)["weight"].tolist() == [[0.0, 0.0]] * 3 + [[2.0, 2.0], [0.0, 0.0]]


def test_a_sparse_embedding_gives_the_gradient_of_a_dense_one() -> None:
    sparse, dense = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4)
    dense.load_state_dict(sparse.state_dict())
    flat = FlatModule(sparse)
    _, gradient, _ = bound(flat)
    tokens = torch.tensor([1, 4, 1, 8])
    backward(flat, sparse(tokens).square().sum())
    dense(tokens).square().sum().backward()
    torch.testing.assert_close(flat.layout.views(gradient)["weight"], dense.weight.grad)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_that_are_trained_must_be_float32_and_are_not_converted(kind: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).to(kind))
    name = str(kind).removeprefix("torch.")
    with pytest.raises(UserError, match=rf"parameter 1.weight is {name}, .*: call model.float\(\) before"):
        FlatModule(model)
    assert model[1].weight.dtype == kind


def test_a_frozen_part_and_a_buffer_keep_their_type() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False))
    model.register_buffer("constant", torch.tensor([1.0 + 1e-12], dtype=torch.float64))
    flat = FlatModule(model)
    weights, _, _ = bound(flat)
    saved = flat.state_dict(weights, None)
    kinds = [saved[name].dtype for name in ("0.weight", "1.weight", "constant")]
    assert kinds == [torch.float32, torch.bfloat16, torch.float64]
    assert saved["constant"].item() == 1.0 + 1e-12 and not flat.state_size


def test_running_statistics_ride_in_the_bound_state() -> None:
    torch.manual_seed(0)
    model, plain = Normed(), Normed()
    plain.load_state_dict(model.state_dict())
    flat = FlatModule(model)
    _, _, state = bound(flat)
    views = flat.state_layout.views(state)
    assert views["norm.running_var"].tolist() == [1.0] * 5
    inputs = torch.randn(8, 3)
    model(inputs)
    plain(inputs)
    assert torch.equal(views["norm.running_mean"], plain.norm.running_mean)
    assert torch.equal(views["norm.running_var"], plain.norm.running_var)
    assert views["norm.running_mean"].abs().sum() > 0


def test_the_mixture_of_statistics_is_that_of_the_pooled_data() -> None:
    torch.manual_seed(0)
    flat = FlatModule(Normed())
    parts = [torch.randn(50, 5) * (1 + worker) + 10 * worker for worker in range(3)]
    states = []
    for part in parts:
        state = torch.zeros(flat.state_size)
        flat.state_layout.views(state)["norm.running_mean"].copy_(part.mean(0))
        flat.state_layout.views(state)["norm.running_var"].copy_(part.var(0, correction=0))
        states.append(state)
    mixed = flat.mixture(states)
    assert mixed is not None
    pooled = torch.cat(parts)
    views = flat.state_layout.views(mixed)
    torch.testing.assert_close(views["norm.running_mean"], pooled.mean(0))
    torch.testing.assert_close(views["norm.running_var"], pooled.var(0, correction=0))


def test_the_mixture_of_one_is_itself_and_of_none_is_none() -> None:
    flat = FlatModule(Normed())
    state = torch.rand(flat.state_size)
    assert torch.equal(flat.mixture([state]), state)
    assert flat.mixture([]) is None
    assert FlatModule(nn.Linear(2, 2)).mixture([torch.empty(0)]) is None


def test_a_saved_model_gives_the_outputs_that_evaluate_scored() -> None:
    torch.manual_seed(0)
    data = torch.randn(40, 3) * 4 + 2, torch.randint(0, 2, (40,))
    task = SupervisedTask(Normed(), F.cross_entropy, data, data)
    weights, gradient, state = task.initial(), torch.zeros(task.layout.size), torch.zeros(task.state_size)
    task.bind(weights, gradient, state)
    for _ in range(5):
        loss = task.loss(task.model(data[0]), data[1])
        assert torch.isfinite(loss)
    trained, statistics = weights + 0.1 * torch.randn_like(weights), state.clone()
    scores = task.evaluate(trained, statistics, data)
    fresh = Normed()
    fresh.load_state_dict(task.flat.state_dict(trained, statistics))
    outputs = fresh.eval()(data[0])
    assert F.cross_entropy(outputs, data[1]).item() == pytest.approx(scores.loss, rel=1e-6)
    assert int((outputs.argmax(1) == data[1]).sum()) == scores.correct
    assert torch.equal(weights, task.initial())
    assert torch.equal(state, statistics), "evaluation must not touch the running statistics"


def test_a_saved_model_does_not_depend_on_how_many_batches_this_process_has_seen() -> None:
    task = SupervisedTask(Normed(), F.cross_entropy, (torch.randn(4, 3), torch.randint(0, 2, (4,))))
    before = task.state_dict(task.initial(), None)
    task.model(torch.randn(4, 3))
    after = task.state_dict(task.initial(), None)
    assert torch.equal(after["norm.num_batches_tracked"], before["norm.num_batches_tracked"])


def test_a_copy_for_another_thread_shares_parameters_and_has_small_buffers_of_its_own() -> None:
    flat = FlatModule(Normed())
    flat.bind(flat.initial(), torch.zeros(flat.layout.size), torch.zeros(10_000)[: flat.state_size])
    copied = sharing_parameters(flat.module)
    for ours, theirs in zip(flat.module.parameters(), copied.parameters(), strict=True):
        assert ours is theirs
    for mine, other in zip(flat.module.buffers(), copied.buffers(), strict=True):
        assert torch.equal(mine, other) and mine.data_ptr() != other.data_ptr()
        assert other.untyped_storage().nbytes() < 1000
