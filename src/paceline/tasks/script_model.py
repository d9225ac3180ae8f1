"""The server's view of a model that lives in a user's script: the names and offsets of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from paceline.errors import UserError
from paceline.interfaces import Layout
from paceline.system.sealed_weights import check_weights, seal_weights
from paceline.tasks.flat import mixture


class ScriptModel:
    """Layouts of parameters and running statistics, as the script's workers report them.

    `sources` maps names in the state dict to names in the layouts; `frozen` holds the tensors outside the layouts.
    """

    def __init__(
        self,
        layout_rows: list[list[Any]],
        state_rows: list[list[Any]],
        sources: Mapping[str, str] | None = None,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.layout = Layout.from_rows(layout_rows)
        self.state_layout = Layout.from_rows(state_rows)
        self._sources, self._frozen = sources, frozen or {}
        self._estimated: tuple[Tensor, Tensor] | None = None  # weights, and the statistics that belong to them

    def mixture(self, states: list[Tensor], samples: Sequence[int] | None = None) -> Tensor | None:
        """Combine the running statistics of workers, or return None if the model has none."""
        return mixture(self.state_layout, states, samples) if states and self.state_layout.parameters else None

    def estimated(self, weights: Tensor, state: Tensor) -> Tensor:
        """Return the statistics that workers have estimated for these `weights`, else `state`: no code is here."""
        return self._estimated[1] if self._estimated is not None and self._estimated[0] is weights else state

    def set_statistics(self, weights: Tensor, state: Tensor) -> None:
        """From now on `state`, which workers have estimated for these `weights`, is saved with them."""
        self._estimated = weights, state

    def state_dict(self, weights: Tensor, state: Tensor | None) -> dict[str, Tensor]:
        """Return copies of all tensors by name, for plain `load_state_dict`."""
        flat = self.layout.views(weights)
        if state is not None:
            flat |= self.state_layout.views(state)
        sources = self._sources if self._sources is not None else {name: name for name in flat}
        named = {name: flat[source] for name, source in sources.items() if source in flat}
        return {name: tensor.cpu().clone() for name, tensor in {**self._frozen, **named}.items()}


def save_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return named tensors as the bytes of a sealed safetensors file."""
    return seal_weights(save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load the tensors of `save_tensors`; return none if the file does not exist, refuse a damaged one."""
    if not path.is_file():
        return {}
    try:
        check_weights(path)
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): the run folder is damaged") from None
