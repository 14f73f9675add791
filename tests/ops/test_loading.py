# SPDX-License-Identifier: Apache-2.0
"""Which extensions are loaded, and the one reason why not."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fl_lightning import ops
from fl_lightning.ops import _extension, _library

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


def built(patch, record, cuda, problem):
    """Extensions that a build has left with this record, beside a torch for a release of CUDA; their loader."""
    Path("built").write_text(record)
    patch.delenv("FL_LIGHTNING_DISABLE_EXT", raising=False)
    patch.setattr(_extension, "_RECORD", Path("built"))
    patch.setattr(torch.version, "cuda", cuda)
    patch.setattr(torch, "__version__", "2.10.0")
    loader = Loader(problem)
    patch.setattr(_extension.importlib, "import_module", loader)
    return loader


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


def test_a_gpu_older_than_the_kernels_runs_pure_torch(monkeypatch):
    loader = built(monkeypatch, "kernels for the processor and for CUDA 7.5;8.0;9.0a;10.0+PTX\n", "13.0", None)
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
    release, problem, no_cuda, asked, monkeypatch, recwarn
):
    record = "kernels for the processor; none for CUDA: no nvcc was found (set CUDA_HOME)\n"
    loader = built(monkeypatch, record, release, problem)
    found = _extension.load()
    assert found == _extension.Extension(MODULE, "", not no_cuda, no_cuda)
    assert loader.asked == [f"fl_lightning.{name}" for name in asked]
    warned = [str(w.message) for w in recwarn.list if w.category is RuntimeWarning]
    assert len(warned) == ("do not load" in no_cuda)
    assert all(w.startswith("the CUDA kernels of fl_lightning do not load, so pure torch runs on CUDA") for w in warned)
