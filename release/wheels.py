# SPDX-License-Identifier: Apache-2.0
"""Builds what a release uploads, and checks it: `make dist` runs this.

The sources are those of the last commit. The folder gets a source distribution, a wheel in pure PyTorch for every
platform, and on Linux a wheel with compiled kernels for this processor that serves all Pythons and all torch releases
(``--cuda``: with those for CUDA too, as a release of its own such as 0.1.0+cu13). The wheels are built from the source
distribution, without a network. It needs what the extra ``dist`` names, torch and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Libraries that torch brings: one copy serves all extensions of a process.
OF_TORCH = ("libc10*.so", "libtorch*.so", "libcudart.so.*")


def run(*command: str, cwd: Path, **environment: str) -> None:
    """Runs a program of this Python's environment; its output is shown if it fails, which ends the build."""
    print("$", " ".join(command), flush=True)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FL_LIGHTNING_NO_EXT")}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, "PATH": path, **environment}, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    for line in said.splitlines() if done.returncode else re.findall(r"^fl-lightning: .*", said, re.MULTILINE):
        print("   ", line)
    if done.returncode:
        sys.exit(f"{command[0]} failed")


def build(kind: str, source: Path, folder: Path, *options: str, **environment: str) -> Path:
    """One file of PyPA's build, made without a network in a folder of its own, which is created."""
    python = sys.executable
    command = (python, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), *options, str(source))
    run(*command, cwd=folder.parent, **environment)
    (made,) = folder.iterdir()
    return made


def committed(folder: Path) -> Path:
    """A copy of the last commit: whatever else lies in the checkout stays out of a release."""
    archive = folder / "commit.tar"
    run("git", "archive", "--output", str(archive), "HEAD", cwd=ROOT)
    with tarfile.open(archive) as sources:
        sources.extractall(folder / "commit", filter="data")
    changes = subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changes:
        print("    not committed, so left out:", ", ".join(line[3:] for line in changes.splitlines()))
    return folder / "commit"


def files(folder: Path) -> set[str]:
    """The names of all files in a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def unpacked(sdist: Path, folder: Path) -> Path:
    """A new copy of a source distribution's files, in a folder that is created."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def check_sources(want: set[str], sdist: Path, source: Path) -> None:
    """Ends the build unless a source distribution has these files and the metadata that setuptools adds."""
    found = {name for name in files(source) if not name.startswith("fl_lightning.egg-info/")}
    more, less = found - want - {"PKG-INFO", "setup.cfg"}, want - found
    if more or less:
        sys.exit(f"{sdist.name} is not the commit: it has also {sorted(more)} and lacks {sorted(less)}")


def cuda_release() -> str:
    """The major release of CUDA that torch is built for."""
    import torch

    if torch.version.cuda is None:
        sys.exit("--cuda needs a torch that is built for CUDA")
    return torch.version.cuda.partition(".")[0]


def check_contents(wheel: Path, *libraries: str) -> None:
    """Ends the build unless the wheel has these compiled libraries and no others."""
    with zipfile.ZipFile(wheel) as archive:
        found = sorted(name for name in archive.namelist() if ".so" in name)
    if found != sorted(f"fl_lightning/{name}.abi3.so" for name in libraries):
        sys.exit(f"{wheel.name} holds {found}, and not the libraries {libraries}")


def build_kernels(source: Path, folder: Path, target: Path, cuda: bool) -> None:
    """The wheel with kernels, checked for stable interfaces, with the oldest platform that it runs on in its name."""
    libraries, options = ["_C"], []
    if cuda:
        libraries.append("_C_cuda")
        options = ["-C--global-option=egg_info", f"-C--global-option=--tag-build=+cu{cuda_release()}"]
    wheel = build("wheel", source, folder / "kernels", *options, FORCE_CUDA=str(int(cuda)))
    check_contents(wheel, *libraries)
    run("abi3audit", "--strict", str(wheel), cwd=folder)
    excluded = [word for name in OF_TORCH for word in ("--exclude", name)]
    run("auditwheel", "repair", *excluded, "--wheel-dir", str(target), str(wheel), cwd=folder)


def main() -> None:
    """Builds into dist/, or the folder that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where to; what lies there is deleted")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--pure", action="store_true", help="no kernels: the source distribution and the pure wheel")
    only.add_argument("--cuda", action="store_true", help="only the wheel that has kernels for CUDA too")
    arguments = parser.parse_args()
    target = arguments.folder.resolve()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        commit = committed(folder)
        want = files(commit)
        sdist = build("sdist", commit, folder / "sdists", FL_LIGHTNING_NO_EXT="1")
        check_sources(want, sdist, unpacked(sdist, folder / "checked"))
        if not arguments.cuda:
            pure = build("wheel", unpacked(sdist, folder / "for pure"), folder / "pure", FL_LIGHTNING_NO_EXT="1")
            check_contents(pure)
            shutil.copy(sdist, target)
            shutil.copy(pure, target)
        if not arguments.pure:
            build_kernels(unpacked(sdist, folder / "for kernels"), folder, target, arguments.cuda)
    made = sorted(target.iterdir())
    run("twine", "check", "--strict", *map(str, made), cwd=target)
    for path in made:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")


if __name__ == "__main__":
    main()
