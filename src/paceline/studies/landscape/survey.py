"""`paceline landscape`: project training runs onto their nearest plane and evaluate the loss around them."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.analysis.scored_weights import kind_of
from paceline.assembly.preflight import require_device
from paceline.assembly.task import make_task
from paceline.config import RunConfig
from paceline.data.datasets import load, locate_data
from paceline.errors import UserError
from paceline.reports.console import Console
from paceline.runs.durable_files import write_atomically
from paceline.studies.landscape.losses import Losses
from paceline.studies.landscape.paths import RunSnapshots, TrainingPath, read_path
from paceline.studies.landscape.plane import Plane, nearest_plane
from paceline.system.cpu import cores
from paceline.system.strict_json import to_json
from paceline.system.subnormals import flush_subnormals
from paceline.system.terminal import seconds_text
from paceline.tasks.given_weights import read_given

SCHEMA = 1
SHOWN_SHARES = 10
MIN_TIMED_LOSSES = 20  # losses evaluated before the remaining time is shown: the first are slow
MIN_ASPECT = 0.4  # minimum ratio of the grid's shorter side to its longer side


@dataclass(frozen=True)
class LandscapeView:
    """The part of the landscape to evaluate, and the data to evaluate it on."""

    grid: int = 41
    margin: float = 0.25
    on: str = "train"
    samples: int = 1000
    device: str = "cpu"


@dataclass(frozen=True)
class Landscape:
    """The content of landscape.json (`facts`), and the loss [grid, grid] at every (y, x)."""

    facts: dict[str, Any]
    x: list[float]
    y: list[float]
    losses: Tensor

    def as_csv(self) -> str:
        """Return one CSV line per point of the grid."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["x", "y", "loss"])
        for y, row in zip(self.y, self.losses.tolist(), strict=True):
            writer.writerows([f"{x:.7g}", f"{y:.7g}", f"{loss:.7g}"] for x, loss in zip(self.x, row, strict=True))
        return text.getvalue()

    def save(self, folder: Path) -> None:
        """Write landscape.csv and landscape.json."""
        write_atomically(folder / "landscape.csv", self.as_csv().encode())
        write_atomically(folder / "landscape.json", (to_json(self.facts, indent=1) + "\n").encode())


def survey(runs: list[RunSnapshots], view: LandscapeView, console: Console) -> Landscape:
    """Read the snapshots, find their plane, and evaluate the loss on it and along the paths."""
    require_device(RunConfig(device=view.device))
    flush_subnormals()
    torch.set_num_threads(cores())
    try:
        config = runs[0].config
        location = locate_data(config)
        given = read_given(config, runs[0].folder.initial_file)
        task = make_task(config, load(location) if location is not None else None, given)
        paths = [read_path(run, task) for run in runs]
        plane = nearest_plane(torch.cat([path.points for path in paths]))
        task.to(torch.device(view.device))
        data = task.train if view.on == "train" else task.test
        if data is None:
            raise UserError(f"--on {view.on}: {runs[0].trained} has no test data; use --on train")
        losses = Losses(task, data, view.samples, side_by_side=config.task is None)
        return evaluate(paths, plane, losses, view, console)
    except torch.OutOfMemoryError:
        found = f"--device {view.device} has too little memory for the data"
        raise UserError(f"{found}: use fewer --samples, or --device cpu") from None


def evaluate(
    paths: list[TrainingPath], plane: Plane, losses: Losses, view: LandscapeView, console: Console
) -> Landscape:
    """Evaluate the loss at every point of the grid, at every snapshot, and at every snapshot's projection."""
    places = [plane.coordinates(path.points) for path in paths]
    x, y = _axes(torch.cat(places), view)
    meter = SurveyProgress(console, len(x) * len(y) + 2 * sum(map(len, places)))
    placed = plane.to(losses.device)
    state = paths[0].states[-1].to(losses.device) if paths[0].states is not None else None

    def in_plane(where: Tensor) -> Tensor:
        return losses(((placed.at(*pair), state) for pair in where.tolist()), meter.tick)

    rows = []
    for path, place in zip(paths, places, strict=True):
        true = losses(path.each(), meter.tick)
        rows.append(_path_facts(path, place, true, in_plane(place), plane.distances(path.points)))
    surface = in_plane(torch.cartesian_prod(y, x).flip(1)).view(len(y), len(x))
    first = paths[0].run
    facts = {
        "schema": SCHEMA,
        "trained": first.trained,
        "explained": [round(share, 6) for share in plane.shares[:2]],
        "principal_shares": [round(share, 6) for share in plane.shares[:SHOWN_SHARES]],
        "on": view.on,
        "samples": losses.num_samples,
        "statistics_of": str(first.folder.path) if state is not None else None,
        "grid": {"x": _ends(x), "y": _ends(y), "size": view.grid, **_lowest(surface, x, y)},
        "device": view.device,
        "seconds": round(meter.seconds, 3),
        "runs": rows,
    }
    return Landscape(facts, x.tolist(), y.tolist(), surface)


