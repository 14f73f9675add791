# SPDX-License-Identifier: Apache-2.0
import os
import zlib
from pathlib import Path

import pytest
import simt_build
from once import once

needs_compiler = "no C++ compiler (set CXX): the kernels' device code is not run"


def compile_kernels(folder):
    """Objects of the kernels and of the harness, and the library of them all."""
    sources = simt_build.sources(simt_build.CUDA)
    objects = simt_build.compile_all(sources, folder, workers=os.cpu_count() or 1)
    simt_build.link(objects.values(), folder / "kernels.so")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of objects and library; FL_LIGHTNING_SIMT names one that is built already, with a fault in it."""
    if os.environ.get("FL_LIGHTNING_SIMT"):
        return Path(os.environ["FL_LIGHTNING_SIMT"])
    if simt_build.compiler() is None:
        pytest.skip(needs_compiler)
    return once(tmp_path_factory, "simt", compile_kernels)


@pytest.fixture(scope="session")
def objects(built):
    """Object files of the kernels and of the harness by the stem of their source."""
    return {path.stem: path for path in sorted(built.glob("*.o"))}


@pytest.fixture(scope="session")
def kernels(built):
    """All kernels, unchanged."""
    import simt_library  # not earlier: the package comes after what tests/conftest.py copies

    return simt_library.Kernels(built / "kernels.so")


@pytest.fixture
def simt(kernels, request):
    """The kernels, under another schedule for each test, and always the same one for the same test."""
    import simt_library

    number = zlib.crc32(request.node.nodeid.encode())
    schedule = simt_library.SCHEDULES[number % len(simt_library.SCHEDULES)]
    return kernels.outputs(simt_library.ODD).schedule(schedule, number % 97)


@pytest.fixture
def call(simt):
    """An implementation beside those of tests/ops, whose tests take it."""
    return lambda op, *arguments: getattr(simt, op)(*arguments)
