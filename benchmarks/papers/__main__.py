# SPDX-License-Identifier: Apache-2.0
"""Repeats tables of the papers.

    python -m benchmarks.papers ledger                       every table, figure and theorem, and how far it is repeated
    python -m benchmarks.papers list
    python -m benchmarks.papers run NAME --data-root DIR [--seeds 0 1] [--rounds 100] [--only TEXT ...] [--jobs 2]
    python -m benchmarks.papers report [NAME ...] [--rounds 100]
    python -m benchmarks.papers pack [NAME ...]

Every run is a process of one thread. A run that is complete is skipped; one that was killed goes on from its last
evaluation when the same command is given again, also with more ``--rounds``. Several processes can run one experiment.

``report`` writes the tables into the folder ``--out``. From the committed results it also writes those of docs.

Results are JSON lines in the folder ``--out``, one per evaluation. A run writes them to ``NAME/CASE-seedK.jsonl``. At
its end ``run`` moves them to ``NAME.jsonl.xz``; ``pack`` does so at any time, such as after a kill.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.papers import ledger
from benchmarks.papers.catalog import EXPERIMENTS, experiment
from benchmarks.papers.pages import write_ledger, write_pages
from benchmarks.papers.records import pack
from benchmarks.papers.report import write
from benchmarks.papers.runner import Pool, clock, plan
from benchmarks.papers.sources import MissingDataError

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the experiments")
    listing = commands.add_parser("ledger", help="every table, figure and theorem of the papers, and what was run")
    running = commands.add_parser("run", help="run what is not complete yet")
    running.add_argument("name", choices=[each.name for each in EXPERIMENTS])
    running.add_argument("--data-root", type=Path, required=True, help="folder of the data sets")
    running.add_argument("--seeds", type=int, nargs="+", help="default: those of the experiment")
    running.add_argument("--rounds", type=int, help="fewer than published")
    running.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name contains one of these"
    )
    running.add_argument("--jobs", type=int, default=1, help="processes at a time")
    running.add_argument("--accelerator", default="cpu", help="cpu, gpu or mps")
    running.add_argument("--dry-run", action="store_true", help="only say what it would cost")
    reporting = commands.add_parser("report", help="tables and curves of the results")
    reporting.add_argument("--rounds", type=int, help="after so many rounds, to compare runs of different lengths")
    packing = commands.add_parser("pack", help="move the lines of runs that were killed to the compressed files")
    for command in (reporting, packing):
        command.add_argument("names", nargs="*", choices=[*(each.name for each in EXPERIMENTS), []], metavar="name")
    for command in (listing, running, reporting, packing):
        command.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the results ({RESULTS})")
    arguments = parser.parse_args()
    for name in ("jobs", "rounds"):
        if (value := getattr(arguments, name, None)) is not None and value < 1:
            parser.error(f"--{name} must be positive, found {value}")
    if arguments.command == "list":
        for each in EXPERIMENTS:
            print(f"{each.name:<18}{len(each.cases):>3} cases  {each.title}")
    elif arguments.command == "ledger":
        print(ledger.text(arguments.out))
    elif arguments.command == "run":
        run(arguments)
    else:
        for name in arguments.names or [each.name for each in EXPERIMENTS]:
            if arguments.command == "pack":
                pack(arguments.out, name)
            else:
                write(experiment(name), arguments.out, arguments.rounds)
        if arguments.command == "report" and arguments.rounds is None and arguments.out == RESULTS:
            write_pages(arguments.names or [each.name for each in EXPERIMENTS], arguments.out)
            write_ledger(arguments.out)


def run(arguments: argparse.Namespace) -> None:
    """Says what it will cost, and does it."""
    chosen = experiment(arguments.name)
    try:
        runs = plan(
            chosen,
            arguments.data_root,
            arguments.out,
            arguments.seeds,
            arguments.rounds,
            arguments.only,
            arguments.accelerator,
        )
    except MissingDataError as error:
        raise SystemExit(str(error)) from None
    cost = sum(each.cost for each in runs)
    print(
        f"{chosen.name}: {len(runs)} runs to do, about {clock(cost)} of one idle core, "
        f"{clock(cost / min(arguments.jobs, max(len(runs), 1)))} with --jobs {arguments.jobs}",
        flush=True,
    )
    for each in runs if arguments.dry_run else []:
        print(f"  {each.job.name}: rounds {each.first} to {each.job.rounds}, {clock(each.cost)}")
    if arguments.dry_run:
        return
    failed = Pool(runs, arguments.jobs).work()
    pack(arguments.out, chosen.name)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
