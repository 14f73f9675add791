# SPDX-License-Identifier: Apache-2.0
"""The compiled extension of this installation: what it registers, exports and asks of others."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fl_lightning import ops
from fl_lightning.ops import _library

ROOT = Path(__file__).parents[2]
EXTENSION = _library.EXTENSION.module
built = pytest.mark.skipif(EXTENSION is None, reason=f"no compiled kernels: {_library.EXTENSION.reason}")
# `make test` says so, because it has just built whatever can be built here.
MUST_BE_BUILT = os.environ.get("FL_LIGHTNING_TEST_KERNELS") == "built" and "FL_LIGHTNING_DISABLE_EXT" not in os.environ


def registered(key):
    """The ops that have a kernel of their own for a dispatch key."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in _library.NAMES if has(f"fl_lightning::{name}", key)}


def can_be_built():
    """The dispatch keys for which kernels could be built here."""
    spec = importlib.util.spec_from_file_location("fl_lightning_setup", ROOT / "setup.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    from torch.utils import cpp_extension

    keys = set()
    with contextlib.suppress(script.CannotBuildError):
        script.check_kernels()
        keys.add("CPU")
        script.find_cuda(torch.version.cuda, cpp_extension.CUDA_HOME)
        keys.add("CUDA")
    return keys


@pytest.mark.skipif(not MUST_BE_BUILT, reason="nobody says that the kernels have just been built")
def test_whatever_can_be_built_here_is_built_and_registered():
    """A build that quietly lost its CUDA kernels, or all of them, must not pass for a good one. No GPU is needed."""
    possible = can_be_built()
    assert {key for key in ("CPU", "CUDA") if registered(key)} == possible
    assert (EXTENSION is not None) == bool(possible)


@built
def test_every_op_is_registered():
    assert registered("CPU") == set(_library.NAMES)
    own = set(_library.NAMES) - set(_library.COMPOSED)
    assert registered("CUDA") == (own if _library.EXTENSION.cuda else set())


def test_without_the_extension_nothing_is_registered():
    """Else the test above would say nothing."""
    assert not registered("XLA")
    if EXTENSION is None:
        assert not registered("CPU") | registered("CUDA")
        assert {backend.implementation for backend in ops.backend().values()} == {"torch"}


def library(name):
    """The file of an extension; skips where it is not built."""
    found = [] if EXTENSION is None else sorted(Path(EXTENSION.__file__).parent.glob(f"{name}.*so"))
    if not found:
        pytest.skip(f"no {name} is built")
    return found[0]


def symbols(name, option):
    """Names and types of an extension's dynamic symbols, C++ names in plain text."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of GNU binutils")
    command = ["nm", "--dynamic", "--demangle", option, str(library(name))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [re.match(r"(?:[0-9a-f]+)?\s*(\w) (.*)", line).groups() for line in lines]


@pytest.mark.parametrize("name", ["_C", "_C_cuda"])
def test_only_the_entry_is_exported(name):
    """A template of the standard library that we export, compiled our way, could replace that of another library."""
    assert symbols(name, "--defined-only") == [("T", f"PyInit_{name}")]


@pytest.mark.parametrize(
    ("name", "of_python"), [("_C", {"PyModule_Create2", "PyUnicode_FromString"}), ("_C_cuda", {"PyModule_Create2"})]
)
def test_only_stable_interfaces_are_used(name, of_python):
    """One binary for several releases: of torch its stable C functions, of Python the limited interface."""
    needed = [found for kind, found in symbols(name, "--undefined-only") if kind == "U"]
    assert "torch_call_dispatcher" in needed
    unstable = re.compile(r"^(typeinfo for |vtable for )?(c10|at|torch|fl_lightning|pybind11)::")
    assert [found for found in needed if unstable.match(found)] == []
    assert {found for found in needed if re.match("_?Py", found)} == of_python
    assert ".abi3." in library(name).name


def test_the_kernels_for_the_processor_need_nothing_of_cuda():
    """They load beside a torch without CUDA, which has no libtorch_cuda.so."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf, of GNU binutils")
    command = ["readelf", "--dynamic", "--wide", str(library("_C"))]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", subprocess.run(command, capture_output=True, text=True).stdout)
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if "cuda" in name] == []
