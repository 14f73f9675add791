# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled kernels; everything else is in pyproject.toml.

Environment:
    FL_LIGHTNING_NO_EXT=1    pure torch, no compiler needed
    FORCE_CUDA=1             CUDA kernels even if no nvcc is found by itself (then an error says what is missing)
    TORCH_CUDA_ARCH_LIST     architectures, default 8.0;9.0;10.0+PTX
    MAX_JOBS, DEBUG=1        as torch.utils.cpp_extension has them
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def note(text: str) -> None:
    """One line that survives pip's filtering if the build is verbose or fails."""
    print(f"fl-lightning: {text}", file=sys.stderr)


def pip_cuda() -> list[Path]:
    """Folders in which pip's CUDA packages keep headers and libraries (torch's headers want cusparse.h and others)."""
    folders = {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")), *map(Path, sys.path)}
    return sorted(found for folder in folders if folder.is_dir() for found in folder.glob("nvidia/cu1[0-9]"))


def wants_cuda(torch_cuda: str | None, cuda_home: str | None) -> bool:
    """Whether to build CUDA kernels; raises SystemExit if they were demanded and cannot be."""
    forced = os.environ.get("FORCE_CUDA") == "1"
    if torch_cuda is None:
        if forced:
            sys.exit("fl-lightning: FORCE_CUDA=1 needs a CUDA build of torch, found a CPU build")
        return False
    if cuda_home is None and not shutil.which("nvcc"):
        if forced:
            sys.exit("fl-lightning: FORCE_CUDA=1 needs nvcc: install the CUDA toolkit or set CUDA_HOME")
        return False
    return True


def extension() -> dict[str, object]:
    """Arguments of setup() for the extension, or none where it cannot be built."""
    if os.environ.get("FL_LIGHTNING_NO_EXT") == "1":
        note("FL_LIGHTNING_NO_EXT=1, pure torch")
        return {}
    if sys.platform != "linux":
        note(f"compiled kernels are for Linux, {sys.platform} runs pure torch")
        return {}
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        note(
            "torch is not installed where the build runs: pure torch (pip install --no-build-isolation builds kernels)"
        )
        return {}
    if not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")):
        note("no C++ compiler: pure torch")
        return {}
    cuda = wants_cuda(torch.version.cuda, cpp_extension.CUDA_HOME)
    sources = ["csrc/extension.cpp", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc/cpu").glob("*.cpp")))]
    optimise = ["-O0", "-g"] if os.environ.get("DEBUG") == "1" else ["-O3"]
    # No fused multiply-add behind our back: the same sums on every build, whatever the compiler's default.
    flags = {"cxx": [*optimise, "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]}
    options: dict[str, object] = {"include_dirs": [str(ROOT / "csrc")]}
    make = cpp_extension.CppExtension
    if cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
        make = cpp_extension.CUDAExtension
        sources += [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc/cuda").glob("*.cu"))]
        flags["cxx"].append("-DFL_LIGHTNING_CUDA")
        flags["nvcc"] = [*optimise, "-std=c++17", "-lineinfo"]
        options["include_dirs"] = [*options["include_dirs"], *(str(p / "include") for p in pip_cuda())]  # type: ignore[misc]
        options["library_dirs"] = [str(p / "lib") for p in pip_cuda()]
        note(f"CPU and CUDA kernels for {os.environ['TORCH_CUDA_ARCH_LIST']}")
    else:
        note("CPU kernels")
    module = make("fl_lightning._C", sources, extra_compile_args=flags, **options)
    return {"ext_modules": [module], "cmdclass": {"build_ext": cpp_extension.BuildExtension}}


setup(**extension())
