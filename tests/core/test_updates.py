# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix


class Nested(nn.Module):
    """Owns parameters itself and through submodules, at two depths."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.block = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2, bias=False))
        self.block.shift = nn.Parameter(torch.zeros(5))
        self.offset = nn.Parameter(torch.zeros(2, 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_module_layers_join_what_one_submodule_owns():
    layout = ParamLayout.from_module(Nested())
    assert layout.names == ("scale", "offset", "block.shift", "block.0.weight", "block.0.bias", "block.2.weight")
    assert layout.shapes == ((), (2, 1), (5,), (2, 3), (2,), (2, 2))
    assert layout.sizes == (1, 2, 5, 6, 2, 4)
    assert layout.layer_names == ("model", "block", "block.0", "block.2")
    assert layout.layer_starts == (0, 3, 8, 16, 20)
    assert layout.numel == 20 == sum(p.numel() for p in Nested().parameters())
    assert layout.num_layers == 4
    assert layout.offsets.tolist() == [0, 3, 8, 16, 20]
    assert layout.offsets.dtype == torch.int64


def test_parameters_of_the_root_stay_apart_from_a_submodule_called_model():
    module = nn.Module()
    module.model = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.ones(3))
    layout = ParamLayout.from_module(module)
    assert layout.layer_names == ("root", "model")
    assert layout.layer_starts == (0, 3, 9)


def test_tensor_and_model_layers():
    tensors = ParamLayout.from_module(Nested(), "tensor")
    assert tensors.layer_names == tensors.names == tuple(n for n, _ in Nested().named_parameters())
    assert tensors.layer_starts == (0, 1, 3, 8, 14, 16, 20)
    whole = ParamLayout.from_module(Nested(), "model")
    assert (whole.layer_names, whole.layer_starts) == (("model",), (0, 20))
    assert whole == tensors.merged()


def test_explicit_layers_give_the_flat_order():
    layers = [["block.2.weight"], ["block.0.bias", "scale"], ["block.0.weight", "offset", "block.shift"]]
    layout = ParamLayout.from_module(Nested(), layers)
    assert layout.names == ("block.2.weight", "block.0.bias", "scale", "block.0.weight", "offset", "block.shift")
    assert layout.layer_names == ("block.2.weight", "block1", "block2")
    assert layout.layer_starts == (0, 4, 7, 20)
    module = Nested()
    assert [
        p is dict(module.named_parameters())[n] for p, n in zip(layout.parameters(module), layout.names, strict=True)
    ]
    assert [tuple(p.shape) for p in layout.parameters(module)] == list(layout.shapes)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([["scale"]], ["missing", "block.shift", "offset"]),
        ([["0.weight", "0.bias", "0.weight"]], ["twice ['0.weight']"]),
        ([["0.weight", "0.bias", "nose"]], ["unknown ['nose']"]),
        ([["0.weight", "0.bias"], []], ["layers[1]", "a sequence that is not empty, found []"]),
        (["0.weight", "0.bias"], ["layers[0]", "a sequence", "0.weight"]),
        ("modules", ["'module', 'tensor', 'model' or a sequence", "'modules': did you mean 'module'?"]),
        (3, ["a sequence", "3"]),
    ],
)
def test_layers_that_fit_nothing_are_refused(layers, words):
    module = Nested() if layers == [["scale"]] else nn.Sequential(nn.Linear(2, 2))
    with pytest.raises((TypeError, ValueError), match=r"layers.* must") as error:
        ParamLayout.from_module(module, layers)
    for word in words:
        assert word in str(error.value)


def test_tied_parameters_count_once_and_frozen_ones_not_at_all():
    layout = ParamLayout.from_module(Tied())
    assert layout.names == ("embed.weight",)
    assert layout.numel == 28
    module = Nested()
    module.block[0].requires_grad_(False)
    layout = ParamLayout.from_module(module)
    assert layout.names == ("scale", "offset", "block.shift", "block.2.weight")
    assert layout.layer_names == ("model", "block", "block.2")


def test_modules_that_cannot_be_laid_out():
    with pytest.raises(ValueError, match="at least one parameter that requires gradients"):
        ParamLayout.from_module(nn.ReLU())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="at least one parameter that requires gradients"):
        ParamLayout.from_module(frozen)
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0\.weight' is uninitialised: run one batch"):
        ParamLayout.from_module(lazy)
    partly = nn.Sequential(nn.Linear(2, 2), lazy)
    with pytest.raises(ValueError, match=r"'1\.0\.weight' is uninitialised: run one batch"):
        ParamLayout.from_module(partly, trained=["0.weight"])
    lazy(torch.zeros(2, 4))
    assert ParamLayout.from_module(lazy).sizes == (12, 3)


def test_empty_parameters_take_no_room():
    module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    module[1].none = nn.Parameter(torch.zeros(0, 3))
    layout = ParamLayout.from_module(module)
    assert layout.layer_starts == (0, 6, 6)
    assert layout.views(torch.arange(6.0))[2].shape == (0, 3)


def test_views_and_flatten_undo_each_other():
    layout = ParamLayout.from_module(Nested())
    flat = torch.arange(20.0)
    views = layout.views(flat)
    assert [tuple(v.shape) for v in views] == list(layout.shapes)
    assert torch.equal(layout.flatten(views), flat)
    assert layout.flatten(views).data_ptr() != flat.data_ptr()
    views[3].add_(100)  # block.0.weight, the slice 8:14
    assert flat.tolist() == [*range(8), *range(108, 114), *range(14, 20)]


def test_flatten_takes_tensors_in_logical_order_whatever_their_memory():
    layout = ParamLayout(("w",), ((2, 3),), ("w",), (0, 6))
    weight = torch.arange(6.0).view(3, 2).T.requires_grad_()
    assert layout.flatten([weight]).tolist() == [0, 2, 4, 1, 3, 5]
    assert not layout.flatten([weight]).requires_grad


def test_views_and_flatten_refuse_other_shapes():
    layout = ParamLayout.from_sizes([2, 3])
    with pytest.raises(ValueError, match=r"contiguous vector of 5 numbers, found shape \(4,\)"):
        layout.views(torch.zeros(4))
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        layout.views(torch.zeros(10)[::2])
    with pytest.raises(ValueError, match="layout's shapes"):
        layout.flatten([torch.zeros(2), torch.zeros(1, 3)])
    with pytest.raises(ValueError, match="layout's shapes"):
        layout.flatten([torch.zeros(2)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((("a",), ((2,), (3,)), ("a",), (0, 2)), "names and shapes"),
        ((("a",), ((2,),), ("a",), (0,)), "layer_starts must begin at 0 and be one longer than layer_names, found"),
        ((("a",), ((2,),), ("a",), (1, 2)), "begin at 0"),
        ((("a",), ((2,),), ("a", "b", "c"), (0, 2, 1, 2)), "must not decrease"),
        ((("a",), ((2,),), ("a",), (0, 3)), "must end at 2, found 3"),
        ((("a", "b"), ((2,), (3,)), ("x", "x"), (0, 2, 5)), "distinct"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        ParamLayout(*fields)


def test_a_layout_may_name_some_parameters_and_says_which_are_gone():
    module = Nested()
    layout = ParamLayout.from_module(module, trained=["block.shift", "scale", "offset"])
    assert layout.names == ("scale", "offset", "block.shift")
    module.offset.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layout must name parameters of Nested that require .* \['offset'\]"):
        layout.parameters(module)
    with pytest.raises(ValueError, match=r"trained must name parameters of Nested that require .* \['offset', 'no'\]"):
        ParamLayout.from_module(module, trained=["scale", "offset", "no"])


# ---- UpdateMatrix against plain torch


def matrix(m=4, dtype=torch.float32, sizes=(5, 0, 9, 3)):
    rows = torch.randn(m, sum(sizes), generator=torch.Generator().manual_seed(m)).to(dtype)
    return UpdateMatrix(rows, ParamLayout.from_sizes(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 4])
def test_products_are_per_layer_and_float64(m, dtype):
    updates = matrix(m, dtype)
    others = matrix(3, dtype).rows
    step = torch.randn(17, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert len(updates) == m
    for layer, part in enumerate([slice(0, 5), slice(5, 5), slice(5, 14), slice(14, 17)]):
        wide = updates.rows[:, part].double()
        torch.testing.assert_close(updates.gram()[layer], wide @ wide.T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(updates.cross_gram(others)[layer], wide @ others[:, part].double().T)
        torch.testing.assert_close(updates.dots(step)[layer], wide @ step[part].double())
    assert updates.gram() is updates.gram(), "computed once"
    assert updates.gram().dtype == updates.dots(step).dtype == updates.cross_gram(others).dtype == torch.float64


def test_combine_takes_one_coefficient_per_row_or_per_layer_and_row():
    updates = matrix()
    same = torch.tensor([0.5, -1.0, 2.0, 0.0])
    torch.testing.assert_close(updates.combine(same), same @ updates.rows)
    coeff = torch.randn(4, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    parts = [coeff[i].float() @ block for i, block in enumerate(updates.rows.split([5, 0, 9, 3], 1))]
    torch.testing.assert_close(updates.combine(coeff), torch.cat(parts), rtol=1e-5, atol=1e-6)
    start = torch.arange(17.0)
    out = start.clone()
    assert updates.combine(coeff, out=out) is out
    torch.testing.assert_close(out, start + torch.cat(parts), rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_fit_are_refused():
    layout = ParamLayout.from_sizes([2, 3])
    with pytest.raises(ValueError, match=r"rows must have shape \[m, 5\], found \(3, 4\)"):
        UpdateMatrix(torch.zeros(3, 4), layout)
    with pytest.raises(ValueError, match=r"rows must have shape \[m, 5\], found \(5,\)"):
        UpdateMatrix(torch.zeros(5), layout)
    with pytest.raises(ValueError, match=r"floating point, found torch\.int64"):
        UpdateMatrix(torch.zeros(3, 5, dtype=torch.int64), layout)
    with pytest.raises(ValueError, match="coeff"):
        UpdateMatrix(torch.zeros(3, 5), layout).combine(torch.ones(2))
    with pytest.raises(ValueError, match="step"):
        UpdateMatrix(torch.zeros(3, 5), layout).dots(torch.ones(4))
