# SPDX-License-Identifier: Apache-2.0
"""Models: the small networks of the papers' experiments, as plain modules that return logits.

``ClientModule`` is a module to inherit from.

Uses ``lightning`` and ``arguments``.
"""

from fl_lightning.models.networks import MLP, CifarCNN, LeNet, MnistCNN, NFResNet18, ResNet10

__all__ = ["MLP", "CifarCNN", "LeNet", "MnistCNN", "NFResNet18", "ResNet10"]
