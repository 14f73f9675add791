# SPDX-License-Identifier: Apache-2.0
"""What a registered client costs, sampled or not."""

import ctypes
import gc
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from lightning.pytorch import Callback
from support import CLASSES, FEATURES, Classifier, Manual, blobs, fit, fresh, train
from torch import nn

import fl_lightning as fl
from fl_lightning.core.tensors import padded

CLIENTS, SAMPLES = 10_000, 10
ALLOWED = CLIENTS * (1000 + 8 * SAMPLES)  # bytes: 1 kB per client, 8 bytes per sample
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Clock(Callback):
    """CPU seconds per round, validation excluded."""

    def __init__(self):
        self.seconds = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.began = time.process_time()

    def on_train_epoch_end(self, trainer, pl_module):
        self.seconds.append(time.process_time() - self.began)


class Wide(Classifier):
    """35 kB of parameters: keeping them per registered client could not go unnoticed."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def seconds_per_round(dataset, clients, algorithm=fl.algorithms.FedAvg, rounds=7):
    """Of a fit that samples ten clients in every round."""
    clock = Clock()
    data = fl.FederatedDataModule(dataset, fl.data.IID(clients), batch_size=10)
    rule = {"algorithm": algorithm(), "clients_per_round": 10}
    strategy = fit(fresh(Wide), rounds, data=data, callbacks=[clock], **rule).strategy
    assert len(strategy.last_round.client_ids) == 10
    assert data.num_clients == clients
    return median(clock.seconds)


def kilobytes(key):
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1])


def growth_of_peak_memory(run):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that other tests have freed would be taken again unseen
    before = kilobytes("VmRSS")
    _CLEAR.write_text("5")  # the peak starts anew
    run()
    return 1024 * (kilobytes("VmHWM") - before)


@pytest.fixture(scope="module")
def datasets():
    return {clients: blobs(clients * SAMPLES) for clients in (100, CLIENTS)}


@pytest.mark.skipif(not _CLEAR.exists(), reason="peak memory is read from /proc")
def test_peak_memory_grows_by_little_more_than_indices(datasets):
    seconds_per_round(datasets[100], 100, rounds=2)  # imports and caches
    assert growth_of_peak_memory(lambda: seconds_per_round(datasets[CLIENTS], CLIENTS, rounds=2)) < ALLOWED


class Large(Manual):
    """4 MB of parameters, and steps that take no time."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1000, 1000)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net.weight.mul_(0.5)


@pytest.mark.skipif(not _CLEAR.exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(("counts", "rows"), [(True, (50, 55)), (False, (5, 8))])
def test_updates_that_are_added_up_take_the_memory_of_a_few(datasets, counts, rows):
    data = fl.FederatedDataModule(datasets[100], fl.data.IID(50))
    grown = growth_of_peak_memory(
        lambda: train(fresh(Large), 2, data=data, clients_per_round=50, count_conflicts=counts)
    )
    assert rows[0] < grown / (4 * 1_001_000) < rows[1]


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.FedLF])
def test_round_time_does_not_follow_the_registered_clients(datasets, algorithm):
    few, many = (min(seconds_per_round(datasets[n], n, algorithm) for _ in range(2)) for n in (100, CLIENTS))
    assert many < 2 * few + 0.005


def test_the_cohort_alone_decides_what_a_round_holds(datasets):
    seen = []

    class Spy(fl.algorithms.FedAvg):
        def aggregate(self, cohort):
            seen.append((cohort.updates.rows.untyped_storage().nbytes(), cohort.num_clients))
            return super().aggregate(cohort)

    seconds_per_round(datasets[CLIENTS], CLIENTS, Spy, rounds=1)
    n = sum(p.numel() for p in fresh(Wide).parameters())
    assert seen == [(10 * padded(n, torch.float32) * torch.float32.itemsize, CLIENTS)]
