"""Lightning on Paceline's workers: `FabricStrategy` for Fabric, `TrainerStrategy` for the Trainer."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.errors import UserError
from paceline.integrations.own_session import join_run, missing
from paceline.runtimes.scripts.loading.loader import WorkerLoader

try:
    from lightning.fabric import strategies as fabric
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Trainer
    from lightning.pytorch import strategies as pytorch
except ImportError as error:
    raise missing("lightning", error) from None


class LateLoader(DataLoader[Any]):
    """A worker's share of a loader. Everything is prepared when its first batch is asked for."""

    def __init__(self, shared: DataLoader[Any], prepare: Callable[[], None]) -> None:
        self.__dict__.update(shared.__dict__)
        self.shared, self._prepare_all = shared, prepare

    def __len__(self) -> int:
        return len(self.shared)

    def __iter__(self) -> Any:
        self._prepare_all()
        return iter(self.shared)


class WorkerStrategy:
    """What both strategies have in common: this process is one worker of the run that `paceline run` started.

    Without a run it is a strategy for a single device.
    """

    optimizers: Any

    def __init__(self, strategy: str | None = None, device: str | torch.device | None = None, **settings: Any) -> None:
        """`strategy` is that of the run, as `paceline run --strategy` names it. `device`: by default a GPU, if any."""
        self.session = join_run(strategy, type(self).__name__)
        worker = self.session.worker
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", worker % torch.cuda.device_count())
        super().__init__(device=device or "cpu", **settings)  # type: ignore[call-arg]  # of Lightning's strategy
        self.global_rank, self.world_size = worker, self.session.num_workers
        rank_zero_only.rank = worker
        self._models: list[nn.Module] = []
        self._schedulers: list[Any] = []
        self._loaders: list[DataLoader[Any]] = []
        self._is_prepared = False

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker prints and saves."""
        return self.session.is_main

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's share of a loader."""
        if self._is_prepared:
            what = f"{type(self).__name__}: another loader after the first batch"
            raise UserError(f"{what}; the server knows the loaders from the start: set up all of them before the loop")
        self._loaders.append(self.session.share(dataloader))
        return LateLoader(self._loaders[-1], self.prepare)

    def prepare(self) -> None:
        """Hand everything that was set up to the session, once. The first batch or forward pass does it."""
        if not self._is_prepared:
            self._is_prepared = True
            self.session.prepare(*self._models, *self.optimizers, *self._schedulers, *self._loaders)

    def finish(self) -> None:
        """End this worker's training: afterwards the model holds the final weights, in worker 0 also its optimizers."""
        self.prepare()
        self.session.finish(with_optimizers=self.session.is_main)

    def _require_one_worker(self, call: str) -> None:
        if self.session.num_workers > 1:
            what = f"{call} waits for all workers, and those of {self.session.config.strategy} exchange only gradients"
            raise UserError(f"{what}: leave it out; session.report(name=value) keeps what each worker measured")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Refuse it on several workers; alone, the tensor is all there is."""
        self._require_one_worker("all_gather(...)")
        return tensor


class FabricStrategy(WorkerStrategy, fabric.SingleDeviceStrategy):
    """`Fabric(strategy=FabricStrategy())`: the loop stays as it is, and `fabric.strategy.finish()` ends it."""

    def __init__(self, strategy: str | None = None, device: str | torch.device | None = None, **settings: Any) -> None:
        super().__init__(strategy, device, **settings)
        self.local_rank = self.session.worker  # that of 0 prints
        self.optimizers: list[Optimizer] = []
        self._hooks: list[Any] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare the model with the others, before it is first trained."""
        self._models.append(module)
        self._hooks.append(module.register_forward_pre_hook(self._before_forward))
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare the optimizer with the others."""
        self.optimizers.append(optimizer)
        return optimizer

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Prepare all of them with the others."""
        self._schedulers += [scheduler] if scheduler is not None else []
        return self.setup_module(module), [self.setup_optimizer(one) for one in optimizers], scheduler

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self.optimizers:
            self.prepare()

    def prepare(self) -> None:
        """Hand everything that was set up to the session, once."""
        while self._hooks:
            self._hooks.pop().remove()
        super().prepare()

    def optimizer_step(self, optimizer: Any, **named: Any) -> Any:
        """Push the gradients and load the next weights."""
        if not self._is_prepared:
            what = "FabricStrategy: a step before the model was called or a loader of fabric.setup_dataloaders read"
            raise UserError(f"{what}: call fabric.strategy.prepare() before the loop")
        return super().optimizer_step(optimizer, **named)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, which is in the server; only worker 0 saves it."""
        return super().get_optimizer_state(optimizer) if self.is_global_zero else {}

    def all_reduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """Refuse it on several workers; alone, the tensor is all there is."""
        self._require_one_worker("fabric.all_reduce(...)")
        return tensor


class TrainerStrategy(WorkerStrategy, pytorch.SingleDeviceStrategy):
    """`Trainer(strategy=TrainerStrategy())`. After `trainer.fit(...)` the module holds the final weights."""

    def __init__(self, strategy: str | None = None, device: str | torch.device | None = None, **settings: Any) -> None:
        super().__init__(strategy, device, **settings)
        self._trainer: Trainer | None = None
        self._resumed = 0
        self._evaluation = ExitStack()

    def setup(self, trainer: Trainer) -> None:
        """Remember the trainer: it says which loaders are trained on."""
        if self._is_prepared and trainer.state.fn == "fit":
            raise UserError("TrainerStrategy: a second fit(...): a run trains once; start another with 'paceline run'")
        self._trainer = trainer
        trainer._accelerator_connector.use_distributed_sampler = False  # the session divides the data
        super().setup(trainer)

    @property
    def is_distributed(self) -> bool:
        """Whether there are other workers: Lightning then asks for sums of metrics, which `reduce` refuses."""
        return self.session.num_workers > 1

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's share of a training loader. Every worker evaluates on all data."""
        return super().process_dataloader(dataloader) if self._trainer and self._trainer.training else dataloader

    def prepare(self) -> None:
        """Hand module, optimizers, schedulers and loaders to the session, once."""
        if not self._is_prepared:
            self._models = [self.lightning_module]
            self._schedulers = [one.scheduler for one in self.lr_scheduler_configs]
            super().prepare()
            self._go_on()

    def _go_on(self) -> None:
        """Note how many batches of its epoch this worker had before a restart."""
        places = [one.position[1] for one in self._loaders if isinstance(one, WorkerLoader)]
        self._resumed = places[0] if places else 0
        if self._resumed and self._resumed == len(self._loaders[0]):
            self._resumed = 0
            what = "a worker was killed between two epochs: Lightning makes no step of a schedule for the first of them"
            print(f"{what}; step schedules per batch (interval='step') to have all of them", file=sys.stderr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """After a restart of this worker in the middle of an epoch, let Lightning count the batches before it too."""
        if self._trainer and self._resumed:
            counts = self._trainer.fit_loop.epoch_loop.batch_progress.current
            for name in ("ready", "started", "processed", "completed"):
                setattr(counts, name, getattr(counts, name) + self._resumed)
            self._resumed = 0

    def on_validation_start(self) -> None:
        """Validate the weights that would be saved now."""
        if self._is_prepared:
            self._evaluation.enter_context(self.session.eval_weights())

    def on_validation_end(self) -> None:
        """Go on with the weights of the training."""
        self._evaluation.close()

    def on_exception(self, exception: BaseException) -> None:
        """Go on with the weights of the training."""
        self._evaluation.close()

    def on_train_end(self) -> None:
        """End this worker's training."""
        self.finish()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, which is in the server; only worker 0 saves it."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def teardown(self) -> None:
        """Forget the state that the server had: Lightning moves states to the CPU."""
        for optimizer in self.optimizers if not self.is_global_zero else ():
            optimizer.state = defaultdict(dict)
        super().teardown()

    def reduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        """Refuse to reduce metrics of several workers. Lightning also sums lengths, to see that none is 0."""
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            self._require_one_worker("self.log(..., sync_dist=True)")
        return tensor
