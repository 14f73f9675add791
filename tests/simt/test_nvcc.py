# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources through CUDA's own compiler, where it is installed. No GPU is needed."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import simt_build

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


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
def test_nvcc_compiles_without_warnings_and_spills(source, tmp_path):
    folder = headers()
    if folder is None:
        pytest.skip("no CUDA headers: neither a toolkit's nor a pip package's")
    command = [NVCC, "-std=c++17", "-arch=sm_90", "-cubin", "-Xptxas", "-v", f"-I{folder}", str(source)]
    result = subprocess.run([*command, "-o", str(tmp_path / "kernel.cubin")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr, result.stderr
    stores = [int(number) for number in re.findall(r"(\d+) bytes spill stores", result.stderr)]
    assert stores
    # A table of registers and shared memory: nvcc -Xptxas -v, as above.
    assert max(stores) == 0, result.stderr
