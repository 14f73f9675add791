# SPDX-License-Identifier: Apache-2.0
"""Notebook: a project as it is, the three lines that federate it, and what FedAvg and FedLF do to each client."""

# %% [markdown]
# # Fair digits
#
# A small project with hand-written digits is trained as it is, then over 20 clients. Two methods are compared by what
# each client gets. All of it runs on a processor in well under a minute.
#
# ```sh
# pip install '.[demo]'  # in a checkout of fl_lightning
# ```

# %%
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl

L.seed_everything(0, verbose=False)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

# %% [markdown]
# ## The project
#
# A LightningModule and its data. Nothing here knows of clients.

# %%
images, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
held_out, rest = order[:539], order[539:]


class Digits(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(inputs[rest], targets[rest]), batch_size=10, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(inputs[held_out], targets[held_out]), batch_size=256)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


quiet = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
plain = L.Trainer(max_epochs=3, **quiet)
plain.fit(Classifier(), Digits())
print(f"accuracy without clients: {float(plain.callback_metrics['val_acc']):.3f}")

# %% [markdown]
# ## The same project, federated
#
# `Pathological` gives each of 20 clients two digits, as if each had seen little of the world. The strategy is the only
# argument of the Trainer that changes. One epoch is one round: five clients train, and the server combines their
# updates.

# %%
ROUNDS = 30


def federate(method):
    L.seed_everything(0, verbose=False)
    data = fl.FederatedDataModule(Digits(), fl.data.Pathological(num_clients=20, classes_per_client=2), seed=0)
    strategy = fl.FederatedStrategy(method, clients_per_round=5, seed=0)
    recorder = fl.callbacks.FitRecorder()
    trainer = L.Trainer(max_epochs=ROUNDS, strategy=strategy, callbacks=[recorder], num_sanity_val_steps=0, **quiet)
    trainer.fit(Classifier(), data)
    return strategy.last_evaluation, recorder.record


average, average_record = federate(fl.algorithms.FedAvg())
fair, fair_record = federate(fl.algorithms.FedLF())

# %% [markdown]
# ## Who fares how
#
# `last_evaluation` has each client's value. Sorted by what they get from FedAvg, the clients on the left are those
# that averaging serves worst.

# %%
from matplotlib import pyplot as plt

before, after = average.values["val_acc"], fair.values["val_acc"]
order = before.argsort(stable=True)
figure, (clients, rounds) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for shift, values, name, colour in ((-0.2, before, "FedAvg", "#b0713a"), (0.2, after, "FedLF", "#2f6f8f")):
    clients.bar(torch.arange(20) + shift, values[order], 0.4, color=colour, label=name)
clients.set_xticks(range(20), [str(average.client_ids[i]) for i in order])
clients.set(xlabel="client", title="accuracy of each client", ylim=(0, 1))
for record, name, colour in ((average_record, "FedAvg", "#b0713a"), (fair_record, "FedLF", "#2f6f8f")):
    curve = next(series for series in record.metrics if series.metric == "val_acc")
    rounds.plot(curve.rounds, curve.summaries["worst_10"], color=colour, label=name)
rounds.set(xlabel="round", title="worst 10 % of the clients", ylim=(0, 1))
rounds.legend(frameon=False)
plt.show()

# %% [markdown]
# The same in numbers: the mean over clients, the mean of the worst tenth, and the fairness angle, which is 0 if all
# clients have the same accuracy.

# %%
for name, record in (("FedAvg", average), ("FedLF", fair)):
    summary = record.summary("val_acc")
    print(f"{name:7}", *(f"{key} {float(summary[key]):.3f}" for key in ("mean", "worst_10", "angle")), sep="   ")

# %% [markdown]
# One seed and one split say little. [Evidence](../evidence.md) has the papers' tables with several seeds, and [Choose
# a method](../choose.md) says what else there is.
