# SPDX-License-Identifier: Apache-2.0
from flwr.app import Context
from task import STRATEGY, Data, Model

from fl_lightning.federation.flower import lightning_client_app


def model(context: Context) -> Model:
    return Model(context.node_config["client-id"])


def data(context: Context) -> Data:
    return Data(context.node_config["client-id"])


app = lightning_client_app(model, data, STRATEGY, trainer={"accelerator": "cpu"}, state_dir="state")
