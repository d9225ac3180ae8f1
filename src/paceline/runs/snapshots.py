"""Snapshots of the weights: at the start, at fixed numbers of samples, and at the end; and the best weights.

`RUN/snapshots/` holds one safetensors file per version, for plain `load_state_dict`, and an index.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from paceline.config import RunConfig
from paceline.core.server import Server
from paceline.errors import UserError
from paceline.interfaces import Scores
from paceline.runs.durable_files import BackgroundWriter, write_atomically
from paceline.runs.folder import RunFolder
from paceline.runs.result import NamedTensors, trained_tensors
from paceline.settings.stopping import BestMetric
from paceline.system.sealed_weights import check_weights, seal_weights
from paceline.system.strict_json import is_count, is_number, is_text, seal, to_json, unseal


@dataclass(frozen=True)
class SnapshotEntry:
    """One snapshot in the index; `extra` marks a final one that was not due."""

    version: int
    samples: int
    epochs: float
    sha256: str
    extra: bool = False

    @property
    def file_name(self) -> str:
        return f"{self.version:012d}.safetensors"


class Snapshots:
    """Takes the snapshots of one run, starting at the server's current version.

    One is due after the update at which the applied samples first reach k / `per_epoch` epochs, k = 0, 1, 2, ...
    """

    def __init__(
        self, folder: RunFolder, per_epoch: float, server: Server, model: NamedTensors, writer: BackgroundWriter
    ) -> None:
        self._path, self._model, self._writer = folder.snapshots, model, writer
        self._epoch_samples = server.budget.epoch_samples
        self._rate = Fraction(str(per_epoch)) / self._epoch_samples
        self._entries = read_index(folder) if folder.snapshots.is_dir() else []
        self._last = self._entries[-1].version if self._entries else -1
        self._due = 0 if not server.version and not self._entries else self._next_due(server.samples)

    def _next_due(self, samples: int) -> int:
        return math.ceil((math.floor(samples * self._rate) + 1) / self._rate)

    def is_due(self, server: Server) -> bool:
        """Return whether `take_if_due` would take a snapshot."""
        return server.samples >= self._due

    def take_if_due(self, server: Server) -> None:
        """Take a snapshot if one is due: one copy here, written on another thread."""
        if self.is_due(server):
            self._due = self._next_due(server.samples)
            self._save(server, extra=False)

    def take_final(self, server: Server) -> None:
        """Take a snapshot of the final weights, unless the last one has them."""
        if server.version != self._last:
            self._save(server, extra=True)

    def _save(self, server: Server, extra: bool) -> None:
        version, samples = server.version, server.samples
        tensors = trained_tensors(server, self._model)
        self._last = version

        def write() -> None:
            content = save(tensors)
            epochs = round(samples / self._epoch_samples, 6)
            entry = SnapshotEntry(version, samples, epochs, hashlib.sha256(content).hexdigest(), extra)
            self._path.mkdir(exist_ok=True)
            write_atomically(self._path / entry.file_name, content)
            self._entries = [*self._entries, entry]
            _write_index(self._path, self._entries)

        self._writer.submit("a snapshot", write)


def snapshots_of(
    config: RunConfig, folder: RunFolder, server: Server, model: NamedTensors, writer: BackgroundWriter
) -> Snapshots | None:
    """Return the run's `Snapshots`, or None if the config asks for none."""
    return Snapshots(folder, config.snapshots, server, model, writer) if config.snapshots is not None else None


def drop_snapshots_after(folder: RunFolder, version: int) -> None:
    """Remove snapshots after `version` and a final one that was not due: a resumed run takes them again."""
    if not folder.snapshots.is_dir():
        return
    kept = [entry for entry in read_index(folder) if entry.version <= version and not entry.extra]
    _write_index(folder.snapshots, kept)
    names = {entry.file_name for entry in kept}
    for path in folder.snapshots.glob("*.safetensors"):
        if path.name not in names:
            path.unlink()


def _write_index(path: Path, entries: list[SnapshotEntry]) -> None:
    content = to_json(seal({"snapshots": [asdict(entry) for entry in entries]}), indent=1)
    write_atomically(path / "index.json", f"{content}\n".encode())


