"""Checkpoints as cuts: all a server is between two updates, with the weights each worker is computing on.

Safetensors plus JSON in a folder named after the version, written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.core.memory import Memory
from paceline.core.server import Server
from paceline.errors import UserError

KEPT = 2


@dataclass(frozen=True)
class Cut:
    """A snapshot: the server's facts, its tensors, and where in the arrivals log it was taken."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    log_offset: int
    now: float

    @property
    def version(self) -> int:
        return int(self.facts["version"])

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, by the rest of their names."""
        return {name[len(prefix) :]: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def take_cut(server: Server, memories: Mapping[int, Memory], log_offset: int, now: float) -> Cut:
    """One copy of everything, with what each live worker's memory holds: its weights as last sent, its own state."""
    tensors = {"weights": server.weights}
    tensors |= {f"rule.{name}": tensor for name, tensor in server.rule_state.items()}
    for worker, member in server.members.items():
        if member.live and not member.done:
            tensors |= _of_worker(server, worker, memories[worker], member.seq)
    tensors |= {f"state.{worker}": state for worker, state in server.worker_states.items()}
    copies = {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in tensors.items()}
    return Cut(server.facts(), copies, log_offset, now)


def _of_worker(server: Server, worker: int, memory: Memory, seq: int) -> dict[str, Tensor]:
    """What a live worker has, and its own state as the last push that was taken left it."""
    found, differences = {f"sent.{worker}": memory.weights}, server.differences
    if differences is not None and worker in differences.held:
        found[f"sent.{worker}"] = differences.held[worker]  # the worker itself may be about to add the last of it
        found |= {f"pull.{worker}.{name}": tensor for name, tensor in differences.states[worker].items()}
    if memory.sizes.own and seq >= 0:
        found[f"own.{worker}"] = memory.kept(seq)
    return found


def restore(server: Server, cut: Cut) -> None:
    """Make `server` what it was when the cut was taken; a cut of another rule or model is a UserError."""
    _require_same_rule(server, cut)
    _require_same_codecs(server, cut)
    server.restore(cut.facts, cut.tensors["weights"], cut.group("rule."))
    if server.differences is not None:
        held = {int(worker): weights for worker, weights in cut.group("sent.").items()}
        server.differences.restore(held, {worker: cut.group(f"pull.{worker}.") for worker in held})
    server.worker_states = {int(worker): state for worker, state in cut.group("state.").items()}


def _require_same_rule(server: Server, cut: Cut) -> None:
    tensors = {"weights": server.weights, **{f"rule.{name}": t for name, t in server.rule_state.items()}}
    here = {name: list(tensor.shape) for name, tensor in tensors.items()}
    there = {name: list(t.shape) for name, t in cut.tensors.items() if name == "weights" or name.startswith("rule.")}
    rule = cut.facts.get("rule", server.rule.name)
    if (rule, there) != (server.rule.name, here):
        raise UserError(
            f"checkpoint {cut.version} was made by rule {rule} ({_in_words(there)}), and this run has rule "
            f"{server.rule.name} ({_in_words(here)}): put back the settings it was made with, or start a new run"
        )


def _require_same_codecs(server: Server, cut: Cut) -> None:
    then = cut.facts.get("codecs", ["none", "none"])
    if then != server.codecs.names:
        raise UserError(
            f"checkpoint {cut.version} was made with codecs {' and '.join(then)}, and this run has "
            f"{' and '.join(server.codecs.names)}: put back the settings it was made with, or start a new run"
        )


def _in_words(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name.removeprefix('rule.')} {shape}" for name, shape in sorted(shapes.items()))


def write_cut(folder: Path, cut: Cut) -> Path:
    """Write, rename, then remove all but the newest few."""
    final = folder / f"{cut.version:012d}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors = save(cut.tensors)
        (temporary / "tensors.safetensors").write_bytes(tensors)
        digest = hashlib.sha256(tensors).hexdigest()
        facts = {"server": cut.facts, "log_offset": cut.log_offset, "now": cut.now, "tensors_sha256": digest}
        (temporary / "facts.json").write_text(json.dumps(facts))
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in _finished(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest_cut(folder: Path) -> tuple[Cut | None, list[str]]:
    """The newest cut that can be read, and a sentence for each newer one that cannot."""
    complaints: list[str] = []
    for path in reversed(_finished(folder)):
        try:
            return read_cut(path), complaints
        except (OSError, ValueError, KeyError) as error:
            complaints.append(f"checkpoint {path.name} cannot be read ({error}); using an older one")
    return None, complaints


def read_cut(path: Path) -> Cut:
    """One cut; a file that is missing or not as it was written is an OSError, a ValueError or a KeyError."""
    facts = json.loads((path / "facts.json").read_text())
    content = (path / "tensors.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != facts["tensors_sha256"]:
        raise ValueError("its tensors do not have the checksum they were written with")
    return Cut(facts["server"], load(content), facts["log_offset"], facts["now"])


def readable_cuts(folder: Path) -> list[Cut]:
    """Every cut that can be read, oldest first."""
    cuts = []
    for path in _finished(folder):
        with contextlib.suppress(OSError, ValueError, KeyError):
            cuts.append(read_cut(path))
    return cuts


def _finished(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdecimal())
