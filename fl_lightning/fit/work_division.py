# SPDX-License-Identifier: Apache-2.0
"""How the processes of a fit divide its work: clients, and the columns of their updates."""

from __future__ import annotations

from copy import deepcopy

from fl_lightning.algorithms.records import Federation
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.ranks.column_state import ColumnState
from fl_lightning.clients.ranks.ranked_runner import Ranked
from fl_lightning.core.columns import Columns
from fl_lightning.core.storage import kept
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.rank_checks import Agreement, whole_rows_reason
from fl_lightning.lightning.ranks import Ranks


def shared_work(
    ranks: Ranks, options: FitOptions, binding: BoundParameters, num_clients: int, agreement: Agreement
) -> Ranked:
    """Divides the columns among the ranks, if both halves of the method can work on a share of them."""
    total, rule = binding.theta.numel(), options.client_rule
    if whole_rows_reason(options) is not None:
        return Ranked(ranks, Columns((0, total), note=agreement.note))
    columns = Columns(Columns.cut(total, ranks.size), ranks.rank, ranks.gather_parts, agreement.note)
    if not kept.columns(rule):
        return Ranked(ranks, columns)
    theta = binding.theta
    federation = Federation(num_clients, binding.layout, theta.device, theta.dtype)
    return Ranked(ranks, columns, ColumnState(rule, deepcopy(rule), columns, ranks, federation))
