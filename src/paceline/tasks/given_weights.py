"""Weights that a run begins from (`--weights FILE`): compare them with a model, and load those that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.errors import UserError
from paceline.system.sealed_weights import read_weights
from paceline.system.terminal import printable
from paceline.tasks.flat import FlatModule

MAX_NAMED = 3  # tensors that a line names; the event and the result have all
_MAX_NAME = 100


@dataclass(frozen=True)
class InitialWeights:
    """Which file a run began from, and the names of all tensors that were not taken from it."""

    file: str
    sha256: str
    loaded: int = 0
    missing: list[str] = field(default_factory=list)  # in the model only
    unexpected: list[str] = field(default_factory=list)  # in the file only
    unequal: dict[str, str] = field(default_factory=dict)  # in both, with other shapes or kinds: what they are
    converted: list[str] = field(default_factory=list)  # loaded, but of another floating type in the file

    @property
    def fits(self) -> bool:
        """Whether file and model have the same tensors."""
        return not (self.missing or self.unexpected or self.unequal)

    def misfits(self) -> str:
        """What does not fit, with the first few names."""
        found = [_some(self.missing, "missing in the file"), _some(self.unexpected, "unknown to the model")]
        unequal = [f"{name} ({what})" for name, what in self.unequal.items()]
        return "; ".join(text for text in (*found, _some(unequal, "of another shape or kind")) if text)

    def line(self) -> str:
        """What was loaded, for the user."""
        text = f"begins from {printable(self.file, 400)}: {self.loaded} tensors loaded"
        if not self.fits:
            text += f", not loaded: {self.misfits()}; result.json names all"
        if self.converted:
            text += f"; {_some(self.converted, 'converted to the type of the model')}"
        return text

    def row(self) -> dict[str, Any]:
        """JSON values, with every name."""
        return asdict(self)


@dataclass(frozen=True)
class GivenWeights:
    """The tensors of a file to begin from; if `is_partial`, those that fit by name and shape are loaded."""

    file: str
    sha256: str
    tensors: Mapping[str, Tensor]
    is_partial: bool

    def compare(self, module: nn.Module) -> InitialWeights:
        """Compare names, shapes and kinds with those of a module, which may be on the meta device.

        A parameter with several names (tied weights) is there if the file has one of them.
        """
        plain: dict[str, Tensor] = module.state_dict(keep_vars=True)
        names = _tied_names(plain)
        there = {id(plain[name]) for name in self.tensors if name in plain}
        unequal = {}
        for name, tensor in self.tensors.items():
            if name in plain and (why := _why_not(tensor, plain[name])):
                unequal[name] = why
        missing = [name for name, tensor in plain.items() if id(tensor) not in there]
        unexpected = [name for name in self.tensors if name not in plain]
        loaded = [name for name in self.tensors if name in plain and name not in unequal]
        converted = [name for name in loaded if self.tensors[name].dtype != plain[name].dtype]
        for name in loaded:
            first = next(one for one in names[id(plain[name])] if one in self.tensors)
            if first != name and not torch.equal(self.tensors[first], self.tensors[name]):
                both = f"{printable(first, _MAX_NAME)} and {printable(name, _MAX_NAME)}"
                raise UserError(f"--weights {self.file}: {both} are one parameter of the model, and differ in the file")
        return InitialWeights(
            self.file, self.sha256, len(loaded), sorted(missing), sorted(unexpected), unequal, converted
        )

    def require_fit(self, module: nn.Module) -> InitialWeights:
        """Raise UserError unless all tensors fit, or with `is_partial` at least one."""
        found, asked = self.compare(module), f"--weights {self.file}"
        if self.is_partial and not found.loaded:
            remedy = "give a file of a similar model, or leave it out"
            raise UserError(f"{asked}: no tensor fits the model by name and shape: {found.misfits()}: {remedy}")
        if not self.is_partial and not found.fits:
            remedy = "give a file of this very model, or load what fits with --weights-partial"
            raise UserError(f"{asked} does not fit the model: {found.misfits()}: {remedy}")
        return found

    def load_into(self, flat: FlatModule) -> InitialWeights:
        """Load what fits into a module, before its memory is bound."""
        found = self.require_fit(flat.module)
        plain: dict[str, Tensor] = flat.module.state_dict(keep_vars=True)
        names = _tied_names(plain)
        chosen: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name in plain and name not in found.unequal:
                chosen |= dict.fromkeys(names[id(plain[name])], tensor)
        flat.load(chosen)
        for name, view in flat.layout.views(flat.initial()).items():
            if not torch.isfinite(view).all():
                raise UserError(f"--weights {self.file}: {name} has a NaN or infinity, which cannot be trained")
        return found


def read_given(config: RunConfig, path: Path | None = None) -> GivenWeights | None:
    """Read the weights that a run begins from: those of `path`, which must be the file of the config; None if none."""
    if config.weights is None:
        return None
    if config.weights_sha256 is None:
        raise UserError(
            f"weights {printable(config.weights)} have no weights_sha256 beside them: the settings are damaged"
        )
    path = path if path is not None else Path(config.weights)
    content = read_weights(path, config.weights_sha256)
    try:
        tensors = dict(sorted(load(content).items()))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"weights {path} cannot be used ({printable(str(error))}): give another file") from None
    return GivenWeights(config.weights, config.weights_sha256, tensors, bool(config.weights_partial))


def _tied_names(plain: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """The names of each tensor of a state dict."""
    found: dict[int, list[str]] = {}
    for name, tensor in plain.items():
        found.setdefault(id(tensor), []).append(name)
    return found


def _why_not(given: Tensor, own: Tensor) -> str | None:
    """Why a tensor of the file cannot become one of the model; None if it can."""
    if given.shape != own.shape:
        return f"{list(given.shape)} in the file, {list(own.shape)} in the model"
    if given.dtype != own.dtype and not (given.is_floating_point() and own.is_floating_point()):
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (given, own)]
        return f"{kinds[0]} in the file, {kinds[1]} in the model"
    return None


def _some(names: list[str], what: str) -> str:
    """How many there are, and the first names.

    >>> _some(["a", "b", "c", "d"], "missing")
    '4 missing: a, b, c and 1 more'
    >>> _some([], "missing")
    ''
    """
    if not names:
        return ""
    shown = ", ".join(printable(name, _MAX_NAME) for name in names[:MAX_NAMED])
    return f"{len(names)} {what}: {shown}" + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
