# SPDX-License-Identifier: Apache-2.0
"""What is compared on, as LightningCLI reads it from a YAML file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.comparison.plan import Run
from fl_lightning.comparison.project import RATE_NAMES, Parts, bare, described_each, divided, division
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.command_line import short_cli
from fl_lightning.lightning.fit_description import plain
from fl_lightning.lightning.names import LightningDataModule, LightningModule, Trainer

_REPLACED = ("seed_everything", "ckpt_path", "weights_only", "trainer.default_root_dir", "trainer.strategy", "config")


class YamlProject:
    """A project in YAML, as ``python -m fl_lightning fit`` takes it; methods replace its strategy's ``algorithm``."""

    def __init__(self, options: Sequence[str]) -> None:
        logging.disable(logging.INFO)  # what Lightning has to remark belongs to the runs
        try:
            cli = _cli(["fit", *options])
        finally:
            logging.disable(logging.NOTSET)
        bare(cli.trainer)
        self._config = cli.config.clone()
        config = self._config["fit"]
        if config.get("ckpt_path") is not None:
            raise ValueError(f"ckpt_path must be left out of a comparison, found {config['ckpt_path']}")
        found = cli.config_init["fit"]["trainer"]["strategy"]
        self.strategy = FederatedStrategy() if found == FederatedStrategy.strategy_name else found
        if not isinstance(self.strategy, FederatedStrategy):
            raise ValueError(
                f"trainer.strategy must be federated or a class_path of fl_lightning.FederatedStrategy, found {found!r}"
            )
        # Files of the runs are the same wherever their strategies come from.
        config["trainer"]["strategy"] = FederatedStrategy.strategy_name

    def learning_rate(self) -> float | None:
        """The learning rate in the file; ``None`` if it has none that could be replaced."""
        place = self._rate_place()
        return None if place is None else float(self._config["fit"][place])

    def check_learning_rates(self) -> None:
        """Refuses learning rates where nothing in the file can be replaced by them."""
        if self._rate_place() is None:
            raise ValueError(
                "the learning rates of --lr replace optimizer.init_args.lr, the model's argument lr or learning_rate, "
                "or the lr of an optimizer among the model's arguments, and the file has none of these: give the "
                "model such an argument, or leave --lr out"
            )

    def _rate_place(self) -> str | None:
        places = ["optimizer.init_args.lr"]  # LightningCLI lets it take the place of the model's own
        places += [f"model.init_args.{name}" for name in RATE_NAMES]
        places += ["model.init_args.optimizer.init_args.lr"]
        config = self._config["fit"]
        return next((place for place in places if isinstance(config.get(place), (int, float))), None)

    def build(self, run: Run, strategy: FederatedStrategy, root: Path) -> Parts:
        """Lets LightningCLI make everything anew, with the run's seed and learning rate."""
        config = self._config.clone()
        config["fit"]["seed_everything"] = run.seed
        if run.learning_rate is not None:
            config["fit"][self._rate_place()] = run.learning_rate
        cli = _cli(config, strategy=strategy, default_root_dir=str(root))
        return Parts(cli.model, divided(cli.datamodule, cli.model, *self._division(), run.division), bare(cli.trainer))

    def configuration(self) -> Mapping[str, Any]:
        """The file with all defaults filled in, without what is replaced in each run."""
        left_out = {*_REPLACED, self._rate_place()}
        entries = vars(self._config["fit"].as_flat()).items()
        own = {name: plain(value) for name, value in entries if name not in left_out}
        return own | described_each("", division(*self._division()))

    def _division(self) -> tuple[object, int]:
        arguments = self.strategy.arguments
        return arguments.get("partition"), arguments.get("seed", 0)


def _cli(arguments: Any, **replaced: Any) -> Any:
    """LightningCLI up to the point where ``fit`` would begin."""
    base: Any = short_cli()

    class Reader(base):  # type: ignore[misc]
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {"fit": base.subcommands()["fit"]}  # making parsers for the others takes long

        def parse_arguments(self, parser: Any, args: Any) -> None:
            # LightningCLI would warn of the options in sys.argv, which are not meant for it.
            self.config = parser.parse_args(args) if isinstance(args, list) else parser.parse_object(args)

        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            return super().instantiate_trainer(**kwargs, **replaced)  # type: ignore[no-any-return]

        fit: Callable[..., None] = staticmethod(lambda **parts: None)

    return Reader(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        seed_everything_default=False,
        args=arguments,
        parser_kwargs={"prog": "python -m fl_lightning compare"},
    )
