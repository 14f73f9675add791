# SPDX-License-Identifier: Apache-2.0
"""The residual network of the FedHEAL experiments (Digits and Office-Caltech), with BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.arguments import Bounds, checked
from fl_lightning.models._shape import check_images


class _BasicBlock(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, inputs: Tensor) -> Tensor:
        branch = F.relu(self.bn1(self.conv1(inputs)))
        return F.relu(self.bn2(self.conv2(branch)) + self.shortcut(inputs))


class ResNet10(nn.Module):
    """A ResNet with one basic block per stage, a 3x3 stem and no max-pooling.

    4,903,242 parameters with the defaults; BatchNorm's running statistics are buffers and never enter updates.
    Source: FedHEAL (CVPR 2024), experiments.

    Args:
        num_classes: number of logits.
        width: channels of the stem and the first stage; each further stage doubles them.
        in_channels: channels of the images.

    Shape:
        ``[B, in_channels, H, W]`` to ``[B, num_classes]``; 32x32 for Digits and 192x192 for Office-Caltech in the
        paper.
    """

    @checked(num_classes=Bounds(1), width=Bounds(1), in_channels=Bounds(1))
    def __init__(self, num_classes: int = 10, width: int = 64, in_channels: int = 3) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            _BasicBlock(width, width, stride=1),
            _BasicBlock(width, 2 * width, stride=2),
            _BasicBlock(2 * width, 4 * width, stride=2),
            _BasicBlock(4 * width, 8 * width, stride=2),
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch.

        Raises:
            ValueError: ``images`` is not ``[B, in_channels, H, W]``.
        """
        check_images(images, self.in_channels)
        features = self.blocks(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
