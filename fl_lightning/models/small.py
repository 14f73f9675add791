# SPDX-License-Identifier: Apache-2.0
"""The small networks of the FedFV, FedMDFG and FedLF experiments, with PyTorch's default initialisation."""

from __future__ import annotations

from torch import Tensor, nn

from fl_lightning.arguments import Bounds, checked
from fl_lightning.models._shape import check_images


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
        check_images(images, self.channels, self.side)
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
