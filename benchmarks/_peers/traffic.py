# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a process sends through torch.distributed, whoever calls it.

Counted are the payloads that this process has to bring to others, by the least that an exchange needs: an all_reduce
of ``b`` bytes on ``R`` processes sends ``2 b (R - 1) / R``, an all_gather ``b (R - 1)`` of the own part, an all_to_all
what is meant for others, a broadcast ``b (R - 1)`` at its source. Objects count as the bytes that they become, padded
as torch pads them. Counters in a store are not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

_Count = Callable[..., float]


class Traffic:
    """Counts from the moment it is made.

    Attributes:
        sent: bytes so far.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        for name in (*_COUNTS, *_UNKNOWN):
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., Any]:
        call, count = getattr(dist.ProcessGroup, name), _COUNTS.get(name)

        @functools.wraps(call)
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            if count is None:
                raise RuntimeError(f"the bytes of ProcessGroup.{name} are not counted yet")
            self.sent += count(group, *args, **kwargs)
            return call(group, *args, **kwargs)

        return counted


def _bytes(what: Any) -> float:
    """Of a tensor, or of all tensors in a list of lists."""
    if isinstance(what, Tensor):
        return what.numel() * what.element_size()
    return sum(map(_bytes, what))


def _broadcast(group: Any, tensors: Any, options: Any = None, root: int | None = None, **kwargs: Any) -> float:
    source = kwargs.get("root", root) if options is None else getattr(options, "rootRank", options)
    return _bytes(tensors) * (group.size() - 1) if (source or 0) == group.rank() else 0


def _all_gather(group: Any, output: Any, own: Any, *rest: Any, **kwargs: Any) -> float:
    return _bytes(own) * (group.size() - 1)


def _all_reduce(group: Any, tensors: Any, *rest: Any, **kwargs: Any) -> float:
    return 2 * _bytes(tensors) * (group.size() - 1) / group.size()


def _reduce_scatter(group: Any, output: Any, whole: Any, *rest: Any, **kwargs: Any) -> float:
    return _bytes(whole) * (group.size() - 1) / group.size()


def _all_to_all(group: Any, outputs: Any, parts: Sequence[Tensor], *rest: Any, **kwargs: Any) -> float:
    return _bytes(parts) - _bytes(parts[group.rank()])


def _all_to_all_single(
    group: Any, output: Tensor, whole: Tensor, outgoing: Any = (), sizes: Sequence[int] = (), *rest: Any, **kwargs: Any
) -> float:
    sizes = kwargs.get("input_split_sizes", sizes)
    share = sizes[group.rank()] / max(sum(sizes), 1) if sizes else 1 / group.size()
    return _bytes(whole) * (1 - share)


def _gather(group: Any, outputs: Any, own: Any, *rest: Any, **kwargs: Any) -> float:
    return 0 if outputs else _bytes(own)


def _scatter(group: Any, outputs: Any, parts: Any, *rest: Any, **kwargs: Any) -> float:
    return _bytes(parts) * (group.size() - 1) / group.size() if parts else 0


def _send(group: Any, tensors: Any, *rest: Any, **kwargs: Any) -> float:
    return _bytes(tensors)


_COUNTS: dict[str, _Count] = {
    "broadcast": _broadcast,
    "allgather": _all_gather, "_allgather_base": _all_gather, "all_gather_single": _all_gather,
    "allreduce": _all_reduce, "allreduce_coalesced": _all_reduce,
    "reduce_scatter": _reduce_scatter, "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "alltoall": _all_to_all, "alltoall_base": _all_to_all_single, "all_to_all_single": _all_to_all_single,
    "gather": _gather, "scatter": _scatter, "send": _send,
}  # fmt: skip

_UNKNOWN = (
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather_into_tensor",
    "gather_single", "reduce", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
)  # fmt: skip
