# SPDX-License-Identifier: Apache-2.0
"""Several evaluation loaders: what is one client's, and how they are divided."""

import lightning as L
import pytest
import torch
from gathering import OfLoaders, TwoSources
from plain_loop import client_batches
from support import Blobs, blobs, fresh, quiet_trainer
from torch.utils.data import DataLoader

import fl_lightning as fl


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_a_fit_goes_on_as_if_no_client_had_been_evaluated_alone(caplog):
    def weights_after(data):
        module, strategy = fresh(OfLoaders), fl.FederatedStrategy(clients_per_round=3)
        trainer = quiet_trainer(strategy, 3, num_sanity_val_steps=2)
        trainer.fit(module, data)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), strategy.last_evaluation, module

    class Untested(Blobs):
        val_dataloader = L.LightningDataModule.val_dataloader

    divided = fl.data.Dirichlet(6, 0.3)
    found, record, module = weights_after(fl.FederatedDataModule(TwoSources(), divided, seed=0))
    expected, _, _ = weights_after(fl.FederatedDataModule(Untested(), divided, seed=0))
    assert torch.equal(found, expected)
    assert (record.round, module.right, module.losses) == (3, 0, [[], []])
    assert module.accuracy.update_count == 0
    assert caplog.text.count("OfLoaders.validation_step changes right, starts, which nothing can add up") == 1


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
@pytest.mark.parametrize("first", [True, False])
def test_what_undivided_data_leave_in_the_module_is_no_clients(first):
    strategy, module, divided = fl.FederatedStrategy(), fresh(OfLoaders), client_batches("val")
    loaders = [Blobs().test_dataloader(), divided]
    quiet_trainer(strategy).validate(module, loaders[::-1] if first else loaders, verbose=False)
    values, shift = strategy.last_evaluation.values, 0 if first else 1
    x, y = divided.dataset.tensors
    right = module(x + shift).argmax(1) == y
    for client in range(6):
        mine = divided.indices(client)
        assert values["right"][client] == int(right[mine].sum())
        assert values["seen"][client] == -(-len(mine) // divided.batch_size)
    assert not any(name in values for name in (f"acc/dataloader_idx_{1 - shift}", f"largest_{1 - shift}"))


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_own_models_are_evaluated_on_every_loader():
    strategy = fl.FederatedStrategy(fl.algorithms.Ditto(lam=0.1))
    data = fl.FederatedDataModule(TwoSources(), fl.data.IID(3), seed=0)
    quiet_trainer(strategy, 2).fit(fresh(OfLoaders), data)
    values = strategy.last_evaluation.values
    for k in (0, 1):
        own, shared = (values[f"{prefix}loss/dataloader_idx_{k}"] for prefix in ("personal/", ""))
        assert not own.isnan().any()
        assert not torch.equal(own, shared)


def test_divisions_of_the_first_loader_are_those_of_one_and_the_second_is_drawn_apart():
    class Same(Blobs):
        def val_dataloader(self):
            return [super().val_dataloader(), super().val_dataloader()]

    partition = fl.data.Dirichlet(6, 1.0)
    first, second = client_batches("val", fl.FederatedDataModule(Same(), partition, seed=0))
    alone = client_batches("val", fl.FederatedDataModule(Blobs(), partition, seed=0))
    assert first.sizes.tolist() == alone.sizes.tolist()
    assert all(torch.equal(first.indices(k), alone.indices(k)) for k in range(6))
    assert not all(torch.equal(first.indices(k), second.indices(k)) for k in range(6))


def test_loaders_are_divided_anew_once_the_data_are_set_up_anew():
    class Growing(Blobs):
        seed = 1

        def setup(self, stage):
            self.seed += stage == "test"

        def test_dataloader(self):
            return [DataLoader(blobs(80, self.seed)), DataLoader(blobs(80, 10 + self.seed))]

    data = fl.FederatedDataModule(Growing(), fl.data.Dirichlet(6, 0.3), seed=0)
    for _ in range(2):
        for loaders in client_batches("test", data):
            labels = loaders.dataset.tensors[1]
            own = [int((labels[loaders.indices(k)] == 0).sum()) for k in range(6)]
            trained = data.label_counts()[:, 0]
            expected = trained * int((labels == 0).sum()) / int(trained.sum())
            assert (torch.tensor(own) - expected).abs().max() <= 1.5  # in proportion, to whole samples


def test_sites_that_only_some_loaders_have_are_refused():
    class Sites(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(self.of("ab"))

        def val_dataloader(self):
            return [DataLoader(self.of("ab")), DataLoader(self.of("ac"))]

        @staticmethod
        def of(sites):
            data = blobs(20)
            data.site = [sites[k % 2] for k in range(20)]
            return data

    data = fl.FederatedDataModule(Sites(), fl.data.ByKey("site"), evaluation="independent")
    with pytest.raises(ValueError, match=r"of Sites.val_dataloader\(\) have different clients that training lacks"):
        client_batches("val", data)
