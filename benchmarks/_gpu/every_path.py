# SPDX-License-Identifier: Apache-2.0
"""Calls every path of every kernel for CUDA once, on small odd shapes; compute-sanitizer watches.

    python -m benchmarks._gpu.every_path [--device cuda|cpu] [--part I/N]

``--part 1/14`` makes the calls with one number of rows; tools that take long watch such parts side by side. Without a tool
it takes seconds, and checks that what must be finite is. PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes every tensor end where its
memory ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks._gpu.facts import add_device
from fl_lightning import ops

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES = (300, 0, 3, 2474)
# Of the direct kernel each size, tiles, tiles in several blocks, tensor cores in one block and in several. On Hopper 18
# to 128 have each kernel for warpgroups once.
ROWS = (1, 4, 7, 9, 11, 16, 18, 27, 34, 61, 66, 106, 113, 130)
SOLVED = (1, 2, 3, 40, 74, 170)  # 74 ask for shared memory beyond 48 KB; of 170 the numbers do not fit any
PROJECTED = (3, 40, 257)  # 257: the first whose numbers do not fit shared memory


def offsets_of(sizes: tuple[int, ...]) -> Tensor:
    """Offsets of layers of these sizes."""
    return torch.tensor([0, *sizes]).cumsum(0)


def results(device: torch.device, part: int = 0, parts: int = 1) -> Iterator[tuple[str, Tensor]]:
    """What ops return, and the name of each, of this part of the calls."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    offsets, n = offsets_of(SIZES), sum(SIZES)
    many = offsets_of((*[9] * 300, n - 2700))
    for dtype, m in list(product(DTYPES, ROWS))[part::parts]:
        rows = normal(m, n).to(dtype).to(device)  # its last row ends where memory ends
        apart = torch.zeros(m, n + 3, dtype=dtype, device=device)[:, 2:-1].copy_(rows)  # and none is aligned
        coeff = normal(len(SIZES), m + 2)
        keep = torch.randint(-(2**31), 2**31, (m, -(-n // 32)), dtype=torch.int32, generator=generator).to(device)
        for held in (rows, apart):
            yield "layer_gram", ops.layer_gram(held, offsets)
            yield "layer_squares", ops.layer_squares(held, offsets)
            yield "layer_dots", ops.layer_dots(held, rows[-1].clone(), offsets)
            for trim in {0, (m - 1) // 4, (m - 1) // 2}:
                yield "trimmed_mean", ops.trimmed_mean(held, trim)
            for own in (coeff, coeff.to(device)):  # numbers of the host travel with the launch
                yield "layer_combine", ops.layer_combine(held, offsets, own[:, :m].contiguous())
                yield "layer_cross_combine", ops.layer_cross_combine(held, normal(2, n).to(held), offsets, own)
            yield "puc_combine", ops.puc_combine(held, keep, torch.ones(m))
        for other in DTYPES:
            few = normal(3, n).to(other).to(device)
            yield "layer_cross_gram", ops.layer_cross_gram(rows, few, offsets)
            out = torch.zeros(n, dtype=other, device=device)
            yield "layer_combine", ops.layer_combine(rows, offsets, coeff[:, :m].contiguous(), out)
        yield "layer_cross_gram", ops.layer_cross_gram(rows, rows[: m // 2 + 1].clone(), offsets)
        yield "layer_cross_gram", ops.layer_cross_gram(rows, rows, offsets, torch.tensor([m - 1, 0]))
        for counts in (torch.uint8, torch.int16, torch.int32):
            for where in (offsets, many):
                past = torch.zeros(n, dtype=counts, device=device)
                yield "puc_track", ops.puc_track(rows[0].clone(), past, 1, 2, where)[1]
        yield "layer_gram", ops.layer_gram(rows, many)
        rows[0, 5] = torch.inf  # sums that float32 cannot hold are summed again
        ops.layer_gram(rows, offsets)
        ops.layer_squares(rows, offsets)
        ops.layer_cross_gram(rows, rows[:1].clone(), offsets)
        ops.layer_dots(rows, rows[0].clone(), offsets)
    if part + 1 < parts:
        return
    for k in SOLVED:
        vectors = normal(2, k, max(1, k // 2))
        gram, online = (vectors @ vectors.mT).to(device), (k + 1) // 2
        yield "min_norm", ops.min_norm(gram)[0]
        for scale in (None, torch.ones(2, k, dtype=torch.float64)):
            for weights in (None, normal(online)):
                bounds = {"zero_row": 1e-8, "zero_direction": 1e-4, "rounding": 1e-7}
                yield "common_descent", ops.common_descent(gram, online, scale, weights, **bounds)[0]
    for m in PROJECTED:
        vectors, kept = normal(1, m, m), torch.arange(m) % max(1, m // 3) > 0  # few rows are projected where many are
        order = torch.randperm(m, generator=generator)
        yield "project_conflicts", ops.project_conflicts((vectors @ vectors.mT).to(device), order, kept)


def run(device: torch.device, part: int = 0, parts: int = 1) -> dict[str, int]:
    """How often each op was called.

    Raises:
        RuntimeError: something that must be finite is not, or some op was not called.
    """
    calls = dict.fromkeys(ops.backend(), 0)
    for name, result in results(device, part, parts):
        calls[name] += 1
        if not result.isfinite().all():
            raise RuntimeError(f"call {calls[name]} of {name} gives numbers that are not finite")
    missing = [name for name, count in calls.items() if count == 0]
    if missing and parts == 1:
        raise RuntimeError(f"not called: {missing}")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return calls


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the calls (default: all)")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    found = run(torch.device(arguments.device), part - 1, parts)
    print("called " + ", ".join(f"{name} {count} times" for name, count in found.items()))


if __name__ == "__main__":
    main()
