"""The newest states of a worker's streams, in the run folder: a worker that comes back goes on from one of them."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UserError
from paceline.runs.durable_files import write_atomically
from paceline.runtimes.scripts.loading.loader import WorkerLoader
from paceline.system.strict_json import from_json, to_json
from paceline.tasks.script_model import load_tensors, save_tensors

SECONDS_BETWEEN_STATES = 5.0
MAX_STATES = 16
"""States that are kept of a loader: they reach back further than the newest checkpoint of `--checkpoint-every 60`."""
_STRUCTURE = "structure"
_FIELDS = {"pass": int, "batch": int, "read": int, "ended": bool, "next": int}


class KeptStates:
    """The files `WORKER-LOADER-PASS-BATCH.safetensors` of one worker. Without a folder, nothing is kept or loaded."""

    def __init__(self, folder: Path | None, worker: int, loaders: Sequence[WorkerLoader]) -> None:
        self._folder, self._worker = folder, worker
        stateful = {number: loader for number, loader in enumerate(loaders) if loader.facts.keeps_state}
        self._loaders = stateful if folder is not None else {}
        self._unchecked: dict[int, dict[str, Any]] = {}  # states by loader; the batch after each is not read yet
        self._due = time.monotonic() + SECONDS_BETWEEN_STATES

    def go_on(self) -> None:
        """Let each loader go on from its newest state that is not after its position; remove those that are."""
        for number, loader in self._loaders.items():
            found = False
            for place, path in reversed(self._files(number)):
                if place > loader.position:  # of a time before the run went back
                    with contextlib.suppress(OSError):
                        path.unlink()
                elif place[0] == loader.position[0] and not found:
                    state = _read(path, place)
                    if state is not None:
                        loader.load_state(state)
                        found = True

    def after_push(self) -> None:
        """Write the states whose next batch was read meanwhile; when it is time, ask the loaders for new ones."""
        if not self._loaders:
            return
        for number in [number for number, state in self._unchecked.items() if "next" in state]:
            with contextlib.suppress(OSError):  # a full disk: the server says so
                self._write(number, self._unchecked.pop(number))
        if time.monotonic() < self._due:
            return
        for number, loader in list(self._loaders.items()):
            try:
                state = loader.state()
            except UserError as error:
                print(f"{error}; the state is not kept", file=sys.stderr)
                del self._loaders[number]
                continue
            if state is not None and state["batch"] and (state["pass"], state["batch"]) == loader.position:
                self._unchecked[number] = state
        self._due = time.monotonic() + SECONDS_BETWEEN_STATES

    def _write(self, number: int, state: dict[str, Any]) -> None:
        assert self._folder is not None
        self._folder.mkdir(exist_ok=True)
        name = f"{self._worker}-{number}-{state['pass']}-{state['batch']}.safetensors"
        write_atomically(self._folder / name, save_tensors(to_tensors(state)))
        for _, path in self._files(number)[:-MAX_STATES]:
            path.unlink(missing_ok=True)

    def _files(self, number: int) -> list[tuple[tuple[int, int], Path]]:
        """Return the places and files of a loader's states, the first place first."""
        assert self._folder is not None
        found = []
        for path in self._folder.glob(f"{self._worker}-{number}-*-*.safetensors"):
            parts = path.stem.split("-")[2:]
            if len(parts) == 2 and all(part.isdecimal() for part in parts):
                found.append(((int(parts[0]), int(parts[1])), path))
        return sorted(found)


def _read(path: Path, place: tuple[int, int]) -> dict[str, Any] | None:
    """Return the state in a file, or None if it is damaged."""
    try:
        state = from_tensors(load_tensors(path))
    except (UserError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(state, dict) or any(type(state.get(name)) is not kind for name, kind in _FIELDS.items()):
        return None
    return state if "stream" in state and (state["pass"], state["batch"]) == place else None


def to_tensors(state: Any) -> dict[str, Tensor]:
    """Return a state of plain values and tensors as named tensors; one of them is the JSON of its structure.

    >>> from_tensors(to_tensors({"place": 3, "order": [torch.tensor(2), None, "x"]}))
    {'place': 3, 'order': [tensor(2), None, 'x']}
    """
    tensors: dict[str, Tensor] = {}

    def noted(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": len(tensors) - 1}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(float(value))}  # JSON has none
        if isinstance(value, dict):
            return {"dict": {name: noted(part) for name, part in value.items()}}
        return [noted(part) for part in value] if isinstance(value, list) else value

    structure = to_json(noted(state)).encode()
    return {**tensors, _STRUCTURE: torch.frombuffer(bytearray(structure), dtype=torch.uint8)}


def from_tensors(tensors: dict[str, Tensor]) -> Any:
    """Return the state of `to_tensors`; raise ValueError, LookupError, TypeError or AttributeError for others."""

    def restored(value: Any) -> Any:
        if isinstance(value, list):
            return [restored(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return tensors[str(value["tensor"])]
        if "float" in value:
            return float(value["float"])
        return {name: restored(part) for name, part in value["dict"].items()}

    return restored(from_json(tensors[_STRUCTURE].numpy().tobytes()))
