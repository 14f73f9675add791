# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning compare``, where methods are written as ``FedLF`` or ``QFedAvg(q=2)``."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_lightning import algorithms
from fl_lightning.algorithms import ServerRule
from fl_lightning.arguments import TEXT, checked, nearest
from fl_lightning.comparison.comparison import FILES
from fl_lightning.comparison.plan import BOUNDS, MOST
from fl_lightning.comparison.project import YamlProject
from fl_lightning.comparison.session import Session
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
        given = {name: value for name, value in vars(options).items() if name not in ("config", "methods", "lr")}
        given["seeds"] = options.seeds[0] if len(options.seeds) == 1 else options.seeds
        rates = options.lr or [project.learning_rate()]
        session = Session(project, methods, project.strategy, learning_rates=rates, **given)
        found = session.carry_out()
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        sys.stderr.write(f"compare: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("compare: stopped; the same command goes on from here\n")
        return 130
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


_count = partial(_number, int, 1, MOST, f"be between 1 and {MOST:,}")
_seed = partial(_number, int, 0, math.inf, "not be negative")
_rate = partial(_number, float, 5e-324, sys.float_info.max, "be a positive number")
_seconds = partial(_number, float, 0, sys.float_info.max, "not be negative")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fl_lightning compare",
        description="Trains every method with every learning rate and seed on one project, and prints one table. "
        "The same command goes on where it was stopped or killed.",
        epilog=f"All other options are those of `python -m fl_lightning fit`, such as --trainer.max_epochs=50. "
        f"Methods: {', '.join(method_names())}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", "-c", action="append", required=True, metavar="FILE", help="the project in YAML")
    add("--methods", nargs="+", required=True, help='such as FedAvg "QFedAvg(q=2)" my_project.MyRule; reference first')
    add("--lr", nargs="+", type=_rate, help="learning rates to pick from; default the project's own")
    add("--seeds", nargs="+", type=_seed, default=[3], help="how many seeds (default 3), or several seeds")
    add("--tuning-seeds", type=_count, help="pick learning rates with the first so many seeds; default with all")
    add("--divisions", type=_count, default=1, help="divide the data anew so often, each time for all seeds; default 1")
    add("--metric", help="validation metric to compare; default the first where large values are good")
    add("--select", choices=("mean", "worst_10"), default="mean", help="what of the clients to pick learning rates by")
    add("--bounds", choices=tuple(BOUNDS), default="both", help="also train each client alone, one model on all data")
    add("--jobs", type=_count, default=1, help="runs at a time (default 1)")
    add("--folder", type=Path, default=Path("comparison"), help="where results go (default comparison)")
    add("--save-seconds", type=_seconds, default=60.0, help="least seconds between a run's checkpoints (default 60)")
    return parser


def method_names() -> list[str]:
    """The methods of :mod:`fl_lightning.algorithms`."""
    return sorted((name for name, value in vars(algorithms).items() if _is_rule(value)), key=str.casefold)


@checked(text=TEXT)
def rule_from(text: str) -> ServerRule:
    """Makes the server rule that a text names: a name of :mod:`fl_lightning.algorithms`, or the import path of a class.

    Arguments in brackets are literals; nothing is evaluated.
    """
    name, positional, named = _call(text)
    kind = _class(name)
    try:
        inspect.signature(kind).bind(*positional, **named)
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "no arguments"
        raise TypeError(f"{name} takes {takes}, found {text!r}: {error}") from None
    return kind(*positional, **named)


def _call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = ast.unparse(call.func)
        if not all(map(str.isidentifier, name.split("."))) or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("no name, or ** in front of an argument")
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"a method must be a name such as FedLF, with arguments such as QFedAvg(q=2), found {text!r}"
        ) from error
    return name, positional, named


def _class(name: str) -> type[ServerRule]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module) if module else algorithms, attribute)
    except (ImportError, AttributeError) as error:
        if module:
            raise ValueError(f"the method {name} cannot be imported: {error}") from error
        found = None
    if not module and not _is_rule(found):
        names = method_names()
        raise ValueError(f"there is no method {name!r}{nearest(name, names) or ':'} there are {', '.join(names)}")
    if not _is_rule(found):
        raise ValueError(f"the method {name} must be a subclass of fl_lightning.algorithms.ServerRule")
    return found  # type: ignore[no-any-return]


def _is_rule(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, ServerRule) and value is not ServerRule
