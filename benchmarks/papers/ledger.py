# SPDX-License-Identifier: Apache-2.0
"""The ledger: a row for every table, figure and theorem of the five papers, and how far it is repeated here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers.catalog import experiment
from benchmarks.papers.report import gather


@dataclass(frozen=True)
class Row:
    """One table, figure or theorem.

    Attributes:
        item: as the papers name it.
        experiment: what repeats it.
        only: which cases of the experiment, those whose names contain one of these.
        command: what repeats it, where that is no experiment.
        reduced: what is smaller than published, if anything is; a run that is too short is found by itself.
        stand_in: which data or clients stand for the published ones, if any do.
    """

    item: str
    experiment: str = ""
    only: tuple[str, ...] = ("",)
    command: str = ""
    reduced: str = ""
    stand_in: str = ""

    def state(self, out: Path) -> tuple[str, str]:
        """How it is repeated, and how much of it has been run.

        Args:
            out: folder of the results.
        """
        coded = "with a stand-in" if self.stand_in else "reduced" if self.reduced else "whole"
        said = [text for text in (self.stand_in, self.reduced) if text]
        if not self.experiment:
            return coded, "; ".join(said)
        chosen = experiment(self.experiment)
        cases = [case for case in chosen.cases if any(text in case.name for text in self.only)]
        results = gather(chosen, out)
        reached = [
            max((int(lines[-1]["round"]) for lines in results.get(case.name, {}).values()), default=0) for case in cases
        ]
        ran = sum(rounds > 0 for rounds in reached)
        if not ran:
            return "coded, not run", "; ".join(said)
        whole = sum(rounds >= case.rounds for rounds, case in zip(reached, cases, strict=True))
        if whole < len(cases):
            coded = coded if self.stand_in else "reduced"
            shorter = [(r, case.rounds) for r, case in zip(reached, cases, strict=True) if 0 < r < case.rounds]
            said += [f"{ran} of {len(cases)} rows"] if ran < len(cases) else []
            if shorter:
                reach = " to ".join(f"{r:,}" for r in sorted({min(shorter)[0], max(shorter)[0]}))
                said.append(f"{reach} of {max(shorter)[1]:,} rounds")
        seeds = {len(results[case.name]) for case in cases if case.name in results}
        return coded, "; ".join([*said, f"seeds: {' to '.join(str(n) for n in sorted({min(seeds), max(seeds)}))}"])

    def does(self) -> str:
        """The command."""
        if not self.experiment:
            return f"`{self.command}`"
        only = "" if self.only == ("",) else " --only " + " ".join(f'"{text}"' for text in self.only)
        return f"`run {self.experiment}{only}`"


THEOREMS = "pytest tests/algorithms/test_theorems.py"
ROWS: dict[str, tuple[Row, ...]] = {
    "FedFV": (
        Row("Table 2: CIFAR-10", "fedfv-table2", ("as recorded: ",)),
        Row("Table 3: Fashion-MNIST", "fedfv-table3", ("as recorded: ",)),
        Row("Table 4: projecting order", "fedfv-table4"),
        Row(
            "Figure 2 (a): curves on CIFAR-10",
            "fedfv-table2",
            tuple(
                f"recorded: {n}"
                for n in ("FedAvg", "q-FedAvg 1", "FedFa", "FedMGDA+ .1", "FedFV .1, 0", "FedFV .1, 10")
            ),
        ),
        Row(
            "Figure 2 (b): curves on MNIST, 78 % less communication",
            "fedfv-figure2",
            reduced="a CNN of a quarter of the channels, half of the images, at most 60 rounds for 1,000",
        ),
        Row("Theorems 1, 2 and 4: bounds by place in the order, descent", command=THEOREMS),
    ),
    "FedMDFG": (
        Row(
            "Table 2: CIFAR-10 normal, mutex, unbalanced",
            "fedmdfg-table2",
            reduced="one image in 25, a CNN of a quarter of the channels, at most 100 rounds for 2,000",
        ),
        Row(
            "Table 3: one client overfits, nine join",
            "fedmdfg-table3",
            reduced="a tenth of Fashion-MNIST in place of CIFAR-10, at most 200 rounds for 3,000",
        ),
        Row("Table 4: attacks", "fedmdfg-attacks"),
        Row(
            "Figure 3: CIFAR-100",
            "fedmdfg-figures",
            ("CIFAR-100, 10 %", "CIFAR-100, 50 %"),
            stand_in="a tenth of Fashion-MNIST, at most 200 rounds",
        ),
        Row(
            "Figure 4: curves on MNIST and CIFAR-100",
            "fedmdfg-figures",
            ("MNIST", "CIFAR-100, all"),
            reduced="a fiftieth of MNIST, a CNN of a quarter of the channels, at most 60 rounds",
        ),
        Row("Figure 5: ablation", "fedmdfg-ablation", reduced="a tenth of Fashion-MNIST, at most 200 rounds"),
        Row("Theorem 1: common descent", command=THEOREMS),
    ),
    "FedLF": (
        Row("Table 1: Fashion-MNIST", "fedlf-table1", tuple(f"{n}: " for n in ("Dir(0.1)", "Pat-1", "Pat-2"))),
        Row(
            "Table 1: CIFAR-10",
            "fedlf-table1-cifar",
            ("CIFAR-10, ",),
            reduced="a tenth of the images, a CNN of a quarter of the channels, at most 200 rounds for 3,000",
        ),
        Row(
            "Table 1: CIFAR-100 and NResNet-18",
            "fedlf-table1-cifar",
            ("CIFAR-100, ",),
            stand_in="NResNet-18 on a tenth of CIFAR-10, at most 200 rounds",
        ),
        Row("Table 2: conflicts on CIFAR-10", "fedlf-table2"),
        Row("Table 3: ablation", "fedlf-ablation"),
        Row(
            "Figures 3 and 4: each client's accuracy; curves",
            "fedlf-figures",
            reduced="a tenth of Fashion-MNIST in place of CIFAR-10, at most 200 rounds for 3,000",
        ),
        Row("Theorem 1: bound of the step, Pareto stationarity", command=THEOREMS),
    ),
    "FCFL": (
        Row("Section 5.2: synthetic problem, Figure 2", "fcfl-synthetic"),
        Row("Figures 3, S1, S3, S4: Adult, budgets, beside MMPF, FA, FairReg", "fcfl-baselines", ("budget .",)),
        Row("Figures 5, S2: budgets of each client", "fcfl-adult", (".8 of the original",)),
        Row("Table S2: accuracies without constraints", "fcfl-baselines", ("no budget",)),
        Row("eICU: Figures 4, 5, Tables S1, S3", "fcfl-eicu", ("made-up",), stand_in="made-up hospitals"),
        Row("G: budgets that clients vote on", command="python -m benchmarks.papers.votes"),
    ),
    "FedHEAL": (
        Row(
            "Table 2: Office-Caltech-10",
            "fedheal",
            ("Office-Caltech: Fed", "Office-Caltech: SC", "Office-Caltech: MO"),
            reduced="48 x 48 pixels, width 16, 60 rounds of 5 epochs",
        ),
        Row(
            "Table 2: digits",
            "fedheal",
            ("MNIST and USPS",),
            stand_in="two of four domains",
            reduced="16 x 16 pixels, width 16, 60 rounds of 2 epochs",
        ),
        Row(
            "Table 3: Ditto and FedFV",
            "fedheal-parameters",
            ("other",),
            stand_in="two of four domains",
            reduced="as Table 4; Office-Caltech-10 is coded in fedheal",
        ),
        Row(
            "Table 4, Figure 6: beta and tau",
            "fedheal-parameters",
            ("beta", "tau"),
            stand_in="two of four domains",
            reduced="16 x 16 pixels, width 8, 40 rounds of 2 epochs",
        ),
        Row("Table 5: ablation", "fedheal", ("FedAvg + FedHEAL", "alone"), reduced="as Table 2"),
        Row("Figure 2: consistency of signs", "fedheal-signs", reduced="32 x 32 pixels, width 8, 2 epochs"),
        Row(
            "Figures 5 and 7: curves",
            "fedheal",
            ("Office-Caltech: FedAvg", "Office-Caltech: FedProx"),
            reduced="as Table 2: its picture",
        ),
    ),
}


def text(out: Path) -> str:
    """The ledger in Markdown.

    Args:
        out: folder of the results.
    """
    lines, counts = ["| paper | item | repeated | how far | command |", "|---|---|---|---|---|"], dict[str, int]()
    for paper, rows in ROWS.items():
        for row in rows:
            state, far = row.state(out)
            counts[state] = counts.get(state, 0) + 1
            lines.append(f"| {paper} | {row.item} | {state} | {far} | {row.does()} |")
    total = "; ".join(f"{count} {state}" for state, count in sorted(counts.items(), key=lambda pair: -pair[1]))
    return "\n".join([*lines, "", f"{sum(counts.values())} rows: {total}."])
