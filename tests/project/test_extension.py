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
    assert registered("CUDA") == (set(_library.NAMES) - set(_library.COMPOSED) if EXTENSION.has_cuda() else set())


def test_without_the_extension_nothing_is_registered():
    """Else the test above would say nothing."""
    assert not registered("XLA")
    if EXTENSION is None:
        assert not registered("CPU") | registered("CUDA")
        assert {backend.implementation for backend in ops.backend().values()} == {"torch"}


def symbols(option):
    """Names and types of the extension's dynamic symbols, C++ names in plain text."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of GNU binutils")
    command = ["nm", "--dynamic", "--demangle", option, EXTENSION.__file__]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [re.match(r"(?:[0-9a-f]+)?\s*(\w) (.*)", line).groups() for line in lines]


@built
def test_only_the_entry_is_exported():
    """A template of the standard library that we export, compiled our way, could replace that of another library."""
    assert symbols("--defined-only") == [("T", "PyInit__C")]


@built
def test_only_stable_interfaces_are_used():
    """One binary for several releases: of torch its stable C functions, of Python the limited interface."""
    needed = [name for kind, name in symbols("--undefined-only") if kind == "U"]
    assert "torch_call_dispatcher" in needed
    unstable = re.compile(r"^(typeinfo for |vtable for )?(c10|at|torch|fl_lightning|pybind11)::")
    assert [name for name in needed if unstable.match(name)] == []
    assert {name for name in needed if re.match("_?Py", name)} == {
        "PyBool_FromLong",
        "PyModule_Create2",
        "PyUnicode_FromString",
    }
    assert ".abi3." in Path(EXTENSION.__file__).name
