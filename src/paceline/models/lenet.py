"""LeNet5 as in the published parameter-server runs: 61,706 parameters on images of 1 x 28 x 28."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.pooling import max_pool_2x2


class LeNet5(nn.Module):
    """Two convolutions and three linear layers; returns log-probabilities."""

    def __init__(self, image_shape: tuple[int, ...] = (1, 28, 28), num_classes: int = 10) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:  # [B, C, H, W] -> [B, classes]
        x = max_pool_2x2(F.relu(self.conv1(images)))
        x = max_pool_2x2(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return F.log_softmax(self.fc3(x).float(), dim=1)
