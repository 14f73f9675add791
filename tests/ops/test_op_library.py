# SPDX-License-Identifier: Apache-2.0
"""Registration: schemas, shapes, mutation, torch.compile, and the report of implementations."""

import shutil

import pytest
import torch
from implementations import CHANGED, NO_GPU, every, samples

from fl_lightning import ops
from fl_lightning.ops import _library

SAMPLES = samples()
PUBLIC = {
    **{name: getattr(ops, name) for name in _library.NAMES if name not in _library.VARIANTS},
    "layer_chosen_gram": ops.layer_cross_gram,
    "common_descent": lambda gram, online, scale, weights, zero_row, zero_direction, rounding: ops.common_descent(
        gram, online, scale, weights, zero_row=zero_row, zero_direction=zero_direction, rounding=rounding
    ),
    "layer_combine_add": lambda out, rows, offsets, coeff: ops.layer_combine(rows, offsets, coeff, out),
}
INDUCTOR = pytest.param(
    "inductor", marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")]
)


def test_every_op_has_a_sample():
    assert set(SAMPLES) == set(_library.NAMES)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name, device):
    arguments = [a.clone() if torch.is_tensor(a) else a for a in SAMPLES[name]]
    moved = [a.to(device) if torch.is_tensor(a) and a.dtype != torch.int64 else a for a in arguments]
    torch.library.opcheck(getattr(torch.ops.fl_lightning, name).default, tuple(moved))


def test_ops_that_write_are_those_whose_schema_says_so():
    schemas = {name: getattr(torch.ops.fl_lightning, name).default._schema for name in SAMPLES}
    writes = {n: [i for i, a in enumerate(s.arguments) if a.alias_info is not None] for n, s in schemas.items()}
    assert {name: places for name, places in writes.items() if places} == {n: [i] for n, i in CHANGED.items()}


@every
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("backward", [False, True])
def test_what_an_op_writes_to_rises_in_its_version(name, backward, call):
    """Autograd notices then that values are gone which it has kept for a backward pass."""
    arguments, place = call.moved(SAMPLES[name]), CHANGED[name]
    written = arguments[place] = arguments[place].clone()
    loss = None
    if backward and written.is_floating_point():
        loss = (written.requires_grad_() ** 2).sum()
    before = written._version
    with torch.no_grad():
        call.find(name)(*arguments)
    assert written._version > before
    if loss is not None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every
@pytest.mark.parametrize("name", CHANGED)
def test_an_op_does_not_write_where_it_reads(name, call):
    def run(written, rows):
        arguments = list(SAMPLES[name])
        arguments[CHANGED[name]], arguments[1 - CHANGED[name]] = written, rows
        call.find(name)(*arguments)

    room = torch.zeros(4, 64, device=call.device)
    adds = name == "layer_combine_add"
    rows = room[:3, :50] if adds else room[0, :50]
    own = room if adds else room.view(torch.int32)
    for overlapping in (own[0, :50], own[0, 1:51], own[0, 49:64].new_zeros(1).expand(50)):
        with pytest.raises((ValueError, RuntimeError), match=r"share no memory|one place in memory"):
            run(overlapping, rows)
    run(own[3, :50], rows)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("name", SAMPLES)
def test_every_public_function_compiles_without_graph_breaks(name, backend):
    def outcome(function):
        arguments = [a.clone() if torch.is_tensor(a) else a for a in SAMPLES[name]]
        result = function(*arguments)
        return [*(result if isinstance(result, tuple) else (result,)), *filter(torch.is_tensor, arguments)]

    torch.compiler.reset()
    want, got = outcome(PUBLIC[name]), outcome(torch.compile(PUBLIC[name], backend=backend, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_backend_reports_every_public_op():
    report = ops.backend()
    assert set(report) == {name for name in ops.__all__ if name not in ("Backend", "backend")}
    assert all(name == backend.op for name, backend in report.items())
    (implementation,) = {backend.implementation for backend in report.values()}
    (reason,) = {backend.reason for backend in report.values()}
    assert implementation in (("torch",) if _library.EXTENSION.module is None else ("cpu", "cuda"))
    assert bool(reason) == (implementation != "cuda")
