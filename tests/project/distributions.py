# SPDX-License-Identifier: Apache-2.0
"""Builds wheels and source distributions as pip does without build isolation."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", ".github", "benchmarks", "csrc", "docs", "examples", "fl_lightning", "release", "tests")
FILES = (
    ".clang-format", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md", "pyproject.toml", "setup.py",
)  # fmt: skip


def copy_of_the_sources(folder):
    """What a distribution is made of: setuptools writes beside it, and stale files there would hide missing ones."""
    copy = folder / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "_built.txt", "*.egg-info", ".*cache")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    return copy


def run(*command, cwd, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FL_LIGHTNING_", "FORCE_CUDA"))}
    clean.pop("PYTHONPATH", None)
    result = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False, timeout=1500
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    return result.stdout + result.stderr


def build(hook, source, target, **environment):
    """Calls the build backend; returns the file it made and what it printed."""
    pytest.importorskip("setuptools", minversion="77")
    code = f"import setuptools.build_meta as b; print('made', b.build_{hook}({str(target)!r}))"
    printed = run(sys.executable, "-c", code, cwd=source, **environment)
    return target / next(line.split()[1] for line in printed.splitlines() if line.startswith("made ")), printed
