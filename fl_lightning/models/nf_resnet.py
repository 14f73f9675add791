# SPDX-License-Identifier: Apache-2.0
"""The normaliser-free residual network of the FedLF experiments: no BatchNorm, so no buffers to average."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.arguments import Bounds, checked
from fl_lightning.models._shape import check_images

_RELU_GAIN = 1.71396  # sqrt(2 / (1 - 1 / pi)): keeps unit variance through a ReLU of a standard normal
_BRANCH_SCALE = 0.2


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
        check_images(images, self.in_channels)
        features = self.blocks(self.pool(F.relu(self.stem(images))))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits
