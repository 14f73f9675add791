# SPDX-License-Identifier: Apache-2.0
"""Where a trainer function takes its loaders from, and another data module in its place."""

from __future__ import annotations

from typing import Any

from fl_lightning.lightning.names import LightningDataModule, Trainer, TrainerFn


class DataSources:
    """The data that a trainer function was called with."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        validation = trainer.fit_loop.epoch_loop.val_loop
        self._all: tuple[Any, ...] = (
            trainer.fit_loop, validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop,
        )  # fmt: skip
        self._used: dict[TrainerFn, dict[str, Any]] = {
            TrainerFn.FITTING: {"train": trainer.fit_loop, "val": validation},
            TrainerFn.VALIDATING: {"val": trainer.validate_loop},
            TrainerFn.TESTING: {"test": trainer.test_loop},
        }
        self._replaced: tuple[list[Any], Any, LightningDataModule | None] | None = None

    def owners(self) -> dict[str, Any]:
        """By stage: the module or data module to ask for loaders, or the loaders themselves; predictions have none."""
        function = self._trainer.state.fn
        loops = self._used.get(function, {}) if function is not None else {}
        sources = {stage: loop._data_source for stage, loop in loops.items()}
        return {stage: source.instance for stage, source in sources.items() if source.is_defined()}

    def replace(self, data: LightningDataModule) -> None:
        """Lets the trainer function run as if it had been called with this data module."""
        trainer, connector = self._trainer, self._trainer._data_connector
        instances = [loop._data_source.instance for loop in self._all]
        self._replaced = instances, connector._datahook_selector, trainer.datamodule  # type: ignore[attr-defined]
        connector.attach_datamodule(trainer.lightning_module, data)

    def restore(self) -> None:
        """The trainer has its own data again."""
        if self._replaced is None:
            return
        instances, selector, datamodule = self._replaced
        for loop, instance in zip(self._all, instances, strict=True):
            loop._data_source.instance = instance
        self._trainer._data_connector._datahook_selector = selector
        self._trainer.datamodule = datamodule  # type: ignore[attr-defined]
        self._replaced = None
