# SPDX-License-Identifier: Apache-2.0
"""What CUDA's own compiler made of the kernels, read from the built library. No GPU is needed."""

import re

import pytest
import simt_build

from benchmarks.cuda_resources import dump, find_cuobjdump, find_library, variants, wide_accesses

ARCHITECTURE = 90

# The 16-byte loads and stores that the code of every variant of a kernel must have at least: a run of each row that is
# read together, and what is written of it. Where a compiler splits them, nothing but speed tells.
WIDE = {
    ("layer_combine", "combine"): (8, 0),
    ("layer_cross_gram", "products_mma"): (4, 0),
    ("layer_cross_gram", "products_tiled"): (1, 0),
    ("layer_dots", "dots"): (9, 0),
    ("layer_gram", "gram_direct"): (4, 0),
    ("layer_gram", "products_mma"): (4, 0),
    ("layer_gram", "products_tiled"): (1, 0),
    ("puc_combine", "combine"): (8, 1),
    ("puc_track", "track"): (2, 0),
}
# combine, for an output of the rows' dtype. To others it may store less than 16 bytes at a time.
SAME = re.compile(r"combineI(?:(\w)\1|\d+(?:__half|__nv_bfloat16)S\d*_)L")


@pytest.fixture(scope="module")
def tool():
    if find_library() is None:
        pytest.skip("the CUDA kernels are not built")
    found = find_cuobjdump()
    if found is None:
        pytest.skip("no cuobjdump: neither a toolkit's nor triton's")
    return found


@pytest.fixture(scope="module")
def kernels(tool):
    report = dump(tool, find_library(), "--dump-resource-usage")
    found = [each for each in variants(report) if each.arch == ARCHITECTURE]
    if not found:
        pytest.skip(f"the CUDA kernels are not built for sm_{ARCHITECTURE}")
    return found


def test_every_source_has_kernels_and_none_spills(kernels):
    sources = {path.stem for path in simt_build.CUDA.rglob("*.cu")}
    assert {each.file for each in kernels} == sources - {"layers"}, "which has no kernel"
    assert [each for each in kernels if each.local > 0] == []


def test_accesses_are_wide(tool, kernels):
    accesses = wide_accesses(dump(tool, find_library(), "--dump-sass", "-arch", f"sm_{ARCHITECTURE}"))
    assert {(each.file, each.kernel) for each in kernels} >= WIDE.keys()
    for each in kernels:
        loads, stores = WIDE.get((each.file, each.kernel), (0, 0))
        assert accesses[each.name]["LDG"] >= loads, each.name
        assert accesses[each.name]["STG"] >= stores + bool(SAME.search(each.name)), each.name
