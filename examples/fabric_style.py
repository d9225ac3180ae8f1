"""A Lightning Fabric style loop on several workers: `paceline run -n 2 examples/fabric_style.py`.

The class `Fabric` below replaces Lightning's, so that a loop written for it stays unchanged.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

EPOCHS = 4


class Fabric:
    """The methods that such a loop calls, on a Paceline session."""

    def __init__(self, epochs: int) -> None:
        self._session, self._epochs = paceline.join(), epochs

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Remember model and optimizer; `setup_dataloaders` passes them to the session together with the data."""
        self._model, self._optimizer = model, optimizer
        return model, optimizer

    def setup_dataloaders(self, loader: Any) -> Any:
        """Prepare the training loader; loaders for evaluation need no preparation."""
        _, _, batches = self._session.prepare(self._model, self._optimizer, loader, epochs=self._epochs)
        return batches

    def backward(self, loss: torch.Tensor) -> None:
        self._session.backward(loss)

    def clip_gradients(self, model: nn.Module, optimizer: Any, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def finish(self) -> None:
        """Load the weights that are saved into the model."""
        self._session.finish()

    def log_dict(self, figures: dict[str, float]) -> None:
        self._session.report(**figures)

    @property
    def is_global_zero(self) -> bool:
        return self._session.worker == 0


torch.manual_seed(0)
x = torch.rand(1200, 3) * 2 - 1
y = (x[:, :1] * x[:, 1:2] + x[:, 2:].square()).detach()
model: nn.Module = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

fabric = Fabric(EPOCHS)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=20, shuffle=True))

for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=5.0)
        optimizer.step()

fabric.finish()
with torch.no_grad():
    error = (model(x[1000:]) - y[1000:]).abs().mean().item()
fabric.log_dict({"mae": error})
if fabric.is_global_zero:
    print(f"mean absolute error {error:.3f}")
