# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fit tell each other, so that they cannot come apart unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fl_lightning.core.digest import checksum
from fl_lightning.core.errors import RankError
from fl_lightning.core.fit_description import FitDescription
from fl_lightning.core.lightning.names import rank_zero_info
from fl_lightning.core.lightning.ranks import Ranks
from fl_lightning.core.records import RoundRecord


def check_same_fit(ranks: Ranks, description: FitDescription) -> None:
    """Makes sure that all ranks have the same data, method, options and versions.

    Raises:
        ValueError: a rank differs; names it and the difference.
    """
    first, *others = map(FitDescription.from_state_dict, ranks.gather(description.state_dict()))
    for rank, other in enumerate(others, 1):
        difference = first.difference(other)
        if difference:
            raise ValueError(
                f"all ranks must run the same fit, found that rank {rank} differs from rank 0 in {difference}: seed "
                "what draws the data (random_split, for instance), and read it from the same files"
            )


def say_processes(ranks: Ranks, sizes: Sequence[int], per_round: int, row: int) -> None:
    """Says what the processes can do for the fit.

    Args:
        ranks: the processes.
        sizes: training samples of all clients.
        per_round: clients per round.
        row: bytes of one client's update.
    """
    largest = max(sizes)
    bound = min(ranks.size, per_round * sum(sizes) / (len(sizes) * largest)) if largest else 1.0
    machines = f"{ranks.num_nodes} machine{'s' * (ranks.num_nodes > 1)}"
    rank_zero_info(
        f"{ranks.size} processes on {machines}: with {per_round} clients per round, the largest of which trains as "
        f"long as {largest} samples take, at most {max(bound, 1.0):.1f} times as fast as one. Updates take "
        f"{per_round * row:,} B in each process"
    )


def compared(ranks: Ranks, record: RoundRecord, params: Tensor) -> RoundRecord:
    """Makes sure that all ranks have come out of a round with the same model.

    Args:
        ranks: the processes.
        record: this rank's account of the round.
        params: ``[n]`` the global parameters after the round.

    Returns:
        The record with the times that the first rank took.

    Raises:
        RankError: a rank has other parameters; names it.
    """
    found = ranks.gather((checksum(params), (record.seconds, record.training_seconds)))
    for rank, (bits, _) in enumerate(found):
        if bits != found[0][0]:
            raise RankError(
                f"after round {record.round}, rank {rank} must have the global parameters of rank 0, found others: use "
                "machines of one kind with the same versions, one thread per process on the CPU (OMP_NUM_THREADS=1), "
                "and deterministic kernels on GPUs"
            )
    seconds, training = found[0][1]
    return replace(record, seconds=seconds, training_seconds=training)
