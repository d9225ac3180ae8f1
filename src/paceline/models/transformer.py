"""A transformer that classifies sentences: 6 layers, width 256, 4 heads, post-LN, attending both ways.

It reads token ids, padded with 0 behind the sentence, and answers from the mean over the tokens that are not padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.dropout import AddressedDropout

PADDING = 0
MAX_LENGTH = 256
VOCABULARY = 30_522
WIDTH, NUM_HEADS, MLP_WIDTH, NUM_LAYERS = 256, 4, 1024, 6
POSITION_DEVIATION = 0.1
"""Of the positions at first, beside words of deviation 1. With both at the usual .02 the first norm multiplies every
gradient by 50, and six layers with the norm behind do not learn at lr .001; so they do, with no warm-up."""


class SelfAttention(nn.Module):
    """Every token looks at every token that is not padding.

    Written out rather than fused: torch's fused kernels for a GPU add up in no fixed order, and a run must replay.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:  # [B, L, W], bool [B, L] -> [B, L, W]
        batch, length, width = tokens.shape
        heads = self.queries_keys_values(tokens).view(batch, length, 3, self.num_heads, width // self.num_heads)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, L, W / heads]
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)
        # Not -inf: a sentence without a token would become NaN.
        scores = scores.masked_fill(~real[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ values
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Layer(nn.Module):
    """Attention, then two linear layers; each added to what came in and normalised after."""

    def __init__(self, number: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(WIDTH, NUM_HEADS)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, MLP_WIDTH)
        self.fc2 = nn.Linear(MLP_WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.dropout1 = AddressedDropout(dropout, layer=2 * number)
        self.dropout2 = AddressedDropout(dropout, layer=2 * number + 1)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:  # [B, L, W], bool [B, L] -> [B, L, W]
        tokens = self.norm1(tokens + self.dropout1(self.attention(tokens, real)))
        tokens = self.norm2(tokens + self.dropout2(self.fc2(F.gelu(self.fc1(tokens)))))
        return tokens


class Transformer(nn.Module):
    """Token ids `[B, L]` to log-probabilities; `input_shape` is (L,), the length that sentences are padded to."""

    def __init__(
        self,
        input_shape: tuple[int, ...] = (MAX_LENGTH,),
        num_classes: int = 5,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1 or input_shape[0] > MAX_LENGTH:
            shape = " x ".join(map(str, input_shape))
            raise UserError(
                f"model transformer reads sentences of at most {MAX_LENGTH} token ids, got inputs of {shape}"
            )
        self.embedding = nn.Embedding(vocabulary, WIDTH, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.empty(MAX_LENGTH, WIDTH))
        self.dropout = AddressedDropout(dropout, layer=1)
        self.layers = nn.ModuleList(Layer(number, dropout) for number in range(1, NUM_LAYERS + 1))
        self.fc = nn.Linear(WIDTH, num_classes)
        nn.init.normal_(self.positions, std=POSITION_DEVIATION)

    def forward(self, ids: Tensor) -> Tensor:  # integers [B, L] -> [B, classes]
        if ids.shape[1] > MAX_LENGTH:
            raise UserError(
                f"a sentence of {ids.shape[1]} tokens, and the limit is {MAX_LENGTH}: cut it, or pad to less"
            )
        ids = _without_common_padding(ids)
        real = ids != PADDING
        tokens = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            tokens = layer(tokens, real)
        share = real.to(tokens.dtype) / real.sum(1, keepdim=True).clamp(min=1)
        mean = (tokens * share[:, :, None]).sum(1)
        return F.log_softmax(self.fc(mean).float(), dim=1)


def _without_common_padding(ids: Tensor) -> Tensor:
    """On a CPU, only as much as the longest sentence of the batch needs; on a GPU, shapes that stay the same.

    >>> _without_common_padding(torch.tensor([[5, 0, 0, 0], [7, 8, 0, 0]])).tolist()
    [[5, 0], [7, 8]]
    """
    if ids.is_cuda:
        return ids
    used = (ids != PADDING).any(0).nonzero()
    return ids[:, : int(used[-1]) + 1] if len(used) else ids[:, :1]
