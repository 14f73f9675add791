# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources through CUDA's own compiler, where it is installed. No GPU is needed."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import simt_build

from benchmarks.cuda_resources import dump, find_cuobjdump, plain_name, wide_accesses

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

# The 16-byte loads and stores that the code of every variant of a kernel must have at least: a run of each row that is
# read together, and what is written of it. Where a compiler splits them, nothing but speed tells.
WIDE = {
    "layer_combine": {"combine": (8, 0)},
    "layer_cross_gram": {"products_mma": (4, 0), "products_tiled": (1, 0)},
    "layer_dots": {"dots": (9, 0)},
    "layer_gram": {"gram_direct": (4, 0), "products_mma": (4, 0), "products_tiled": (1, 0)},
    "puc_combine": {"combine": (8, 1)},
    "puc_track": {"track": (2, 0)},
}
# combine, for an output of the rows' dtype. To others it may store less than 16 bytes at a time.
SAME = re.compile(r"combineI(?:(\w)\1|\d+(?:__half|__nv_bfloat16)S\d*_)L")


def headers():
    """Folder of CUDA's headers: the toolkit's, or that of pip's CUDA packages."""
    nvidia = importlib.util.find_spec("nvidia")
    candidates = [Path(NVCC).resolve().parents[1] / "include"]
    candidates += (
        [path for root in nvidia.submodule_search_locations or () for path in Path(root).glob("*/include")]
        if nvidia
        else []
    )
    return next((path for path in candidates if (path / "cuda_fp16.h").exists()), None)


@pytest.mark.skipif(NVCC is None, reason="no nvcc: the CUDA sources are not compiled for a device")
@pytest.mark.parametrize("source", sorted(simt_build.CUDA.rglob("*.cu")), ids=lambda source: source.stem)
def test_nvcc_compiles_without_warnings_and_spills_and_with_wide_accesses(source, tmp_path):
    folder = headers()
    if folder is None:
        pytest.skip("no CUDA headers: neither a toolkit's nor a pip package's")
    command = [NVCC, "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas", "-v", f"-I{folder}", str(source)]
    result = subprocess.run([*command, "-o", str(tmp_path / "kernel.cubin")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr
    stores = [int(number) for number in re.findall(r"(\d+) bytes spill stores", result.stderr)]
    assert stores or source.stem == "layers"  # which has no kernel
    # A table of registers and shared memory: nvcc -Xptxas -v, as above.
    assert max(stores, default=0) == 0, result.stderr
    if find_cuobjdump() is None:
        pytest.skip("no cuobjdump: neither a toolkit's nor triton's")
    found = wide_accesses(dump(find_cuobjdump(), tmp_path / "kernel.cubin", "--dump-sass"))
    for kernel, (loads, stores) in WIDE.get(source.stem, {}).items():
        variants = {name: count for name, count in found.items() if plain_name(name) == kernel}
        assert variants
        for name, count in variants.items():
            assert count["LDG"] >= loads, name
            assert count["STG"] >= stores + bool(SAME.search(name)), name
