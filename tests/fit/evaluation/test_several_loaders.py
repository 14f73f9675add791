# SPDX-License-Identifier: Apache-2.0
"""Several evaluation loaders: every client has a value of each, as a plain Trainer on its batches alone has it."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from plain_loop import client_batches
from support import CLASSES, Blobs, Classifier, blobs, fresh, quiet_trainer
from torch.utils.data import DataLoader, Subset
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl


class TwoSources(Blobs):
    """Validates and tests on a large source and on a small one, which not all clients share."""

    def val_dataloader(self):
        return [DataLoader(blobs(80, 1), batch_size=7), DataLoader(blobs(5, 2), batch_size=3)]

    def test_dataloader(self):
        return tuple(reversed(self.val_dataloader()))


class Plain(Classifier):
    """Logs in its steps alone."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)
        self.log(f"own_{dataloader_idx}", float(batch_idx), add_dataloader_idx=False, reduce_fx="max")

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.validation_step(batch, batch_idx, dataloader_idx)


class Gathering(Classifier):
    """Gathers in a list per loader, in a metric of all loaders and in numbers of its own, and has hooks around."""

    def __init__(self):
        super().__init__()
        self.losses = [[], []]
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.right, self.starts = 0, 0

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + dataloader_idx, batch[1]]

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.starts += 1 + dataloader_idx

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        logits = self(batch[0])
        self.losses[dataloader_idx].append(F.cross_entropy(logits, batch[1]))
        self.accuracy(logits, batch[1])
        self.right += int((logits.argmax(1) == batch[1]).sum())
        self.log("acc", self.accuracy)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("ends", 1.0 + dataloader_idx, on_epoch=True, reduce_fx="sum")

    def on_validation_epoch_end(self):
        for k, losses in enumerate(self.losses):
            if losses:
                self.log(f"largest_{k}", max(losses))
            losses.clear()
        self.log("right", float(self.right))
        self.log("starts", float(self.starts))
        self.log("seen", float(sum(self.trainer.num_val_batches)))
        known = self.trainer.callback_metrics
        for k in (0, 1):
            if (value := known.get(f"acc/dataloader_idx_{k}")) is not None:
                self.log(f"twice_{k}", 2 * value)
        self.right = self.starts = 0


def of_client(loaders, client):
    """The client's share of each loader, as anybody would write it."""
    return [DataLoader(Subset(one.dataset, one.indices(client).tolist()), batch_size=one.batch_size) for one in loaders]


@pytest.mark.filterwarnings("ignore:Total length")  # Lightning's, of a client without samples of the second loader
@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
@pytest.mark.parametrize(("module_class", "word"), [(Plain, "validate"), (Plain, "test"), (Gathering, "validate")])
def test_clients_have_what_a_plain_trainer_logs_on_their_batches(module_class, word):
    stage = {"validate": "val", "test": "test"}[word]
    data, strategy = fl.FederatedDataModule(TwoSources(), fl.data.Dirichlet(6, 0.3), seed=0), fl.FederatedStrategy()
    trainer, module = quiet_trainer(strategy), fresh(module_class)
    getattr(trainer, word)(module, data, verbose=False)
    together = {name: float(v) for name, v in trainer.callback_metrics.items() if not name.startswith("fed/")}
    record, loaders = strategy.last_evaluation, getattr(data, f"{stage}_dataloader")()
    empty = [client for client in range(6) if not min(one.sizes[client] for one in loaders)]
    assert 0 < len(empty) < 6
    assert record.sizes.tolist() == (loaders[0].sizes + loaders[1].sizes).tolist()
    for client in record.client_ids:
        plain = quiet_trainer("auto")
        getattr(plain, word)(fresh(module_class), of_client(loaders, client), verbose=False)
        expected = {name: float(value) for name, value in plain.callback_metrics.items()}
        found = {name: values[client].item() for name, values in record.values.items()}
        assert {name for name, value in found.items() if value == value} == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5), (client, name)
    assert together.keys() == record.values.keys()
    plain = quiet_trainer("auto")
    batches = [[batch for c in range(6) for batch, _ in one.batches(c, seed=None)] for one in loaders]
    getattr(plain, word)(fresh(module_class), [DataLoader(all_, batch_size=None) for all_ in batches], verbose=False)
    expected = {name: float(value) for name, value in plain.callback_metrics.items()}
    for name, values in record.values.items():
        if name.startswith("own"):
            expected[name] = float(values.nan_to_num(-1).max())
        elif module_class is Gathering and not name.startswith(("acc", "ends")):  # it counts in numbers of its own
            known = values.isfinite()
            expected[name] = float((values * record.sizes)[known].sum() / record.sizes[known].sum())
    assert together == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_a_fit_goes_on_as_if_no_client_had_been_evaluated_alone(caplog):
    def weights_after(data):
        module, strategy = fresh(Gathering), fl.FederatedStrategy(clients_per_round=3)
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
    assert caplog.text.count("Gathering.validation_step changes right, starts, which nothing can add up") == 1


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
@pytest.mark.parametrize("first", [True, False])
def test_what_undivided_data_leave_in_the_module_is_no_clients(first):
    strategy, module, divided = fl.FederatedStrategy(), fresh(Gathering), client_batches("val")
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


