"""The published small CNN: 1,199,882 parameters on images of 1 x 28 x 28, dropout .25 and .5."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.dropout import AddressedDropout
from paceline.models.pooling import max_pool_2x2


class Cnn(nn.Module):
    """Two convolutions (no ReLU after the second, as published) and two linear layers; returns log-probabilities."""

    def __init__(self, image_shape: tuple[int, ...] = (1, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = AddressedDropout(0.25, layer=1)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.dropout2 = AddressedDropout(0.5, layer=2)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        x = max_pool_2x2(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x).float(), dim=1)