def read_index(folder: RunFolder) -> list[SnapshotEntry]:
    """Return the run's snapshots, oldest first; empty if none was written yet."""
    path = folder.snapshots / "index.json"
    try:
        entries = [SnapshotEntry(**row) for row in unseal(path.read_bytes())["snapshots"]]
        if not all(is_count(one.version) and is_text(one.sha256) and is_number(one.epochs) for one in entries):
            raise ValueError("a row is of another type")
        return entries
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): remove {path.parent} to continue without them") from None


def read_snapshot(folder: RunFolder, entry: SnapshotEntry) -> dict[str, Tensor]:
    """Return the tensors of one snapshot by name; raise UserError if the file has changed."""
    path = folder.snapshots / entry.file_name
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise ValueError("its checksum is wrong")
        return load(content)
    except (OSError, ValueError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"snapshot {path} cannot be read ({why}): remove its line from index.json") from None


class BestWeights:
    """Keeps the best weights by their scores on `part` (validation or test): by `measure`, else accuracy, else loss."""

    def __init__(
        self,
        folder: RunFolder,
        model: NamedTensors,
        writer: BackgroundWriter,
        part: str,
        measure: BestMetric | None = None,
    ) -> None:
        self._folder, self._model, self._writer, self._part, self._measure = folder, model, writer, part, measure
        self.found = read_best(folder)

    def save_if_best(self, server: Server, scores: Scores) -> None:
        """Save the weights if they are the best so far: one copy here, written on another thread."""
        row: dict[str, Any] = {
            "updates": server.version,
            "samples": server.samples,
            "chosen_on": self._part,
            f"{self._part}_accuracy": round(scores.accuracy, 4) if scores.per_class else None,
            f"{self._part}_loss": scores.loss,
        }
        if not scores.per_class and not math.isfinite(scores.loss) and self._measure is None:
            return
        if self._measure is not None:
            value = scores.value(self._measure.metric)
            if value is None or math.isnan(value):
                return
            row |= {"measure": self._measure.text, "value": value}
        if self.found is not None and _rank(row) <= _rank(self.found):
            return
        before, self.found = self.found, row
        tensors = {name: tensor.clone() for name, tensor in trained_tensors(server, self._model).items()}
        texts = {name: str(value) for name, value in row.items() if value is not None}

        def write() -> None:
            try:
                self._folder.checkpoints.mkdir(exist_ok=True)
                write_atomically(self._folder.best_file, seal_weights(save(tensors, texts)))
            except OSError:
                if self.found is row:
                    self.found = before  # `best` of the result names weights that are on disk
                raise

        self._writer.submit("the best weights so far", write)


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return a sort key; higher is better."""
    if "measure" in row:
        value = row["value"]
        return -value if row["measure"].startswith("min") else value, 0.0
    accuracy, loss = (row[f"{row['chosen_on']}_{what}"] for what in ("accuracy", "loss"))
    return accuracy or 0.0, -loss if math.isfinite(loss) else -math.inf


def read_best(folder: RunFolder) -> dict[str, Any] | None:
    """Return the scores and the update of the best weights so far; None if there are none."""
    try:
        check_weights(folder.best_file)
        with safe_open(folder.best_file, "pt") as file:
            texts = file.metadata() or {}
        part = texts.get("chosen_on", "test")
        accuracy = texts.get(f"{part}_accuracy")
        return {
            "updates": int(texts["updates"]),
            "samples": int(texts["samples"]),
            "chosen_on": part,
            f"{part}_accuracy": float(accuracy) if accuracy is not None else None,
            f"{part}_loss": float(texts[f"{part}_loss"]),
            **({"measure": texts["measure"], "value": float(texts["value"])} if "measure" in texts else {}),
        }
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        path = folder.best_file
        raise UserError(f"{path} cannot be read ({error}): remove it to choose the best weights anew") from None


def drop_best_after(folder: RunFolder, version: int) -> None:
    """Remove the best weights if they are from an update after `version`, which the run rolled back."""
    found = read_best(folder)
    if found is not None and found["updates"] > version:
        folder.best_file.unlink()
