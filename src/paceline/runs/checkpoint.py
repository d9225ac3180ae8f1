"""Checkpoints as cuts: all a server is between two updates, with the weights each worker is computing on.

Safetensors plus JSON in a folder named after the version, written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load
from torch import Tensor

from paceline.core.buffers import Memory
from paceline.core.server import Server, restore_server, server_facts
from paceline.errors import UserError

_TYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""
Kind: TypeAlias = tuple[torch.Size, torch.dtype]
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a damaged checkpoint can raise."""


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


class Room:
    """Memory that cuts are copied into, one after another: new memory takes several times as long to be written."""

    def __init__(self) -> None:
        self._free: defaultdict[Kind, list[Tensor]] = defaultdict(list)

    def make(self, kinds: Iterable[Kind]) -> None:
        """Have room ready; the system hands memory out when it is first written, which is done here."""
        for shape, dtype in kinds:
            self._free[shape, dtype].append(torch.empty(shape, dtype=dtype).fill_(0))

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, in memory that was free if there is some."""
        free = self._free[tensor.shape, tensor.dtype]
        return (free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)).copy_(tensor)

    def take_back(self, cut: Cut) -> None:
        """A cut that nobody needs any more."""
        for tensor in cut.tensors.values():
            self._free[tensor.shape, tensor.dtype].append(tensor)


def take_cut(
    server: Server, memories: Mapping[int, Memory], log_offset: int, now: float, room: Room | None = None
) -> Cut:
    """One copy of everything, with what each live worker's memory holds: its weights as last sent, its own state."""
    room = room if room is not None else Room()
    copies = {name: room.copy(tensor) for name, tensor in _tensors_of(server, memories).items()}
    return Cut(server_facts(server), copies, log_offset, now)


def kinds_of(server: Server, memories: Mapping[int, Memory]) -> list[Kind]:
    """What a cut taken now would need room for."""
    return [(tensor.shape, tensor.dtype) for tensor in _tensors_of(server, memories).values()]


def _tensors_of(server: Server, memories: Mapping[int, Memory]) -> dict[str, Tensor]:
    tensors = {"weights": server.weights}
    tensors |= {f"rule.{name}": tensor for name, tensor in server.rule_state.items()}
    for worker, member in server.members.items():
        if member.live and not member.done:
            tensors |= _of_worker(server, worker, memories[worker], member.seq)
    return tensors | {f"state.{worker}": state for worker, state in server.worker_states.items()}


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
    restore_server(server, cut.facts, cut.tensors["weights"], cut.group("rule."))
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


def write_cut(folder: Path, cut: Cut, keep: int = 2) -> Path:
    """Write, sync, rename, then remove all older ones but the newest of them, so that `keep` are left."""
    final = folder / f"{cut.version:012d}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        digest = _write_tensors(temporary / "tensors.safetensors", cut.tensors)
        facts = {"server": cut.facts, "log_offset": cut.log_offset, "now": cut.now, "tensors_sha256": digest}
        _write_synced(temporary / "facts.json", json.dumps({**facts, "facts_sha256": _sha256_of(facts)}).encode())
        _sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    older = [path for path in _finished(folder) if path.name < final.name]
    for old in older[: max(0, len(older) - keep + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Safetensors, a tensor at a time: nothing is copied, and no thread waits while bytes are hashed and written."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(len(text).to_bytes(8, "little")), memoryview(text), *map(_bytes_of, tensors.values())]
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for part in parts:
            digest.update(part)
            while part:
                part = part[file.write(part) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """What was made, renamed or removed in a folder is on disk only when the folder is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def newest_cut(folder: Path, log_nbytes: int | None = None) -> tuple[Cut | None, list[str]]:
    """The newest cut that can be used, and a sentence for each newer one that cannot.

    A cut is of no use if it cannot be read, or was taken behind the end of a log that has `log_nbytes` bytes.
    """
    complaints: list[str] = []
    for path in reversed(_finished(folder)):
        try:
            cut = read_cut(path)
            if log_nbytes is None or cut.log_offset <= log_nbytes:
                return cut, complaints
            why = f"was taken at byte {cut.log_offset} of a log that has {log_nbytes}, so the log has lost its end"
        except UNREADABLE as error:
            why = f"cannot be read ({error})"
        complaints.append(f"checkpoint {path.name} {why}; using an older one")
    return None, complaints


def set_aside(folder: Path, version: int) -> None:
    """Cuts newer than `version` are of a time that is no more: what they are called is taken by others now."""
    for path in _finished(folder):
        if int(path.name) > version:
            aside = path.with_name(f"{path.name}.unused")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def read_cut(path: Path) -> Cut:
    """One cut; a file that is missing or not as it was written is one of the UNREADABLE errors."""
    facts = json.loads((path / "facts.json").read_text())
    digest = facts.pop("facts_sha256", None)  # older versions wrote none
    if digest is not None and digest != _sha256_of(facts):
        raise ValueError("its facts do not have the checksum they were written with")
    content = (path / "tensors.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != facts["tensors_sha256"]:
        raise ValueError("its tensors do not have the checksum they were written with")
    return Cut(facts["server"], load(content), facts["log_offset"], facts["now"])


def readable_cuts(folder: Path) -> list[Cut]:
    """Every cut that can be read, oldest first."""
    cuts = []
    for path in _finished(folder):
        with contextlib.suppress(*UNREADABLE):
            cuts.append(read_cut(path))
    return cuts


def _finished(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdecimal())
