"""The best weights that were scored on the way: `checkpoints/best.safetensors`, with what they scored in its header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from paceline.core.server import Server
from paceline.interfaces import Scores
from paceline.runs.background_writer import Writer
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runs.result import Trained, trained_tensors
from paceline.settings.stopping import Measure


class Best:
    """Keeps the evaluated weights that are best by `measure`: without one, those with the highest test accuracy, or the
    lowest loss where nothing is classified.
    """

    def __init__(self, folder: RunFolder, model: Trained, writer: Writer, measure: Measure | None = None) -> None:
        self._folder, self._model, self._writer, self._measure = folder, model, writer, measure
        self.found = read_best(folder)

    def look(self, server: Server, scores: Scores) -> None:
        """After an evaluation: keep the weights if none before were as good. One copy; another thread writes it."""
        row: dict[str, Any] = {
            "updates": server.version,
            "samples": server.samples,
            "test_accuracy": round(scores.accuracy, 4) if scores.per_class else None,
            "test_loss": scores.loss,
        }
        if self._measure is not None:
            value = scores.value(self._measure.metric)
            if value is None or math.isnan(value):
                return
            row |= {"measure": self._measure.text, "value": value}
        if self.found is not None and _rank(row) <= _rank(self.found):
            return
        self.found = row
        tensors = {name: tensor.clone() for name, tensor in trained_tensors(server, self._model).items()}
        texts = {name: str(value) for name, value in row.items() if value is not None}
        self._writer.do("the best weights so far", lambda: self._write(save(tensors, texts)))

    def _write(self, content: bytes) -> None:
        self._folder.checkpoints.mkdir(exist_ok=True)
        write_atomically(self._folder.best_file, content)


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Higher is better."""
    if "measure" in row:
        value = row["value"]
        return -value if row["measure"].startswith("min") else value, 0.0
    return row["test_accuracy"] or 0.0, -row["test_loss"]


def read_best(folder: RunFolder) -> dict[str, Any] | None:
    """What the best weights kept so far scored, and at which update; None where there are none to be read."""
    try:
        with safe_open(folder.best_file, "pt") as file:
            texts = file.metadata() or {}
        accuracy = texts.get("test_accuracy")
        return {
            "updates": int(texts["updates"]),
            "samples": int(texts["samples"]),
            "test_accuracy": float(accuracy) if accuracy is not None else None,
            "test_loss": float(texts["test_loss"]),
            **({"measure": texts["measure"], "value": float(texts["value"])} if "measure" in texts else {}),
        }
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def forget_best(folder: RunFolder, version: int) -> None:
    """Weights of an update behind `version`, to which the run went back, were never its own."""
    found = read_best(folder)
    if found is not None and found["updates"] > version:
        folder.best_file.unlink()
