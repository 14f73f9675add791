# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest
import simt_library

needs_compiler = "no C++ compiler (set CXX): the kernels' device code is not run"


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """Object files of the kernels and of the harness by the stem of their source."""
    if simt_library.compiler() is None:
        pytest.skip(needs_compiler)
    folder = tmp_path_factory.mktemp("simt")
    sources = [*sorted(simt_library.CUDA.rglob("*.cu")), *(simt_library.HERE / name for name in simt_library.HARNESS)]
    return simt_library.compile_all(sources, folder, workers=os.cpu_count() or 1)


@pytest.fixture(scope="session")
def kernels(objects, tmp_path_factory):
    """All kernels, unchanged."""
    target = tmp_path_factory.mktemp("simt") / "kernels.so"
    return simt_library.Kernels(simt_library.link(objects.values(), target))
