"""Judge a push before it counts: is it finite, and is it in proportion to the run's history?

A verdict reaches the server as an input (`Expel`, `Discard`), so a replay follows the log and judges nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median_low
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from paceline.core.membership import Member
from paceline.core.messages import Disposition, Push
from paceline.core.server.updates import Updater

BOUND = 100.0
"""A push is suspicious if its norm is this many times the largest recent one of the typical worker. The largest
factor in ordinary runs of the built-in models was 31 (`benchmarks/robust.py --norms`)."""
MIN_HISTORY = 4  # pushes before the first is judged
REMEMBERED = 0.999  # of a worker's largest norm, at each of its pushes
REFRESH_EVERY = 64  # pushes after which the bound is computed again, also if no push exceeds it
MAX_STRIKES = 3  # discarded pushes of a worker, one after another, until it is expelled

Guard: TypeAlias = Callable[[Push], Disposition | None]
"""Returns how a push is turned down, before it changes anything; None: it counts."""
Recompute: TypeAlias = Callable[[Push], Push | str]
"""Computes a worker's push again, or returns why that is impossible."""


def norm_of(update: Tensor) -> float:
    """The norm of an update; NaN or infinity if and only if it holds one. In float32 the squares of 1e20 overflow."""
    squares = float(update.dot(update))
    if math.isfinite(squares):
        return math.sqrt(squares)
    return float(torch.linalg.vector_norm(update, dtype=torch.float64))


class NormHistory:
    """The largest recent norm of each worker's pushes, and the bound that follows from the median of these.

    >>> history = NormHistory()
    >>> for worker, norm in enumerate((3.0, 1.0, 2.0, 1e9)):
    ...     history.add(worker, norm)
    >>> history.exceeds(199.0), history.exceeds(201.0)
    (False, True)
    """

    def __init__(self) -> None:
        self._largest: dict[int, float] = {}
        self.known = 0
        self.usual = 0.0
        self.bound = math.inf

    def add(self, worker: int, norm: float) -> None:
        """Learn from a push that counts."""
        faded = REMEMBERED * self._largest.get(worker, 0.0)
        self._largest[worker] = norm if norm > faded else faded
        self.known += 1
        if self.known == MIN_HISTORY or not self.known % REFRESH_EVERY:
            self._refresh()

    def exceeds(self, norm: float) -> bool:
        """Whether a norm is out of all proportion to the history."""
        if norm <= self.bound:
            return False
        self._refresh()
        return norm > self.bound

    def _refresh(self) -> None:
        """The median: a minority of workers, however large their pushes, does not move the bound far."""
        self.usual = median_low([norm for norm in self._largest.values() if norm] or [0.0])
        self.bound = BOUND * self.usual if self.known >= MIN_HISTORY and self.usual else math.inf

    @property
    def are_all_zero(self) -> bool:
        """Whether there were pushes, and every one of them was zero."""
        return self.known > 0 and not any(self._largest.values())

    def facts(self) -> dict[str, Any]:
        """Everything needed to go on from here, as JSON values."""
        return {"known": self.known, "largest": sorted(self._largest.items())}

    def restore(self, facts: dict[str, Any]) -> None:
        """Go on from what `facts` returned."""
        self.known = facts.get("known", 0)
        self._largest = {int(worker): float(norm) for worker, norm in facts.get("largest", ())}
        self._refresh()


class Finding(NamedTuple):
    """What the guard has to say about a push."""

    worker: int
    kind: str  # `expelled`, `suspicious`, or `not_finite`: nobody is expelled for it
    why: str


class PushGuard:
    """Measures every push, once. Expels a worker whose push the server computes otherwise; warns of immense pushes.

    With `rejects` (`--robust`), an immense push is computed again, which decides between push and worker. If that is
    impossible, it is discarded, and its worker expelled after `MAX_STRIKES` in a row. A guard that `follows_log`
    learns from the pushes of a log and turns none down.
    """

    def __init__(
        self,
        members: Mapping[int, Member],
        norms: NormHistory,
        updater: Updater,
        rejects: bool = False,
        recompute: Recompute | None = None,
        follows_log: bool = False,
        findings: list[Finding] | None = None,
    ) -> None:
        self._members, self._norms, self._updater = members, norms, updater
        self._rejects, self.recompute, self._follows_log = rejects, recompute, follows_log
        self._strikes: Counter[int] = Counter()
        self.findings = findings if findings is not None else []  # what the driver has yet to tell the user
        updater.checks_sums = False

    def __call__(self, push: Push) -> Disposition | None:
        """Return how to turn the push down, or None if it counts."""
        norm, norms = norm_of(push.update), self._norms
        if not math.isfinite(norm) or push.loss == math.inf:
            return self._judge_broken(push, norm)
        scale = self._scale(push.worker)
        if norms.exceeds(norm / scale) and not self._follows_log:
            return self._judge_immense(push, norm / scale, scale)
        self._count(push.worker, norm / scale)
        return None

    def _count(self, worker: int, norm: float) -> None:
        self._norms.add(worker, norm)
        if self._strikes:
            self._strikes.pop(worker, None)

    def _scale(self, worker: int) -> float:
        """Drifts grow with the local steps and their learning rate, which a schedule changes; gradients do not."""
        member = self._members[worker]
        return member.lr * member.steps or 1.0

    def _judge_broken(self, push: Push, norm: float) -> Disposition | None:
        """A push with a NaN or an infinity is the worker's own if the server's computation of it has none."""
        has = "holds a NaN or an infinity" if not math.isfinite(norm) else "has a loss that is not finite"
        again = self.recompute(push) if self.recompute is not None else None
        if isinstance(again, Push) and again.loss != math.inf and math.isfinite(norm_of(again.update)):
            self._find(push, "expelled", f"its push {has}, but the server's computation of it is finite")
            return Disposition.EXPELLED
        if again is not None:
            own = "the server's own computation of it is not finite either"
            reason = own if isinstance(again, Push) else f"the server cannot compute it again: {again}"
            self._find(push, "not_finite", f"its push {has}, and {reason}")
        self._updater.checks_sums = True
        return None

    def _judge_immense(self, push: Push, norm: float, scale: float) -> Disposition | None:
        worker, norms = push.worker, self._norms
        has = f"its push has norm {norm:.3g}, {norm / norms.usual:.3g} times the usual largest"
        self._find(push, "suspicious", has)
        again = self.recompute(push) if self._rejects and self.recompute is not None else None
        if not self._rejects or (isinstance(again, Push) and norms.exceeds(norm_of(again.update) / scale)):
            self._count(worker, norm)
            return None
        self._strikes[worker] += 1
        if isinstance(again, Push):
            self._find(push, "expelled", f"{has}, but the server's computation of it {norm_of(again.update):.3g}")
        elif self._strikes[worker] >= MAX_STRIKES:
            self._find(push, "expelled", f"{has}, the {MAX_STRIKES}rd such push in a row")
        else:
            return Disposition.DISCARDED
        self._strikes.pop(worker)
        return Disposition.EXPELLED

    def _find(self, push: Push, kind: str, why: str) -> None:
        self.findings.append(Finding(push.worker, kind, why))
