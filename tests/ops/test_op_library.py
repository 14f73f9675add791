# SPDX-License-Identifier: Apache-2.0
"""Registration: schemas, shapes, mutation, torch.compile, and the report of implementations."""

import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from implementations import CHANGED, NO_GPU, every, samples

from fl_lightning import ops
from fl_lightning.ops import _extension, _library

SAMPLES = samples()
ROWS, OFFSETS = SAMPLES["layer_gram"]
COEFF = SAMPLES["layer_combine"][2]
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


UNKNOWN = "installed without compiled kernels (see docs/install.md: --no-build-isolation, a C++ compiler)"


def not_built(patch, record=None):
    patch.setitem(sys.modules, "fl_lightning._C", None)
    patch.setattr(torch, "__version__", "2.10.0")
    patch.setattr(_extension, "_RECORD", Path("built"))  # a build here has left its own
    if record is not None:
        Path("built").write_text(record)


def switched_off(patch):
    patch.setenv("FL_LIGHTNING_DISABLE_EXT", "1")


def other_platform(patch):
    not_built(patch)
    patch.setattr(sys, "platform", "win32")


def old_torch(patch):
    """Beside kernels, as pip installs the wheel for this platform, and nothing warns of them."""
    patch.setitem(sys.modules, "fl_lightning._C", SimpleNamespace())
    patch.setattr(torch, "__version__", "2.9.1+cpu")


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (switched_off, "switched off by FL_LIGHTNING_DISABLE_EXT=1"),
        (not_built, UNKNOWN),
        (partial(not_built, record="kernels for the processor; none for CUDA: no nvcc was found\n"), UNKNOWN),
        *(
            (partial(not_built, record=f"pure torch: {why}\n"), f"installed without compiled kernels: {why}")
            for why in ("there is no C++ compiler (c++)", "FL_LIGHTNING_NO_EXT=1")
        ),
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


