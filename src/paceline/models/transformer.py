"""Transformer encoder that classifies sentences: 6 layers, width 256, 4 heads, post-LN.

It reads token ids, padded with 0 at the end, and classifies the mean over the tokens that are not padding.
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
"""Initial standard deviation of the position embeddings; that of the scaled words is 1.

With both at the usual .02, the first norm multiplies gradients by 50, and six post-LN layers do not learn at lr .001.
With these values they learn without warm-up.
"""
WORD_SCALE = WIDTH**0.5
"""Factor on the word embeddings, as in the original transformer.

They are stored at standard deviation 1/16 and scaled to 1. A step of Adam has the same size for every value, so it
moves the scaled words 16 times as far, and a few epochs are enough.
"""


class TokenPacking:
    """Converts between packed tokens [T, W], which the layers use, and padded sentences [B, L, W], for attention.

    On a CPU, packing removes the padding: half of all tokens for SST-5. On a GPU, shapes stay constant.
    """

    def __init__(self, ids: Tensor) -> None:  # [B, L]
        self.shape = ids.shape
        self.real = ids != PADDING
        self.words = None if ids.is_cuda else self.real.flatten().nonzero().squeeze(1)

    def packed(self, places: Tensor) -> Tensor:  # [B * L, ...] -> [T, ...]
        return places if self.words is None else places.index_select(0, self.words)

    def padded(self, words: Tensor) -> Tensor:  # [T, W] -> [B, L, W]
        if self.words is not None:
            words = words.new_zeros(self.real.numel(), words.shape[1]).index_copy(0, self.words, words)
        return words.view(*self.shape, -1)


class SelfAttention(nn.Module):
    """Every token attends to every token that is not padding.

    Not fused: torch's fused GPU kernels sum in no fixed order, and a replay must give the same bits.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor, packing: TokenPacking) -> Tensor:  # [T, W] -> [T, W]
        batch, length = packing.shape
        heads = packing.padded(self.queries_keys_values(tokens)).view(batch, length, 3, self.num_heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # each [B, heads, L, W / heads]
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-2, -1)
        # Not -inf: a sentence without tokens would become NaN.
        scores = scores.masked_fill(~packing.real[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = (scores.softmax(-1) @ values).transpose(1, 2).reshape(batch * length, -1)
        output: Tensor = self.output(packing.packed(mixed))
        return output


class Layer(nn.Module):
    """Attention, then two linear layers; each with a residual connection and a norm after it."""

    def __init__(self, number: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(WIDTH, NUM_HEADS)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, MLP_WIDTH)
        self.fc2 = nn.Linear(MLP_WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.dropout1 = AddressedDropout(dropout, layer=2 * number)
        self.dropout2 = AddressedDropout(dropout, layer=2 * number + 1)

    def forward(self, tokens: Tensor, packing: TokenPacking) -> Tensor:  # [T, W] -> [T, W]
        tokens = self.norm1(tokens + self.dropout1(self.attention(tokens, packing)))
        tokens = self.norm2(tokens + self.dropout2(self.fc2(F.gelu(self.fc1(tokens)))))
        return tokens


class Transformer(nn.Module):
    """Maps token ids [B, L] to log-probabilities; `input_shape` is (L,), the padded length."""

    def __init__(
        self,
        input_shape: tuple[int, ...] = (MAX_LENGTH,),
        num_classes: int = 5,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1 or input_shape[0] > MAX_LENGTH:
            found = f"inputs of {' x '.join(map(str, input_shape))}"
            raise UserError(f"model transformer reads sentences of at most {MAX_LENGTH} token ids, got {found}")
        self.embedding = nn.Embedding(vocabulary, WIDTH, padding_idx=PADDING)
        self.positions = nn.Parameter(torch.empty(MAX_LENGTH, WIDTH))
        self.dropout = AddressedDropout(dropout, layer=1)
        self.layers = nn.ModuleList(Layer(number, dropout) for number in range(1, NUM_LAYERS + 1))
        self.fc = nn.Linear(WIDTH, num_classes)
        nn.init.normal_(self.positions, std=POSITION_DEVIATION)
        with torch.no_grad():
            self.embedding.weight.div_(WORD_SCALE)

    def forward(self, ids: Tensor) -> Tensor:  # integers [B, L] -> [B, classes]
        if ids.shape[1] > MAX_LENGTH:
            what = f"a sentence of {ids.shape[1]} tokens, and the limit is {MAX_LENGTH}"
            raise UserError(f"{what}: truncate it, or pad to less")
        ids = _without_common_padding(ids)
        packing = TokenPacking(ids)
        words = self.embedding(ids) * WORD_SCALE + self.positions[: ids.shape[1]]
        tokens = self.dropout(packing.packed(words.flatten(0, 1)))
        for layer in self.layers:
            tokens = layer(tokens, packing)
        share = packing.real.to(tokens.dtype) / packing.real.sum(1, keepdim=True).clamp(min=1)
        mean = (packing.padded(tokens) * share[:, :, None]).sum(1)
        return F.log_softmax(self.fc(mean).float(), dim=1)


def _without_common_padding(ids: Tensor) -> Tensor:
    """Trim the ids to the longest sentence of the batch on a CPU; return them unchanged on a GPU.

    >>> _without_common_padding(torch.tensor([[5, 0, 0, 0], [7, 8, 0, 0]])).tolist()
    [[5, 0], [7, 8]]
    """
    if ids.is_cuda:
        return ids
    used = (ids != PADDING).any(0).nonzero()
    return ids[:, : int(used[-1]) + 1] if len(used) else ids[:, :1]
