# SPDX-License-Identifier: Apache-2.0
"""Budgets that clients vote on (FCFL, appendix G), from the recorded runs on Adult.

    python -m benchmarks.papers.votes

Budgets are shares of the clients' own disparities. A client approves of a share if its accuracy is at most .03 below
the best that it has with any share, and its disparity at most half of the largest. The share with most approvals wins,
among equals the one with the best accuracy of the worse client. The figures are those on test data: a federation that
means to use the model would vote on validation data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.papers.catalog import experiment
from benchmarks.papers.report import gather

RESULTS = Path(__file__).parent / "results"
Figures = Sequence[tuple[float, float]]
"""Accuracy and absolute disparity of every client."""


def approvals(found: Mapping[str, Figures]) -> dict[str, list[bool]]:
    """Which clients approve of which option."""
    columns = list(zip(*found.values(), strict=True))  # a client's figures with all options
    bounds = [(max(accuracy for accuracy, _ in own) - 0.03, max(gap for _, gap in own) / 2) for own in columns]
    return {
        option: [accuracy >= low and gap <= high for (accuracy, gap), (low, high) in zip(figures, bounds, strict=True)]
        for option, figures in found.items()
    }


def winner(found: Mapping[str, Figures], votes: Mapping[str, Sequence[bool]]) -> str:
    """The option with most approvals, then with the best accuracy of the worst client."""
    return max(found, key=lambda option: (sum(votes[option]), min(accuracy for accuracy, _ in found[option])))


def recorded(attribute: str, out: Path) -> dict[str, Figures]:
    """Figures of doctorates and others with budgets that are shares of their own disparities."""
    found: dict[str, Figures] = {}
    for name, runs in gather(experiment("fcfl-adult"), out).items():
        before, _, after = name.partition(f"library: {attribute} DP, ")
        if not before and after.endswith(" of the original"):
            line = next(iter(runs.values()))[-1]
            found[after.removesuffix(" of the original")] = [
                (line["doctorates"], abs(line["disparity 1"])),
                (line["others"], abs(line["disparity 2"])),
            ]
    return found


def main() -> None:
    """Prints a Markdown table, and who won."""
    for attribute in ("race", "sex"):
        found = recorded(attribute, RESULTS)
        votes = approvals(found)
        print(f"| {attribute}: share | doctorates | others | approved by |\n|---|---|---|---|")
        for option, figures in found.items():
            cells = [f"{accuracy:.3f}, {gap:.3f}" for accuracy, gap in figures]
            names = [name for name, vote in zip(("doctorates", "others"), votes[option], strict=True) if vote]
            print(f"| {option} | {' | '.join(cells)} | {' and '.join(names)} |")
        print(f"\nThe share {winner(found, votes)} wins. A cell has accuracy and disparity.\n")


if __name__ == "__main__":
    main()
