# SPDX-License-Identifier: Apache-2.0
"""Builds the CUDA sources for the processor."""

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
HARNESS = ("simt.cpp", "shared.cpp", "device_memory.cpp", "mma.cpp", "warpgroup.cpp", "entry.cpp", "faults.cu")
CUDA = HERE.parents[1] / "csrc" / "cuda"
KEPT = HERE.parents[1] / "build" / "simt" / "objects"  # of all runs, by what they are compiled from
# Contraction is off because the processor's kernels and the reference have none; longjmp between stacks upsets FORTIFY.
_FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
# A vector at an address that is no multiple of its size is a fault on a device. Here it ends the process (SIGILL).
_ALIGNMENT = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
# In device code every access of memory calls a function of device_memory.cpp.
_WATCHED = ("-fsanitize=thread", "-fno-threadsafe-statics")


def compiler():
    """A C++ compiler, or None."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def compile_source(source, folder, level="-O1"):
    """Object file of one source, with the stand-ins for CUDA's headers, unless another run has compiled the same.

    The level is that of device code; the harness is compiled once for many calls.
    """
    target = Path(folder) / f"{source.stem}.o"
    flags = (*((level, *_WATCHED) if source.suffix == ".cu" else ("-O3",)), *_FLAGS, *_ALIGNMENT)
    command = [compiler(), *flags, f"-I{HERE / 'include'}", "-x", "c++", str(source)]
    text = run([compiler(), "--version"]) + repr(flags) + run([*command, "-E", "-P"])
    kept = KEPT / f"{hashlib.sha256(text.encode()).hexdigest()}.o"
    if not kept.exists():
        run([*command, "-c", "-o", str(target)])
        KEPT.mkdir(parents=True, exist_ok=True)
        part = Path(shutil.copyfile(target, f"{kept}.{os.getpid()}"))
        part.replace(kept)
    return Path(shutil.copyfile(kept, target))


def compile_all(sources, folder, workers):
    """Object files by the stems of their sources."""
    with ThreadPoolExecutor(workers) as pool:
        targets = pool.map(lambda source: compile_source(source, folder), sources)
        return {source.stem: target for source, target in zip(sources, targets, strict=True)}


def sources(kernels):
    """All kernels' sources of a folder, and the harness."""
    return [*sorted(kernels.rglob("*.cu")), *(HERE / name for name in HARNESS)]


def link(objects, target):
    """A library. Of a function that several sources have, such as those of strings, that of the harness counts."""
    objects = sorted(objects, key=lambda path: f"{path.stem}.cpp" not in HARNESS)
    run([compiler(), "-shared", "-o", str(target), *map(str, objects)])
    return target


def relink(source, objects, folder, target, level="-O1"):
    """The library of some objects, by stem, in which one source is compiled anew."""
    folder.mkdir(exist_ok=True)
    # First: of a kernel that several sources have, the one that the linker meets first counts.
    others = [path for stem, path in objects.items() if stem != source.stem]
    return link([compile_source(source, folder, level), *others], target)


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[-4000:]}"
    return result.stdout
