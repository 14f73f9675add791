# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled kernels; everything else is in pyproject.toml.

Environment:
    FL_LIGHTNING_NO_EXT=1    pure torch, no compiler needed
    FORCE_CUDA=1             CUDA kernels or an error that says what is missing; without it, CUDA where nvcc is found
    FORCE_CUDA=0             no CUDA kernels
    TORCH_CUDA_ARCH_LIST     architectures, default 7.5;8.0;9.0a;10.0+PTX as far as nvcc knows them
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import setup

ROOT = Path(__file__).parent
# torch's stable interface as of this release: the binary runs with this one and all later ones.
TORCH = (2, 10)
ARCHITECTURES = ("7.5", "8.0", "9.0", "10.0")
OPTIMISE = ["-O0", "-g"] if os.environ.get("DEBUG") == "1" else ["-O3", "-g0"]
CUDA_PROGRAM = "#include <cuda_runtime.h>\n#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"


class CannotBuildError(Exception):
    """One sentence, or the second half of one: what a build lacks."""


class Cuda(NamedTuple):
    """What CUDA kernels are built with: folders of headers, the runtime library, architectures, and more options."""

    headers: list[str]
    runtime: str
    architectures: str
    options: list[str]


NOTES: list[str] = []


def note(text: str) -> None:
    """One line that pip shows when the build is verbose or fails, and that ``fl_lightning info`` shows later."""
    NOTES.append(text)
    print(f"fl-lightning: {text}", file=sys.stderr)


def run(*command: str, stdin: str = "") -> tuple[bool, str]:
    """Whether a command succeeds, and what it printed: to standard error if it fails."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except OSError as error:
        return False, str(error)
    return (False, done.stderr) if done.returncode else (True, done.stdout)


def output(*command: str) -> str:
    """What a command printed to standard output; nothing if it fails."""
    succeeded, text = run(*command)
    return text if succeeded else ""


def error_in(messages: str) -> str:
    """The line of a compiler's messages that says what is wrong."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it gives no reason")


