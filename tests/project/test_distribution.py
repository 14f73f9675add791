# SPDX-License-Identifier: Apache-2.0
"""Source distributions and wheels with compiled kernels, built and tested as a user would."""

import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from distributions import ROOT, build, copy_of_the_sources, run

from fl_lightning.ops import _library

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
buildable = pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C++ compiler")


def path_without(program, folder):
    """PATH as it is, but a folder that holds the program is replaced by links to everything else in it."""
    kept = []
    for number, entry in enumerate(os.environ["PATH"].split(os.pathsep)):
        if not Path(entry, program).exists():
            kept.append(entry)
            continue
        links = folder / f"bin{number}"
        links.mkdir()
        for path in Path(entry).iterdir():
            if path.name != program:
                (links / path.name).symlink_to(path)
        kept.append(str(links))
    return os.pathsep.join(kept)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@buildable
def test_kernels_built_from_the_source_distribution_pass_the_op_tests(tmp_path):
    sdist, _ = build("sdist", copy_of_the_sources(tmp_path), tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    # CUDA kernels are built below, once.
    hide_nvcc = {"CUDA_HOME": str(tmp_path / "nothing"), "PATH": path_without("nvcc", tmp_path)}
    wheel, printed = build("wheel", source, tmp_path, **hide_nvcc)
    assert "kernels for the processor; none for CUDA" in printed
    assert "-cp310-abi3-linux_" in wheel.name
    clean = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(clean)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    where = "import fl_lightning.ops as o; print(o.__file__, o.backend()['layer_gram'])"
    printed = run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(clean))
    assert str(clean) in printed
    assert "implementation='cpu'" in printed
    run(
        *(sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "tests/ops"),
        cwd=tmp_path,
        PYTHONPATH=str(clean),
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
@buildable
@pytest.mark.skipif(shutil.which("nvcc") is None or torch.version.cuda is None, reason="needs nvcc and torch for CUDA")
def test_cuda_kernels_compile_link_and_load(tmp_path):
    """With or without a GPU."""
    source = copy_of_the_sources(tmp_path)
    built = tmp_path / "built"
    run(
        *(sys.executable, "setup.py", "build", "--build-lib", str(built), "--build-temp", str(tmp_path / "objects")),
        cwd=source,
        FORCE_CUDA="1",
        TORCH_CUDA_ARCH_LIST="9.0",
    )
    own = sorted(set(_library.NAMES) - set(_library.COMPOSED))
    code = (
        "import torch, fl_lightning._C, fl_lightning._C_cuda as c\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        f"assert all(has('fl_lightning::' + name, 'CUDA') for name in {own!r})\n"
        "print('registered', c.__file__)"
    )
    assert f"registered {built}" in run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(built))
