# SPDX-License-Identifier: Apache-2.0
"""Federated data: partitions, per-client loaders, the data module, and samplers of cohorts.

Uses ``lightning``, ``core`` and ``arguments``.
"""

from fl_lightning.data.by_key import ByKey
from fl_lightning.data.client_indices import ClientIndices
from fl_lightning.data.client_loaders import ClientLoaders, LoaderSettings
from fl_lightning.data.cohort_samplers import (
    AllClients,
    AvailabilitySampler,
    CohortSampler,
    Selection,
    SizeWeightedSampler,
    UniformSampler,
)
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.dirichlet_partitions import Dirichlet, DirichletClasses
from fl_lightning.data.labels import Samples, labels_of
from fl_lightning.data.matched_split import label_counts, matched_split
from fl_lightning.data.partitions import IID, Mutex, Partition, Pathological, Shards, Unbalanced

__all__ = [
    "IID", "AllClients", "AvailabilitySampler", "ByKey", "ClientIndices", "ClientLoaders", "CohortSampler", "Dirichlet",
    "DirichletClasses", "FederatedDataModule", "LoaderSettings", "Mutex", "Partition", "Pathological", "Samples",
    "Selection", "Shards", "SizeWeightedSampler", "Unbalanced", "UniformSampler", "label_counts", "labels_of",
    "matched_split",
]  # fmt: skip
