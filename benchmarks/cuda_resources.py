# SPDX-License-Identifier: Apache-2.0
"""Registers, shared memory, stack and occupancy of the CUDA kernels in the built extension. No GPU is needed.

    python -m benchmarks.cuda_resources [--out FILE]

Reads what the compiler left in the library, through cuobjdump (of the CUDA toolkit, or the one that comes with triton).
Occupancy is what the registers alone allow. Bandwidth and time are not measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

_REGISTERS, _THREADS, _WARP = 65536, 2048, 32  # per multiprocessor of these architectures
_FOUND = re.compile(
    r"^arch = sm_(?P<arch>\d+)|^identifier = .*/(?P<file>\w+)\.cu"
    r"|^ Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)"
    r" LOCAL:(?P<local>\d+)",
    re.MULTILINE,
)
HEAD = (
    "| file | kernel | variants | sm | registers | shared bytes | stack or local bytes | occupancy |\n"
    + "|---" * 8
    + "|"
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


def table(report: str) -> list[str]:
    """One line per kernel and architecture; of the variants for dtypes and tile sizes the largest numbers.

    Args:
        report: what ``cuobjdump --dump-resource-usage`` prints.
    """
    arch, file, worst = "", "", dict[tuple[str, str, int], list[int]]()
    for match in _FOUND.finditer(report):
        arch, file = match["arch"] or arch, match["file"] or file
        if match["name"] is None:
            continue
        # _ZN<n>name...: the last plain name before the template's arguments
        names = re.findall(r"(?<=\d)([a-z][a-z_]+)(?=I|E)", match["name"])
        own = worst.setdefault((file, names[-1] if names else match["name"], int(arch)), [0, 0, 0, 0])
        numbers = int(match["registers"]), int(match["shared"]), int(match["stack"]) + int(match["local"])
        own[:] = [own[0] + 1, *(max(a, b) for a, b in zip(own[1:], numbers, strict=True))]
    return [
        f"| {file} | {name} | {count} | {arch} | {registers} | {shared} | {local} | {occupancy(registers):.0%} |"
        for (file, name, arch), (count, registers, shared, local) in sorted(worst.items())
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    tool = find_cuobjdump()
    library = next((Path(__file__).parents[1] / "fl_lightning").glob("_C_cuda.*so"), None)
    if tool is None or library is None:
        sys.exit("no cuobjdump was found" if tool is None else "the CUDA kernels are not built (make kernels)")
    command = [tool, "--dump-resource-usage", str(library)]
    lines = table(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if not lines:
        sys.exit("the extension has no CUDA kernels")
    text = "\n".join([HEAD, *lines])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(f"# CUDA kernels, as compiled\n\n{text}\n", "utf-8")


if __name__ == "__main__":
    main()
