# SPDX-License-Identifier: Apache-2.0
"""The folders of csrc: which may include which, and what the files compiled once per instruction set may use."""

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FILES = sorted(path.relative_to(CSRC) for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu"))
KERNELS = [path for path in FILES if path.name.endswith("_kernel.h")]
MAY_INCLUDE = {
    ".": set(),
    "cpu": {"cpu/kernels"},
    "cpu/kernels": {"cpu/simd"},
    "cpu/simd": set(),
    "cuda": {"cuda/kernels", "cuda/device"},
    "cuda/kernels": {"cuda/device"},
    "cuda/device": set(),
}


def included(path):
    """The files of csrc that a file includes."""
    text = (CSRC / path).read_text(encoding="utf-8")
    names = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    kernel = re.findall(r'^#define FL_KERNEL "(.+)"', text, re.MULTILINE)
    found = [(CSRC / path.parent / name).resolve() for name in names]
    found += [CSRC.resolve() / "cpu/kernels" / name for name in kernel]
    assert all(file.is_file() for file in found), found
    return [file.relative_to(CSRC.resolve()) for file in found]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_includes_point_one_way(path):
    own = path.parent.as_posix()
    for other in included(path):
        folder = other.parent.as_posix()
        shared = other.as_posix() in ("ops.h", "tiles.h", "active_set.h")
        assert shared or folder == own or folder in MAY_INCLUDE[own], f"{path} includes {other}"


def test_only_the_wrappers_see_torch():
    see = {path.as_posix() for path in FILES if "#include <torch/" in (CSRC / path).read_text(encoding="utf-8")}
    assert see == {"extension.cpp", "tensors.h"}


@pytest.mark.parametrize("path", KERNELS, ids=str)
def test_a_kernel_uses_kernels_and_no_standard_templates(path):
    text = (CSRC / path).read_text(encoding="utf-8")
    assert "#pragma once" not in text
    assert all(other in KERNELS for other in included(path))
    assert not re.search("^#include <", text, re.MULTILINE)
    assert all(re.fullmatch(r"u?int(8|16|32|64|ptr)_t", name) for name in re.findall(r"std::(\w+)", text))
