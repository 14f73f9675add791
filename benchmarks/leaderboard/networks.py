# SPDX-License-Identifier: Apache-2.0
"""The papers' small networks as sequences whose last module is the head."""

from __future__ import annotations

from torch import nn

from benchmarks.leaderboard.text import CHARACTERS, CONTEXT
from benchmarks.papers.architectures import MLP, CifarCNN, ResNet10
from benchmarks.papers.networks import IMAGENET_MEAN, IMAGENET_STD, Pixels


def fashion() -> nn.Sequential:
    """The MLP 784-200-200-10 on bytes."""
    return nn.Sequential(Pixels(nn.Flatten()), *MLP().layers)


def people(inputs: int = 97) -> nn.Sequential:
    """One hidden layer, two logits."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 2))


def characters() -> nn.Sequential:
    """One hidden layer on 16 embedded characters, one logit per character."""
    embedded = nn.Sequential(nn.Embedding(CHARACTERS, 16), nn.Flatten())
    return nn.Sequential(embedded, nn.Linear(16 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, CHARACTERS))


def cifar() -> nn.Sequential:
    """The CNN for CIFAR-10 at half its width, which takes a third of the time, with the papers' normalisation."""
    net = CifarCNN(width=32)
    pixels = Pixels(nn.Identity(), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    return nn.Sequential(pixels, *net.features, *net.classifier)


def resnet() -> nn.Sequential:
    """ResNet-10 of width 16 with ImageNet's normalisation, and random mirroring in training."""
    net = ResNet10(width=16)
    pixels = Pixels(nn.Identity(), IMAGENET_MEAN, IMAGENET_STD, flip=True)
    return nn.Sequential(pixels, net.stem, net.blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.head)
