# SPDX-License-Identifier: Apache-2.0
"""The networks on images of bytes, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn

from benchmarks.papers.architectures import MLP, CifarCNN, MnistCNN, NFResNet18, ResNet10


class Pixels(nn.Module):
    """A network on images of bytes.

    Args:
        net: the network.
        mean: to subtract per channel, from pixels in [0, 1].
        std: to divide by per channel.
        flip: mirror every image with probability one half in training.
        channels_last: lay the pixels out channels last, which convolutions take over: 1.4 times as fast for ResNet-10
            of width 16 on one core.
    """

    def __init__(
        self,
        net: nn.Module,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
        flip: bool = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.net, self.mean, self.std, self.flip = net, mean, std, flip
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        pixels = images.float().div_(255)
        if self.mean != (0.0,):
            mean, std = (torch.tensor(value, device=images.device).view(-1, 1, 1) for value in (self.mean, self.std))
            pixels = pixels.sub_(mean).div_(std)
        if self.flip and self.training:
            chosen = torch.rand(len(pixels), 1, 1, 1, device=pixels.device) < 0.5
            pixels = torch.where(chosen, pixels.flip(-1), pixels)
        logits: Tensor = self.net(pixels.contiguous(memory_format=self.layout))
        return logits


class SoftmaxRegression(nn.Module):
    """Logistic regression that returns probabilities, as the authors of FedFV trained it.

    Their loss takes the outputs for logits and applies the softmax a second time.
    """

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(784, classes)
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Probabilities."""
        return torch.softmax(self.layer(images.float().flatten(1)), 1)


def cifar_mlp_twice() -> nn.Module:
    """The MLP for CIFAR-10 with probabilities in place of logits, of which the loss takes the softmax a second time."""
    return nn.Sequential(cifar_mlp(), nn.Softmax(1))


def coloured(make: Callable[..., nn.Module], *arguments: int) -> Pixels:
    """A network with the papers' normalisation of CIFAR."""
    return Pixels(make(*arguments), CIFAR_MEAN, CIFAR_STD)


def grey(make: Callable[..., nn.Module], *arguments: int) -> Pixels:
    """A network for pixels in [0, 1]."""
    return Pixels(make(*arguments))


mlp = partial(grey, MLP)
three_mlp = partial(grey, MLP, 784, 200, 3)
cifar_mlp = partial(coloured, MLP, 3 * 32 * 32)
cifar_cnn = partial(coloured, CifarCNN)
narrow_cifar_cnn = partial(coloured, CifarCNN, 16)
cifar100_cnn = partial(coloured, CifarCNN, 64, 100)
nf_resnet = partial(coloured, NFResNet18)
nf_resnet_of_ten = partial(coloured, NFResNet18, 10)
mnist_cnn = partial(grey, MnistCNN)
narrow_mnist_cnn = partial(grey, MnistCNN, 8, 128)


def narrow_resnet() -> Pixels:
    """ResNet-10 of width 16, with ImageNet's normalisation."""
    return Pixels(ResNet10(width=16), IMAGENET_MEAN, IMAGENET_STD)


def tiny_resnet() -> Pixels:
    """ResNet-10 of width 8, with ImageNet's normalisation."""
    return Pixels(ResNet10(width=8), IMAGENET_MEAN, IMAGENET_STD, channels_last=True)


def flipping_resnet() -> Pixels:
    """The same with random mirroring in training."""
    return Pixels(ResNet10(width=16), IMAGENET_MEAN, IMAGENET_STD, flip=True, channels_last=True)


def wide_resnet() -> Pixels:
    """ResNet-10 of the published width, with random mirroring in training."""
    return Pixels(ResNet10(), IMAGENET_MEAN, IMAGENET_STD, flip=True, channels_last=True)


CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@cache
def seconds_per_sample(
    network: Callable[[], nn.Module], shape: tuple[int, ...], batch_size: int
) -> tuple[float, float]:
    """Of a training step and of a forward pass, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        net, images = network(), torch.randint(0, 256, (batch_size, *shape), dtype=torch.uint8)
    times = []
    for backward in (True, False):
        runs: list[float] = []
        while sum(runs) < 0.1 or len(runs) < 2:
            began = time.perf_counter()
            with torch.set_grad_enabled(backward):
                total = net(images).square().mean()
            if backward:
                total.backward()
            runs.append(time.perf_counter() - began)
        times.append(min(runs) / batch_size)
    torch.set_num_threads(threads)
    return times[0], times[1]
