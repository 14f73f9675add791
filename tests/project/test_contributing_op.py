# SPDX-License-Identifier: Apache-2.0
"""The worked example of a new op in docs/add_an_op.md, taken from the page and put where the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
NAMES = [
    "reference", "fake", "entry", "public", "sample", "test", "cpu_declaration", "cuda_declaration", "cpu_kernel",
    "cpu_source", "cuda_source", "wrapper", "forward", "registration",
]  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the sources with the example's op in it."""
    page = (ROOT / "docs/add_an_op.md").read_text(encoding="utf-8")
    found = re.findall(r"```(?:python|cpp)\n(.*?)```", page, flags=re.DOTALL)
    block = dict(zip(NAMES, found, strict=True))
    folder = tmp_path_factory.mktemp("op")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("fl_lightning", "csrc", "tests/ops", "tests/simt"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    helpers = (
        f"tests/{name}.py" for name in ("cases", "conftest", "descent_cases", "implementations", "copies", "qp_cases")
    )
    for name in ("pyproject.toml", ".clang-format", *helpers):
        shutil.copy(ROOT / name, folder / name)

    def insert(name, anchor, text):
        path = folder / name
        whole = path.read_text(encoding="utf-8")
        assert whole.count(anchor) == 1, anchor
        path.write_text(whole.replace(anchor, text + anchor), encoding="utf-8")

    insert("fl_lightning/ops/_reference.py", "def layer_combine(", block["reference"] + "\n\n")
    insert("fl_lightning/ops/_library.py", "def _layer_cross_gram(", block["fake"] + "\n\n")
    insert("fl_lightning/ops/_library.py", '    "layer_dots": _Op(', block["entry"])
    insert("fl_lightning/ops/_layers.py", "@torch.no_grad()\ndef layer_combine(", block["public"] + "\n\n")
    exports = "fl_lightning/ops/__init__.py"
    insert(exports, "from fl_lightning.ops._library import", "from fl_lightning.ops._layers import layer_lengths\n")
    insert(exports, '"layer_squares", ', '"layer_lengths", ')
    insert("tests/implementations.py", '        "layer_dots": (', block["sample"])
    with (folder / "tests/ops/test_kernels.py").open("a", encoding="utf-8") as file:
        file.write("\n\n" + block["test"])
    header = (folder / "csrc/ops.h").read_text(encoding="utf-8")
    insert("csrc/ops.h", "// out[c] (+)= sum_i", block["cpu_declaration"])
    insert("csrc/ops.h", header.splitlines()[-4] + "\n", block["cuda_declaration"])
    for name, key in (
        ("cpu/kernels/layer_lengths_kernel.h", "cpu_kernel"),
        ("cpu/layer_lengths.cpp", "cpu_source"),
        ("cuda/layer_lengths.cu", "cuda_source"),
    ):
        (folder / "csrc" / name).write_text(block[key], encoding="utf-8")
    insert("csrc/extension.cpp", "  static Tensor layer_combine(", block["wrapper"] + "\n")
    insert("csrc/extension.cpp", "  FL_LIGHTNING_FORWARD(space, layer_combine, last)", block["forward"])
    insert("csrc/extension.cpp", '  library.impl("layer_combine", ', block["registration"])
    return folder


def run(folder, *command, **environment):
    result = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_python_half_passes_lint_and_its_tests(copy):
    pytest.importorskip("ruff")
    run(copy, sys.executable, "-m", "ruff", "check", "--ignore=I001", "fl_lightning/ops", "tests/ops")
    pattern = "lengths and (reference or cpu)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "tests/ops"]
    printed = run(copy, *command, "-k", pattern, PYTHONPATH=str(copy), FL_LIGHTNING_DISABLE_EXT="1")
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 2, "its contract and the test of its own"


@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs Linux and a C++ compiler")
@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("csrc/cpu/layer_lengths.cpp", ["-std=c++20"]),
        ("csrc/cuda/layer_lengths.cu", ["-std=c++17", "-x", "c++", "-Itests/simt/include"]),
        ("csrc/extension.cpp", ["-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000", "torch"]),
    ],
    ids=lambda value: Path(value).stem if isinstance(value, str) else "",
)
def test_the_compiled_half_compiles(copy, source, options):
    if options[-1] == "torch":
        import sysconfig

        from torch.utils import cpp_extension

        folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        options = [*options[:-1], *(f"-I{folder}" for folder in folders)]
    run(copy, COMPILER, *options, "-w", "-fsyntax-only", source)


def test_the_compiled_half_is_formatted(copy):
    program = shutil.which("clang-format", path=str(Path(sys.executable).parent)) or shutil.which("clang-format")
    if program is None:
        pytest.skip("no clang-format")
    sources = ["csrc/ops.h", "csrc/extension.cpp", *copy.glob("csrc/**/layer_lengths*")]
    run(copy, program, "--dry-run", "--Werror", *sources)
