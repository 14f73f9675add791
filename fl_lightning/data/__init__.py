# SPDX-License-Identifier: Apache-2.0
"""Federated data: partitions, per-client loaders, the data module, and samplers of cohorts.

Uses ``lightning``, ``core`` and ``arguments``.
"""

from fl_lightning.data.client_indices import ClientIndices
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.cohort_samplers import (
    AllClients,
    AvailabilitySampler,
    CohortSampler,
    Selection,
    SizeWeightedSampler,
    UniformSampler,
)
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.dirichlet_functions import dirichlet, dirichlet_classes
from fl_lightning.data.labels import Samples, labels_of
from fl_lightning.data.matched_split import label_counts, matched_split
from fl_lightning.data.partition_functions import by_key, iid, mutex, pathological, shards, unbalanced
from fl_lightning.data.partitions import (
    IID,
    ByKey,
    Dirichlet,
    DirichletClasses,
    Mutex,
    Partition,
    Pathological,
    Shards,
    Unbalanced,
)
from fl_lightning.data.sources import LoaderSettings

__all__ = [
    "IID", "AllClients", "AvailabilitySampler", "ByKey", "ClientIndices", "ClientLoaders", "CohortSampler", "Dirichlet",
    "DirichletClasses", "FederatedDataModule", "LoaderSettings", "Mutex", "Partition", "Pathological", "Samples",
    "Selection", "Shards", "SizeWeightedSampler", "Unbalanced", "UniformSampler", "by_key", "dirichlet",
    "dirichlet_classes", "iid", "label_counts", "labels_of", "matched_split", "mutex", "pathological", "shards",
    "unbalanced",
]  # fmt: skip
