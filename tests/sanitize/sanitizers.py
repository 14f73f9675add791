# SPDX-License-Identifier: Apache-2.0
"""Builds the CPU kernels with sanitizers and calls them at random, once for each instruction set of this machine.

Needs a C++ compiler with its sanitizers, and not torch: ``python tests/sanitize/sanitizers.py --calls 100000``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "csrc" / "cpu"
SETS = ("avx512", "avx2", "base")
SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
# Checks are calls, which takes less time to compile.
QUICK = ("-O0", "--param=asan-instrumentation-with-call-threshold=0")
FLAGS = ("-std=c++20", "-g1", "-Wall", "-ffp-contract=off", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS")


def compiler() -> list[str]:
    """The C++ compiler and its options, as setup.py chooses it."""
    return shlex.split(os.environ.get("CXX", "c++"))


def why_not(folder: Path) -> str | None:
    """Why no program with sanitizers can be built and run here, if so."""
    if sys.platform != "linux":
        return f"the kernels are for Linux, this is {sys.platform}"
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}\n", encoding="utf-8")
    try:
        subprocess.run([*compiler(), *SANITIZERS, str(source), "-o", str(program)], capture_output=True, check=True)
        subprocess.run([str(program)], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (getattr(error, "stderr", None) or b"").decode().strip().splitlines()
        return f"{shlex.join(compiler())} builds no program with sanitizers: {detail[0] if detail else error}"
    return None


def digest(*options: str) -> str:
    """Names what a program is built from: compiler, options and sources."""
    version = subprocess.run([*compiler(), "--version"], capture_output=True, check=True).stdout
    files = sorted(path for folder in (KERNELS.parent, HERE) for path in folder.rglob("*.*") if path.suffix != ".pyc")
    parts = version, repr((SANITIZERS, FLAGS, options)).encode(), *(path.read_bytes() for path in files)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build(folder: Path, *options: str, kernels: Path = KERNELS) -> Path:
    """The program that makes the calls.

    Raises:
        subprocess.CalledProcessError: a source does not compile.
    """
    harness = folder / "harness.cpp"  # one source: half the time to compile
    harness.write_text("".join(f'#include "{path}"\n' for path in sorted(HERE.glob("*.cpp"))), encoding="utf-8")
    sources = [*sorted(kernels.rglob("*.cpp")), harness]
    objects = [folder / f"{source.stem}.o" for source in sources]
    begin = [*compiler(), *FLAGS, *SANITIZERS, *options]
    commands = ([*begin, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True))
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    program = folder / "fuzz"
    subprocess.run([*begin, *map(str, objects), "-pthread", "-o", str(program)], check=True)
    return program


def calls(program: Path, instructions: str, count: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Runs the program in one instruction set; the return code tells whether there was a finding."""
    # GCC up to 13 lays wide vectors at wrong addresses on a stack that is watched for use after return (bug 110027).
    options = "detect_stack_use_after_return=0:strict_init_order=1:check_initialization_order=1"
    environment = {
        **os.environ,
        "FL_LIGHTNING_ISA": instructions,
        "ASAN_OPTIONS": options,
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [str(program), str(count), str(seed)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def instruction_sets(program: Path) -> list[str]:
    """Those of FL_LIGHTNING_ISA that make a difference on this machine, the best one first."""
    chosen = {calls(program, name, 0, 0).stdout.partition(":")[0]: name for name in reversed(SETS)}
    return [name for name in SETS if name in chosen.values()]


def main() -> int:
    """Exit status 0 without a finding, 1 with one, 2 where nothing could be run."""
    parser = argparse.ArgumentParser(description="random calls of the CPU kernels under sanitizers")
    parser.add_argument("--calls", type=int, default=100_000, help="calls in each instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimise", default="-O1", help="optimisation of the compiler")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        obstacle = why_not(folder)
        if obstacle is not None:
            print(obstacle, file=sys.stderr)
            return 2
        program = build(folder, arguments.optimise)
        for instructions in instruction_sets(program):
            result = calls(program, instructions, arguments.calls, arguments.seed)
            print(result.stdout + result.stderr, end="", flush=True)
            if result.returncode != 0:
                print(f"finding in {instructions}: exit status {result.returncode}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
