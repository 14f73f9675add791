# SPDX-License-Identifier: Apache-2.0
"""A client: Flower runs it on every SuperNode, in a process per message."""

from __future__ import annotations

import task

from fl_lightning.federation.flower import client_id_of, lightning_client_app

app = lightning_client_app(
    model=task.Model,
    data=lambda context: task.SiteData(client_id_of(context)),
    strategy=task.STRATEGY,
    trainer={"accelerator": "auto"},
    state_dir="~/.fl_lightning/flower",
)
