# SPDX-License-Identifier: Apache-2.0
"""What setup.py builds, and the one clear sentence where it cannot. Nothing is compiled here."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
buildable = pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C++ compiler")


@pytest.fixture
def script(monkeypatch):
    """setup.py as a module, in an environment that asks for nothing."""
    for name in ("FL_LIGHTNING_NO_EXT", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX", "DEBUG"):
        monkeypatch.setenv(name, "")  # so that whatever the script sets is undone
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("fl_lightning_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(folder, name, text, status=0):
    """An executable that prints a text, to standard error if it fails."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat >{'&2' if status else '&1'} <<'END'\n{text}\nEND\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def told_not_to(patch, folder):
    patch.setenv("FL_LIGHTNING_NO_EXT", "1")


def other_platform(patch, folder):
    patch.setattr(sys, "platform", "darwin")


def free_threaded(patch, folder):
    known = sysconfig.get_config_var
    patch.setattr(sysconfig, "get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else known(name))


def build_isolation(patch, folder):
    patch.setitem(sys.modules, "torch", None)


def old_torch(patch, folder):
    patch.setattr(torch, "__version__", "2.6.0+cu124")


def no_compiler(patch, folder):
    patch.setenv("CXX", "no-such-compiler -m64")


def no_python_headers(patch, folder):
    patch.setenv("CXX", "true")
    patch.setattr(sysconfig, "get_path", lambda name: str(folder))


def old_compiler(patch, folder):
    (folder / "Python.h").touch()
    patch.setattr(sysconfig, "get_path", lambda name: str(folder))
    patch.setenv("CXX", program(folder, "old-c++", "c++: error: unrecognized option '-std=c++20'", status=1))


@pytest.mark.skipif(sys.platform != "linux", reason="the other platforms end in the same sentence")
@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (told_not_to, "FL_LIGHTNING_NO_EXT=1"),
        (other_platform, "compiled kernels are for Linux, this is darwin"),
        (free_threaded, "this is a free-threaded Python, which has no stable binary interface"),
        (
            build_isolation,
            "torch is not installed where the build runs (pip install --no-build-isolation builds the kernels)",
        ),
        (old_torch, "compiled kernels need torch 2.10, this is 2.6.0+cu124"),
        (no_compiler, "there is no C++ compiler (no-such-compiler)"),
        (no_python_headers, "Python's headers are not installed (Python.h, often in a package named python3-dev)"),
        (old_compiler, "does not compile C++20: c++: error: unrecognized option '-std=c++20'"),
    ],
)
def test_pure_torch_with_the_reason(script, situation, reason, monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        situation(patch, tmp_path)
        assert script.extension() == {}
        (sentence,) = capsys.readouterr().err.splitlines()
        assert sentence.startswith("fl-lightning: pure torch: ")
        assert sentence.endswith(reason)
        patch.setenv("FORCE_CUDA", "1")
        with pytest.raises(SystemExit) as stopped:
            script.extension()
    assert str(stopped.value).startswith("fl-lightning: FORCE_CUDA=1, but ")
    assert str(stopped.value).endswith(reason)


def nvcc_of(release):
    text = f"Cuda compilation tools, release {release}, V{release}.1"
    return lambda folder: program(folder, "nvcc", text)


def broken_nvcc(folder):
    return program(folder, "nvcc", "Segmentation fault", status=1)


def nvcc_without_a_host_compiler(folder):
    path = Path(nvcc_of("13.0")(folder))
    error = "host_config.h:164:2: error: #error -- unsupported GNU version!"
    path.write_text(path.read_text().replace("#!/bin/sh", f'#!/bin/sh\n[ "$1" = -E ] && echo "{error}" >&2 && exit 1'))
    return str(path)


@buildable
@pytest.mark.parametrize(
    ("torch_cuda", "nvcc", "reason"),
    [
        (None, nvcc_of("13.0"), "torch is a build without CUDA"),
        ("13.0", None, "no nvcc was found (install the CUDA toolkit, or set CUDA_HOME)"),
        ("13.0", broken_nvcc, "nvcc --version fails"),
        ("13.0", nvcc_of("12.4"), "torch is built for CUDA 13.0 and nvcc is of CUDA 12"),
        (
            "13.0",
            nvcc_without_a_host_compiler,
            "nvcc compiles nothing: host_config.h:164:2: error: #error -- unsupported GNU version!",
        ),
        (
            "47.0",
            nvcc_of("47.0"),
            "no libcudart.so.47 was found (install the CUDA toolkit, or pip's nvidia-cuda-runtime)",
        ),
    ],
)
def test_what_cuda_kernels_lack(script, torch_cuda, nvcc, reason, monkeypatch, tmp_path, capsys):
    found = nvcc(tmp_path) if nvcc else None
    monkeypatch.setattr(script, "find_nvcc", lambda home: found)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    (module,) = script.extension()["ext_modules"]
    assert module.name == "fl_lightning._C"
    assert not [source for source in module.sources if "cuda" in source]
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("fl-lightning: kernels for the processor; none for CUDA: ")
    assert sentence.endswith(reason)
    monkeypatch.setenv("FORCE_CUDA", "1")
    with pytest.raises(SystemExit) as stopped:
        script.extension()
    assert str(stopped.value).startswith("fl-lightning: FORCE_CUDA=1, but ")
    assert str(stopped.value).endswith(reason)


@buildable
def test_cuda_kernels_can_be_left_out(script, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_CUDA", "0")
    (module,) = script.extension()["ext_modules"]
    assert module.name == "fl_lightning._C"
    # torch may speak first, the first time.
    assert capsys.readouterr().err.endswith("fl-lightning: kernels for the processor; none for CUDA: FORCE_CUDA=0\n")


@buildable
def test_every_source_is_built(script, monkeypatch):
    monkeypatch.setattr(script, "find_cuda", lambda *_: script.Cuda(["headers"], "libcudart.so.13", "9.0", ["--small"]))
    arguments = script.extension()
    cpu, cuda = arguments["ext_modules"]
    found = {p.relative_to(ROOT).as_posix() for end in ("cpp", "cu") for p in (ROOT / "csrc").rglob(f"*.{end}")}
    assert sorted(cpu.sources + cuda.sources) == sorted(found)
    assert [source for source in cpu.sources if "cuda" in source] == []
    assert (cpu.name, cuda.name) == ("fl_lightning._C", "fl_lightning._C_cuda")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert cpu.py_limited_api
    assert cuda.py_limited_api
    assert arguments["options"]["bdist_wheel"]["py_limited_api"] == "cp310"
    assert {"-Iheaders", "--small"} <= set(cuda.extra_compile_args["nvcc"])
    assert "-lineinfo" not in cuda.extra_compile_args["nvcc"]
    assert "libcudart.so.13" in cuda.extra_link_args
    assert "torch_cuda" in cuda.libraries
    assert not {"libcudart.so.13"} & set(cpu.extra_link_args)
    assert "torch_cuda" not in cpu.libraries
    all_flags = [flag for each in (cpu, cuda) for flags in each.extra_compile_args.values() for flag in flags]
    assert not any("march" in flag or "fast-math" in flag for flag in all_flags)


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ("compute_75\ncompute_80\ncompute_90\ncompute_100\n", "7.5;8.0;9.0a;10.0+PTX"),
        ("compute_75\ncompute_80\ncompute_86\ncompute_90\n", "7.5;8.0;9.0+PTX"),
        ("compute_50\ncompute_80\n", "8.0+PTX"),
    ],
)
def test_architectures_are_those_that_nvcc_knows(script, known, chosen, monkeypatch):
    monkeypatch.setattr(script, "output", lambda *command: known)
    assert script.architectures("nvcc") == chosen
