"""Checkpoints: the whole server state between two updates, with the weights each worker computes on.

Each is a folder named after the version, with safetensors and JSON, written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
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

from paceline.core.buffers import WorkerBuffers
from paceline.core.membership import Member
from paceline.core.own_loop.torch_optimizer import PREFIX
from paceline.core.server import Server, restore_server, server_facts
from paceline.errors import UserError
from paceline.runs.durable_files import sync_folder
from paceline.runs.folder import CHECKPOINT_DIGITS
from paceline.system.strict_json import sha256_of, to_json

_TYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16"}
_TYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
"""Data types by their safetensors names."""
Kind: TypeAlias = tuple[torch.Size, torch.dtype]
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors that reading a damaged checkpoint can raise."""


@dataclass(frozen=True)
class Checkpoint:
    """A snapshot: the server's facts, its tensors, and the offset in the arrivals log at which it was taken."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]
    log_offset: int
    now: float

    @property
    def version(self) -> int:
        return int(self.facts["version"])

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names start with `prefix`, by the rest of their names."""
        return {name[len(prefix) :]: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


class CopyBuffers:
    """Reused memory for checkpoint copies: writing to fresh memory takes several times as long."""

    def __init__(self) -> None:
        self._free: defaultdict[Kind, list[Tensor]] = defaultdict(list)

    def make(self, kinds: Iterable[Kind]) -> None:
        """Allocate buffers and touch them, because the system provides the pages at the first write."""
        for shape, dtype in kinds:
            self._free[shape, dtype].append(torch.empty(shape, dtype=dtype).fill_(0))

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor`, in a free buffer if there is one."""
        free = self._free[tensor.shape, tensor.dtype]
        return (free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype)).copy_(tensor)

    def recycle(self, checkpoint: Checkpoint) -> None:
        """Take back the buffers of a checkpoint that is no longer needed."""
        for tensor in checkpoint.tensors.values():
            self._free[tensor.shape, tensor.dtype].append(tensor)


def take_checkpoint(
    server: Server, memories: Mapping[int, WorkerBuffers], log_offset: int, now: float, room: CopyBuffers | None = None
) -> Checkpoint:
    """Copy the server's state, and each live worker's weights and local state, as a `Checkpoint`."""
    room = room if room is not None else CopyBuffers()
    copies = {name: room.copy(tensor) for name, tensor in _tensors_of(server, memories).items()}
    return Checkpoint({**server_facts(server), "norms": server.norms.facts()}, copies, log_offset, now)


def tensor_kinds(server: Server, memories: Mapping[int, WorkerBuffers]) -> list[Kind]:
    """Return the shape and dtype of every tensor that a checkpoint taken now would hold."""
    return [(tensor.shape, tensor.dtype) for tensor in _tensors_of(server, memories).values()]


def weights_and_rule(server: Server) -> dict[str, Tensor]:
    """Return the weights and the state of the server's rule, by their names in a checkpoint."""
    states = {_rule_key(number): one.rule_state for number, one in enumerate(server.by_optimizer)}
    named = {f"{key}{name}": tensor for key, state in states.items() for name, tensor in state.items()}
    return {"weights": server.weights, **named}


def _rule_key(optimizer: int) -> str:
    """What the names of a rule's state begin with: of the first optimizer, and of further ones."""
    return f"rule{optimizer or ''}."


def _pull_key(optimizer: int) -> str:
    """What the names of a pull codec's memory begin with: of the first optimizer, and of further ones."""
    return f"pull{optimizer or ''}."


def _tensors_of(server: Server, memories: Mapping[int, WorkerBuffers]) -> dict[str, Tensor]:
    tensors = weights_and_rule(server)
    tensors |= {f"own.{worker}": saved for worker, saved in server.own_states.items()}
    for worker, member in server.members.items():
        if member.live and not member.inactive:
            tensors |= _of_worker(server, worker, memories[worker])
        elif f"own.{worker}" not in tensors and not member.inactive and worker in memories:
            saved = settled_state(member, memories[worker])
            tensors |= {f"own.{worker}": saved} if saved is not None else {}
    return tensors | {f"state.{worker}": state for worker, state in server.worker_states.items()}


def settled_state(member: Member, memory: WorkerBuffers) -> Tensor | None:
    """A worker's own state after its last push that became part of an update; None if it has no such state."""
    return memory.saved_state(member.settled) if memory.sizes.local_state else None


def _of_worker(server: Server, worker: int, memory: WorkerBuffers) -> dict[str, Tensor]:
    """Return the weights last sent to a live worker, and its local state after its last push that was not dropped."""
    found, member = {f"sent.{worker}": memory.weights}, server.members[worker]
    encoders = [one.differences for one in server.by_optimizer if one.differences is not None]
    if encoders and worker in encoders[0].held:
        held = [one.held[worker] for one in encoders]  # the worker may not have added the last delta yet
        found[f"sent.{worker}"] = held[0] if len(held) == 1 else torch.cat(held)
        for number, one in enumerate(encoders):
            found |= {f"{_pull_key(number)}{worker}.{name}": tensor for name, tensor in one.states[worker].items()}
    if memory.sizes.local_state and (member.seq >= 0 or memory.brings_own_state):
        found[f"local_state.{worker}"] = memory.saved_state(member.settled)
    return found


def restore(server: Server, checkpoint: Checkpoint) -> None:
    """Set `server` to the state of the checkpoint; raise UserError for one of another rule, model or codec."""
    _require_same_rule(server, checkpoint)
    _require_same_codecs(server, checkpoint)
    restore_server(server, checkpoint.facts, checkpoint.tensors["weights"], checkpoint.group("rule."))
    for number, one in enumerate(server.by_optimizer[1:], start=1):
        facts = checkpoint.facts["optimizers"][number - 1]
        restore_server(one, facts, one.weights, checkpoint.group(_rule_key(number)))
    server.norms.restore(checkpoint.facts.get("norms", {}))
    sent = {int(worker): weights for worker, weights in checkpoint.group("sent.").items()}
    held = {worker: weights for worker, weights in sent.items() if server.members[worker].serial >= 0}
    begin = 0
    for number, one in enumerate(server.by_optimizer):
        span = slice(begin, begin + one.updater.weights.numel())
        if one.differences is not None:
            states = {worker: checkpoint.group(f"{_pull_key(number)}{worker}.") for worker in held}
            one.differences.restore({worker: weights[span] for worker, weights in held.items()}, states)
        begin = span.stop
    server.own_states = {int(worker): saved for worker, saved in checkpoint.group("own.").items()}
    server.worker_states = {int(worker): state for worker, state in checkpoint.group("state.").items()}


def _require_same_rule(server: Server, checkpoint: Checkpoint) -> None:
    here = {name: list(tensor.shape) for name, tensor in weights_and_rule(server).items() if not _grows(name)}
    there = {
        name: list(t.shape)
        for name, t in checkpoint.tensors.items()
        if name == "weights" or (name.startswith("rule") and not _grows(name))
    }
    if there["weights"] != here["weights"]:
        then, now = (math.prod(shapes["weights"]) for shapes in (there, here))
        raise UserError(
            f"checkpoint {checkpoint.version} is of another model ({then} floats) than the task or script now builds "
            f"({now} floats): restore that code, or start a new run"
        )
    rule = checkpoint.facts.get("rule", server.rule.name)
    if (rule, there) != (server.rule.name, here):
        raise UserError(
            f"checkpoint {checkpoint.version} was made by rule {rule} ({_shapes_text(there)}), but this run uses rule "
            f"{server.rule.name} ({_shapes_text(here)}): restore the settings it was made with, or start a new run"
        )


def _grows(name: str) -> bool:
    """Whether a torch optimizer makes this tensor with its first steps, so that a new server has none."""
    return name.partition(".")[2].startswith(PREFIX)


def _require_same_codecs(server: Server, checkpoint: Checkpoint) -> None:
    then = checkpoint.facts.get("codecs", ["none", "none"])
    if then != server.codecs.names:
        raise UserError(
            f"checkpoint {checkpoint.version} was made with codecs {' and '.join(then)}, but this run uses "
            f"{' and '.join(server.codecs.names)}: restore the settings it was made with, or start a new run"
        )


def _shapes_text(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name.removeprefix('rule.')} {shape}" for name, shape in sorted(shapes.items()))


def write_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write, sync and rename a checkpoint; then delete older ones so that `keep` are left."""
    final = folder / f"{checkpoint.version:0{CHECKPOINT_DIGITS}d}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        digest = _write_tensors(temporary / "tensors.safetensors", checkpoint.tensors)
        facts = {"server": checkpoint.facts, "log_offset": checkpoint.log_offset, "now": checkpoint.now}
        facts |= {"tensors_sha256": digest}
        _write_synced(temporary / "facts.json", to_json({**facts, "facts_sha256": sha256_of(facts)}).encode())
        sync_folder(temporary)
        _remove(final)
        temporary.rename(final)
        sync_folder(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    older = [path for path in _finished(folder) if path.name < final.name]
    for old in older[: max(0, len(older) - keep + 1)]:
        with contextlib.suppress(OSError):
            _remove(old)
    return final


def _remove(path: Path) -> None:
    """Remove a checkpoint under the name of an unfinished one, so that a killed process leaves no half of it."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write safetensors one tensor at a time, without copies and without holding the GIL while hashing."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = to_json(header).encode()
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


def newest_checkpoint(folder: Path, log_nbytes: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest usable checkpoint, and a sentence for each newer unusable one.

    A checkpoint is unusable if it cannot be read, or was taken past the end of a log of `log_nbytes` bytes.
    """
    complaints: list[str] = []
    for path in reversed(_finished(folder)):
        try:
            checkpoint = read_checkpoint(path)
            if log_nbytes is None or checkpoint.log_offset <= log_nbytes:
                return checkpoint, complaints
            why = f"was taken at byte {checkpoint.log_offset}, but the log ends at byte {log_nbytes}"
        except UNREADABLE as error:
            why = f"cannot be read ({error})"
        complaints.append(f"checkpoint {path.name} {why}; using an older one")
    return None, complaints


def set_aside(folder: Path, version: int) -> None:
    """Move checkpoints newer than `version` aside: the run was rolled back, and new ones will reuse their names."""
    for path in _finished(folder):
        if int(path.name) > version:
            aside = path.with_name(f"{path.name}.unused")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint; a missing or changed file raises one of the UNREADABLE errors."""
    facts = json.loads((path / "facts.json").read_text())
    if facts.pop("facts_sha256") != sha256_of(facts):
        raise ValueError("the checksum of its facts is wrong")
    content = (path / "tensors.safetensors").read_bytes()
    if hashlib.sha256(content).hexdigest() != facts["tensors_sha256"]:
        raise ValueError("the checksum of its tensors is wrong")
    return Checkpoint(facts["server"], load(content), facts["log_offset"], facts["now"])


def readable_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return every readable checkpoint, oldest first."""
    checkpoints = []
    for path in _finished(folder):
        with contextlib.suppress(*UNREADABLE):
            checkpoints.append(read_checkpoint(path))
    return checkpoints


def log_offsets(folder: Path) -> list[int]:
    """Return the lengths of the log at the checkpoints, oldest first, without reading their tensors."""
    found = []
    for path in _finished(folder):
        with contextlib.suppress(*UNREADABLE):
            found.append(int(json.loads((path / "facts.json").read_text())["log_offset"]))
    return found


def _finished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name.isdecimal())
