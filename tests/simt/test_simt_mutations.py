# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels' sources: the comparisons and the harness must find every one of them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import simt_build
import simt_library
import torch
from mutations.change import Change
from simt_library import KernelError

from fl_lightning.ops import _gram_problems
from fl_lightning.ops import _reference as reference

OFFSETS = torch.tensor([0, 300, 300, 303, 1400])
N = 1400


def rows_of(m, lead=1):
    values = torch.randint(-3, 4, (m, N + lead), generator=torch.Generator().manual_seed(m)).float()
    return values[:, lead:]


def gram_is_right(kernels, m=7):
    return torch.equal(kernels.layer_gram(rows_of(m), OFFSETS), reference.layer_gram(rows_of(m), OFFSETS))


def cross_gram_is_right(kernels):
    rows, others = rows_of(6), rows_of(3)
    want = reference.layer_cross_gram(rows, others, OFFSETS)
    return torch.equal(kernels.layer_cross_gram(rows, others, OFFSETS), want)


def many_are_right(kernels):
    """On tensor cores: whole numbers exactly, others to seven digits."""
    rows = torch.randn(33, N, generator=torch.Generator().manual_seed(0))
    got, want = kernels.layer_gram(rows, OFFSETS), reference.layer_gram(rows, OFFSETS)
    return gram_is_right(kernels, 41) and bool(((got - want).abs() <= 3e-4).all())


def hopper_is_right(kernels):
    """The same on a device that has tensor cores for warpgroups, where nothing is exact."""
    try:
        kernels.capability(9)
        return all(
            bool(
                ((kernels.layer_gram(rows, OFFSETS) - reference.layer_gram(rows, OFFSETS)).abs() <= 3e-4 * scale).all()
            )
            for rows, scale in ((torch.randn(33, N, generator=torch.Generator().manual_seed(0)), 1), (rows_of(41), 10))
        )
    finally:
        kernels.capability(8)


def dots_are_right(kernels):
    rows, step = rows_of(9), rows_of(1)[0]
    return torch.equal(kernels.layer_dots(rows, step, OFFSETS), reference.layer_dots(rows, step, OFFSETS))


def many_chunks_are_right(kernels):
    rows, offsets = torch.ones(1, 70_000), torch.tensor([0, 70_000])
    return torch.equal(kernels.layer_gram(rows, offsets), reference.layer_gram(rows, offsets))


def combination_is_right(kernels):
    coeff = torch.arange(12.0).view(4, 3)
    return torch.equal(
        kernels.layer_combine(rows_of(3), OFFSETS, coeff), reference.layer_combine(rows_of(3), OFFSETS, coeff)
    )


