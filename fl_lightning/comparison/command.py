# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning compare``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fl_lightning.algorithms import ServerRule
from fl_lightning.comparison.comparison import FILES
from fl_lightning.comparison.methods import BOUNDS, method_names, rule_from
from fl_lightning.comparison.plan import MOST
from fl_lightning.comparison.session import Session
from fl_lightning.comparison.yaml_project import YamlProject
from fl_lightning.fit.strategy import FederatedStrategy


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status.

    0 if all runs came to their end, 1 if some failed, 2 for options that make no sense, 130 if Ctrl-C stopped it.
    """
    parser = _parser()
    options, project_options = parser.parse_known_args(list(arguments))
    try:
        rules = _rules(options.methods)
        project = YamlProject([*(f"--config={file}" for file in options.config), *project_options])
        if options.lr is not None:
            project.check_learning_rates()
        methods = {name: _strategy(name, rule, project.strategy) for name, rule in rules.items()}
        given = {
            name: value for name, value in vars(options).items() if name not in ("config", "methods", "lr", "dry_run")
        }
        given["seeds"] = options.seeds[0] if len(options.seeds) == 1 else options.seeds
        rates = options.lr or [project.learning_rate()]
        session = Session(project, methods, project.strategy, learning_rates=rates, **given)
        found = session.carry_out(only_cost=options.dry_run)
    except (ValueError, TypeError, RuntimeError) as error:
        sys.stderr.write(f"compare: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("compare: stopped; the same command goes on from here\n")
        return 130
    if found is None:
        return 0
    sys.stdout.write(f"{found}\n")
    written = [name for name in FILES if (options.folder / name).exists()]
    sys.stdout.write(f"\nIn {options.folder}: {', '.join(written)}\n")
    return 1 if found.failures else 0


def _rules(texts: Sequence[str]) -> dict[str, ServerRule]:
    rules = {text.strip(): rule_from(text) for text in texts}
    if len(rules) < len(texts):
        raise ValueError(f"--methods must name each method once, found {' '.join(texts)}")
    return rules


def _strategy(name: str, rule: ServerRule, base: FederatedStrategy) -> FederatedStrategy:
    try:
        return base.with_arguments(algorithm=rule)
    except ValueError as error:
        raise ValueError(f"{name} does not fit the project's strategy: {error}") from error


def _number(kind: Callable[[str], float], least: float, most: float, words: str, text: str) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"must {words}, found {text}")
    return number


_LARGEST = sys.float_info.max
_count = partial(_number, int, 1, MOST, f"be between 1 and {MOST:,}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fl_lightning compare",
        description="Trains every method with every learning rate and seed on one project, and prints one table. "
        "The same command goes on where it was stopped or killed.",
        epilog=f"All other options are those of `python -m fl_lightning fit`, such as --trainer.max_epochs=50. "
        f"Methods: {', '.join(method_names())}.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", "-c", action="append", required=True, metavar="FILE", help="the project in YAML")
    parser.add_argument(
        "--methods", nargs="+", required=True, metavar="METHOD",
        help='such as FedAvg "QFedAvg(q=2)" my_project.MyRule; the first is the reference',
    )  # fmt: skip
    parser.add_argument(
        "--lr",
        nargs="+",
        type=partial(_number, float, 5e-324, _LARGEST, "be a positive number"),
        help="learning rates to pick from; default the project's own",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=partial(_number, int, 0, math.inf, "not be negative"),
        default=[3],
        help="how many seeds (default 3), or several seeds",
    )
    parser.add_argument(
        "--tuning-seeds", type=_count, metavar="N",
        help="pick learning rates with the first N seeds; the others run with the picked one alone; default all",
    )  # fmt: skip
    parser.add_argument(
        "--divisions", type=_count, default=1, metavar="N",
        help="divide the data anew so often, each time for all seeds (default 1: as the project says)",
    )  # fmt: skip
    parser.add_argument("--metric", help="validation metric to compare; default the first where large values are good")
    parser.add_argument("--test-metric", help="test metric that belongs to it; default the one with test for val")
    parser.add_argument(
        "--select", choices=("mean", "worst_10"), default="mean",
        help="pick learning rates by the mean over the clients (default), or by that of their worst tenth",
    )  # fmt: skip
    parser.add_argument(
        "--bounds", choices=tuple(BOUNDS), default="both",
        help="also train each client alone (local), and one model on all data together (pooled); default both",
    )  # fmt: skip
    parser.add_argument("--jobs", type=_count, default=1, help="runs at a time (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("comparison"), help="where results go (default comparison)")
    parser.add_argument(
        "--save-seconds",
        type=partial(_number, float, 0, _LARGEST, "not be negative"),
        default=60.0,
        help="least seconds between a run's checkpoints (default 60)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what it would cost")
    return parser
