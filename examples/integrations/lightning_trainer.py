"""A Lightning Trainer on several workers: `paceline run -n 2 examples/integrations/lightning_trainer.py`."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import TrainerStrategy


class Disc(LightningModule):
    """Tells points inside a circle from those outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("test_accuracy", 100 * (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.3)]


seed_everything(0)
points = torch.rand(3000, 2) * 4 - 2
labels = (points.norm(dim=1) < 1.5).long()
train = DataLoader(TensorDataset(points[:2500], labels[:2500]), batch_size=20, shuffle=True)
test = DataLoader(TensorDataset(points[2500:], labels[2500:]), batch_size=500)

strategy = TrainerStrategy()
trainer = Trainer(
    strategy=strategy,
    max_epochs=8,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Disc()
trainer.fit(module, train, test)
(scores,) = trainer.validate(module, test, verbose=False)
strategy.session.report(test_accuracy=scores["test_accuracy"])
if trainer.is_global_zero:
    print(f"test accuracy {scores['test_accuracy']:.1f} %")
