"""LoRA: adapters train on several workers beside a frozen model: `paceline run -n 2 examples/lora.py`.

Only parameters that require a gradient travel, here one in 25. `python examples/lora.py` trains in one process,
`paceline train --task examples/lora.py:build --optimizer adamw --lr 0.01` trains it as a task.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import paceline

WORDS, LENGTH, WIDTH, RANK, EPOCHS = 16, 12, 64, 2, 3
ADAPTED = ("query", "value", "widen", "narrow")


class Block(nn.Module):
    """Attention with one head and a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        x = self.first(states)
        states = states + scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return states + self.narrow(torch.relu(self.widen(self.second(states))))


class Counter(nn.Module):
    """A small transformer that predicts the next word of each sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(ids) + self.places.weight[: ids.shape[1]]))


class Adapted(nn.Module):
    """A linear layer and a trained update of low rank, which is zero at the start."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def sentences(count: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Make sentences that count by `step` from a random word, and the next word of each place."""
    starts = torch.randint(0, WORDS, (count, 1), generator=torch.Generator().manual_seed(seed))
    ids = (starts + step * torch.arange(LENGTH + 1)) % WORDS
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def pretrained() -> nn.Module:
    """Train a model to count by ones. Instead, load your own: `model.load_state_dict(load_file(...))`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # every worker must get the same bits
    torch.manual_seed(0)
    model, (ids, targets) = Counter(), sentences(64, step=1, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss_of(model(ids), targets).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """Freeze the model, and add adapters to some of its layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if name in ADAPTED and isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(layer))
    return model


def build() -> paceline.Task:
    """The same as a task: frozen parameters do not travel there either."""
    train, test = sentences(2000, step=3, seed=1), sentences(200, step=3, seed=2)
    return paceline.Task(with_adapters(pretrained()), loss_of, train, test)


def main() -> None:
    model = with_adapters(pretrained())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(TensorDataset(*sentences(2000, step=3, seed=1)), batch_size=32, shuffle=True)
    session = paceline.join()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _epoch in range(EPOCHS):
        for ids, targets in loader:
            optimizer.zero_grad()
            loss_of(model(ids), targets).backward()
            optimizer.step()
    session.finish()
    ids, targets = sentences(200, step=3, seed=2)
    with torch.no_grad():
        loss = loss_of(model(ids), targets).item()
    session.report(test_loss=loss)
    if session.is_main:
        total, sent = (sum(p.numel() for p in some) for some in (model.parameters(), trained))
        print(
            f"test loss {loss:.3f}; {sent:,} of {total:,} parameters were trained and sent, one in {total / sent:.0f}"
        )


if __name__ == "__main__":
    main()
