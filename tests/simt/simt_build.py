# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA sources for the processor."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
HARNESS = ("simt.cpp", "shared.cpp", "mma.cpp", "warpgroup.cpp", "entry.cpp", "faults.cpp")
CUDA = HERE.parents[1] / "csrc" / "cuda"
# Contraction is off because the processor's kernels and the reference have none; longjmp between stacks upsets FORTIFY.
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
# A vector at an address that is no multiple of its size is a fault on a device. Here it ends the process (SIGILL).
_ALIGNMENT = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")


def compiler():
    """A C++ compiler, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def compile_source(source, folder):
    """Object file of one source, with the stand-ins for CUDA's headers."""
    target = Path(folder) / f"{source.stem}.o"
    run([compiler(), *_FLAGS, *_ALIGNMENT, f"-I{HERE / 'include'}", "-x", "c++", "-c", str(source), "-o", str(target)])
    return target


def compile_all(sources, folder, workers):
    """Object files by the stems of their sources."""
    with ThreadPoolExecutor(workers) as pool:
        targets = pool.map(lambda source: compile_source(source, folder), sources)
        return {source.stem: target for source, target in zip(sources, targets, strict=True)}


def sources(kernels):
    """All kernels' sources of a folder, and the harness."""
    return [*sorted(kernels.rglob("*.cu")), *(HERE / name for name in HARNESS)]


def link(objects, target):
    run([compiler(), "-shared", "-o", str(target), *map(str, objects)])
    return target


def relink(source, objects, folder, target):
    """The library of some objects, by stem, in which one source is compiled anew."""
    folder.mkdir(exist_ok=True)
    # First: of a function that several sources have, the linker takes the one it meets first.
    others = [path for stem, path in objects.items() if stem != source.stem]
    return link([compile_source(source, folder), *others], target)


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[-4000:]}"
