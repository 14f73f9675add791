# SPDX-License-Identifier: Apache-2.0
"""What a module keeps from step to step: every visit begins as the round found it, and the round goes on from there."""

import lightning as L
import pytest
import torch
from support import quiet_trainer
from torch.utils.data import DataLoader, TensorDataset
from visit_variants import WIDTH, Together

import fl_lightning as fl


class Samples(L.LightningDataModule):
    """A batch size that leaves a short batch, in the same order at every pass."""

    def __init__(self, number=44):
        super().__init__()
        torch.manual_seed(4)
        x = torch.randn(number, WIDTH)
        self.samples = TensorDataset(x, x.sum(1))

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=10)


def differing(one, other):
    return sorted(name for name in one if not torch.equal(one[name], other[name]))


@pytest.mark.fit
def test_one_client_with_all_data_is_plain_lightning():
    ends = []
    for strategy in ("auto", fl.FederatedStrategy(planned_steps="never")):
        module, data = Together(), Samples()
        divided = data if strategy == "auto" else fl.FederatedDataModule(data, [torch.arange(44)])
        quiet_trainer(strategy, 3).fit(module, divided)
        ends.append(module.found())
    assert not differing(*ends)


@pytest.mark.fit
@pytest.mark.parametrize("workers", [2, 3])
def test_worker_processes_give_the_same_bits(workers):
    ends = []
    for executor in (None, fl.executors.Parallel(workers)):
        module, parts = Together(), list(torch.arange(44).split([12, 9, 23]))
        strategy = fl.FederatedStrategy(planned_steps="never", executor=executor)
        quiet_trainer(strategy, 3).fit(module, fl.FederatedDataModule(Samples(), parts))
        assert strategy.executor_fallback is None
        ends.append(module.found())
    assert not differing(*ends)
