# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.core.layout import ParamLayout
from fl_lightning.models import MLP, CifarCNN, LeNet, MnistCNN, NFResNet18, ResNet10
from fl_lightning.models.networks import ScaledStdConv2d

# model, parameters, tensors, layers in the sense of ParamLayout's default, image shape, classes
CASES = [
    (MLP, 199_210, 6, 3, (1, 28, 28), 10),
    (CifarCNN, 797_962, 10, 5, (3, 32, 32), 10),
    (MnistCNN, 1_663_370, 8, 4, (1, 28, 28), 10),
    (LeNet, 62_006, 10, 5, (3, 32, 32), 10),
    (NFResNet18, 189_844, 34, 17, (3, 32, 32), 100),
    (ResNet10, 4_903_242, 38, 25, (3, 32, 32), 10),
]


@pytest.mark.parametrize(("make", "numel", "tensors", "layers", "shape", "classes"), CASES)
def test_sizes_and_shapes(make, numel, tensors, layers, shape, classes):
    torch.manual_seed(0)
    model = make()
    assert sum(p.numel() for p in model.parameters()) == numel
    assert len(list(model.parameters())) == tensors
    assert ParamLayout.from_module(model).num_layers == layers
    logits = model(torch.rand(2, *shape))
    assert logits.shape == (2, classes)
    F.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert all(float(p.grad.norm()) > 0 for p in model.parameters())


@pytest.mark.parametrize("make", [CifarCNN, MnistCNN, LeNet, NFResNet18, ResNet10])
def test_wrong_images_are_refused_with_the_shape_found(make):
    with pytest.raises(ValueError, match=r"images must have shape .*, found \[2, 2, 32, 32\]"):
        make()(torch.rand(2, 2, 32, 32))


@pytest.mark.parametrize(("make", "channels"), [(CifarCNN, 3), (MnistCNN, 1), (LeNet, 3)])
def test_fixed_size_models_refuse_other_sizes(make, channels):
    with pytest.raises(ValueError, match=r"found \[2, \d, 30, 30\]"):
        make()(torch.rand(2, channels, 30, 30))


def test_mlp_takes_flat_and_shaped_samples_and_names_a_mismatch():
    model = MLP(in_features=64, hidden=8, num_classes=3)
    assert torch.equal(model(torch.ones(2, 8, 8)), model(torch.ones(2, 64)))
    with pytest.raises(ValueError, match=r"64 numbers per sample, found shape \[2, 65\]"):
        model(torch.ones(2, 65))


def test_cifar_cnn_dropout():
    images = torch.rand(2, 3, 32, 32)
    dropped, plain = CifarCNN(), CifarCNN(dropout=(0.0, 0.0))
    assert [m.p for m in dropped.modules() if isinstance(m, nn.Dropout)] == [0.2, 0.5]
    assert not torch.equal(dropped(images), dropped(images))
    assert torch.equal(plain(images), plain(images))
    dropped.eval()
    assert torch.equal(dropped(images), dropped(images))


def test_default_initialisation_of_linear_layers():
    torch.manual_seed(3)
    model = MLP()
    torch.manual_seed(3)
    first = nn.Linear(784, 200)
    assert torch.equal(model.layers[0].weight, first.weight)
    assert torch.equal(model.layers[0].bias, first.bias)


def test_scaled_std_conv_against_its_formula():
    torch.manual_seed(0)
    conv = ScaledStdConv2d(3, 4, 3, stride=2).double()
    with torch.no_grad():
        conv.gain.copy_(torch.rand(4, 1, 1, 1))
    images = torch.rand(2, 3, 9, 9, dtype=torch.float64)
    weight = torch.empty_like(conv.weight)
    for channel in range(4):
        w = conv.weight[channel]
        weight[channel] = conv.gain[channel] * (w - w.mean()) / (math.sqrt(27) * (w.std(correction=0) + 1e-5))
    expected = F.conv2d(images, weight, stride=2, padding=1)
    assert torch.allclose(conv(images), expected, rtol=0, atol=1e-12)


def test_nf_resnet_initialisation():
    torch.manual_seed(0)
    convolutions = [m for m in NFResNet18().modules() if isinstance(m, ScaledStdConv2d)]
    assert len(convolutions) == 16
    for conv in convolutions:
        assert torch.equal(conv.gain, torch.ones_like(conv.gain))
        fan_in = conv.weight[0].numel()
        tolerance = 5 / math.sqrt(2 * conv.weight.numel())  # five standard errors of a standard deviation
        assert float(conv.weight.detach().std()) * math.sqrt(fan_in) == pytest.approx(1.0, rel=tolerance)


def test_nf_resnet_block_is_the_described_sum():
    torch.manual_seed(0)
    first, second = NFResNet18().blocks[0], NFResNet18().blocks[1]
    images = torch.randn(2, 64, 6, 6)
    assert isinstance(first.shortcut, ScaledStdConv2d)
    act = lambda x: 1.71396 * torch.relu(x)  # noqa: E731
    branch = first.conv2(act(first.conv1(act(images))))
    assert torch.allclose(first(images), first.shortcut(images) + 0.2 * branch, atol=1e-6)
    narrow = torch.randn(2, 16, 6, 6)
    assert isinstance(second.shortcut, nn.Identity)
    assert torch.allclose(second(narrow), narrow + 0.2 * second.conv2(act(second.conv1(act(narrow)))), atol=1e-6)


def test_only_resnet10_has_buffers_and_any_image_size_works():
    assert [make.__name__ for make, *_ in CASES if list(make().buffers())] == ["ResNet10"]
    assert ResNet10(width=4, num_classes=7).eval()(torch.rand(1, 3, 48, 40)).shape == (1, 7)
    assert NFResNet18(num_classes=7, in_channels=1)(torch.rand(1, 1, 64, 64)).shape == (1, 7)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ResNet10(width=4), [(4, 32), (8, 16), (16, 8), (32, 4)]),
        (NFResNet18, [(16, 16), (16, 16), (32, 8), (32, 8), (64, 4), (64, 4)]),
    ],
)
def test_channels_and_resolution_of_the_blocks(make, expected):
    model = make().eval()
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:3])))
    model(torch.rand(1, 3, 32, 32))
    assert sizes == expected