def projection_is_right(kernels):
    rows = torch.randn(3, 40, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = (rows @ rows.mT, torch.arange(40), torch.arange(40) % 3 == 0)
    return torch.allclose(kernels.project_conflicts(*arguments), _gram_problems.project_conflicts(*arguments))


def min_norm_is_right(kernels):
    rows = torch.randn(1, 40, 90, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    gram = rows @ rows.mT
    results = [kernels.min_norm(gram), kernels.min_norm(gram[:, :2, :2].contiguous())]
    flat = rows[:, :20, :3].float()
    indefinite = (flat @ flat.mT).double()  # by rounding, which takes several searches
    return bool(
        all((gap < 1e-14).all() and ((lam.sum(1) - 1).abs() < 1e-12).all() for lam, gap in results)
        and (kernels.min_norm(indefinite)[0].sum(1) - 1).abs().max() < 1e-12
    )


def descent_is_right(kernels):
    rows = torch.randn(1, 12, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3
    arguments = (rows @ rows.mT, 8, None, torch.linspace(-1, 1, 8, dtype=torch.float64), 1e-8, 1e-4, 0.0)
    return torch.allclose(kernels.common_descent(*arguments)[0], _gram_problems.common_descent(*arguments)[0])


def tracking_is_right(kernels):
    row, own = rows_of(1)[0], torch.arange(N).remainder(6).to(torch.uint8)
    theirs = own.clone()
    got, want = kernels.puc_track(row, own, 2, 5, OFFSETS), reference.puc_track(row, theirs, 2, 5, OFFSETS)
    return all(map(torch.equal, got, want)) and torch.equal(own, theirs)


def mean_is_right(kernels):
    keep = torch.randint(-(2**31), 2**31, (3, 44), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    arguments = (rows_of(3), keep, torch.tensor([1.0, 2.0, 4.0]))
    return torch.allclose(kernels.puc_combine(*arguments), reference.puc_combine(*arguments))


@dataclass(frozen=True)
class Planted(Change):
    """A change of a file in csrc/cuda: which object file is rebuilt, and what must notice it."""

    rebuilt: str
    check: Callable[[simt_library.Kernels], bool]


NO_BARRIER, NO_WARP_BARRIER = "«__syncthreads();→»", "«__syncwarp();→»"
MUTATIONS = {
    # Missing barriers: before a read of what others wrote, and before a write of what others read.
    "tiled: read before staged": Planted(
        "kernels/products_tiled.cuh", NO_BARRIER, "layer_cross_gram", cross_gram_is_right
    ),
    "tiled: staged before read": Planted(
        "kernels/products_tiled.cuh", NO_BARRIER, "layer_cross_gram", cross_gram_is_right, occurrence=1
    ),
    "direct: warp reads before": Planted("kernels/gram_direct.cuh", NO_WARP_BARRIER, "layer_gram", gram_is_right),
    "dots: warps not waited for": Planted("kernels/row_products.cuh", NO_BARRIER, "layer_dots", dots_are_right),
    "projection: written while read": Planted(
        "project_conflicts.cu", NO_WARP_BARRIER, "project_conflicts", projection_is_right, occurrence=1
    ),
    "tensor cores: read before staged": Planted("kernels/products_mma.cuh", NO_BARRIER, "layer_gram", many_are_right),
    "warpgroups: read before copied": Planted("kernels/products_wgmma.cuh", NO_BARRIER, "layer_gram", hopper_is_right),
    "warpgroups: copied while read": Planted(
        "kernels/products_wgmma.cuh", "at« == 0 ? kEnd - kTile : at - kTile→»", "layer_gram", hopper_is_right
    ),
    "warpgroups: copies not waited for": Planted(
        "kernels/products_wgmma.cuh", "COPY_WAIT(kDeep - «2→1»)", "layer_gram", hopper_is_right, occurrence=1
    ),
    "warpgroups: tensor cores not told": Planted(
        "kernels/products_wgmma.cuh", "«FENCE_TENSOR_CORES();→»", "layer_gram", hopper_is_right, occurrence=1
    ),
    "warpgroups: products not waited for": Planted(
        "kernels/products_wgmma.cuh", "«WGMMA_WAIT(chain);→»", "layer_gram", hopper_is_right
    ),
    "warpgroups: totals read before they are there": Planted(
        "kernels/products_wgmma.cuh", NO_BARRIER, "layer_gram", hopper_is_right, occurrence=2
    ),
    "min_norm: swept while copied": Planted(
        "kernels/active_set.cuh", NO_BARRIER, "min_norm", min_norm_is_right, occurrence=2
    ),
    "descent: products read before they are there": Planted(
        "common_descent.cu", NO_BARRIER, "common_descent", descent_is_right
    ),
    "descent: the fair row changed while read": Planted(
        "common_descent.cu", NO_BARRIER, "common_descent", descent_is_right, occurrence=4
    ),
    "descent: a row beyond the last": Planted(
        "common_descent.cu", "kWarp; i <«→=» k;", "common_descent", descent_is_right
    ),
    "dots: sums of other rows' blocks": Planted(
        "kernels/row_products.cuh", "«(first_row + e)→e» * items", "layer_dots", dots_are_right
    ),
    "tracking: sums overwritten": Planted("puc_track.cu", NO_BARRIER, "puc_track", tracking_is_right, occurrence=2),
    # Wrong indices.
    "layers: last item of a layer": Planted("device/layers.cuh", "<«=→» value", "layer_combine", combination_is_right),
    "tiled: neighbouring rows": Planted(
        "kernels/products_tiled.cuh",
        "load_shared(left, (y «+ i * kApart→* kEach + i»)",
        "layer_cross_gram",
        cross_gram_is_right,
    ),
    "tensor cores: registers of other rows": Planted(
        "kernels/products_mma.cuh",
        "{others.big«[half], others.big[half + 2]→[0], others.big[1]»}",
        "layer_gram",
        many_are_right,
    ),
    "tensor cores: small parts dropped": Planted(
        "kernels/products_mma.cuh", "«mma<T>(next, rows.big, small, next);→»", "layer_gram", many_are_right
    ),
    "warpgroups: runs in their own places": Planted(
        "device/warpgroup.cuh", "«(column ^ row % 8 * 4)→column»", "layer_gram", hopper_is_right
    ),
    "warpgroups: patterns of rows too near": Planted(
        "device/warpgroup.cuh", "«kPatternBytes→512» >> 4", "layer_gram", hopper_is_right
    ),
    "warpgroups: the same columns twice": Planted(
        "kernels/products_wgmma.cuh", "«half * 2 * kStepOn→0»", "layer_gram", hopper_is_right
    ),
    "warpgroups: small parts dropped": Planted(
        "kernels/products_wgmma.cuh", "«small_part(big[k], 2.0f)→0»", "layer_gram", hopper_is_right
    ),
    "warpgroups: a tile anywhere": Planted(
        "kernels/products_wgmma.cuh",
        "«(kPatternBytes - SHARED_ADDRESS(held_rows) % kPatternBytes) % kPatternBytes / →»4",
        "layer_gram",
        hopper_is_right,
    ),
    "mean: bits of the wrong column": Planted(
        "puc_combine.cu", "keep + «column→(column + 4)» / 32", "puc_combine", mean_is_right
    ),
    "sums: of the last chunks only": Planted(
        "kernels/partials.cuh", "for (; «group >> level & 1→false»;", "layer_gram", many_chunks_are_right
    ),
    # Outputs that nobody writes.
    "combination: last columns": Planted(
        "device/columns.cuh", "column + v «→+ 1 »< stop) row[", "layer_combine", combination_is_right
    ),
    "sums: upper triangle": Planted(
        "kernels/partials.cuh", "if («kPairs == Pairs::symmetric→false») matrix[", "layer_gram", gram_is_right
    ),
    # A warp of which not all lanes take part.
    "tracking: half a warp's bits": Planted(
        "puc_track.cu", "__shfl_xor_sync(«kFullWarp→0xffffu»", "puc_track", tracking_is_right
    ),
}

# One of each way in which a fault shows: a race within a block, one between blocks, a read of what nobody wrote, an
# address beyond the memory, a warp of which not all lanes take part, memory that tensor cores are not told of, rows
# where these do not look, an output that nobody writes, and another result.
QUICK = (
    "tracking: sums overwritten", "dots: sums of other rows' blocks", "min_norm: swept while copied",
    "descent: a row beyond the last", "tracking: half a warp's bits", "warpgroups: tensor cores not told",
    "warpgroups: a tile anywhere", "combination: last columns", "mean: bits of the wrong column",
)  # fmt: skip


@pytest.mark.parametrize(
    "check", dict.fromkeys(mutation.check for mutation in MUTATIONS.values()), ids=lambda check: check.__name__
)
def test_the_checks_pass_without_a_fault(kernels, check):
    assert check(kernels.schedule("random", 1))


FOUND = ("race", "never written", "outside of the device's memory", "partial warp", "no fence", "pattern")


def is_found(mutation, kernels):
    """Whether the comparison with the reference fails, or the harness complains."""
    try:
        return not mutation.check(kernels)
    except KernelError as error:
        return any(kind in str(error) for kind in FOUND)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MUTATIONS]
)
def test_a_planted_fault_is_found_under_every_schedule(objects, tmp_path, name):
    mutation = MUTATIONS[name]
    shutil.copytree(simt_build.CUDA.parent, tmp_path / "csrc")
    mutation.apply(tmp_path / "csrc" / "cuda")
    source = tmp_path / "csrc" / "cuda" / f"{mutation.rebuilt}.cu"
    library = simt_build.relink(source, objects, tmp_path, tmp_path / "mutant.so", "-O0")  # half the time to compile
    kernels = simt_library.Kernels(library)
    for schedule in simt_library.SCHEDULES:
        assert is_found(mutation, kernels.schedule(schedule)), schedule
