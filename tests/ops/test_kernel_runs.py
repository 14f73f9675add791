# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels: the same bits again and with other threads, sizes beyond 32 bits, instruction sets, the switch."""

import json
import os
from pathlib import Path

import pytest
import torch
from implementations import EXTENSION, MISSING, compiled, every, gaussian, offsets_of, results_of, samples

from fl_lightning import ops
from fl_lightning.ops import _library

ROOT = Path(__file__).parents[2]


@every
@pytest.mark.parametrize("m", [3, 41])
@pytest.mark.parametrize("op", _library.NAMES)
def test_same_bits_again_and_with_more_threads(call, op, m):
    arguments = list(samples(m, n=300_007 if m < 10 else 60_007)[op])
    if arguments[0].dim() == 3:  # enough matrices for several threads
        arguments[0] = arguments[0].repeat(14, 1, 1)
    first = results_of(call, op, arguments)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, results_of(call, op, arguments), first))


@compiled
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_same_bits_of_other_dtypes_with_more_threads(call, dtype):
    rows, offsets = gaussian(10, 300_007, dtype), offsets_of((20_000, 1, 280_006))
    coeff, target = gaussian(3, 10, torch.float64), torch.ones(300_007, dtype=torch.float32)

    def results():
        out = target.clone()
        call("layer_combine_add", out, rows, offsets, coeff)
        return call("layer_gram", rows, offsets), out

    first = results()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, results(), first))


def free_memory():
    """Bytes that can be allocated now."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 0
    return 1024 * int(next(line.split()[1] for line in info.read_text().splitlines() if "MemAvailable" in line))


@pytest.mark.slow
@compiled
def test_more_elements_than_32_bits_count(call):
    if free_memory() < 14 << 30:
        pytest.skip("needs 14 GiB of free memory")
    n = 1_100_000_000
    rows = torch.ones(2, n, dtype=torch.bfloat16)
    rows[1, -1] = 2
    offsets = offsets_of((5, n - 5))
    assert rows.numel() > 2**31
    gram = call("layer_gram", rows, offsets)
    assert gram.tolist() == [[[5, 5], [5, 5]], [[n - 5, n - 4], [n - 4, n - 2]]]
    assert call("layer_dots", rows, rows[1], offsets).tolist() == [[5, 5], [n - 4, n - 2]]
    assert call("layer_cross_gram", rows, rows[1:], offsets).tolist() == [[[5], [5]], [[n - 4], [n - 2]]]
    step = call("layer_combine", rows, offsets, torch.tensor([[1.0, 1.0], [2.0, 3.0]], dtype=torch.float64))
    assert step[:5].eq(2).all()
    assert step[5:-1].eq(5).all()
    assert step[-1] == 8
    words = torch.full((2, -(-n // 32)), -1, dtype=torch.int32)
    words[0, -1] = 0  # the last 32 coordinates are kept by the second client alone
    step = call("puc_combine", rows, words, torch.tensor([1.0, 3.0]))
    assert step[:-1].eq(1).all()
    assert step[-1] == 2
    del rows, step, words
    row = torch.ones(2**31 + 40, dtype=torch.bfloat16)
    row[-1] = -1
    counts = torch.zeros(len(row), dtype=torch.uint8)
    words, squares = call("puc_track", row, counts, 0, 0, offsets_of((len(row) - 2, 2)))
    assert squares.tolist() == [len(row) - 2, 2]
    assert counts[:-1].eq(0).all()
    assert counts[-1] == 1
    assert words[:-1].eq(-1).all()
    assert int(words[-1]) == 2 ** (len(row) % 32) - 1


@pytest.mark.process
@MISSING
@pytest.mark.skipif("FL_LIGHTNING_ISA" in os.environ, reason="this run is for one instruction set")
@pytest.mark.parametrize("instructions", ["avx2", "base"])
def test_lesser_instruction_sets_pass_too(interpreter_with_lightning, instructions):
    if instructions == EXTENSION.instruction_set():
        pytest.skip("every test of the kernels runs in this instruction set anyway")
    files = sorted(str(path) for path in Path(__file__).parent.glob("test_*kernel*.py"))
    left_out = "million", "relabelled", "of_ten", "many_rows", "fuzz", "same_bits_again", "one_sign"
    chosen = " and not ".join(("compiled", *left_out))
    code = (
        "import sys, pytest\n"
        "from fl_lightning.ops import _library\n"
        "print('runs', _library.EXTENSION.module.instruction_set())\n"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', '-k', '{chosen}', *{files}]))"
    )
    result = interpreter_with_lightning(code, cwd=ROOT, FL_LIGHTNING_ISA=instructions)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    assert (
        f"runs {'avx2' if instructions == 'avx2' else ''}" in result.stdout or EXTENSION.instruction_set() != "avx512"
    )


@pytest.mark.process
def test_the_switch_leads_to_the_reference(interpreter_with_lightning):
    """The same numbers from pure torch, in an installation with kernels or without."""
    code = (
        "import json, torch; from fl_lightning import ops; rows = torch.arange(12.0).view(3, 4)\n"
        "used = {b.implementation for b in ops.backend().values()} | {b.reason for b in ops.backend().values()}\n"
        "print(json.dumps([sorted(used), ops.layer_gram(rows, torch.tensor([0, 1, 4])).tolist()]))"
    )
    result = interpreter_with_lightning(code, FL_LIGHTNING_DISABLE_EXT="1")
    assert result.returncode == 0, result.stderr
    used, gram = json.loads(result.stdout.splitlines()[-1])
    assert used == ["switched off by FL_LIGHTNING_DISABLE_EXT=1", "torch"]
    assert gram == ops.layer_gram(torch.arange(12.0).view(3, 4), torch.tensor([0, 1, 4])).tolist()


def test_what_runs_is_reported():
    reported = {backend.implementation for backend in ops.backend().values()}
    cuda = _library.EXTENSION.cuda and torch.cuda.is_available()
    expected = "torch" if EXTENSION is None else "cuda" if cuda else "cpu"
    assert reported == {expected}
