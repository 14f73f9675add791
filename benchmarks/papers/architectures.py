# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers' experiments, as plain modules that return logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Two hidden layers with ReLU: the networks for Fashion-MNIST and for flat features.

    Source: FedLF (AAAI 2024) and FedMDFG (AAAI 2023), experiments; 199,210 parameters with the defaults.

    Args:
        in_features: numbers per sample.
        hidden: width of both hidden layers.
        num_classes: number of logits.
    """

    def __init__(self, in_features: int = 784, hidden: int = 200, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, ...]`` with ``in_features`` numbers per sample, to ``[B, num_classes]``."""
        logits: Tensor = self.layers(inputs.flatten(1))
        return logits


class MnistCNN(nn.Module):
    """Two 5x5 convolutions and two linear layers for 28x28 grey images.

    Source: FedFV (IJCAI 2021) and FedMDFG (AAAI 2023), MNIST; 1,663,370 parameters with the defaults.

    Args:
        width: channels of the first convolution, half of those of the second one.
        hidden: width of the hidden layer.
    """

    def __init__(self, width: int = 32, hidden: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(98 * width, hidden), nn.ReLU(), nn.Linear(hidden, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 28, 28]`` or ``[B, 1, 28, 28]`` to ``[B, 10]``."""
        logits: Tensor = self.layers(images.view(-1, 1, 28, 28))
        return logits


class CifarCNN(nn.Module):
    """Two 5x5 convolutions and three linear layers for 32x32 colour images.

    Source: FedLF (AAAI 2024) and FedMDFG (AAAI 2023), CIFAR-10 experiments; 797,962 parameters with the defaults.

    Args:
        width: channels of both convolutions; the papers' 64.
        num_classes: number of logits.
    """

    def __init__(self, width: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(25 * width, 384), nn.Dropout(0.2), nn.ReLU(),
            nn.Linear(384, 192), nn.Dropout(0.5), nn.ReLU(),
            nn.Linear(192, num_classes),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, 32, 32]`` to ``[B, num_classes]``."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


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
        width: channels of the stem and the first stage; each further stage doubles them.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            _BasicBlock(width, width, stride=1),
            _BasicBlock(width, 2 * width, stride=2),
            _BasicBlock(2 * width, 4 * width, stride=2),
            _BasicBlock(4 * width, 8 * width, stride=2),
        )
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to ``[B, 10]``."""
        features = self.blocks(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class _ScaledConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 / fan-in for every output, times a gain."""

    def __init__(self, in_planes: int, planes: int, size: int, stride: int = 1) -> None:
        super().__init__(in_planes, planes, size, stride, padding=size // 2, bias=False)
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")
        self.gain = nn.Parameter(torch.ones(planes, 1, 1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        std, mean = torch.std_mean(self.weight, dim=(1, 2, 3), keepdim=True, correction=0)
        scale = self.gain * self.weight[0].numel() ** -0.5
        return F.conv2d(inputs, scale * (self.weight - mean) / (std + 1e-5), None, self.stride, self.padding)


class _NormFreeBlock(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _ScaledConv(in_planes, planes, 3, stride)
        self.conv2 = _ScaledConv(planes, planes, 3)
        same = stride == 1 and in_planes == planes
        self.shortcut: nn.Module = nn.Identity() if same else _ScaledConv(in_planes, planes, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        gain = 1.71396  # which keeps the variance behind a ReLU
        branch = self.conv2(gain * F.relu(self.conv1(gain * F.relu(inputs))))
        total: Tensor = self.shortcut(inputs) + 0.2 * branch
        return total


class NFResNet18(nn.Module):
    """A ResNet without normalisation, as the authors of FedLF coded their NResNet-18: three stages, 16 convolutions.

    Source: FedLF (AAAI 2024), CIFAR-100; 189,844 parameters with the defaults.

    Args:
        num_classes: number of logits.
    """

    def __init__(self, num_classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(_ScaledConv(3, 64, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        sizes = ((64, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
        self.blocks = nn.Sequential(*(_NormFreeBlock(*size) for size in sizes))
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, H, W]`` to ``[B, num_classes]``."""
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits
