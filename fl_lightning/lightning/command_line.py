# SPDX-License-Identifier: Apache-2.0
"""LightningCLI, whose saved configurations lie beside logs alone."""

from __future__ import annotations

from typing import Any

from fl_lightning.lightning import names


def lightning_cli() -> Any:
    """LightningCLI; a function, because the class exists only where the CLI extra is installed."""
    base: Any = names.LightningCLI
    saving: Any = names.lightning_module("cli").SaveConfigCallback

    class SavesBesideLogs(saving):  # type: ignore[misc]
        """Without a logger, runs share the working directory, where the file of a run before would stop the next."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)

    class CLI(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"save_config_callback": SavesBesideLogs, **kwargs})

    return CLI
