# SPDX-License-Identifier: Apache-2.0
"""The two files that see torch compile with its headers alone: no nvcc, no CUDA.

With those of the installed torch, or of the release whose folder of headers FL_LIGHTNING_TORCH_HEADERS names. A
workflow names the oldest release that setup.py promises: a later one has names that it lacks.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
GIVEN = os.environ.get("FL_LIGHTNING_TORCH_HEADERS")
HEADERS = Path(GIVEN) if GIVEN else Path(torch.__file__).parent / "include"
COMPILER = shlex.split(os.environ.get("CXX", "c++"))


def promised():
    """The oldest release of torch for kernels."""
    spec = importlib.util.spec_from_file_location("fl_lightning_setup", ROOT / "setup.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.TORCH


@pytest.mark.skipif(not GIVEN, reason="FL_LIGHTNING_TORCH_HEADERS names no headers of another torch")
def test_the_headers_are_those_of_the_oldest_release():
    text = (HEADERS / "torch" / "headeronly" / "version.h").read_text()
    assert tuple(int(re.search(rf"TORCH_VERSION_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")) == promised()


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler")
@pytest.mark.skipif(not (HEADERS / "torch" / "csrc" / "stable").is_dir(), reason="this torch has no stable interface")
@pytest.mark.skipif(not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="no headers of Python")
@pytest.mark.parametrize("source", ["extension.cpp", "extension_cuda.cpp"])
def test_the_wrappers_compile(source):
    major, minor = promised()
    command = [
        *COMPILER, "-std=c++20", "-fsyntax-only", "-Wall", "-DPy_LIMITED_API=0x030A0000",
        f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000", f"-isystem{HEADERS}",
        f"-I{sysconfig.get_path('include')}", str(ROOT / "csrc" / source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
