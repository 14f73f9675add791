# SPDX-License-Identifier: Apache-2.0
"""Calls the ops as no public function would: ``python tests/ops/hostile_calls.py CALLS SEED LAST``.

Arguments are valid ones that were changed at random: dtypes, shapes, no rows, strides, other devices, extreme numbers.
An op may refuse them or compute something; a compiled one computes nothing that the reference refuses, and its results
have the reference's shapes, and finite numbers where it has them. The file LAST holds the call in hand, for whoever
finds the process dead.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from implementations import samples

from fl_lightning.ops import _library

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip


def sparse(tensor: Tensor) -> Tensor:
    return tensor.to_sparse() if tensor.dim() and tensor.dtype != torch.bool else tensor


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda t: t.to(random.choice(DTYPES)),
    "no rows": lambda t: t[:0],
    "one row": lambda t: t[:1],
    "fewer": lambda t: t[..., : random.randrange(t.shape[-1] + 1)] if t.dim() else t,
    "more": lambda t: torch.cat([t, t]) if t.dim() else t,
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t[0] if t.dim() and len(t) else t,
    "flat": lambda t: t.reshape(-1),
    "transposed": lambda t: t.T.contiguous().T if t.dim() == 2 else t,
    "turned": lambda t: t.T if t.dim() == 2 else t,
    "every other": lambda t: t[..., ::2],
    "apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "stride 0": lambda t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
    "offset by one": lambda t: torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape) if t.numel() else t,
    "meta": lambda t: t.to("meta"),
    "sparse": sparse,
    "negative": lambda t: -t if t.dtype != torch.bool else t,
    "huge": lambda t: t * 2**62 if t.dtype == torch.int64 else t * 1e30 if t.is_floating_point() else t,
    "NaN": lambda t: t * float("nan") if t.is_floating_point() else t,
    "None": lambda t: None,
    "a number": lambda t: 3,
}
NUMBERS = (-1, 0, 1, 7, 254, 255, 2**15, 2**31, 2**62, -(2**62), None, 1.5)


def changed(value: Any, words: list[str]) -> Any:
    if not isinstance(value, Tensor):
        words.append(repr(number := random.choice(NUMBERS)))
        return number
    words.append(name := random.choice(list(CHANGES)))
    try:
        return CHANGES[name](value)
    except Exception:  # the change itself is impossible
        return value


def varied(arguments: tuple[Any, ...], rows: int) -> list[Any]:
    """Valid arguments in other dtypes, or of no clients."""
    dtypes, none = random.random() < 0.3, random.random() < 0.15
    found = []
    for value in arguments:
        if isinstance(value, Tensor):
            value = value.clone()
            if dtypes and value.is_floating_point():
                value = value.to(random.choice(DTYPES[:4]))
            if none and value.dim() == 2 and len(value) == rows:
                value = value[:0]
        found.append(value)
    return found


def hostile(op: str, arguments: list[Any]) -> str:
    words = [op]
    for _ in range(random.choice((0, 1, 1, 2))):
        place = random.randrange(len(arguments))
        words.append(f"argument {place}")
        arguments[place] = changed(arguments[place], words)
    return ", ".join(words)


def _can_be_copied(value: Any) -> bool:
    strided = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return strided and 0 not in value.stride()


def outcome(kernel: Callable[..., Any], arguments: list[Any]) -> tuple[Tensor, ...] | str:
    """Results on copies of the arguments, or the error."""
    own = [a.clone() if _can_be_copied(a) else a for a in arguments]
    try:
        found = kernel(*own)
    except Exception as error:  # which one is for other tests: here none may be a signal
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, tuple) else () if found is None else (found,)


def difference(op: str, arguments: list[Any]) -> str:
    """How a compiled op and the reference disagree, in words; empty if they agree."""
    want = outcome(torch.no_grad()(_library._OPS[op].kernel), arguments)
    got = outcome(getattr(torch.ops.fl_lightning, op), arguments)
    if isinstance(got, str):
        return ""
    if isinstance(want, str):
        # Python has larger integers than a float.
        return "" if want.startswith("OverflowError") else f"computes what the reference refuses: {want}"
    for ours, theirs in zip(got, want, strict=True):
        if ours.shape != theirs.shape:
            return f"gives shape {tuple(ours.shape)}, the reference {tuple(theirs.shape)}"
        if not torch.equal(ours.isfinite(), theirs.isfinite()):
            return "gives finite numbers elsewhere than the reference"
    return ""


def main(calls: int, seed: int, last: Path) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    ends: Counter[str] = Counter()
    with last.open("w", encoding="utf-8") as file:
        for _ in range(calls):
            rows = random.choice((1, 3, 12))
            valid = samples(rows, random.choice((0, 1, 50, 300)))
            op = random.choice(list(valid))
            arguments = varied(valid[op], rows)
            if op.startswith(
                ("layer_gram", "layer_squares", "layer_cross_gram", "layer_chosen", "layer_dots", "puc_track")
            ):
                arguments.append(random.choice((None, 50, *NUMBERS)))  # total_columns
            words = hostile(op, arguments)
            file.seek(0)
            file.write(f"{words}\n")
            file.truncate()
            file.flush()
            tensors = [a for a in arguments if isinstance(a, Tensor)]
            comparable = all(t.layout == torch.strided and t.device.type == "cpu" for t in tensors)
            if comparable and (found := difference(op, arguments)):
                print(f"{words}: {found}")
            refused = isinstance(outcome(getattr(torch.ops.fl_lightning, op), arguments), str)
            ends["refused" if refused else "computed"] += 1
    print(dict(ends))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
