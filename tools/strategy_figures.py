"""Draw the figures of `docs/strategies/` and the README: when workers compute, send and wait, and each update.

    python tools/strategy_figures.py [sync ... pace]      # without a name, all of them; a few seconds

Each figure shows a run that is simulated for it. The same command writes the same bytes.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from strategy_timeline import Push, Timeline, agrees, read_timeline, waits

from paceline.config import RunConfig
from paceline.reports.console import Console
from paceline.simulation.run import simulate

FIGURES = Path(__file__).parents[1] / "docs/figures"
PACE = "pace"
"""The README's figure: three strategies, one below the other."""
COMPARED = ("sync", "async", "bounded")
SPEEDS, LINK = "61ms,68ms,79ms,180ms", "1000gbit,5ms"
"""Four workers, the last one slow."""
LEFT, WIDTH, ROW, BAR = 118, 600, 34, 18
PACE_ROW, HEADING = 24, 24
"""Pixels between two workers of the README's figure, and above each of its strategies."""
DIGIT = 8
"""Pixels per digit."""
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .faint { fill: #57606a } .axis { stroke: #8c959f }
  .compute { fill: #3b76c4 } .dropped { fill: #fff; stroke: #c93c37; stroke-width: 1.5 } .cross { stroke: #c93c37 }
  .wait { fill: #dfe3e8 } .send { stroke: #d08700; stroke-width: 2.5 } .step { stroke: #fff }
  .update { stroke: #1f7a3d; stroke-width: 3 } .round { stroke: #1f7a3d; stroke-dasharray: 2 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e8ec } .faint { fill: #a9b1bc } .axis { stroke: #6b7480 }
    .compute { fill: #6ea3ea } .dropped { fill: none; stroke: #ff7b72 } .cross { stroke: #ff7b72 }
    .wait { fill: #3d4350 } .send { stroke: #f0b23a } .step { stroke: #1e2129 }
    .update { stroke: #57c274 } .round { stroke: #57c274 }
  }"""


@dataclass(frozen=True)
class Figure:
    """One strategy to draw: its text and the milliseconds to show."""

    strategy: str
    window: int = 600

    @property
    def name(self) -> str:
        return self.strategy.partition(":")[0]


FIGURES_OF = {
    figure.name: figure
    for figure in (
        Figure("classic"),
        Figure("sync"),
        Figure("backup:1"),
        Figure("async"),
        Figure("bounded:1"),
        Figure("allreduce"),
        Figure("local:4", 1800),
        Figure("diloco:4", 1800),
        Figure("async-local:4", 1800),
    )
}


def config_of(figure: Figure, runs: Path) -> RunConfig:
    """Return the config of the run to draw: timing only, no gradients."""
    alone = figure.name == "classic"
    return RunConfig(
        strategy=figure.strategy,
        workers=1 if alone else 4,
        speeds=SPEEDS.split(",")[0] if alone else SPEEDS,
        link=None if alone else LINK,
        timing_only=True,
        parameters="62k",
        steps=60,
        name=figure.name,
        runs=str(runs),
    )


def line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def bar(css: str, x1: float, x2: float, y: float) -> str:
    return f'<rect class="{css}" x="{x1:.1f}" y="{y:.1f}" width="{x2 - x1:.1f}" height="{BAR}" rx="2"/>'


def text(content: str, x: float, y: float, css: str = "", anchor: str = "start") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


class Drawing:
    """The parts of one figure, clipped at the end of the window."""

    def __init__(self, timeline: Timeline, window: int, row: int = ROW) -> None:
        self.timeline, self.window, self.row = timeline, window / 1000, row
        self.rows = len(timeline.step_seconds)
        self.parts: list[str] = []

    def x(self, seconds: float) -> float:
        return LEFT + WIDTH * min(max(seconds, 0.0), self.window) / self.window

    def draw(self) -> str:
        """Return the SVG."""
        self.lanes()
        bottom = self.legend(self.axis(self.bottom) + 22)
        self.parts.append(text(self.summary(), 4, bottom + 22, "faint"))
        return svg(f"{self.timeline.strategy}: {self.summary()}", bottom + 22, self.parts)

    @property
    def shows_staleness(self) -> bool:
        return not self.timeline.in_rounds and self.rows > 1

    @property
    def bottom(self) -> int:
        """The y coordinate below the lanes."""
        return 8 + self.row * self.rows + 6 + BAR + (20 if self.shows_staleness else 8)

    def lanes(self) -> None:
        """Draw the workers and the updates."""
        for worker in range(self.rows):
            self.worker(worker)
        self.updates()

    def worker(self, number: int) -> None:
        y = 8 + self.row * number
        milliseconds = round(1000 * self.timeline.step_seconds[number])
        self.parts.append(text(f"worker {number}", 4, y + 13))
        self.parts.append(text(f"{milliseconds} ms", LEFT - 8, y + 13, "faint", "end"))
        for began, ended in waits(self.timeline, number):
            if ended - began > 0.001 and began < self.window:
                self.parts.append(bar("wait", self.x(began), self.x(ended), y))
        for push in self.timeline.pushes:
            if push.worker == number and push.began < self.window:
                self.push(push, y)

    def push(self, push: Push, y: float) -> None:
        """Draw the steps of one push, the push and its reply."""
        middle, exchange = y + BAR / 2, self.timeline.exchange
        if push.began - exchange >= 0 and exchange:
            self.parts.append(line("send", self.x(push.began - exchange), middle, self.x(push.began), middle))
        self.parts.append(bar("compute" if push.counted else "dropped", self.x(push.began), self.x(push.ended), y))
        for step in range(1, push.steps):
            at = push.began + step * (push.ended - push.began) / push.steps
            if at < self.window:
                self.parts.append(line("step", self.x(at), y, self.x(at), y + BAR))
        if push.arrived > push.ended and push.ended < self.window:
            self.parts.append(line("send", self.x(push.ended), middle, self.x(push.arrived), middle))
        if not push.counted and push.ended < self.window:
            at = self.x(push.ended) - 9
            self.parts += [
                line("cross", at - 4, middle - 4, at + 4, middle + 4),
                line("cross", at - 4, middle + 4, at + 4, middle - 4),
            ]

    def updates(self) -> None:
        """Draw the updates, with the staleness of each if pushes are applied one by one."""
        y = 8 + self.row * self.rows + 6
        where = "in the worker" if self.rows == 1 else "in all workers" if self.timeline.ring else "server"
        self.parts.append(text(where, 4, y + 13))
        taken, shown = [push for push in self.timeline.pushes if push.counted], -99.0
        for at in (update for update in self.timeline.updates if update < self.window):
            self.parts.append(line("update", self.x(at), y, self.x(at), y + BAR))
            if self.timeline.in_rounds:
                self.parts.append(line("round", self.x(at), 4, self.x(at), y))
        if not self.shows_staleness:
            return
        for push in taken:
            at = self.x(push.arrived)
            if push.arrived < self.window and at - shown >= DIGIT:
                self.parts.append(text(str(push.staleness), at, y + BAR + 13, "faint", "middle"))
                shown = at

    def axis(self, y: float) -> float:
        self.parts.append(line("axis", LEFT, y, LEFT + WIDTH, y))
        every = 100 if self.window <= 0.6 else 300
        for milliseconds in range(0, round(1000 * self.window) + 1, every):
            at = self.x(milliseconds / 1000)
            self.parts.append(line("axis", at, y, at, y + 4))
            self.parts.append(text(f"{milliseconds} ms" if milliseconds else "0", at, y + 17, "faint", "middle"))
        return y + 17

    def legend(self, y: float) -> float:
        """Draw the legend of the colours in use at height `y`; return `y`."""
        x = 4.0
        entries = [("compute", "computing"), ("wait", "waiting"), ("send", "sending"), ("dropped", "dropped")]
        if self.rows == 1:
            entries = entries[:1]
        for css, label in entries:
            if not any(f'class="{css}"' in part for part in self.parts):
                continue
            mark = line(css, x, y - 4, x + 16, y - 4) if css == "send" else bar(css, x, x + 16, y - 13)
            self.parts += [mark, text(label, x + 22, y)]
            x += 34 + 7 * len(label)
        stale = ", below it how stale the push was" if self.shows_staleness else ""
        self.parts += [line("update", x + 4, y - 13, x + 4, y + 5), text(f"update{stale}", x + 14, y)]
        return y

    def summary(self) -> str:
        """Return a sentence on the updates, batches and computing share in the window."""
        updates = [at for at in self.timeline.updates if at <= self.window]
        batches = sum(push.steps for push in self.timeline.pushes if push.counted and push.arrived <= updates[-1])
        busy = sum(
            min(push.ended, self.window) - push.began for push in self.timeline.pushes if push.began < self.window
        )
        share = 100 * busy / (self.rows * self.window)
        return (
            f"in {1000 * self.window:g} ms: {len(updates)} updates from {batches} batches; "
            f"workers compute {share:.0f} % of the time"
        )


def svg(title: str, bottom: float, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 28} {bottom + 8}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}\n</style>", *parts, "</svg>", ""])


def timeline_of(figure: Figure) -> Timeline:
    """Simulate one strategy and read when each worker did what."""
    with tempfile.TemporaryDirectory() as runs:
        folder, _ = simulate(config_of(figure, Path(runs)), Console(quiet=True))
        timeline = read_timeline(folder.path)
        assert agrees(timeline, folder.path), f"the timeline of {figure.name} differs from its result"
    return timeline


def make(name: str) -> str:
    """Draw one strategy, or the README's figure."""
    if name == PACE:
        return make_pace()
    figure = FIGURES_OF[name]
    return Drawing(timeline_of(figure), figure.window).draw()


def make_pace() -> str:
    """Draw sync, async and bounded one below the other, with one axis and one legend."""
    parts, top = [], 0
    for name in COMPARED:
        drawing = Drawing(timeline_of(FIGURES_OF[name]), FIGURES_OF[name].window, PACE_ROW)
        drawing.lanes()
        sentence = drawing.summary().partition(": ")[2]
        title = f'<tspan font-weight="600">{drawing.timeline.strategy}</tspan>'
        parts += [text(title, 4, top + 16), text(sentence, LEFT, top + 16, "faint")]
        parts += [f'<g transform="translate(0 {top + HEADING})">', *drawing.parts, "</g>"]
        top += HEADING + drawing.bottom
    drawing.parts = parts
    bottom = drawing.legend(drawing.axis(top) + 22)
    return svg(f"The same four workers under {', '.join(COMPARED)}", bottom, drawing.parts)


def file_of(name: str) -> Path:
    """Return the path of a figure."""
    return FIGURES / ("" if name == PACE else "strategies") / f"{name}.svg"


def main(names: list[str]) -> None:
    """Write the named figures, or all of them."""
    for name in names or [*FIGURES_OF, PACE]:
        file_of(name).write_text(make(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