class SurveyProgress:
    """Counts evaluated losses and reports progress and remaining time."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def tick(self) -> None:
        """Count one loss and report the progress."""
        self._done += 1
        left = self.seconds * (self._total - self._done) / self._done
        later = f", about {seconds_text(left)} left" if self._done >= MIN_TIMED_LOSSES else ""
        share = 100 * self._done / self._total
        text = f"{share:3.0f} %  {self._done} of {self._total} losses{later}"
        self._console.report({"kind": "working", "text": text})


def _axes(places: Tensor, view: LandscapeView) -> tuple[Tensor, Tensor]:
    """Return evenly spaced coordinates on both axes around all paths; no axis is much shorter than the other."""
    low, high = places.amin(0), places.amax(0)
    spans = high - low
    half = torch.maximum(spans, MIN_ASPECT * spans.max()) * (0.5 + view.margin)
    middle = (low + high) / 2
    x, y = (torch.linspace(float(m - h), float(m + h), view.grid) for m, h in zip(middle, half, strict=True))
    return x.double(), y.double()


def _ends(axis: Tensor) -> list[float]:
    return [float(axis[0]), float(axis[-1])]


def _lowest(surface: Tensor, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return the point of the grid with the smallest loss."""
    finite = torch.where(torch.isfinite(surface), surface, torch.inf)
    row, column = divmod(int(finite.argmin()), surface.shape[1])
    return {"lowest": {"x": float(x[column]), "y": float(y[row]), "loss": _number(float(finite[row, column]))}}


def _number(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot represent."""
    return value if value - value == 0.0 else None


def _path_facts(path: TrainingPath, place: Tensor, true: Tensor, seen: Tensor, distances: Tensor) -> dict[str, Any]:
    config = path.run.config
    points = []
    columns = (place.tolist(), true.tolist(), seen.tolist(), distances.tolist())
    for entry, (x, y), loss, in_plane, distance in zip(path.entries, *columns, strict=True):
        point = {"version": entry.version, "samples": entry.samples, "epochs": entry.epochs, "x": x, "y": y}
        losses = {"loss": _number(loss), "loss_in_plane": _number(in_plane)}
        points.append({**point, **losses, "distance_from_plane": distance})
    settings = {name: getattr(config, name) for name in ("strategy", "workers", "split", "rule")}
    about = {**settings, "weights": kind_of({}, config), "left_out": path.left_out}
    return {"run": str(path.run.folder.path), **about, "path": points}


def summary(facts: dict[str, Any]) -> list[str]:
    """Return sentences on how well the plane represents the snapshots, and whether they can be compared."""
    first, second = facts["explained"]
    lines = [f"the plane holds {100 * (first + second):.1f} % of the snapshots' variance"]
    for run in facts["runs"]:
        path = run["path"]
        gaps = [abs(p["loss"] - p["loss_in_plane"]) for p in path if None not in (p["loss"], p["loss_in_plane"])]
        off = max(point["distance_from_plane"] for point in path)
        wide = max(facts["grid"]["x"]) - min(facts["grid"]["x"])
        text = f"{run['run']}: {len(path)} snapshots, at most {off:.3g} from the plane (the figure is {wide:.3g} wide)"
        lines.append(text + (f", loss in the plane off by at most {max(gaps):.3g}" if gaps else ""))
        if run["left_out"]:
            versions = ", ".join(map(str, run["left_out"]))
            lines.append(f"  left out because not finite: update{'s' if len(run['left_out']) > 1 else ''} {versions}")
    if len({run["weights"] for run in facts["runs"]}) > 1:
        kinds = ", ".join(f"{run['run']} {run['weights']}" for run in facts["runs"])
        lines.append(
            f"these are paths of different weights ({kinds}): --average on or none for all makes them comparable"
        )
    if facts["statistics_of"] is not None:
        lines.append(f"running statistics on the plane are those at the end of {facts['statistics_of']}")
    return lines
