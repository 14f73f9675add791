# SPDX-License-Identifier: Apache-2.0
"""The training script of every site, which NVFlare starts."""

from task import client

from fl_lightning.federation.nvflare import run_client

run_client(client)
