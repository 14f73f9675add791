# SPDX-License-Identifier: Apache-2.0
"""A site, with its own pictures alone."""

from __future__ import annotations

import task

from fl_lightning.federation.flower import lightning_client_app

app = lightning_client_app(
    model=task.Model,
    data=lambda context: task.Pictures(context.node_config["data-path"]),
    strategy=task.STRATEGY,
    trainer={"accelerator": "cpu"},
)
