# SPDX-License-Identifier: Apache-2.0
"""One table of all methods, tuned alike, on the same real data.

    python -m benchmarks.leaderboard list
    python -m benchmarks.leaderboard run SUITE ... --data-root DIR [--only METHOD ...] [--jobs 2]
    python -m benchmarks.leaderboard divisions SUITE ... --data-root DIR
    python -m benchmarks.leaderboard traffic SUITE ... --data-root DIR
    python -m benchmarks.leaderboard pack [SUITE ...]
    python -m benchmarks.leaderboard report [SUITE ...]

The budget for everything is 60 hours of one core. ``run`` says the cost of a suite before its first run. A suite is a
comparison (``fl_lightning.compare``) in a folder of its own: a run that is finished is kept, and one that was killed
goes on when the command is given again. ``divisions`` runs some methods on further divisions of the data, with the
learning rates that the suite has picked, and each client alone. ``pack`` puts what the tables need of all finished runs
into one small file, and ``run`` begins with these, so that another machine goes on where this one stopped. ``traffic``
counts what clients send and receive. ``report`` writes the tables of a suite beside its packed file, of as many runs as
there are, draws them, and writes the overview of all suites into docs/leaderboard.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks._kernels.memory import keep_freed_memory
from benchmarks.leaderboard import suites
from benchmarks.leaderboard.divisions import Divisions
from benchmarks.leaderboard.pictures import draw
from benchmarks.leaderboard.records import failed, finished, pack, packed_file, read_traffic, unpack, write_traffic
from benchmarks.leaderboard.report import PAGE, overview, tables
from benchmarks.leaderboard.runs import carry_out
from benchmarks.leaderboard.standing import Standing
from benchmarks.leaderboard.suites import Suite, suite
from benchmarks.leaderboard.traffic import measured
from benchmarks.papers.report import rewritten
from benchmarks.papers.sources import MissingDataError

RESULTS = Path(__file__).parent / "results"


def main(given: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.leaderboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [each.name for each in suites.SUITES]
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the suites")
    running = commands.add_parser("run", help="run what is not finished yet")
    running.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    running.add_argument("--seeds", type=int, help="how many seeds (default: those of the suite)")
    running.add_argument("--only", nargs="+", metavar="METHOD", help="these methods, and FedAvg; default all")
    dividing = commands.add_parser("divisions", help="run some methods on further divisions, and each client alone")
    counting = commands.add_parser("traffic", help="count what clients send and receive")
    packing = commands.add_parser("pack", help="put the finished runs into one small file")
    reporting = commands.add_parser("report", help="write the tables, and their overview")
    reporting.add_argument("--page", type=Path, default=PAGE, help=f"where the overview goes ({PAGE})")
    for command in (running, dividing, counting, packing, reporting):
        needs = command in (running, dividing, counting)
        count = {"nargs": "+"} if needs else {"nargs": "*", "default": []}
        command.add_argument("names", choices=[*names, []], metavar="SUITE", help=", ".join(names), **count)
        command.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the results ({RESULTS})")
        if needs:
            command.add_argument("--data-root", type=Path, required=True, help="folder of the data sets")
    arguments = parser.parse_args(given)
    if arguments.command == "list":
        for each in suites.SUITES:
            methods, runs = len(each.methods()), len(each.plan)
            print(f"{each.name:<14}{methods:>3} methods, {runs:>3} runs of {each.rounds:>3} rounds  {each.title}")
        return
    quiet()
    try:
        for name in arguments.names or names:
            COMMANDS[arguments.command](suite(name), arguments)
        if arguments.command == "report":
            write_overview(arguments)
    except MissingDataError as error:
        sys.exit(str(error))


def quiet() -> None:
    """What single fits have to remark is in their logs."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def run(chosen: Suite, arguments: argparse.Namespace) -> None:
    """Carries a suite out, from the packed runs on."""
    keep_freed_memory()
    folder = arguments.out / chosen.name
    unpack(folder)
    print(f"{chosen.name}: {chosen.title}", flush=True)
    found = carry_out(chosen, arguments.data_root, folder, arguments.only, arguments.seeds, arguments.jobs)
    print(f"{found}\n", flush=True)


def run_divisions(chosen: Suite, arguments: argparse.Namespace) -> None:
    """Carries the runs on further divisions out."""
    keep_freed_memory()
    divisions = Divisions(chosen, arguments.out)
    divisions.carry_out(arguments.data_root)
    print(divisions.page(), flush=True)


def count_traffic(chosen: Suite, arguments: argparse.Namespace) -> None:
    """Counts for every method of a suite, and writes the numbers down."""
    dataset = chosen.federate(arguments.data_root).data.train_dataloader().dataset
    found = {}
    for name, strategy in chosen.methods().items():
        found[name] = measured(strategy, chosen.learner, dataset)
        print(f"{chosen.name}, {name}: sends {found[name].up:.0f} bytes, receives {found[name].down:.0f}", flush=True)
    write_traffic(arguments.out / chosen.name, found)


def pack_runs(chosen: Suite, arguments: argparse.Namespace) -> None:
    """Packs a suite and its further divisions, if they have runs."""
    for folder in (arguments.out / chosen.name, Divisions(chosen, arguments.out).folder):
        if finished(folder):
            print(f"{folder.name}: {pack(folder)} runs in {packed_file(folder)}")


def write_tables(chosen: Suite, arguments: argparse.Namespace) -> None:
    """Writes a suite's tables beside its packed file, and draws them."""
    folder, standing = arguments.out / chosen.name, standing_of(chosen, arguments.out)
    draw(standing.rows, standing.plan.methods[0], folder.with_suffix(".png"))
    divisions = Divisions(chosen, arguments.out)
    text = tables(standing, read_traffic(folder), divisions.alone)
    folder.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    if page := divisions.page():
        divisions.folder.with_suffix(".md").write_text(page, encoding="utf-8")
        print(page)


def write_overview(arguments: argparse.Namespace) -> None:
    """Puts the overview of all suites into the page."""
    text = overview(
        [standing_of(each, arguments.out) for each in suites.SUITES],
        {each.name: Divisions(each, arguments.out).alone for each in suites.SUITES},
    )
    page = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(rewritten(page, "overview", text), encoding="utf-8")
    print(text)


def standing_of(chosen: Suite, out: Path) -> Standing:
    """What the finished runs of a suite say."""
    folder = out / chosen.name
    return Standing(chosen, finished(folder), failed(folder))


COMMANDS = {"run": run, "divisions": run_divisions, "traffic": count_traffic, "pack": pack_runs, "report": write_tables}


if __name__ == "__main__":
    main()
