# SPDX-License-Identifier: Apache-2.0
"""Notebook: four sites with names, of unlike sizes and scanners, and two groups of people at each."""

# %% [markdown]
# # Four sites with names
#
# Four clinics of unlike sizes train one model. Their scanners differ, so the model serves them unlike, and at each
# site there are two groups of people. This page shows how to see both: who fares how, by name, and how the groups fare
# at each site. The images are the digits that scikit-learn carries, and the sites are made up.
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
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy

import fl_lightning as fl

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

# %% [markdown]
# ## The data
#
# Each sample has an image, a label, a group and a site. The label asks whether the digit is even, and images of group
# 1 are darker. `ByKey("site")` makes one client of each site. The attribute's values are the names.

# %%
SHARES = {"Aberdeen": 0.6, "Bergen": 0.25, "Cork": 0.1, "Delft": 0.05}


def scanner(site, images):
    """What the site's scanner makes of images."""
    if site == "Cork":
        return images.flip(-1)
    return 1 - images if site == "Delft" else images


class Scans(Dataset):
    def __init__(self, which):
        images, digits = load_digits(return_X_y=True)
        draw = torch.Generator().manual_seed(0)
        order = torch.randperm(len(images), generator=draw)
        groups = torch.randint(0, 2, (len(images),), generator=draw)
        names = list(SHARES)
        shares = torch.tensor(list(SHARES.values()))
        places = torch.multinomial(shares, len(images), replacement=True, generator=draw)
        chosen = order[:1200] if which == "train" else order[1200:]
        images = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16
        images = torch.where(groups[:, None, None] == 1, images * 0.35, images)
        self.site = [names[place] for place in places[chosen]]
        self.images = torch.stack(list(map(scanner, self.site, images[chosen])))
        self.labels, self.groups = torch.tensor(digits)[chosen] % 2 == 0, groups[chosen]

    def __len__(self):
        return len(self.site)

    def __getitem__(self, index):
        return self.images[index], self.labels[index], self.groups[index]


class Clinics(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Scans("train"), batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Scans("val"), batch_size=128)


# %% [markdown]
# ## The model
#
# It logs its accuracy, and two comparisons of the groups: how often they are predicted to be even, and the accuracy.


# %%
class Even(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.accuracy = BinaryAccuracy()
        self.parity = fl.metrics.DemographicParity()
        self.accuracies = fl.metrics.ByGroup(BinaryAccuracy())

    def training_step(self, batch, batch_idx):
        images, labels, _ = batch
        return F.binary_cross_entropy_with_logits(self.net(images).squeeze(1), labels.float())

    def validation_step(self, batch, batch_idx):
        images, labels, groups = batch
        predictions = (self.net(images).squeeze(1) > 0).long()
        self.accuracy(predictions, labels.long())
        self.parity.update(predictions, groups)
        self.accuracies.update(predictions, labels.long(), groups=groups)
        self.log("val_acc", self.accuracy)
        self.log("val_parity_gap", self.parity)
        self.log("val_acc_gap", self.accuracies)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


# %% [markdown]
# ## FedAvg and FedLF
#
# All four sites take part in every round. FedAvg weights them by their samples, so Aberdeen decides. FedLF looks for a
# step that makes the model worse for none of them.


# %%
def federate(method, rounds):
    L.seed_everything(0, verbose=False)
    strategy = fl.FederatedStrategy(method, sampler=fl.data.AllClients(), seed=0, log_client_names=True)
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Even(), fl.FederatedDataModule(Clinics(), fl.data.ByKey("site"), seed=0))
    return strategy.last_evaluation


average = federate(fl.algorithms.FedAvg(), rounds=30)
print(fl.callbacks.format_client_table(average))

# %%
fair = federate(fl.algorithms.FedLF(), rounds=30)
print(fl.callbacks.format_client_table(fair))

# %% [markdown]
# Sites with few samples have rough numbers: the column `samples` says how many there are, and one sample of Delft
# moves its accuracy by several points.
#
# ## The groups
#
# `val_parity_gap` and `val_acc_gap` compare the two groups at each site; 0 is equal. Sites and groups are two kinds of
# fairness: a method that serves sites more alike may treat the groups at a site less alike. [Choose a
# method](../choose.md) names the methods for groups, and [Group fairness](../groups.md) explains the numbers.

# %%
from matplotlib import pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
titles = {"val_acc": "accuracy", "val_acc_gap": "accuracy, gap between the groups"}
for axis, (metric, title) in zip(axes, titles.items(), strict=True):
    for shift, record, name, colour in ((-0.2, average, "FedAvg", "#b0713a"), (0.2, fair, "FedLF", "#2f6f8f")):
        axis.bar(torch.arange(4) + shift, record.values[metric], 0.4, color=colour, label=name)
    axis.set_xticks(range(4), average.client_names)
    axis.set_title(title)
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
plt.show()
