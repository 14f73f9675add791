# SPDX-License-Identifier: Apache-2.0
"""Building the compiled kernels: when, with what, and one clear sentence when not."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from fl_lightning.ops import _library

ROOT = Path(__file__).parents[1]
EXTENSION = _library.EXTENSION.module
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
buildable = pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C++ compiler")


@pytest.fixture
def script(monkeypatch):
    """setup.py as a module, in an environment that asks for nothing."""
    for name in ("FL_LIGHTNING_NO_EXT", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX", "DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("fl_lightning_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told_not_to(patch):
    patch.setenv("FL_LIGHTNING_NO_EXT", "1")


def build_isolation(patch):
    patch.setitem(sys.modules, "torch", None)


def old_torch(patch):
    patch.setattr(torch, "__version__", "2.6.0+cu124")


def no_compiler(patch):
    patch.setenv("CXX", "no-such-compiler -m64")


def other_platform(patch):
    patch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (told_not_to, "FL_LIGHTNING_NO_EXT=1"),
        (build_isolation, "torch is not installed where the build runs (pip install --no-build-isolation"),
        (old_torch, "compiled kernels need torch 2.10, this is 2.6.0+cu124"),
        (no_compiler, "there is no C++ compiler (no-such-compiler)"),
        (other_platform, "compiled kernels are for Linux, this is darwin"),
    ],
)
def test_pure_torch_with_the_reason(script, situation, reason, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        situation(patch)
        assert script.extension() == {}
        assert f"pure torch: {reason}" in capsys.readouterr().err
        patch.setenv("FORCE_CUDA", "1")
        with pytest.raises(SystemExit) as stopped:
            script.extension()
    assert str(stopped.value).startswith(f"fl-lightning: FORCE_CUDA=1, but {reason}")


def fake_nvcc(folder, release):
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return str(path)


@buildable
@pytest.mark.parametrize(
    ("torch_cuda", "release", "reason"),
    [
        (None, "13.0", "torch is a build without CUDA"),
        ("13.0", None, "no nvcc was found"),
        ("13.0", "12.4", "torch is built for CUDA 13.0 and nvcc is of CUDA 12"),
    ],
)
def test_what_forced_cuda_kernels_lack(script, torch_cuda, release, reason, monkeypatch, tmp_path, capsys):
    nvcc = fake_nvcc(tmp_path, release) if release else None
    monkeypatch.setattr(script, "find_nvcc", lambda home: nvcc)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    (module,) = script.extension()["ext_modules"]
    assert not [source for source in module.sources if source.endswith(".cu")]
    assert f"none for CUDA: {reason}" in capsys.readouterr().err
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(SystemExit, match=reason):
        script.extension()


@buildable
def test_every_source_is_built(script, monkeypatch):
    monkeypatch.setattr(script, "why_no_cuda", lambda *_: None)
    monkeypatch.setattr(script, "find_nvcc", lambda _: "nvcc")
    monkeypatch.setattr(script, "cuda_headers", lambda _: ["headers"])
    monkeypatch.setattr(script, "cuda_runtime", lambda *_: "libcudart.so.13")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    arguments = script.extension()
    (module,) = arguments["ext_modules"]
    found = {p.relative_to(ROOT).as_posix() for end in ("cpp", "cu") for p in (ROOT / "csrc").rglob(f"*.{end}")}
    assert set(module.sources) == found
    assert module.py_limited_api
    assert arguments["options"]["bdist_wheel"]["py_limited_api"] == "cp310"
    assert "-Iheaders" in module.extra_compile_args["nvcc"]
    assert "libcudart.so.13" in module.extra_link_args
    assert not any(
        "march" in flag or "fast-math" in flag for flags in module.extra_compile_args.values() for flag in flags
    )


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ("compute_75\ncompute_80\ncompute_90\ncompute_100\n", "8.0;9.0;10.0+PTX"),
        ("compute_75\ncompute_80\ncompute_86\ncompute_90\n", "8.0;9.0+PTX"),
        ("compute_50\ncompute_80\n", "8.0+PTX"),
    ],
)
def test_architectures_are_those_that_nvcc_knows(script, known, chosen, monkeypatch):
    monkeypatch.setattr(script, "output", lambda *command, **_: known)
    assert script.architectures("nvcc") == chosen


@pytest.mark.skipif(EXTENSION is None, reason=f"no compiled kernels: {_library.EXTENSION.reason}")
def test_the_extension_registers_every_op():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for key in ("CPU", "CUDA") if EXTENSION.has_cuda() else ("CPU",):
        assert [name for name in _library.NAMES if not has(f"fl_lightning::{name}", key)] == []


def copy_of_the_sources(folder):
    copy = folder / "source"
    for name in ("fl_lightning", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


def run(*command, cwd, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("FL_LIGHTNING_NO_EXT", "FORCE_CUDA", "PYTHONPATH")}
    result = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False, timeout=1500
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
    return result.stdout + result.stderr


def build(hook, source, target, **environment):
    pytest.importorskip("setuptools", minversion="77")
    code = f"import setuptools.build_meta as b; print('made', b.build_{hook}({str(target)!r}))"
    printed = run(sys.executable, "-c", code, cwd=source, **environment)
    return target / next(line.split()[1] for line in printed.splitlines() if line.startswith("made ")), printed


def test_without_the_extension_the_wheel_is_for_every_platform(tmp_path):
    wheel, printed = build("wheel", copy_of_the_sources(tmp_path), tmp_path, FL_LIGHTNING_NO_EXT="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "pure torch: FL_LIGHTNING_NO_EXT=1" in printed
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "csrc" in name or name.endswith(".so")]


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
    assert "kernels for the processor; none for CUDA: no nvcc was found" in printed
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
    code = (
        "import torch, fl_lightning._C as c; from fl_lightning.ops import _library\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "assert c.has_cuda()\n"
        "assert all(has('fl_lightning::' + name, 'CUDA') for name in _library.NAMES)\n"
        "print('registered', c.__file__)"
    )
    assert f"registered {built}" in run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(built))
