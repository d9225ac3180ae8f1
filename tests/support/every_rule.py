"""One rule of every kind, by name."""

from __future__ import annotations

from paceline.core.optimizers import Adam, GradientTransform, Sgd
from paceline.core.rules.averaged import Averaged
from paceline.core.rules.buffered import Buffered, Delayed
from paceline.core.rules.cached import Cached
from paceline.core.rules.dana import Dana, DanaSlim
from paceline.core.rules.foresight import Foresight, ForesightCached, ForesightFair
from paceline.core.rules.lr_scaling import LrScaling
from paceline.core.rules.plain import Plain, ReplyBeforeApply
from paceline.core.rules.ringleader import Ringleader
from paceline.core.rules.staleness_aware import Compensated, Damped, Gap
from tests.support.courses import MakeRule

RULES: dict[str, MakeRule] = {
    "plain": lambda places: Plain(Sgd(0.9)),
    "damped": lambda places: Damped(Adam()),
    "gap": lambda places: Gap(Sgd(0.9), places),
    "compensated": lambda places: Compensated(Sgd(0.5), places),
    "dana": lambda places: Dana(0.9, places),
    "dana-slim": lambda places: DanaSlim(0.9, places),
    "cached": lambda places: Cached(Adam(), places),
    "ringleader": lambda places: Ringleader(0.5, places),
    "buffered": lambda places: Buffered(3, 0.9),
    "delayed": lambda places: Delayed(0.9),
    "foresight-cached": lambda places: ForesightCached(0.9, places, GradientTransform(0.01, 5.0)),
    "foresight": lambda places: Foresight(0.9, places),
    "foresight-fair": lambda places: ForesightFair(0.9, places),
    "paced": lambda places: LrScaling(Averaged(Foresight(0.9, places)), 2),
    "plain-early": lambda places: ReplyBeforeApply(Sgd(0.9)),
    "averaged": lambda places: Averaged(ForesightCached(0.9, places)),
    "horizon": lambda places: Averaged(Dana(0.9, places), 10.0),
}