def check_kernels() -> None:
    """Raises CannotBuildError if it must be pure torch."""
    if os.environ.get("FL_LIGHTNING_NO_EXT") == "1":
        raise CannotBuildError("FL_LIGHTNING_NO_EXT=1")
    if sys.platform != "linux":
        raise CannotBuildError(f"compiled kernels are for Linux, this is {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CannotBuildError("this is a free-threaded Python, which has no stable binary interface")
    try:
        import torch
    except ImportError:
        raise CannotBuildError(
            "torch is not installed where the build runs (pip install --no-build-isolation builds the kernels)"
        ) from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH:
        raise CannotBuildError(f"compiled kernels need torch {TORCH[0]}.{TORCH[1]}, this is {torch.__version__}")
    command = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(command[0]) is None:
        raise CannotBuildError(f"there is no C++ compiler ({command[0]})")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise CannotBuildError("Python's headers are not installed (Python.h, often in a package named python3-dev)")
    succeeded, messages = run(*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-", stdin="#include <span>\n")
    if not succeeded:
        raise CannotBuildError(f"the C++ compiler ({command[0]}) does not compile C++20: {error_in(messages)}")


def find_nvcc(cuda_home: str | None) -> str | None:
    """The CUDA compiler that torch's build will call."""
    at_home = Path(cuda_home or "", "bin", "nvcc")
    return str(at_home) if cuda_home and at_home.is_file() else shutil.which("nvcc")


def find_cuda(torch_cuda: str | None, cuda_home: str | None) -> Cuda:
    """Everything that CUDA kernels need; raises CannotBuildError where something is missing."""
    if os.environ.get("FORCE_CUDA") == "0":
        raise CannotBuildError("FORCE_CUDA=0")
    if not any((ROOT / "csrc" / "cuda").glob("*.cu")):
        raise CannotBuildError("there are no CUDA sources here")
    if torch_cuda is None:
        raise CannotBuildError("torch is a build without CUDA")
    nvcc = find_nvcc(cuda_home)
    if nvcc is None:
        raise CannotBuildError("no nvcc was found (install the CUDA toolkit, or set CUDA_HOME)")
    release = re.search(r"release (\d+)\.", output(nvcc, "--version"))
    if release is None:
        raise CannotBuildError(f"{nvcc} --version fails")
    if release[1] != torch_cuda.partition(".")[0]:
        raise CannotBuildError(f"torch is built for CUDA {torch_cuda} and nvcc is of CUDA {release[1]}")
    headers, runtime = find_headers(nvcc), find_runtime(nvcc, cuda_home, release[1])
    small = "--compress-mode=size"  # of CUDA 12.8 on; a third of the bytes
    options = [small] if "--compress-mode" in output(nvcc, "--help") else []
    return Cuda(headers, runtime, os.environ.get("TORCH_CUDA_ARCH_LIST") or architectures(nvcc), options)


def pip_cuda() -> list[Path]:
    """Folders in which pip's CUDA packages keep headers and libraries."""
    folders = {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib")), *map(Path, sys.path)}
    found = (found for folder in folders if folder.is_dir() for found in folder.glob("nvidia/*"))
    return sorted(path for path in found if (path / "include").is_dir() or (path / "lib").is_dir())


def find_headers(nvcc: str) -> list[str]:
    """Folders of headers that nvcc does not find by itself: none with a complete toolkit."""
    of_pip = [str(path / "include") for path in pip_cuda() if (path / "include" / "cuda_runtime.h").is_file()]
    for folders in ([], of_pip):
        flags = [f"-I{folder}" for folder in folders]
        succeeded, messages = run(nvcc, "-E", "-x", "cu", *flags, "-", stdin=CUDA_PROGRAM)
        if succeeded:
            return folders
    raise CannotBuildError(f"nvcc compiles nothing: {error_in(messages)}")


def find_runtime(nvcc: str, cuda_home: str | None, major: str) -> str:
    """The runtime library, torch's own first; linked by its path, so no link without a version is needed."""
    dry_run = output("sh", "-c", f"{shlex.quote(nvcc)} --dryrun -x cu /dev/null 2>&1")
    top = re.search(r"^#\$ TOP=(.*)$", dry_run, re.MULTILINE)
    homes = [*pip_cuda(), *([Path(top[1])] if top else []), *([Path(cuda_home)] if cuda_home else [])]
    for home in homes:
        for folder in ("lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            for found in sorted((home / folder).glob(f"libcudart.so.{major}*")):
                return str(found.resolve())
    raise CannotBuildError(
        f"no libcudart.so.{major} was found (install the CUDA toolkit, or pip's nvidia-cuda-runtime)"
    )


def architectures(nvcc: str) -> str:
    """The default architectures that this nvcc knows, the last one with PTX for later ones.

    9.0a is 9.0 with the instructions that no other device has, so of it no later one could run PTX.
    """
    known = output(nvcc, "--list-gpu-arch")
    chosen = [name for name in ARCHITECTURES if f"compute_{name.replace('.', '')}\n" in known] or [ARCHITECTURES[0]]
    return ";".join("9.0a" if name == "9.0" and name != chosen[-1] else name for name in chosen) + "+PTX"


def sources(folder: str, ending: str) -> list[str]:
    """The source files of one folder and those in it; pip wants their paths relative."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "csrc" / folder).rglob(f"*.{ending}"))]


def extension() -> dict[str, Any]:
    """Arguments of setup() for the extensions; none where they cannot be built."""
    forced = os.environ.get("FORCE_CUDA") == "1"
    try:
        check_kernels()
    except CannotBuildError as obstacle:
        if forced:
            sys.exit(f"fl-lightning: FORCE_CUDA=1, but {obstacle}")
        note(f"pure torch: {obstacle}")
        return {}
    import torch
    from torch.utils import cpp_extension

    modules = [module_of_cpu(cpp_extension)]
    try:
        cuda = find_cuda(torch.version.cuda, cpp_extension.CUDA_HOME)
    except CannotBuildError as obstacle:
        if forced:
            sys.exit(f"fl-lightning: FORCE_CUDA=1, but {obstacle}")
        note(f"kernels for the processor; none for CUDA: {obstacle}")
    else:
        os.environ["TORCH_CUDA_ARCH_LIST"] = cuda.architectures
        modules.append(module_of_cuda(cpp_extension, cuda))
        note(f"kernels for the processor and for CUDA {cuda.architectures}")
    return {
        "ext_modules": modules,
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def module_of_cpu(cpp_extension: Any) -> Any:
    """The extension that every torch can load."""
    return module(cpp_extension, "_C", ["csrc/extension.cpp", *sources("cpu", "cpp")])


def module_of_cuda(cpp_extension: Any, cuda: Cuda) -> Any:
    """The extension beside it that only a torch with CUDA can load."""
    made = module(cpp_extension, "_C_cuda", ["csrc/extension_cuda.cpp", *sources("cuda", "cu")])
    made.extra_compile_args["nvcc"] = [OPTIMISE[0], "-std=c++17", "-Xcompiler=-fvisibility=hidden", *cuda.options]
    made.extra_compile_args["nvcc"] += [f"-I{folder}" for folder in cuda.headers]
    made.libraries.append("torch_cuda")
    made.extra_link_args.append(cuda.runtime)
    return made


def module(cpp_extension: Any, name: str, files: list[str]) -> Any:
    """An extension with what both have in common."""
    # Never a fused multiply-add that the source does not ask for: the same sums whatever the compiler's default.
    flags = [*OPTIMISE, "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]
    made = cpp_extension.CppExtension(
        f"fl_lightning.{name}",
        files,
        extra_compile_args={"cxx": [*flags, f"-DTORCH_TARGET_VERSION=0x{TORCH[0]:02x}{TORCH[1]:02x}000000000000"]},
        # Also hides what the standard library's templates would export.
        extra_link_args=["-Wl,--version-script=csrc/exports.map"],
        py_limited_api=True,
    )
    made.depends = ["csrc/exports.map", *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.[hc]*"))]
    return made


def record(notes: list[str]) -> None:
    """Leaves beside the modules what was built and why no more; a wheel takes it along."""
    with suppress(OSError):  # sources that nobody may write to
        (ROOT / "fl_lightning" / "_built.txt").write_text("".join(f"{line}\n" for line in notes), encoding="utf-8")


def published_readme() -> str:
    """The README with links that work outside of the repository: to the files of this release."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1]  # type: ignore[index]
    home = re.search(r'^Homepage = "https://github.com/(.*)"$', project, re.MULTILINE)[1]  # type: ignore[index]

    def absolute(link: re.Match[str]) -> str:
        if "://" in link[3] or link[3].startswith("#"):
            return link[0]
        pages = "https://raw.githubusercontent.com/{}/v{}" if link[1] else "https://github.com/{}/blob/v{}"
        return f"{link[1]}{link[2]}({pages.format(home, version)}/{link[3]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)(\[[^\]]*\])\(([^)\s]+)\)", absolute, text)


if __name__ == "__main__":
    arguments = extension()
    # Set-up and packaging without kernels must not deny those that an earlier build has left in the checkout.
    if arguments.get("ext_modules") or not any((ROOT / "fl_lightning").glob("_C*.so")):
        record(NOTES)
    setup(**arguments, long_description=published_readme(), long_description_content_type="text/markdown")
