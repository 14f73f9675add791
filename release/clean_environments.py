# SPDX-License-Identifier: Apache-2.0
"""Installs the wheels of dist/ in new environments and runs the op tests there: `make dist-test` runs this.

An environment has one Python and one torch, the oldest that the compiled kernels run beside or the newest that the
package index has for this Python. pip chooses among the files of dist/ as it does for a user. The table printed at the
end is the one of docs/kernels.md. Environments take 5 GB each and are deleted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TORCH = ("torch==2.10.*", "torch")
WITNESS = """
import platform, torch, fl_lightning, fl_lightning.ops as ops
print(platform.python_version(), torch.__version__, ops.backend()["layer_gram"].implementation, fl_lightning.__file__)
"""


class Outcome(NamedTuple):
    """What the table says of one environment."""

    python: str
    torch: str
    kernels: str
    tests: str


def output(*command: str | Path, cwd: Path) -> str:
    """What a command prints, with none of this environment's settings; what it said ends the script if it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FL_LIGHTNING_", "PYTHON"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-5000:]}{done.stderr[-5000:]}")
    return done.stdout


def make(folder: Path, python: str, torch: str, wheels: Path) -> Path:
    """An environment with the package and what its op tests need; by uv where that is installed.

    The pure wheel says what the package depends on. Then pip or uv takes what suits this Python best of the wheels.
    """
    (pure,) = wheels.glob("fl_lightning-*-none-any.whl")
    needed = (pure, torch, "pytest", "pytest-timeout", "hypothesis")
    best = ("--no-index", "--no-deps", "--find-links", wheels, "--only-binary", "fl-lightning", "fl-lightning")
    own = folder / "bin" / "python"
    if uv := shutil.which("uv"):
        output(uv, "venv", "--python", python, folder, cwd=wheels)
        output(uv, "pip", "install", "--python", own, *needed, cwd=wheels)
        output(uv, "pip", "install", "--python", own, "--reinstall", *best, cwd=wheels)
    else:
        output(python, "-m", "venv", folder, cwd=wheels)
        output(own, "-m", "pip", "install", *needed, cwd=wheels)
        output(own, "-m", "pip", "install", "--force-reinstall", *best, cwd=wheels)
    return own


def examine(python: Path, folder: Path) -> Outcome:
    """Runs the op tests in a folder that has the tests and not the package's sources."""
    for name in ("tests", "pyproject.toml"):
        output("cp", "-r", ROOT / name, folder, cwd=folder)
    version, torch, kernels, where = output(python, "-c", WITNESS, cwd=folder).split()
    if not Path(where).is_relative_to(python.parents[1]):
        sys.exit(f"{python} imports {where}")
    # Those of processes are the others with fewer instructions of this processor: neither Python nor torch matters.
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not process")
    tests = output(python, "-m", "pytest", *options, "tests/ops", cwd=folder)
    return Outcome(version, torch, kernels, tests.splitlines()[-1].strip("= "))


def main() -> None:
    """Prints a row per environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="interpreters, for instance python3.10 python3.13")
    parser.add_argument("--torch", nargs="+", default=TORCH, help=f"requirements, by default {' and '.join(TORCH)}")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="the folder that `make dist` has filled")
    arguments = parser.parse_args()
    print("| Python | torch | Kernels | Op tests |\n|---|---|---|---|", flush=True)
    for python in arguments.pythons:
        for torch in arguments.torch:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                outcome = examine(make(folder / "venv", python, torch, arguments.wheels.resolve()), folder)
            print(f"| {' | '.join(outcome)} |", flush=True)


if __name__ == "__main__":
    main()
