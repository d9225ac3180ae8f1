"""Our flat Muon against torch.optim.Muon and AdamW on the parameters of a module; many runs as one; by the round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.core.muon import Muon, hidden_matrices, orthogonalized
from paceline.core.rules.step_foresight import StepForesight
from paceline.interfaces import Arrival, pack

LAYOUT = pack(
    [
        ("embedding.weight", (7, 6), True),
        ("one.weight", (6, 10), True),
        ("one.bias", (6,), True),
        ("two.weight", (10, 6), True),
        ("three.weight", (6, 10), True),
        ("output.weight", (3, 6), True),
    ]
)
HIDDEN = {"one.weight", "two.weight", "three.weight"}
STEPS = 25


def start() -> Tensor:
    flat = torch.zeros(LAYOUT.size)
    for number, view in enumerate(LAYOUT.views(flat).values()):
        view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(number)))
    return flat


def gradient_at(weights: Tensor, step: int) -> Tensor:
    """A gradient that depends on the weights, zero in the gaps."""
    noise = torch.randn(weights.shape[-1], generator=torch.Generator().manual_seed(step))
    return (torch.sin(3 * weights) + 0.3 * noise) * (start() != 0)


def train_in_torch(decay: float, momentum: float, clip: float | None) -> Tensor:
    flat, gradient = start(), torch.zeros(LAYOUT.size)
    parameters = {name: nn.Parameter(view) for name, view in LAYOUT.views(flat).items()}
    for name, view in LAYOUT.views(gradient).items():
        parameters[name].grad = view
    muon = torch.optim.Muon(
        [parameters[name] for name in sorted(HIDDEN)],
        lr=0.02,
        weight_decay=decay,
        momentum=momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    others = torch.optim.AdamW([parameters[n] for n in parameters if n not in HIDDEN], lr=0.02, weight_decay=decay)
    for step in range(STEPS):
        gradient.copy_(gradient_at(flat, step))
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters.values(), clip)
        muon.step()
        others.step()
    return flat


@pytest.mark.parametrize(("decay", "momentum", "clip"), [(0.0, 0.95, None), (0.1, 0.9, None), (0.1, 0.95, 1.0)])
def test_many_steps_agree_with_torch(decay: float, momentum: float, clip: float | None) -> None:
    """Up to the rounding of bfloat16, in which both orthogonalize: a step of .02 has values of about .004."""
    weights, muon = start(), Muon(LAYOUT, momentum, weight_decay=decay, clip=clip)
    state = muon.start(weights)
    for step in range(STEPS):
        muon.step(weights, state, gradient_at(weights, step), torch.tensor(0.02))
    torch.testing.assert_close(weights, train_in_torch(decay, momentum, clip), rtol=0.0, atol=1e-3)
    assert (weights != start())[start() != 0].all(), "every parameter has moved"
    assert not weights[start() == 0].any(), "gaps stay zero"


def test_embeddings_and_the_output_are_no_hidden_matrices() -> None:
    assert {parameter.name for parameter in hidden_matrices(LAYOUT)} == HIDDEN
    words = pack([(f"{name}.weight", (2, 2), True) for name in ("transformer.wpe", "tok", "head")])
    assert [parameter.name for parameter in hidden_matrices(words)] == ["tok.weight"]


@pytest.mark.parametrize("shape", [(8, 8), (4, 20), (20, 4)])
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    """Newton-Schulz with these coefficients ends between .5 and 1.5, in the directions of the matrix."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(matrix[None])[0]
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.4 and values.max() < 1.6
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    middle = u.T @ found @ v.T
    torch.testing.assert_close(middle, torch.diag(middle.diagonal()), rtol=0.0, atol=0.03)


def test_many_runs_under_the_look_ahead_are_each_alone() -> None:
    runs, several = 3, torch.stack([start() * factor for factor in (1.0, 0.5, -1.0)])
    singles = several.clone()
    rule, sent = StepForesight(Muon(LAYOUT, weight_decay=0.1), 4), torch.zeros(runs, LAYOUT.size)
    state = rule.start(several)
    rules = [StepForesight(Muon(LAYOUT, weight_decay=0.1), 4) for _ in range(runs)]
    states, alone = [one.start(singles[run]) for run, one in enumerate(rules)], torch.zeros(runs, LAYOUT.size)
    for step in range(12):
        workers = torch.tensor([step % 4, step % 2, 0])
        staleness, live = torch.tensor([[min(step, 3)], [min(step, 1)], [0]]), torch.tensor([[4], [2], [1]])
        gradients = torch.stack([gradient_at(weights, step) for weights in singles])
        rule.apply(several, state, gradients, Arrival(workers, staleness, torch.full((runs, 1), 0.02), live))
        rule.reply_weights(several, state, workers, sent)
        for run, one in enumerate(rules):
            worker, late, here = int(workers[run]), int(staleness[run]), int(live[run])
            one.apply(singles[run], states[run], gradients[run], Arrival(worker, late, torch.tensor(0.02), here))
            one.reply_weights(singles[run], states[run], worker, alone[run])
        torch.testing.assert_close(several, singles, rtol=0.0, atol=1e-3)
        torch.testing.assert_close(sent, alone, rtol=0.0, atol=5e-3)
    assert (sent[0] - several[0]).abs().max() > 1e-3, "the worker among four is sent weights ahead"
    assert torch.equal(sent[2], several[2]), "the worker that is alone is not"
