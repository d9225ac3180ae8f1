"""The worker side of local steps in an own loop: the script's optimizer steps here, and its drift is pushed."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from paceline.config import RunConfig
from paceline.core.messages import Reply
from paceline.errors import UserError
from paceline.runtimes.scripts.adopt import UserObjects
from paceline.runtimes.scripts.loading.divisions import Divisions
from paceline.runtimes.scripts.loading.loader import WorkerLoader
from paceline.runtimes.scripts.optimizer import AdoptedOptimizer, PushStep
from paceline.runtimes.scripts.served_loop import ServedLoop, WorkerEnv


class LocalLoop(ServedLoop):
    """A loop whose optimizers keep stepping the model. After H steps of the first one, the drift of all weights is
    pushed and the next weights are loaded; the optimizers' state stays here.
    """

    steps_here = True

    def __init__(
        self,
        env: WorkerEnv,
        config: RunConfig,
        handed: UserObjects,
        loaders: Sequence[WorkerLoader],
        divisions: Divisions,
    ) -> None:
        if not handed.optimizers:
            what = f"strategy {config.strategy} makes local steps with your optimizer"
            raise UserError(f"{what}: give it to session.prepare(model, optimizer, ...)")
        self._first = handed.optimizers[0]
        self._steps = self._samples = 0  # since the last push
        self._weight = 0.0  # of these steps in the mean of a round
        self._missing = 0  # steps that the last push was short of those that the server counts
        self._losses: list[float] = []
        super().__init__(env, config, handed, loaders, divisions)

    def _adopt(self, optimizers: Sequence[Optimizer]) -> list[AdoptedOptimizer]:
        return []

    def _follow_steps(self, push_step: PushStep) -> None:
        self._first.register_step_post_hook(lambda *_: push_step(0, None, None, False))

    @property
    def has_stepped(self) -> bool:
        return super().has_stepped or self._steps > 0

    @property
    def step_number(self) -> int:
        return super().step_number + self._steps - self._missing

    def push(
        self,
        number: int,
        samples: int,
        loss: float | None,
        weight: float | None,
        scale: float | None = None,
        skipped: bool = False,
    ) -> Reply:
        """Count a step of the script. After as many as the last reply asks for, push the drift."""
        self._steps, self._samples = self._steps + 1, self._samples + samples
        self._weight += samples if weight is None else weight
        if loss is not None:
            self._losses.append(loss)
        newest = self._replies[number]
        return newest if self._steps < newest.steps else self._push_drift()

    def _push_drift(self) -> Reply:
        losses, samples = self._losses, self._samples
        weight = None if self._weight == samples else self._weight
        self._missing = self._replies[0].steps - self._steps
        self._steps, self._samples, self._weight, self._losses = 0, 0, 0.0, []
        self.bound.collect_drift()
        return self._exchange(0, samples, sum(losses) / len(losses) if losses else None, weight, [])

    def finish(self) -> None:
        """Push the steps since the last exchange, too; then as without local steps."""
        if self._steps and not self._replies[0].finished:
            self._push_drift()
        super().finish()
