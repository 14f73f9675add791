# SPDX-License-Identifier: Apache-2.0
"""The networks of the papers have the published sizes."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.papers.architectures import MLP, CifarCNN, MnistCNN, NFResNet18, ResNet10
from fl_lightning.core.layout import ParamLayout

# model, parameters, tensors, layers in the sense of ParamLayout's default, image shape
CASES = [
    (MLP, 199_210, 6, 3, (1, 28, 28)),
    (CifarCNN, 797_962, 10, 5, (3, 32, 32)),
    (MnistCNN, 1_663_370, 8, 4, (1, 28, 28)),
    (partial(NFResNet18, 10), 183_994, 34, 17, (3, 32, 32)),
    (ResNet10, 4_903_242, 38, 25, (3, 32, 32)),
]


@pytest.mark.parametrize(("make", "numel", "tensors", "layers", "shape"), CASES)
def test_sizes_and_shapes(make, numel, tensors, layers, shape):
    model = make()
    assert sum(p.numel() for p in model.parameters()) == numel
    assert len(list(model.parameters())) == tensors
    assert ParamLayout.from_module(model).num_layers == layers
    assert model(torch.rand(2, *shape)).shape == (2, 10)


def test_cifar_cnn_drops_as_the_papers_do():
    assert [m.p for m in CifarCNN().modules() if isinstance(m, nn.Dropout)] == [0.2, 0.5]


def test_channels_and_resolution_of_the_blocks():
    model, sizes = ResNet10(width=4).eval(), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    model(torch.rand(1, 3, 32, 24))
    assert sizes == [(4, 32, 24), (8, 16, 12), (16, 8, 6), (32, 4, 3)]
