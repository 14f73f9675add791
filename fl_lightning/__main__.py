# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m fl_lightning info``, LightningCLI's subcommands, ``compare`` and ``audit``."""

from __future__ import annotations

import sys

from fl_lightning.comparison.audit_command import run as audit
from fl_lightning.comparison.command import run as compare
from fl_lightning.core.errors import how_to_install
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning import names
from fl_lightning.lightning.names import LightningDataModule, LightningModule, Trainer, lightning_cli
from fl_lightning.lightning.versions import __version__, show_versions
from fl_lightning.report.number_formats import STAGES, number, plural

_LIGHTNING_COMMANDS = ("fit", "validate", "test", "predict")

_USAGE = """\
usage: python -m fl_lightning COMMAND [options]

  info                  versions, devices, and which implementation of each op runs
  fit      -c FILE      train as the YAML file says
  validate -c FILE      evaluate on the validation data
  test     -c FILE      evaluate on the test data
  predict  -c FILE      predict
  compare  -c FILE --methods FedAvg FedLF --lr 0.01 0.1 --seeds 3
                        train every method with every learning rate and seed, and print one table
  audit    RECORDS --limit worst_10=0.6 --limit alone=0
                        exit with 1 if the clients of a trained model do not keep limits
  --version             the version of this package

The commands fit to compare take LightningCLI's options: `python -m fl_lightning fit --help` lists them,
`--print_config` writes the whole configuration as YAML. `compare --help` lists those that it has besides."""


def main(arguments: list[str]) -> int:
    """Runs one command.

    Args:
        arguments: the command and its options.

    Returns:
        The exit status: 0 if the command ran, 1 if the CLI extra is missing, a run failed or a limit is broken, 2 for a
        wrong command line.
    """
    command, *options = arguments or [""]
    if command == "info" and not options:
        show_versions()
        return 0
    if command in ("-h", "--help", "--version"):
        sys.stdout.write(f"fl_lightning {__version__}\n" if command == "--version" else f"{_USAGE}\n")
        return 0
    if command in _LIGHTNING_COMMANDS:
        return _run_lightning() if _has_cli() else 1
    if command == "compare":
        return compare(options) if _has_cli() else 1
    if command == "audit":
        return audit(options)
    problem = f"info takes no options, found {options}" if command == "info" else f"unknown command {command!r}"
    sys.stderr.write(f"{problem}\n\n{_USAGE}\n" if command else f"{_USAGE}\n")
    return 2


def _has_cli() -> bool:
    """Whether the CLI extra is there; if not, says how to install it."""
    try:
        # Lightning knows which jsonargparse it can work with; its parser refuses to exist without it.
        names.LightningArgumentParser()
    except ModuleNotFoundError as missing:
        sys.stderr.write(f"this command needs the CLI extra ({missing}): {how_to_install('cli')}\n")
        return False
    return True


def _run_lightning() -> int:
    # LightningCLI reads sys.argv itself. It knows strategy="federated", because importing the package registered it.
    cli = lightning_cli()(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        parser_kwargs={"prog": "python -m fl_lightning"},
    )
    if cli.subcommand == "fit" and isinstance(cli.trainer.strategy, FederatedStrategy):
        cli.trainer.print(_fit_in_words(cli.trainer, cli.trainer.strategy))
    return 0


def _fit_in_words(trainer: Trainer, strategy: FederatedStrategy) -> str:
    """What was trained, what came of it, and where it is: without a progress bar and a logger nothing else says so."""
    found = [f"{type(strategy.algorithm).__name__} has trained for {plural(trainer.current_epoch, 'round')}."]
    record = strategy.last_evaluation
    if record is not None and record.values:
        metric = min(record.values, key=lambda name: record.mode(name) != "max")  # the first that is good if large
        summary = record.summary(metric)
        mean, worst = (number(float(summary[key])) for key in ("mean", "worst_10"))
        clients = plural(len(record.client_ids), "client")
        found.append(f"{metric} in {STAGES[record.stage]}: mean of {clients} {mean}, worst 10 % {worst}.")
    saved = getattr(trainer.checkpoint_callback, "best_model_path", "")
    found.append(f"Model: {saved}." if saved else "The model was not saved.")
    if trainer.logger is not None and trainer.log_dir:
        found.append(f"Logs: {trainer.log_dir}.")
    return " ".join(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
