# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled kernels; everything else is in pyproject.toml.

Environment:
    FL_LIGHTNING_NO_EXT=1    pure torch, no compiler needed
    FORCE_CUDA=1             CUDA kernels or an error that says what is missing; without it, CUDA where nvcc is found
    TORCH_CUDA_ARCH_LIST     architectures, default 8.0;9.0;10.0+PTX as far as nvcc knows them
    CXX, CUDA_HOME, MAX_JOBS, DEBUG=1
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

ROOT = Path(__file__).parent
# torch's stable interface as of this release: the binary runs with this one and all later ones.
TORCH = (2, 10)
ARCHITECTURES = ("8.0", "9.0", "10.0")


def note(text: str) -> None:
    """One line that pip shows when the build is verbose or fails."""
    print(f"fl-lightning: {text}", file=sys.stderr)


def output(*command: str, stdin: str = "") -> str | None:
    """Standard output of a command, or None if it fails."""
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def find_nvcc(cuda_home: str | None) -> str | None:
    """The CUDA compiler that torch's build will call."""
    at_home = Path(cuda_home or "", "bin", "nvcc")
    return str(at_home) if cuda_home and at_home.is_file() else shutil.which("nvcc")


def why_no_cuda(torch_cuda: str | None, nvcc: str | None) -> str | None:
    """What stands in the way of CUDA kernels, if anything."""
    if not any((ROOT / "csrc" / "cuda").glob("*.cu")):
        return "there are no CUDA sources here"
    if torch_cuda is None:
        return "torch is a build without CUDA"
    if nvcc is None:
        return "no nvcc was found (install the CUDA toolkit, or set CUDA_HOME)"
    release = re.search(r"release (\d+)\.", output(nvcc, "--version") or "")
    if release is None:
        return f"{nvcc} --version fails"
    if release[1] != torch_cuda.partition(".")[0]:
        return f"torch is built for CUDA {torch_cuda} and nvcc is of CUDA {release[1]}"
    return None


def pip_cuda() -> list[Path]:
    """Folders in which pip's CUDA packages keep headers and libraries."""
    folders = {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")), *map(Path, sys.path)}
    found = (found for folder in folders if folder.is_dir() for found in folder.glob("nvidia/*"))
    return sorted(path for path in found if (path / "include").is_dir() or (path / "lib").is_dir())


def cuda_headers(nvcc: str) -> list[str]:
    """Folders of headers that nvcc does not find by itself: none with a complete toolkit."""
    source = "#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
    if output(nvcc, "-E", "-x", "cu", "-", stdin=source) is not None:
        return []
    folders = [str(path / "include") for path in pip_cuda() if (path / "include" / "cuda_runtime.h").is_file()]
    if not folders:
        sys.exit("fl-lightning: nvcc finds no cuda_runtime.h: install the CUDA toolkit's headers or set CUDA_HOME")
    return folders


def cuda_runtime(nvcc: str, cuda_home: str | None, torch_cuda: str) -> str:
    """The runtime library of torch's CUDA version; linked by its path, so no link without a version is needed."""
    dry_run = output("sh", "-c", f"{shlex.quote(nvcc)} --dryrun -x cu /dev/null 2>&1") or ""
    top = re.search(r"^#\$ TOP=(.*)$", dry_run, re.MULTILINE)
    homes = [*pip_cuda(), *([Path(top[1])] if top else []), *([Path(cuda_home)] if cuda_home else [])]
    for home in homes:
        for folder in ("lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            for found in sorted((home / folder).glob(f"libcudart.so.{torch_cuda.partition('.')[0]}*")):
                return str(found.resolve())
    sys.exit("fl-lightning: no libcudart was found: install the CUDA toolkit or pip's nvidia-cuda-runtime")


def architectures(nvcc: str) -> str:
    """The default architectures that this nvcc knows, the last one with PTX for later ones."""
    known = output(nvcc, "--list-gpu-arch") or ""
    chosen = [name for name in ARCHITECTURES if f"compute_{name.replace('.', '')}\n" in known] or [ARCHITECTURES[0]]
    return ";".join(chosen) + "+PTX"


def why_no_kernels() -> str | None:
    """Why pure torch it is, if so."""
    if os.environ.get("FL_LIGHTNING_NO_EXT") == "1":
        return "FL_LIGHTNING_NO_EXT=1"
    if sys.platform != "linux":
        return f"compiled kernels are for Linux, this is {sys.platform}"
    try:
        import torch
    except ImportError:
        return "torch is not installed where the build runs (pip install --no-build-isolation builds the kernels)"
    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH:
        return f"compiled kernels need torch {TORCH[0]}.{TORCH[1]}, this is {torch.__version__}"
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    return None


def extension() -> dict[str, Any]:
    """Arguments of setup() for the extension; none where it cannot be built."""
    forced = os.environ.get("FORCE_CUDA") == "1"
    obstacle = why_no_kernels()
    if obstacle is not None:
        if forced:
            sys.exit(f"fl-lightning: FORCE_CUDA=1, but {obstacle}")
        note(f"pure torch: {obstacle}")
        return {}
    import torch
    from torch.utils import cpp_extension

    nvcc = find_nvcc(cpp_extension.CUDA_HOME)
    obstacle = why_no_cuda(torch.version.cuda, nvcc)
    if obstacle is not None and forced:
        sys.exit(f"fl-lightning: FORCE_CUDA=1, but {obstacle}")

    optimise = ["-O0", "-g"] if os.environ.get("DEBUG") == "1" else ["-O3"]
    # Never a fused multiply-add that the source does not ask for: the same sums whatever the compiler's default.
    flags = {"cxx": [*optimise, "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]}
    flags["cxx"].append(f"-DTORCH_TARGET_VERSION=0x{TORCH[0]:02x}{TORCH[1]:02x}000000000000")
    sources = ["csrc/extension.cpp", *(f"csrc/cpu/{path.name}" for path in sorted((ROOT / "csrc/cpu").glob("*.cpp")))]
    module = cpp_extension.CppExtension("fl_lightning._C", sources, extra_compile_args=flags, py_limited_api=True)
    module.depends = [str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.[hc]*")]
    if obstacle is None and nvcc is not None:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(nvcc))
        module.sources += [f"csrc/cuda/{path.name}" for path in sorted((ROOT / "csrc/cuda").glob("*.cu"))]
        flags["cxx"].append("-DFL_LIGHTNING_CUDA")
        flags["nvcc"] = [*optimise, "-std=c++17", "-lineinfo", "-Xcompiler=-fvisibility=hidden"]
        flags["nvcc"] += [f"-I{folder}" for folder in cuda_headers(nvcc)]
        module.libraries.append("torch_cuda")
        module.extra_link_args.append(cuda_runtime(nvcc, cpp_extension.CUDA_HOME, str(torch.version.cuda)))
        note(f"kernels for the processor and for CUDA {os.environ['TORCH_CUDA_ARCH_LIST']}")
    else:
        note(f"kernels for the processor; none for CUDA: {obstacle}")
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


if __name__ == "__main__":
    setup(**extension())
