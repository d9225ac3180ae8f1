"""What a server knows of a model that lives in a user's script: the names and places of its tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.interfaces import Layout
from paceline.tasks.flat import mixture


class ScriptModel:
    """Layouts of parameters and running statistics, as the script's workers told them."""

    def __init__(self, layout_rows: list[list[Any]], state_rows: list[list[Any]]) -> None:
        self.layout = Layout.from_rows(layout_rows)
        self.state_layout = Layout.from_rows(state_rows)

    def mixture(self, states: list[Tensor]) -> Tensor | None:
        """One set of running statistics for all workers, or None when there are none."""
        return mixture(self.state_layout, states) if states and self.state_layout.parameters else None

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """Copies of all trained tensors by name."""
        named = self.layout.views(weights)
        if state is not None:
            named |= self.state_layout.views(state)
        return {name: tensor.cpu().clone() for name, tensor in named.items()}
