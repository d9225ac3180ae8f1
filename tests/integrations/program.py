"""One small program for each library: with Paceline's lines, or as it was before (`--plain`). It saves its weights."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

SAMPLES, EPOCHS = 64, 3


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 3, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network(marker: Path | None) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    if marker is not None:
        net.register_forward_pre_hook(lambda *_: die_once(marker))
    return net


def die_once(marker: Path) -> None:
    """Kill the last worker after its fifth step, unless it was killed before."""
    from paceline.runtimes.scripts import session

    joined = session.joined
    if joined is not None and joined.worker == joined.num_workers - 1 and joined.iteration >= 5 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def fabric(asked: argparse.Namespace) -> nn.Module:
    from lightning.fabric import Fabric

    if asked.plain:
        library = Fabric(accelerator="cpu")
    else:
        from paceline.integrations.lightning import FabricStrategy

        library = Fabric(strategy=FabricStrategy(asked.named))
    net = network(asked.die)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    model, optimizer = library.setup(net, optimizer)
    loader = library.setup_dataloaders(DataLoader(points(), batch_size=asked.batch))
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            library.backward(nn.functional.cross_entropy(model(x), y))
            if asked.clip:
                library.clip_gradients(model, optimizer, max_norm=asked.clip)
            optimizer.step()
    if not asked.plain:
        library.strategy.finish()
    if asked.checkpoint:
        library.save(asked.checkpoint, {"model": model, "optimizer": optimizer})
    return net


def trainer(asked: argparse.Namespace) -> nn.Module:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(asked.die)

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, sync_dist=asked.sync_dist)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "gradient_clip_val": asked.clip or None, "max_epochs": EPOCHS}
    if not asked.plain:
        from paceline.integrations.lightning import TrainerStrategy

        settings["strategy"] = TrainerStrategy(asked.named)
    library = Trainer(**quiet, **settings, accumulate_grad_batches=asked.accumulate)
    module = Module()
    library.fit(module, DataLoader(points(), batch_size=asked.batch), DataLoader(points(), batch_size=32))
    if asked.checkpoint:
        library.save_checkpoint(asked.checkpoint)
    return module.net


def accelerate(asked: argparse.Namespace) -> nn.Module:
    from accelerate import Accelerator

    library = Accelerator(gradient_accumulation_steps=asked.accumulate)
    net = network(asked.die)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader: Any = DataLoader(points(), batch_size=asked.batch)
    model, optimizer, scheduler, loader = library.prepare(net, optimizer, scheduler, loader)
    if not asked.plain:
        import paceline

        session = paceline.join()
        model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            with library.accumulate(model):
                library.backward(nn.functional.cross_entropy(model(x), y))
                if asked.clip and library.sync_gradients:
                    library.clip_grad_norm_(model.parameters(), asked.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if not asked.plain:
        session.finish()
        assert library.is_main_process == session.is_main
    return net


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        x, y = self.points[number]
        return {"x": x, "labels": y}


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, marker: Path | None) -> None:
        super().__init__()
        self.net = network(marker)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def huggingface(asked: argparse.Namespace) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    kind: Any = Trainer
    settings: dict[str, Any] = {}
    if not asked.plain:
        from paceline.integrations.huggingface import WorkerTrainer

        kind, settings = WorkerTrainer, {"pace": asked.named}
    model = WithLoss(asked.die)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=asked.checkpoint or folder,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=asked.batch,
            gradient_accumulation_steps=asked.accumulate,
            train_sampling_strategy="sequential",
            learning_rate=0.02,
            max_grad_norm=asked.clip,
            report_to=[],
            save_strategy="epoch" if asked.checkpoint else "no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        library = kind(model=model, args=arguments, train_dataset=Rows(), **settings)
        library.train()
    return model.net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("fabric", "trainer", "accelerate", "huggingface"))
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--named", default=None)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--sync-dist", action="store_true")
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--die", type=Path)
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    net = globals()[asked.library](asked)
    from paceline.runtimes.scripts import session

    if asked.save and (session.joined is None or session.joined.is_main):
        save_file({name: tensor.detach().clone() for name, tensor in net.state_dict().items()}, asked.save)


main()
