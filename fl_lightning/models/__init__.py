# SPDX-License-Identifier: Apache-2.0
"""Models: the small networks of the papers' experiments, as plain modules that return logits.

``ClientModule`` is a module to inherit from, ``server_optimizers`` holds optimizers for the server's step.

Uses ``lightning`` and ``arguments``.
"""

from fl_lightning.models.nf_resnet import NFResNet18
from fl_lightning.models.resnet10 import ResNet10
from fl_lightning.models.small import MLP, CifarCNN, LeNet, MnistCNN

__all__ = ["MLP", "CifarCNN", "LeNet", "MnistCNN", "NFResNet18", "ResNet10"]
