"""One rule of every kind, by name."""

from __future__ import annotations

from paceline.core.optimizers import Adam, AdamW, GradientTransform, RmsProp, Sgd
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.buffered import Buffered, Delayed, OuterMomentum
from paceline.core.rules.cached import Cached
from paceline.core.rules.dana import Dana, DanaSlim
from paceline.core.rules.foresight import Ahead, Foresight, ForesightCached, ForesightFair
from paceline.core.rules.plain import Plain, ReplyBeforeApply
from paceline.core.rules.ringleader import Ringleader
from paceline.core.rules.staleness_aware import Compensated, Damped, Gap
from paceline.core.rules.step_foresight import StepForesight
from paceline.core.rules.step_limit import LrScaling, StepLimit
from tests.support.courses import MakeRule

RULES: dict[str, MakeRule] = {
    "plain": lambda max_workers: Plain(Sgd(0.9)),
    "damped": lambda max_workers: Damped(Adam()),
    "gap": lambda max_workers: Gap(Sgd(0.9), max_workers),
    "compensated": lambda max_workers: Compensated(Sgd(0.5), max_workers),
    "dana": lambda max_workers: Dana(0.9, max_workers),
    "dana-slim": lambda max_workers: DanaSlim(0.9, max_workers),
    "cached": lambda max_workers: Cached(Adam(), max_workers),
    "ringleader": lambda max_workers: Ringleader(0.5, max_workers),
    "buffered": lambda max_workers: Buffered(3, 0.9),
    "delayed": lambda max_workers: Delayed(0.9),
    "delayed, warmed up": lambda max_workers: Delayed(0.9, 3),
    "outer momentum": lambda max_workers: OuterMomentum(0.9, 3),
    "foresight-cached": lambda max_workers: ForesightCached(0.9, max_workers, GradientTransform(0.01, 5.0)),
    "foresight": lambda max_workers: Foresight(0.9, max_workers),
    "foresight-fair": lambda max_workers: ForesightFair(0.9, max_workers),
    "foresight, adamw": lambda max_workers: StepForesight(AdamW(weight_decay=0.01), max_workers),
    "foresight, rmsprop": lambda max_workers: StepForesight(RmsProp(0.7), max_workers),
    "foresight-fair, nesterov": lambda max_workers: StepForesight(Sgd(0.9, nesterov=True), max_workers, fair=True),
    "ahead": lambda max_workers: Ahead(Adam(), Adam(), max_workers),
    "foresight, limited": lambda max_workers: Foresight(0.9, max_workers, limit=StepLimit(max_workers)),
    "foresight-fair, limited": lambda max_workers: Averaged(
        ForesightFair(0.9, max_workers, limit=StepLimit(max_workers))
    ),
    "paced": lambda max_workers: LrScaling(Averaged(Foresight(0.9, max_workers)), 2),
    "plain-early": lambda max_workers: ReplyBeforeApply(Sgd(0.9)),
    "averaged": lambda max_workers: Averaged(ForesightCached(0.9, max_workers)),
    "horizon": lambda max_workers: Averaged(Dana(0.9, max_workers), 10.0),
}
