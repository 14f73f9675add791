# SPDX-License-Identifier: Apache-2.0
"""Few cases in place of all combinations."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, cycle, islice, product
from typing import Any


def in_turn(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest list has values; every value occurs."""
    values = [list(each) for each in lists]
    return list(islice(zip(*map(cycle, values), strict=True), max(map(len, values))))


def pairwise(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few cases in which every value meets every value of the other lists."""
    values = [list(each) for each in lists]
    places = [set(combinations(enumerate(case), 2)) for case in product(*(range(len(each)) for each in values))]
    left, chosen = set().union(*places), []
    while left:
        best = max(places, key=lambda pairs: len(pairs & left))
        left -= best
        chosen.append(dict(place for pair in best for place in pair))
    return [tuple(each[at[which]] for which, each in enumerate(values)) for at in chosen]
