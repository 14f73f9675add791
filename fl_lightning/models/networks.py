# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers' experiments. Only ``ResNet10`` has BatchNorm, and so buffers to average."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.arguments import Bounds, checked

_RELU_GAIN = 1.71396  # sqrt(2 / (1 - 1 / pi)): keeps unit variance through a ReLU of a standard normal
_BRANCH_SCALE = 0.2


class MLP(nn.Module):
    """Two hidden layers with ReLU: the networks for Fashion-MNIST and for flat features.

    Source: FedLF (AAAI 2024) and FedMDFG (AAAI 2023), experiments; 199,210 parameters with the defaults.

    Args:
        in_features: numbers per sample.
        hidden: width of both hidden layers.
        num_classes: number of logits.

    Shape:
        ``[B, ...]`` with ``in_features`` numbers per sample, to ``[B, num_classes]``.
    """

    @checked(in_features=Bounds(1), hidden=Bounds(1), num_classes=Bounds(1))
    def __init__(self, in_features: int = 784, hidden: int = 200, num_classes: int = 10) -> None:
        super().__init__()
        self.in_features = in_features
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch.

        Raises:
            ValueError: a sample does not have ``in_features`` numbers.
        """
        flat = inputs.flatten(1)
        if flat.shape[1] != self.in_features:
            raise ValueError(
                f"inputs must have {self.in_features} numbers per sample, found shape {list(inputs.shape)}"
            )
        logits: Tensor = self.layers(flat)
        return logits


class _ImageNet(nn.Module):
    """Convolutions, ``features``, and linear layers, ``classifier``, for images of one shape."""

    channels, side = 3, 32
    features: nn.Module
    classifier: nn.Module

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch.

        Raises:
            ValueError: the images have another shape.
        """
        _check_images(images, self.channels, self.side)
        logits: Tensor = self.classifier(self.features(images))
        return logits


class CifarCNN(_ImageNet):
    """Two 5x5 convolutions and three linear layers for 32x32 colour images.

    Source: FedLF (AAAI 2024) and FedMDFG (AAAI 2023), CIFAR-10 experiments; 797,962 parameters with 10 classes.

    Args:
        num_classes: number of logits.
        dropout: probabilities after the first and second linear layer; ``(0, 0)`` is the variant without dropout.
        width: channels of both convolutions; the papers' 64.

    Shape:
        ``[B, 3, 32, 32]`` to ``[B, num_classes]``.
    """

    @checked(num_classes=Bounds(1), dropout=Bounds(0, 1), width=Bounds(1))
    def __init__(self, num_classes: int = 10, dropout: tuple[float, float] = (0.2, 0.5), width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(25 * width, 384), nn.Dropout(dropout[0]), nn.ReLU(),
            nn.Linear(384, 192), nn.Dropout(dropout[1]), nn.ReLU(),
            nn.Linear(192, num_classes),
        )  # fmt: skip


class MnistCNN(_ImageNet):
    """Two padded 5x5 convolutions and two linear layers for 28x28 grey images.

    Source: FedMDFG (AAAI 2023), MNIST experiments; 1,663,370 parameters with 10 classes.

    Args:
        num_classes: number of logits.

    Shape:
        ``[B, 1, 28, 28]`` to ``[B, num_classes]``.
    """

    channels, side = 1, 28

    @checked(num_classes=Bounds(1))
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, num_classes))


class LeNet(_ImageNet):
    """LeNet-5 with ReLU and max-pooling for 32x32 colour images; 62,006 parameters with 10 classes.

    Source: FedMDFG (AAAI 2023), CIFAR experiments.

    Args:
        num_classes: number of logits.

    Shape:
        ``[B, 3, 32, 32]`` to ``[B, num_classes]``.
    """

    @checked(num_classes=Bounds(1))
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )


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
        _check_images(images, self.in_channels)
        features = self.blocks(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class ScaledStdConv2d(nn.Module):
    """A convolution without bias whose weight is standardised per output channel, then scaled by a learned gain.

    With ``W`` a channel's weights, ``n`` their number and the biased standard deviation:
    ``gain * (W - mean(W)) / ((std(W) + 1e-5) * sqrt(n))``. Source: Brock et al., Characterizing signal propagation to
    close the performance gap in unnormalized ResNets (ICLR 2021). At stride 1 images keep their size.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.padding = kernel_size // 2
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size, kernel_size))
        self.gain = nn.Parameter(torch.ones(out_channels, 1, 1, 1))
        nn.init.kaiming_normal_(self.weight, nonlinearity="linear")

    def forward(self, images: Tensor) -> Tensor:
        """Convolves ``[B, C, H, W]``."""
        fan_in = self.weight[0].numel()
        deviation, average = torch.std_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = self.gain * (self.weight - average) / ((deviation + 1e-5) * fan_in**0.5)
        return F.conv2d(images, weight, stride=self.stride, padding=self.padding)


class _Block(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = ScaledStdConv2d(in_planes, planes, 3, stride)
        self.conv2 = ScaledStdConv2d(planes, planes, 3)
        changes = stride != 1 or in_planes != planes
        self.shortcut = ScaledStdConv2d(in_planes, planes, 1, stride) if changes else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        branch = self.conv1(_RELU_GAIN * F.relu(inputs))
        branch = self.conv2(_RELU_GAIN * F.relu(branch))
        outputs: Tensor = self.shortcut(inputs) + _BRANCH_SCALE * branch
        return outputs


class NFResNet18(nn.Module):
    """The network that FedLF's published CIFAR-100 experiments call NFResNet-18.

    It is smaller than the name says: a 64-channel stem, then three stages of two blocks with 16, 32 and 64 channels;
    189,844 parameters in 34 tensors with 100 classes. Source: FedLF (AAAI 2024) and its published code.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.

    Shape:
        ``[B, in_channels, H, W]`` to ``[B, num_classes]``; 32x32 in the paper.
    """

    @checked(num_classes=Bounds(1), in_channels=Bounds(1))
    def __init__(self, num_classes: int = 100, in_channels: int = 3) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.stem = ScaledStdConv2d(in_channels, 64, 3)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            _Block(64, 16, stride=1), _Block(16, 16, stride=1),
            _Block(16, 32, stride=2), _Block(32, 32, stride=1),
            _Block(32, 64, stride=2), _Block(64, 64, stride=1),
        )  # fmt: skip
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch.

        Raises:
            ValueError: ``images`` is not ``[B, in_channels, H, W]``.
        """
        _check_images(images, self.in_channels)
        features = self.blocks(self.pool(F.relu(self.stem(images))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


def _check_images(images: Tensor, channels: int, side: int | None = None) -> None:
    """One clear sentence for images of the wrong shape, instead of a matrix product that does not fit."""
    fits = images.dim() == 4 and images.shape[1] == channels
    if not fits or (side is not None and tuple(images.shape[2:]) != (side, side)):
        wanted = f"[B, {channels}, {side or 'H'}, {side or 'W'}]"
        raise ValueError(f"images must have shape {wanted}, found {list(images.shape)}")
