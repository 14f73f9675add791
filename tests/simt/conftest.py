# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import zlib

import pytest
import simt_library
from once import once

needs_compiler = "no C++ compiler (set CXX): the kernels' device code is not run"


def compile_kernels(folder):
    """Objects of the kernels and of the harness, and the library of them all."""
    sources = [*sorted(simt_library.CUDA.rglob("*.cu")), *(simt_library.HERE / name for name in simt_library.HARNESS)]
    objects = simt_library.compile_all(sources, folder, workers=os.cpu_count() or 1)
    simt_library.link(objects.values(), folder / "kernels.so")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    if simt_library.compiler() is None:
        pytest.skip(needs_compiler)
    return once(tmp_path_factory, "simt", compile_kernels)


@pytest.fixture(scope="session")
def objects(built):
    """Object files of the kernels and of the harness by the stem of their source."""
    return {path.stem: path for path in sorted(built.glob("*.o"))}


@pytest.fixture(scope="session")
def kernels(built):
    """All kernels, unchanged."""
    return simt_library.Kernels(built / "kernels.so")


@pytest.fixture
def simt(kernels, request):
    """The kernels, under another schedule for each test, and always the same one for the same test."""
    number = zlib.crc32(request.node.nodeid.encode())
    return kernels.schedule(simt_library.SCHEDULES[number % len(simt_library.SCHEDULES)], number % 97)
