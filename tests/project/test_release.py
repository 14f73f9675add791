# SPDX-License-Identifier: Apache-2.0
"""What `make dist` refuses to leave behind."""

import importlib.util
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheels():
    spec = importlib.util.spec_from_file_location("release_wheels", ROOT / "release" / "wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sdist_with(folder, *names):
    source = folder / "fl_lightning-1.0"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    path = folder / "fl_lightning-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(source, arcname=source.name)
    return path


METADATA = ("PKG-INFO", "setup.cfg", "fl_lightning.egg-info/SOURCES.txt")


@pytest.mark.parametrize(
    ("inside", "refused"),
    [
        (("setup.py", "csrc/ops.h"), None),
        (("setup.py",), r"lacks \['csrc/ops.h'\]"),
        (("setup.py", "csrc/ops.h", "fl_lightning/_C.abi3.so"), r"it has also \['fl_lightning/_C.abi3.so'\]"),
        (("setup.py", "csrc/ops.h", "tests/.hypothesis/x"), r"it has also \['tests/.hypothesis/x'\]"),
    ],
)
def test_a_source_distribution_holds_the_commit_and_no_more(wheels, inside, refused, tmp_path):
    sdist = sdist_with(tmp_path, *inside, *METADATA)
    source = wheels.unpacked(sdist, tmp_path / "unpacked")
    want = {"setup.py", "csrc/ops.h"}
    if refused is None:
        wheels.check_sources(want, sdist, source)
        return
    with pytest.raises(SystemExit, match=refused):
        wheels.check_sources(want, sdist, source)


@pytest.mark.parametrize(
    ("inside", "wanted", "fine"),
    [
        ((), (), True),
        (("_C.abi3.so",), ("_C",), True),
        (("_C.abi3.so", "_C_cuda.abi3.so"), ("_C", "_C_cuda"), True),
        ((), ("_C",), False),
        (("_C.abi3.so",), (), False),
        (("_C.abi3.so", "_C_cuda.abi3.so"), ("_C",), False),
        (("_C.cpython-310-x86_64-linux-gnu.so",), ("_C",), False),
    ],
)
def test_a_wheel_holds_the_kernels_that_it_is_for(wheels, inside, wanted, fine, tmp_path):
    path = tmp_path / "fl_lightning-1.0-cp310-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("__init__.py", *inside):
            archive.writestr(f"fl_lightning/{name}", "")
    if fine:
        wheels.check_contents(path, *wanted)
        return
    with pytest.raises(SystemExit, match="and not the libraries"):
        wheels.check_contents(path, *wanted)
