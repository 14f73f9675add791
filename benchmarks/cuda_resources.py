# SPDX-License-Identifier: Apache-2.0
"""Registers, shared memory, stack, occupancy and wide accesses of the CUDA kernels as built. No GPU is needed.

    python -m benchmarks.cuda_resources [--out FILE]

Reads what the compiler left in the library, through cuobjdump (of the CUDA toolkit, or the one that comes with triton).
Occupancy is what the registers alone allow. 16-byte loads and stores are the fewest instructions of any variant.
Bandwidth and time are not measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

_REGISTERS, _THREADS, _WARP = 65536, 2048, 32  # per multiprocessor of these architectures
_FOUND = re.compile(
    r"^arch = sm_(?P<arch>\d+a?)"
    r"|^ Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)"
    r" LOCAL:(?P<local>\d+)",
    re.MULTILINE,
)
_ACCESS = re.compile(r"Function : (?P<name>\S+)|\b(?P<kind>LDG|STG)(?:STS)?(?:\.\w+)*\.128\b")
_FILE = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+?)_cu_[0-9a-f]{8}")
HEAD = (
    "| file | kernel | variants | sm | registers | shared bytes | stack or local bytes | occupancy | 16-byte loads "
    "| stores |\n" + "|---" * 10 + "|"
)


def occupancy(registers: int) -> float:
    """Resident threads that this number of registers per thread allows, by the most there can be."""
    per_warp = -(-registers * _WARP // 256) * 256  # registers come in units of 256
    return min(_REGISTERS // per_warp * _WARP, _THREADS) / _THREADS


def find_cuobjdump() -> str | None:
    """The toolkit's, or triton's."""
    triton = importlib.util.find_spec("triton")
    folders = (
        [Path(folder, "backends/nvidia/bin") for folder in (triton.submodule_search_locations or ())] if triton else []
    )
    return shutil.which("cuobjdump") or next(
        (found for f in folders if (found := shutil.which("cuobjdump", path=f))), None
    )


def wide_accesses(sass: str) -> dict[str, Counter[str]]:
    """How many 16-byte loads and stores of device memory the code of each kernel has: ``LDG`` and ``STG``.

    Loads to shared memory count, too.

    Args:
        sass: what ``cuobjdump --dump-sass`` prints for one architecture.
    """
    found, own = dict[str, Counter[str]](), Counter[str]()
    for match in _ACCESS.finditer(sass):
        if match["name"]:
            own = found.setdefault(match["name"], Counter())
        else:
            own[match["kind"]] += 1
    return found


def plain_name(name: str) -> str:
    """Of a mangled name ``_ZN<n>name...``, the last plain name before the template's arguments."""
    names: list[str] = re.findall(r"(?<=\d)([a-z][a-z_]+)(?=I|E)", name)
    return names[-1] if names else name


class Variant(NamedTuple):
    """A kernel for one dtype, tile size and architecture."""

    file: str
    """Whose own the kernel is; ``"kernels"``, the folder, for one of several files."""
    kernel: str
    arch: str
    """Such as ``"90a"``."""
    name: str
    """As mangled."""
    registers: int
    shared: int
    """Bytes of static shared memory."""
    local: int
    """Bytes of stack and other local memory, to which registers are spilled."""


def variants(report: str) -> Iterator[Variant]:
    """All that ``cuobjdump --dump-resource-usage`` has printed."""
    arch = ""
    for match in _FOUND.finditer(report):
        arch = match["arch"] or arch
        name = match["name"]
        if name is not None:
            own = _FILE.search(name)
            file = own[1] if own else "kernels"
            local = int(match["stack"]) + int(match["local"])
            yield Variant(file, plain_name(name), arch, name, int(match["registers"]), int(match["shared"]), local)


def table(report: str, accesses: Mapping[str, Mapping[str, Counter[str]]]) -> list[str]:
    """One line per kernel and architecture; of the variants for dtypes and tile sizes the worst numbers.

    Args:
        report: what ``cuobjdump --dump-resource-usage`` prints.
        accesses: :func:`wide_accesses` by architecture.
    """
    lines = []
    for (file, kernel, arch), group in groupby(sorted(variants(report)), key=lambda each: each[:3]):
        every = list(group)
        registers, shared, local = (max(own) for own in zip(*(each[4:] for each in every), strict=True))
        loads, stores = (min(accesses[arch][each.name][kind] for each in every) for kind in ("LDG", "STG"))
        lines.append(
            f"| {file} | {kernel} | {len(every)} | {arch} | {registers} | {shared} | {local} "
            f"| {occupancy(registers):.0%} | {loads} | {stores} |"
        )
    return lines


def find_library() -> Path | None:
    """The built CUDA kernels."""
    return next((Path(__file__).parents[1] / "fl_lightning").glob("_C_cuda.*so"), None)


def dump(tool: str, file: Path, *options: str) -> str:
    """What cuobjdump prints of a library or cubin."""
    return subprocess.run([tool, *options, str(file)], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    tool, library = find_cuobjdump(), find_library()
    if tool is None or library is None:
        sys.exit("no cuobjdump was found" if tool is None else "the CUDA kernels are not built (make kernels)")
    report = dump(tool, library, "--dump-resource-usage")
    found = sorted({each.arch for each in variants(report)})
    lines = table(report, {a: wide_accesses(dump(tool, library, "--dump-sass", "-arch", f"sm_{a}")) for a in found})
    if not lines:
        sys.exit("the extension has no CUDA kernels")
    text = "\n".join([HEAD, *lines])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(f"# CUDA kernels, as compiled\n\n{text}\n", "utf-8")


if __name__ == "__main__":
    main()