def test_own_models_are_evaluated_on_every_loader():
    strategy = fl.FederatedStrategy(fl.algorithms.Ditto(lam=0.1))
    data = fl.FederatedDataModule(TwoSources(), fl.data.IID(3), seed=0)
    quiet_trainer(strategy, 2).fit(fresh(Plain), data)
    values = strategy.last_evaluation.values
    for k in (0, 1):
        own, shared = (values[f"{prefix}val_loss/dataloader_idx_{k}"] for prefix in ("personal/", ""))
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


def test_a_partition_divides_the_loaders_that_a_trainer_is_given():
    plain = TwoSources()
    strategy = fl.FederatedStrategy(partition=fl.data.IID(3))
    trainer = quiet_trainer(strategy, 1)
    trainer.fit(fresh(Plain), plain.train_dataloader(), plain.val_dataloader())
    assert strategy.last_evaluation.sizes.sum() == 85
    assert not strategy.last_evaluation.values["val_acc/dataloader_idx_0"].isnan().any()


@pytest.mark.filterwarnings("ignore:Total length")
def test_a_client_elsewhere_has_the_values_of_a_fit():
    data, strategy = fl.FederatedDataModule(TwoSources(), fl.data.Dirichlet(6, 0.3), seed=0), fl.FederatedStrategy()
    quiet_trainer(strategy).validate(fresh(Plain), data, verbose=False)
    expected, server = strategy.last_evaluation, fl.FederatedServer(fresh(Plain), strategy, 6)
    for client in range(6):
        one = fl.FederatedClient(fresh(Plain, seed=9), data, strategy, client, trainer={"accelerator": "cpu"})
        found = one.evaluate(server.evaluation_message(client))
        assert found.sizes.tolist() == [expected.sizes[client].item()]
        own = {name: values[client].item() for name, values in expected.values.items()}
        assert {name: values.item() for name, values in found.values.items()} == pytest.approx(
            {name: value for name, value in own.items() if value == value}, rel=1e-6
        )


@pytest.mark.filterwarnings("ignore:Total length")
def test_what_a_client_reaches_alone_has_every_loader(tmp_path):
    compared = fl.compare(
        Plain, fl.FederatedDataModule(TwoSources(), fl.data.Dirichlet(6, 0.3), seed=0),
        {"FedAvg": fl.FederatedStrategy()}, trainer=partial(L.Trainer, max_epochs=1, accelerator="cpu", logger=False),
        folder=tmp_path, seeds=[5], bounds="local",
    )  # fmt: skip
    assert len(compared.results) == 2
    for record in compared.results.values():
        values = record.last_values("val").values
        missing = [values[f"val_loss/dataloader_idx_{k}"].count(None) for k in (0, 1)]
        assert missing[0] == 0 < missing[1] < 6  # some clients have nothing of the second loader
