# SPDX-License-Identifier: Apache-2.0
"""What CUDA's own compiler made of the kernels, read from the built library. No GPU is needed."""

import re
import subprocess

import pytest
import simt_build

from benchmarks.cuda_resources import dump, find_cuobjdump, find_library, variants, wide_accesses

ARCHITECTURES = ("90a", "90")  # of these the first one that there is

# The 16-byte loads and stores that the code of every variant of a kernel must have at least: a run of each row that is
# read together, and what is written of it. Where a compiler splits them, nothing but speed tells.
WIDE = {
    ("layer_combine", "combine"): (8, 0),
    ("kernels", "cross_direct"): (16, 0),
    ("kernels", "gram_direct"): (4, 0),
    ("kernels", "multiply_rows"): (9, 0),
    ("kernels", "products_mma"): (4, 0),
    ("kernels", "products_tiled"): (1, 0),
    ("puc_combine", "combine"): (4, 1),
    ("puc_track", "track"): (5, 0),
}
# combine, for an output of the rows' dtype. To others it may store less than 16 bytes at a time.
SAME = re.compile(r"combineI(?:(\w)\1|\d+(?:__half|__nv_bfloat16)S\d*_)L")

# multiply_rows, of rows with themselves: one load less, that of the step.
ONE_LESS = re.compile(r"multiply_rowsI\w+?Lb1E")


@pytest.fixture(scope="module")
def tool():
    if find_library() is None:
        pytest.skip("the CUDA kernels are not built")
    found = find_cuobjdump()
    if found is None:
        pytest.skip("no cuobjdump: neither a toolkit's nor triton's")
    return found


@pytest.fixture(scope="module")
def every(tool):
    return list(variants(dump(tool, find_library(), "--dump-resource-usage")))


@pytest.fixture(scope="module")
def kernels(every):
    for architecture in ARCHITECTURES:
        found = [each for each in every if each.arch == architecture]
        if found:
            return found
    pytest.skip("the CUDA kernels are not built for sm_90a or sm_90")


@pytest.fixture(scope="module")
def code(tool, kernels, tmp_path_factory):
    """Of the sources with kernels that tests ask for: all others' is as long again."""
    folder, wanted = tmp_path_factory.mktemp("code"), {kernel for _, kernel in WIDE} | {"products_wgmma"}
    subprocess.run([tool, "-xelf", "all", find_library()], cwd=folder, capture_output=True, check=True)
    objects = sorted(folder.glob(f"*.sm_{kernels[0].arch}.cubin"))
    chosen = [path for path in objects if any(f"{len(w)}{w}".encode() in path.read_bytes() for w in wanted)]
    return "".join(dump(tool, path, "--dump-sass") for path in chosen)


def test_every_source_has_kernels_and_none_spills(every):
    sources = {path.stem for path in simt_build.CUDA.rglob("*.cu")}
    without_own = {"layers", "layer_gram", "layer_cross_gram", "layer_dots", "layer_squares"}
    for architecture in {each.arch for each in every}:
        found = {each.file for each in every if each.arch == architecture}
        assert found == sources - without_own | {"kernels"}
    assert [each for each in every if each.local > 0] == []


def test_the_library_is_small():
    """With the default architectures. Line numbers and code that is not compressed would make it 38 MB."""
    assert find_library().stat().st_size < 8e6


def test_accesses_are_wide(code, kernels):
    accesses = wide_accesses(code)
    assert {(each.file, each.kernel) for each in kernels} >= WIDE.keys()
    for each in kernels:
        if (each.file, each.kernel) not in WIDE:
            continue
        loads, stores = WIDE[each.file, each.kernel]
        assert accesses[each.name]["LDG"] >= loads - bool(ONE_LESS.search(each.name)), each.name
        assert accesses[each.name]["STG"] >= stores + bool(SAME.search(each.name)), each.name


def test_products_by_warpgroups(code, kernels):
    """Over as many rows as the variant has, copied 16 bytes at a time, where the body is compiled at all."""
    own = [each for each in kernels if each.kernel == "products_wgmma"]
    assert len(own) == 3 * (8 + 6)
    for each in own:
        kind, rows, groups, symmetric = re.search(r"I(\w+?)Li(\d+)ELi(\d)ELb(\d)E", each.name).groups()
        body = re.search(rf"Function : {each.name}\n(.*?)(?=Function : |\Z)", code, re.DOTALL)[1]
        steps = body.count(f"HGMMA.64x{rows}x")
        if each.arch != "90a":
            # The host takes this kernel only where it has more registers than a kernel without a body.
            assert steps == body.count("HGMMA") == 0
            assert each.registers <= 32
            continue
        alone = symmetric == "1" and groups == "1"
        spans = 2 if symmetric == "1" or groups == "0" else 1
        assert steps == body.count("HGMMA") == (spans * 2 * (4 if alone else 6) if kind == "f" else 8), each.name
        assert "LDGSTS.E.BYPASS.LTC128B.128" in body, each.name
        assert each.registers > 32
