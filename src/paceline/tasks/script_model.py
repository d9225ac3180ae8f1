"""What a server knows of a model that lives in a user's script: the names and places of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from paceline.interfaces import Layout
from paceline.tasks.flat import FlatModule, mixture


class ScriptModel:
    """Layouts of parameters and running statistics, as the script's workers told them.

    `sources` says where the tensors of a state dict are laid out; `kept` are those that are not (frozen ones).
    """

    def __init__(
        self,
        layout_rows: list[list[Any]],
        state_rows: list[list[Any]],
        sources: Mapping[str, str] | None = None,
        kept: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.layout = Layout.from_rows(layout_rows)
        self.state_layout = Layout.from_rows(state_rows)
        self._sources, self._kept = sources, kept or {}

    def mixture(self, states: list[Tensor]) -> Tensor | None:
        """One set of running statistics for all workers, or None when there are none."""
        return mixture(self.state_layout, states) if states and self.state_layout.parameters else None

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """Copies of all tensors by name, as plain `load_state_dict` takes them."""
        flat = self.layout.views(weights)
        if state is not None:
            flat |= self.state_layout.views(state)
        sources = self._sources if self._sources is not None else {name: name for name in flat}
        named = {name: flat[source] for name, source in sources.items() if source in flat}
        return {name: tensor.cpu().clone() for name, tensor in {**self._kept, **named}.items()}


def save_kept(flat: FlatModule) -> bytes | None:
    """The tensors of a script's model that no push brings, as a file; None where there are none."""
    kept = flat.kept()
    return save({name: tensor.cpu().clone().contiguous() for name, tensor in kept.items()}) if kept else None


def load_kept(path: Path) -> dict[str, Tensor]:
    """The inverse, from a file that may not be there."""
    return load_file(path) if path.is_file() else {}
