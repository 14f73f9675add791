# SPDX-License-Identifier: Apache-2.0
"""Registration: schemas, shapes, mutation, torch.compile, and the report of implementations."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fl_lightning import ops
from fl_lightning.ops import _extension, _library

ROWS = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
OFFSETS = torch.tensor([0, 20, 20, 50])
GRAM = (ROWS.double() @ ROWS.double().T).expand(2, 3, 3).contiguous()
COEFF = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SAMPLES = {
    "layer_gram": (ROWS, OFFSETS),
    "layer_cross_gram": (ROWS, ROWS[:2].bfloat16(), OFFSETS),
    "layer_dots": (ROWS, ROWS[0], OFFSETS),
    "layer_combine": (ROWS.half(), OFFSETS, COEFF),
    "layer_combine_add": (torch.zeros(50), ROWS, OFFSETS, COEFF),
    "project_conflicts": (GRAM, torch.tensor([2, 0, 1]), torch.tensor([True, False, False])),
    "min_norm": (GRAM,),
    "puc_track": (ROWS[0], torch.zeros(50, dtype=torch.uint8), 1, 2, OFFSETS),
    "puc_combine": (ROWS, torch.full((3, 2), -1, dtype=torch.int32), torch.ones(3)),
}


def test_every_op_has_a_sample():
    assert set(SAMPLES) == set(_library.NAMES)


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    arguments = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in SAMPLES[name])
    torch.library.opcheck(getattr(torch.ops.fl_lightning, name).default, arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_graph_breaks(backend):
    def server_step(rows, offsets, coeff):
        gram = ops.layer_gram(rows, offsets)
        lam, _ = ops.min_norm(gram)
        step = ops.layer_combine(rows, offsets, lam)
        out = torch.zeros_like(step)
        ops.layer_combine(rows, offsets, coeff, out)
        return step + out, ops.layer_dots(rows, step, offsets)

    want = server_step(ROWS, OFFSETS, COEFF)
    got = torch.compile(server_step, backend=backend, fullgraph=True)(ROWS, OFFSETS, COEFF)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_compiled_tracking_changes_the_counts_in_place():
    def track(row, counts, offsets):
        return ops.puc_track(row, counts, 1, 2, offsets)

    counts, again = torch.ones(50, dtype=torch.uint8), torch.ones(50, dtype=torch.uint8)
    want = track(ROWS[0], counts, OFFSETS)
    got = torch.compile(track, backend="aot_eager", fullgraph=True)(ROWS[0], again, OFFSETS)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert torch.equal(counts, again)
    assert counts.max() == 2


def test_backend_reports_every_public_op():
    report = ops.backend()
    assert set(report) == {name for name in ops.__all__ if name not in ("Backend", "backend")}
    assert all(name == backend.op for name, backend in report.items())
    (implementation,) = {backend.implementation for backend in report.values()}
    (reason,) = {backend.reason for backend in report.values()}
    assert implementation in (("torch",) if _library.EXTENSION.module is None else ("cpu", "cuda"))
    assert bool(reason) == (implementation != "cuda")


def not_built(patch):
    patch.setitem(sys.modules, "fl_lightning._C", None)


def switched_off(patch):
    patch.setenv("FL_LIGHTNING_DISABLE_EXT", "1")


def other_platform(patch):
    not_built(patch)
    patch.setattr(sys, "platform", "win32")


def old_torch(patch):
    not_built(patch)
    patch.setattr(torch, "__version__", "2.9.1+cpu")


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (switched_off, "switched off by FL_LIGHTNING_DISABLE_EXT=1"),
        (not_built, "no compiled extension in this installation"),
        (other_platform, "compiled kernels are for Linux, this is win32"),
        (old_torch, "compiled kernels need torch 2.10, this is 2.9.1+cpu"),
    ],
)
def test_why_there_is_no_extension(situation, reason, monkeypatch, recwarn):
    monkeypatch.delenv("FL_LIGHTNING_DISABLE_EXT", raising=False)
    with monkeypatch.context() as patch:
        situation(patch)
        found = _extension.load()
    assert found == _extension.Extension(None, reason)
    assert not recwarn
    monkeypatch.setattr(_library, "EXTENSION", found)
    assert {(b.implementation, b.reason) for b in ops.backend().values()} == {("torch", reason)}


def test_a_damaged_extension_warns_once_and_gives_way_to_pure_torch(monkeypatch):
    class Damaged:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "fl_lightning._C":
                raise ImportError("undefined symbol: aoti", name=name)

    monkeypatch.delenv("FL_LIGHTNING_DISABLE_EXT", raising=False)
    monkeypatch.delitem(sys.modules, "fl_lightning._C", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Damaged, *sys.meta_path])
    with pytest.warns(RuntimeWarning, match="do not load, so pure torch runs: undefined symbol: aoti") as caught:
        found = _extension.load()
    assert len(caught) == 1
    assert found.module is None
    assert "undefined symbol: aoti" in found.reason


@pytest.mark.parametrize(
    ("built", "present", "implementation", "reason"),
    [
        (False, True, "cpu", "the extension was built without CUDA kernels; on the CPU: avx2"),
        (True, False, "cpu", "no CUDA device; on the CPU: avx2"),
        (True, True, "cuda", ""),
    ],
)
def test_what_a_loaded_extension_reports(built, present, implementation, reason, monkeypatch):
    module = SimpleNamespace(has_cuda=lambda: built, instruction_set=lambda: "avx2")
    monkeypatch.setattr(_library, "EXTENSION", _extension.Extension(module, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert ops.backend()["layer_gram"] == ops.Backend("layer_gram", implementation, reason)


def test_results_on_a_meta_device_have_the_right_shapes():
    rows = torch.empty(4, 50, device="meta")
    assert ops.layer_gram(rows, OFFSETS).shape == (3, 4, 4)
    assert ops.layer_combine(rows, OFFSETS, torch.empty(3, 4, device="meta")).shape == (50,)
