"""The transformer: its size, padding that changes nothing, attention both ways, and that it learns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.assembly.core import make_model
from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.models.dropout import address_dropout
from paceline.models.transformer import MAX_LENGTH, TokenPacking, Transformer
from paceline.settings.resolve import resolve
from paceline.tasks.supervised import SupervisedTask


def small(num_classes: int = 5, dropout: float = 0.1) -> Transformer:
    torch.manual_seed(0)
    return Transformer((12,), num_classes, vocabulary=50, dropout=dropout)


def test_the_number_of_parameters_is_that_of_the_layer_table() -> None:
    attention = 4 * (256 * 256 + 256)
    mlp = (256 * 1024 + 1024) + (1024 * 256 + 256)
    norms = 2 * 2 * 256
    count = 30_522 * 256 + 256 * 256 + 6 * (attention + mlp + norms) + 257 * 5
    model = make_model("transformer", (64,), 5)
    assert sum(parameter.numel() for parameter in model.parameters()) == count == 12_619_013


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 7), (3, 12)])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_forward_gives_log_probabilities_and_backward_reaches_every_parameter(
    batch: int, length: int, kind: torch.dtype
) -> None:
    model = small()
    ids = torch.randint(1, 50, (batch, length), dtype=kind)
    ids[-1, length // 2 + 1 :] = 0
    outputs = model(ids)
    assert outputs.shape == (batch, 5)
    torch.testing.assert_close(outputs.exp().sum(1), torch.ones(batch))
    F.nll_loss(outputs, torch.arange(batch)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_padding_and_the_company_of_longer_sentences_change_nothing() -> None:
    model, sentence = small().eval(), torch.tensor([[4, 9, 2]])
    alone = model(sentence)
    padded = F.pad(sentence, (0, 9))
    together = model(torch.cat([padded, torch.full((1, 12), 7)]))
    torch.testing.assert_close(model(padded), alone)
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-5)


def test_words_alone_give_what_padded_sentences_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the layers see no padding; on a GPU they do."""
    model = small(dropout=0.0)
    ids = torch.randint(1, 50, (4, 9))
    ids[0, 2:], ids[1, 5:], ids[3, 1:] = 0, 0, 0

    def found() -> list[Tensor]:
        model.zero_grad()
        outputs = model(ids)
        F.nll_loss(outputs, torch.arange(4)).backward()
        return [outputs, *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]

    packed, seen = found(), list[int]()
    original = TokenPacking.__init__

    def padded(self: TokenPacking, ids: Tensor) -> None:
        original(self, ids)
        self.words = None

    monkeypatch.setattr(TokenPacking, "__init__", padded)
    model.layers[0].norm1.register_forward_hook(lambda *about: seen.append(len(about[2])))
    for one, other in zip(packed, found(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert seen == [4 * 9]


def test_it_attends_both_ways_and_knows_the_order() -> None:
    model, seen = small().eval(), list[Tensor]()
    model.layers[-1].register_forward_hook(lambda *found: seen.append(found[2]))
    for ids in ([4, 9, 2], [4, 9, 3], [5, 9, 2]):
        model(torch.tensor([ids]))
    original, other_end, other_start = seen
    assert not torch.allclose(original[0], other_end[0]), "the first token sees the last"
    assert not torch.allclose(original[2], other_start[2]), "the last token sees the first"
    assert not torch.allclose(model(torch.tensor([[4, 9, 2]])), model(torch.tensor([[2, 9, 4]])))


def test_an_empty_sentence_is_finite() -> None:
    model = small()
    outputs = model(torch.tensor([[0, 0, 0], [3, 0, 0]]))
    F.nll_loss(outputs, torch.tensor([0, 1])).backward()
    assert torch.isfinite(outputs).all() and torch.isfinite(model(torch.zeros(2, 3, dtype=torch.int64))).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_dropout_is_a_function_of_the_key_and_differs_from_layer_to_layer() -> None:
    model, ids = small(dropout=0.3), torch.tensor([[4, 9, 2]])
    found = []
    for key in (1, 2, 1):
        address_dropout(model, key)
        found.append(model(ids))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    layers = [module.layer for module in model.modules() if hasattr(module, "probability")]
    assert len(layers) == len(set(layers)) == 13


def test_too_long_a_sentence_and_images_are_refused() -> None:
    with pytest.raises(UserError, match="257 tokens, and the limit is 256"):
        small()(torch.ones(1, MAX_LENGTH + 1, dtype=torch.int64))
    with pytest.raises(UserError, match="inputs of 1 x 28 x 28"):
        make_model("transformer", (1, 28, 28))
    with pytest.raises(UserError, match="transformer reads token ids, and dataset mnist holds images of 1 x 28 x 28"):
        resolve(RunConfig(model="transformer", dataset="mnist"))


@pytest.mark.long
def test_it_learns_which_of_two_words_a_sentence_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (16, 8), generator=generator)
    labels = torch.arange(16) % 2
    ids[torch.arange(16), torch.randint(0, 8, (16,), generator=generator)] = labels + 1
    task = SupervisedTask(small(2), F.nll_loss, (ids, labels), (ids, labels))
    weights, gradient = task.initial(), torch.zeros(task.layout.size)
    task.bind(weights, gradient, torch.empty(0))
    optimizer = torch.optim.Adam(task.model.parameters(), lr=1e-3)
    for step in range(8):
        address_dropout(task.model, step)
        task.flat.clear()
        task.loss(task.model(ids), labels).backward()
        optimizer.step()
    assert task.evaluate(weights, None, (ids, labels)).correct >= 15
