# SPDX-License-Identifier: Apache-2.0
"""An environment of its own for every package to compare with."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Package:
    """A package from the index.

    Attributes:
        name: short name, and the name of its environment's folder.
        requirements: what pip is asked for, first choice first; the next one is tried if pip refuses.
        check: a statement that must run in the environment.
        pythons: interpreters to look for, first choice first, where the running one is too old; the environment then
            has the same release of torch, of its own.
    """

    name: str
    requirements: tuple[str, ...]
    check: str
    pythons: tuple[str, ...] = ()


PACKAGES = (
    Package("pfl", ("pfl==0.6.0",), "import pfl.algorithm.federated_averaging, torch"),
    Package("flgo", ("flgo==0.4.4",), "import flgo, torch"),
    Package("fedlab", ("fedlab==1.3.0",), "import fedlab.core.standalone, torch"),
    # 3.0 asks for Python 3.14, best without the global lock; 2.0.3 has the same training loops.
    Package(
        "blazefl",
        ("blazefl[contrib,reproducibility]==3.0.0", "blazefl[contrib,reproducibility]==2.0.3"),
        "import blazefl.contrib, torch",
        ("python3.14t", "python3.14", "python3.13", "python3.12"),
    ),
    # 1.42 asks for a release of certifi that not every mirror of the index has.
    Package("flwr", ("flwr[simulation]==1.42.0", "flwr[simulation]==1.41.0"), "import flwr.simulation, ray, torch"),
)

MISSING = {"pflib": "PFLlib is not on the package index; it is a repository of scripts."}
"""Peers that nobody can install by pip, and why."""


def python_of(folder: Path, package: Package) -> Path:
    """The interpreter of a package's environment."""
    return folder / package.name / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def prepare(folder: Path, package: Package) -> str | None:
    """Makes an environment unless it is there already.

    torch and numpy come from the running interpreter's environment, so that all sides have the same ones and nothing
    of that size is downloaded; what the package installs for itself goes first. A package with interpreters of its own
    downloads them.

    Returns:
        Why the package cannot take part, in one sentence, or ``None``.
    """
    python = python_of(folder, package)
    if python.exists() and _runs(python, package.check) is None:
        return None
    further: list[str] = []
    if package.pythons:
        found = filter(None, map(shutil.which, package.pythons))
        own = next((path for path in found if _runs(Path(path), "") is None), None)
        if own is None:
            return f"{package.name} needs one of {', '.join(package.pythons)}, and none of them runs here."
        subprocess.run([own, "-m", "venv", "--clear", str(folder / package.name)], check=True)
        further = [f"torch=={torch.__version__.split('+')[0]}"]
    else:
        venv.create(folder / package.name, with_pip=True, clear=True)
        asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        (site / "zz_shared_torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    refused = ""
    for requirement in package.requirements:
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", requirement, *further]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            refused = _runs(python, package.check) or ""
            return f"{package.name} is installed but does not start: {refused}" if refused else None
        refused = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"pip ended with {done.returncode}"
    return f"{package.name} cannot be installed here: {refused}"


def version(folder: Path, package: Package) -> str:
    """The installed version; with the interpreter's, where that is not the running one."""
    name = package.requirements[0].split("==")[0].split("[")[0]
    own = ", 'on Python', sys.version.partition('(')[0]" if package.pythons else ""
    code = f"import sys; from importlib.metadata import version; print(version({name!r}){own})"
    return subprocess.run(
        [str(python_of(folder, package)), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _runs(python: Path, statement: str) -> str | None:
    done = subprocess.run([str(python), "-W", "ignore", "-c", statement], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"it ended with {done.returncode}"
