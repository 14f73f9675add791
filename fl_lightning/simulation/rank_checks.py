# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fit tell each other, so that they cannot come apart unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from torch import Tensor

from fl_lightning.core.digest import checksum
from fl_lightning.core.errors import RankError
from fl_lightning.core.fit_description import FitDescription
from fl_lightning.core.lightning.names import rank_zero_info
from fl_lightning.core.lightning.ranks import Ranks
from fl_lightning.core.records import RoundRecord
from fl_lightning.simulation.options import FitOptions
from fl_lightning.training.update_rows import UpdateRows


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


def say_processes(ranks: Ranks, options: FitOptions, sizes: Sequence[int], rows: UpdateRows) -> None:
    """Says what the processes can do for the fit.

    Args:
        ranks: the processes.
        options: the strategy's arguments.
        sizes: training samples of all clients.
        rows: of a round.
    """
    largest, per_round = max(sizes), len(rows)
    bound = min(ranks.size, per_round * sum(sizes) / (len(sizes) * largest)) if largest else 1.0
    machines = f"{ranks.num_nodes} machine{'s' * (ranks.num_nodes > 1)}"
    width, total = rows.values.element_size(), rows.columns.total
    share, reason = max(end - begin for begin, end in rows.columns.spans), whole_rows_reason(options)
    if reason is None:
        trained = ceil(per_round / ranks.size)
        held = (
            f"{(per_round * share + trained * total) * width:,} B in each process, which holds a share of the columns"
        )
    else:
        held = f"{per_round * total * width:,} B in each process, which holds them whole because {reason}"
    rank_zero_info(
        f"{ranks.size} processes on {machines}: with {per_round} clients per round, the largest of which trains as "
        f"long as {largest} samples take, at most {max(bound, 1.0):.1f} times as fast as one. Updates take {held}"
    )


def whole_rows_reason(options: FitOptions) -> str | None:
    """Why every rank holds whole updates, as the end of a sentence; ``None`` if each holds a share of the columns."""
    for rule in (options.algorithm, options.client_rule):
        if rule.column_state is None:
            return f"{type(rule).__name__} does not say that it works on columns (column_state)"
    rule = options.client_rule
    if rule.column_state and rule.overrides("keep"):
        return f"{type(rule).__name__} has state in columns and clients that keep some"
    return None


class Agreement:
    """Finds out a rank that has come to something else than the others.

    Args:
        ranks: the processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._noted = ranks, 0

    def note(self, numbers: Tensor) -> None:
        """Takes numbers that all ranks must come to in this round, such as a step's coefficients."""
        self._noted = (31 * self._noted + checksum(numbers)) % 2**64

    def compared(self, record: RoundRecord, params: Tensor) -> RoundRecord:
        """Makes sure that all ranks have come out of a round with the same model, by the same numbers.

        Args:
            record: this rank's account of the round.
            params: ``[n]`` the global parameters after the round.

        Returns:
            The record with the times that the first rank took.

        Raises:
            RankError: a rank has others; names it.
        """
        found = self._ranks.gather(((checksum(params), self._noted), (record.seconds, record.training_seconds)))
        self._noted = 0
        (theta, noted), (seconds, training) = found[0]
        for rank, ((other, others), _) in enumerate(found):
            if (other, others) != (theta, noted):
                what = "the global parameters" if other != theta else "the coefficients"
                raise RankError(
                    f"after round {record.round}, rank {rank} must have {what} of rank 0, found others: use machines "
                    "of one kind with the same versions, one thread per process on the CPU (OMP_NUM_THREADS=1), and "
                    "deterministic kernels on GPUs"
                )
        return replace(record, seconds=seconds, training_seconds=training)
