"""A Hugging Face style loop on several workers: `paceline run -n 2 examples/huggingface_style.py`.

A model that returns its loss, dict batches of sentences of any length, a collator, AdamW with decay groups, a schedule
with warm-up. `session` replaces the Accelerator; a model of transformers needs no change.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline

EPOCHS, BATCH, VOCABULARY, IGNORED = 3, 16, 12, -100


@dataclass
class CausalOutput:
    """The output type of models in transformers."""

    loss: Tensor
    logits: Tensor


class TinyCausalModel(nn.Module):
    """Predicts the next word from the words before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embeddings.weight  # tied weights

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> CausalOutput:
        states, _ = self.memory(self.embeddings(input_ids) * attention_mask[..., None])
        logits = self.head(states)
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return CausalOutput(nn.functional.cross_entropy(*flat, ignore_index=IGNORED), logits)


def collate(sentences: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad sentences to the longest of the batch."""
    ids = [sentence["input_ids"] for sentence in sentences]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones(len(one)) for one in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=IGNORED),
    }


def counting(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Make sentences that count upwards from a random word and wrap around at the end of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCABULARY, (count,), generator=generator)
    lengths = torch.randint(4, 12, (count,), generator=generator)
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [{"input_ids": (start + torch.arange(length)) % VOCABULARY} for start, length in pairs]


model = TinyCausalModel()
decayed = [p for name, p in model.named_parameters() if "bias" not in name]
others = [p for name, p in model.named_parameters() if "bias" in name]
groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=5e-3)
train = DataLoader(counting(640, seed=1), batch_size=BATCH, shuffle=True, collate_fn=collate)
scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

session = paceline.join()  # instead of Accelerator()
model, optimizer, train, scheduler = session.prepare(model, optimizer, train, scheduler, epochs=EPOCHS)

model.train()
for _epoch in range(EPOCHS):
    for batch in train:
        outputs = model(**batch)
        session.backward(outputs.loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

session.finish()
model.eval()
with torch.no_grad():
    loss = model(**collate(counting(100, seed=2))).loss.item()
session.report(test_loss=loss, perplexity=math.exp(loss))
if session.worker == 0:
    print(f"perplexity {math.exp(loss):.2f} of {VOCABULARY} words")