@pytest.mark.parametrize(("value", "off"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("No", False)])
def test_the_switch_is_read_as_people_write_it(value, off, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_DISABLE_EXT", value)
    assert (_extension.load().reason == f"switched off by FL_LIGHTNING_DISABLE_EXT={value}") == off


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FL_LIGHTNING_ISA", "sse9", "avx512, avx2, base"),
        ("FL_LIGHTNING_ISA", "AVX2", "avx512, avx2, base"),
        ("FL_LIGHTNING_DISABLE_EXT", "maybe", "1, true, yes, on, 0, false, no, off"),
    ],
)
def test_variables_that_mean_nothing_are_refused(name, value, allowed, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be one of {allowed}, found '{value}'"):
        _extension.load()


def test_a_damaged_extension_warns_once_and_gives_way_to_pure_torch(monkeypatch):
    class Damaged:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "fl_lightning._C":
                raise ImportError("undefined symbol: aoti", name=name)

    monkeypatch.delenv("FL_LIGHTNING_DISABLE_EXT", raising=False)
    monkeypatch.delitem(sys.modules, "fl_lightning._C", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    monkeypatch.setattr(sys, "meta_path", [Damaged, *sys.meta_path])
    with pytest.warns(RuntimeWarning, match="do not load, so pure torch runs: undefined symbol: aoti") as caught:
        found = _extension.load()
    assert len(caught) == 1
    assert found.module is None
    assert "undefined symbol: aoti" in found.reason


MODULE = SimpleNamespace(instruction_set=lambda: "avx2")


@pytest.mark.parametrize(
    ("extension", "present", "implementation", "reason"),
    [
        (_extension.Extension(MODULE, "", no_cuda="no nvcc"), True, "cpu", "no nvcc; on the CPU: avx2"),
        (_extension.Extension(MODULE, "", cuda=True), False, "cpu", "no CUDA device; on the CPU: avx2"),
        (_extension.Extension(MODULE, "", cuda=True), True, "cuda", ""),
    ],
)
def test_what_a_loaded_extension_reports(extension, present, implementation, reason, monkeypatch):
    monkeypatch.setattr(_library, "EXTENSION", extension)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert ops.backend()["layer_gram"] == ops.Backend("layer_gram", implementation, reason)


class Loader:
    """Stands for both extensions; the one for CUDA may not load."""

    def __init__(self, problem):
        self.problem, self.asked = problem, []

    def __call__(self, name):
        self.asked.append(name)
        if name == "fl_lightning._C_cuda" and self.problem is not None:
            raise self.problem
        return MODULE


def leaving(*values):
    """A function of NVML that leaves values where its last arguments point."""

    def call(*arguments):
        for pointer, value in zip(arguments[-len(values) :], values, strict=True):
            pointer._obj.value = value
        return 0

    return call


NVML = SimpleNamespace(
    nvmlInit_v2=lambda: 0,
    nvmlDeviceGetCount_v2=leaving(1),
    nvmlDeviceGetHandleByIndex_v2=leaving(99),
    nvmlDeviceGetCudaComputeCapability=leaving(7, 0),
)


def test_a_gpu_older_than_the_kernels_runs_pure_torch(monkeypatch, tmp_path):
    (tmp_path / "built").write_text("kernels for the processor and for CUDA 7.5;8.0;9.0a;10.0+PTX\n")
    monkeypatch.delenv("FL_LIGHTNING_DISABLE_EXT", raising=False)
    monkeypatch.setattr(_extension, "_RECORD", tmp_path / "built")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    loader = Loader(None)
    monkeypatch.setattr(_extension.importlib, "import_module", loader)
    monkeypatch.setattr(_extension.ctypes, "CDLL", lambda name: NVML)
    found = _extension.load()
    assert loader.asked == ["fl_lightning._C"]
    monkeypatch.setattr(_library, "EXTENSION", found)
    reason = "the CUDA kernels were built for compute capability 7.5;8.0;9.0a;10.0+PTX, and GPUs here have 7.0"
    assert ops.backend()["layer_gram"] == ops.Backend("layer_gram", "cpu", f"{reason}; on the CPU: avx2")


@pytest.mark.parametrize(
    ("architectures", "runs", "fails"),
    [
        (
            "7.5;8.0;9.0a;10.0+PTX",
            [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)],
            [(6, 1), (7, 0), (7, 2)],
        ),
        ("9.0a", [(9, 0)], [(8, 0), (10, 0)]),
        ("8.6 9.0", [(8, 6), (8, 9), (9, 0)], [(8, 0), (7, 5), (10, 0)]),
        ("Turing", [(7, 0)], []),  # nobody knows
    ],
)
def test_which_gpus_run_the_kernels(architectures, runs, fails, monkeypatch):
    monkeypatch.setattr(_extension, "built", lambda: f"kernels for the processor and for CUDA {architectures}")
    for capability in (*runs, *fails):
        monkeypatch.setattr(_extension, "_capabilities", lambda own=capability: [own])
        assert bool(_extension._unsuitable()) == (capability in fails), capability
    monkeypatch.setattr(_extension, "_capabilities", lambda: [*runs, *fails])
    assert _extension._unsuitable() == ""


MISSING = "libtorch_cuda.so: cannot open shared object file"


@pytest.mark.parametrize(
    ("release", "problem", "no_cuda", "asked"),
    [
        (None, OSError(MISSING), "torch is a build without CUDA", ["_C"]),
        ("13.0", OSError(MISSING), f"the CUDA kernels do not load: {MISSING}", ["_C", "_C_cuda"]),
        (
            "13.0",
            ModuleNotFoundError(name="fl_lightning._C_cuda"),
            "the extension was built without CUDA kernels (no nvcc was found (set CUDA_HOME))",
            ["_C", "_C_cuda"],
        ),
        ("13.0", None, "", ["_C", "_C_cuda"]),
    ],
)
def test_kernels_for_the_processor_load_whatever_those_for_cuda_do(
    release, problem, no_cuda, asked, monkeypatch, tmp_path, recwarn
):
    (tmp_path / "built").write_text("kernels for the processor; none for CUDA: no nvcc was found (set CUDA_HOME)\n")
    monkeypatch.delenv("FL_LIGHTNING_DISABLE_EXT", raising=False)
    monkeypatch.setattr(_extension, "_RECORD", tmp_path / "built")
    monkeypatch.setattr(torch.version, "cuda", release)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    loader = Loader(problem)
    monkeypatch.setattr(_extension.importlib, "import_module", loader)
    found = _extension.load()
    assert found == _extension.Extension(MODULE, "", not no_cuda, no_cuda)
    assert loader.asked == [f"fl_lightning.{name}" for name in asked]
    warned = [str(w.message) for w in recwarn.list if w.category is RuntimeWarning]
    assert len(warned) == ("do not load" in no_cuda)
    assert all(w.startswith("the CUDA kernels of fl_lightning do not load, so pure torch runs on CUDA") for w in warned)
