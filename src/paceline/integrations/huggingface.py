"""The Trainer of transformers on Paceline's workers: `WorkerTrainer` in place of `Trainer`."""

from __future__ import annotations

from typing import Any

from paceline.errors import UserError
from paceline.integrations.own_session import in_run, join_run, missing
from paceline.runtimes.scripts.adopt import number_process, unwrapped
from paceline.runtimes.scripts.session import Session

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise missing("transformers", error) from None


class SessionCallback(TrainerCallback):
    """Hands what a Trainer has made to the session, before its first batch."""

    def __init__(self, session: Session) -> None:
        self.session, self.is_training = session, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        """Prepare model, optimizer, schedule and loader together."""
        self.session.prepare(*(made[name] for name in ("model", "optimizer", "lr_scheduler", "train_dataloader")))
        state.global_step = self.session.iteration  # not 0 after a restart of this worker
        self.is_training = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        """Go on after an epoch without a batch: this worker finished it before its restart."""
        if self.session.skips_passes:
            control.should_training_stop = False

    def on_train_end(self, args: Any, state: Any, control: Any, **made: Any) -> None:
        """End this worker's training: the model gets the final weights."""
        self.is_training = False
        self.session.finish()


class OnWorkers:
    """Lets a Trainer of any kind train on Paceline's workers: `class MyTrainer(OnWorkers, SFTTrainer)`.

    Without a run it changes nothing. `pace` names the strategy of the run in code.
    """

    def __init__(self, *arguments: Any, pace: str | None = None, **named: Any) -> None:
        self.session = join_run(pace, type(self).__name__)
        number_process(self.session.worker)
        super().__init__(*arguments, **named)
        self._callback = SessionCallback(self.session)
        self.add_callback(self._callback)  # type: ignore[attr-defined]
        if in_run() and self.args.load_best_model_at_end:  # type: ignore[attr-defined]
            what = "load_best_model_at_end=True would replace the weights that the server has trained"
            raise UserError(f"{what}: leave it out, and load the best of worker 0's checkpoints afterwards")

    def get_train_dataloader(self) -> Any:
        """Return this worker's share, inside the loader of Accelerate."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        shared = self.session.share(unwrapped(loader))
        if unwrapped(loader) is loader:
            return shared
        loader.base_dataloader = shared
        return loader

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """Train. A run is resumed as a whole, with its server."""
        if resume_from_checkpoint and in_run():
            what = "train(resume_from_checkpoint=...): the run has a server, which a checkpoint of one worker is not"
            raise UserError(f"{what}: leave it out, and resume with 'paceline resume RUN'")
        return super().train(resume_from_checkpoint, *arguments, **named)  # type: ignore[misc]

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate the weights that would be saved now."""
        if not self._callback.is_training:
            return super().evaluate(*arguments, **named)  # type: ignore[misc]
        with self.session.eval_weights():
            return super().evaluate(*arguments, **named)  # type: ignore[misc]

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Let worker 0 save: all have the same output folder."""
        if self.session.is_main:
            super()._save_checkpoint(*arguments, **named)  # type: ignore[misc]


class WorkerTrainer(OnWorkers, Trainer):
    """`WorkerTrainer(model=model, args=args, train_dataset=data)`, else as `transformers.Trainer`."""
