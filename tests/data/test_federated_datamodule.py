# SPDX-License-Identifier: Apache-2.0
import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fl_lightning as fl
from fl_lightning import data as fd
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data import ClientLoaders, FederatedDataModule, label_counts
from fl_lightning.lightning.names import LightningDataModule, LightningModule, SingleDeviceStrategy, Trainer


def make(n, seed, classes=4):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 3, generator=generator), torch.randint(0, classes, (n,), generator=generator))


class Module(LightningDataModule):
    """An ordinary data module that knows nothing of clients."""

    num_classes = 4

    def __init__(self, rate=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append("setup " + str(getattr(stage, "value", stage)))
        if stage == "fit":
            self.train, self.held = make(200, 0), make(60, 1)
        if stage == "test":
            self.test = make(80, 2)

    def train_dataloader(self):
        self.calls.append("train")
        return DataLoader(self.train, batch_size=8, shuffle=True, drop_last=True)

    def teardown(self, stage):
        self.calls.append("teardown " + str(getattr(stage, "value", stage)))

    def state_dict(self):
        return {"seen": 3}

    def load_state_dict(self, state_dict):
        self.calls.append(("load", state_dict))

    def on_exception(self, exception):
        self.calls.append(type(exception).__name__)


class Evaluated(Module):
    def val_dataloader(self):
        self.calls.append("val")
        return DataLoader(self.held, batch_size=16)

    def test_dataloader(self):
        return [DataLoader(self.test, batch_size=16, shuffle=False)]

    def predict_dataloader(self):
        return DataLoader(make(10, 3), batch_size=5)


class Moved(Evaluated):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls.append("before")
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.calls.append(f"after {self.trainer is not None}")
        return batch


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.seen = {"train": 0, "val": 0, "test": 0, "predict": 0}

    def _step(self, batch, stage):
        self.seen[stage] += len(batch[0])
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "val")

    def test_step(self, batch, batch_idx):
        self._step(batch, "test")

    def predict_step(self, batch, batch_idx):
        self._step(batch, "predict")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Walk(SingleDeviceStrategy):
    """Stands in for the federated strategy: walks over all clients' batches."""

    def process_dataloader(self, dataloader):
        if not isinstance(dataloader, ClientLoaders):
            return dataloader
        return [batch for client in range(len(dataloader)) for batch, _ in dataloader.batches(client, seed=0)]


def trainer(strategy=None, **kwargs):
    return Trainer(
        strategy=Walk(torch.device("cpu")) if strategy is None else strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **kwargs,
    )


def used(loaders):
    return torch.cat([loaders.indices(client) for client in range(len(loaders))]).sort().values.tolist()


def test_divides_a_data_module_and_keeps_its_settings():
    inner = Evaluated()
    data = FederatedDataModule(inner, fd.Dirichlet(10, 0.3), seed=4)
    data.prepare_data()
    data.setup("fit")
    train, val = data.train_dataloader(), data.val_dataloader()
    assert (train.stage, train.batch_size, train.settings.drop_last, train.settings.shuffle) == ("train", 8, True, True)
    assert (val.stage, val.batch_size, val.settings.drop_last, val.settings.shuffle) == ("val", 16, False, False)
    assert used(train) == list(range(200))
    assert used(val) == list(range(60))
    assert data.num_clients == len(train) == len(val) == 10
    assert torch.equal(data.client_sizes, train.sizes)
    expected = fd.Dirichlet(10, 0.3).split(inner.train.tensors[1], derive_seed(4, "partition"))
    assert all(torch.equal(train.indices(i), expected[i]) for i in range(10))
    counts = data.label_counts()
    assert torch.equal(counts, label_counts(inner.train.tensors[1], expected))
    assert torch.equal(torch.bincount(data.client_labels(3), minlength=4), counts[3])
    data.setup("test")
    test = data.test_dataloader()
    assert (test.stage, used(test)) == ("test", list(range(80)))
    assert data.predict_dataloader().batch_size == 5
    assert inner.calls == ["prepare", "setup fit", "train", "val", "setup test"], "each loader is asked for once"


def test_matched_evaluation_follows_training_labels():
    data = FederatedDataModule(Evaluated(), fd.Pathological(6, 2))
    data.setup("fit")
    held = label_counts(data.held.tensors[1], [data.val_dataloader().indices(i) for i in range(6)])
    assert torch.equal(held > 0, data.label_counts() > 0)


def test_independent_and_shared_evaluation():
    independent = FederatedDataModule(Evaluated(), fd.Pathological(6, 2), evaluation="independent")
    independent.setup("fit")
    val = independent.val_dataloader()
    expected = fd.Pathological(6, 2).split(independent.held.tensors[1], derive_seed(0, "partition", "val"))
    assert [val.indices(i).tolist() for i in range(6)] == [part.tolist() for part in expected]
    shared = FederatedDataModule(Evaluated(), fd.IID(6), evaluation="shared")
    shared.setup("fit")
    assert [shared.val_dataloader().indices(i).tolist() for i in range(6)] == [list(range(60))] * 6


def test_datasets():
    train, val, test = make(50, 0), make(20, 1), make(30, 2)
    data = FederatedDataModule(train, fd.IID(4), val=val, test=test)
    assert data.train_dataloader().settings == fd.LoaderSettings(32, True)
    assert data.val_dataloader().settings == fd.LoaderSettings(32, False)
    assert used(data.test_dataloader()) == list(range(30))
    loader = DataLoader(train, batch_size=4, drop_last=True)
    for source, drops in ((train, False), (loader, True)):
        settings = FederatedDataModule(source, fd.IID(4), batch_size=10).train_dataloader().settings
        assert (settings.batch_size, settings.drop_last) == (10, drops)
    sized = FederatedDataModule(train, fd.IID(4), val=val, batch_size=7, eval_batch_size=9)
    assert (sized.train_dataloader().batch_size, sized.val_dataloader().batch_size) == (7, 9)
    assert FederatedDataModule(train, fd.IID(4), val=val, batch_size=7).val_dataloader().batch_size == 7
    listed = FederatedDataModule([(torch.zeros(1), i % 2) for i in range(10)], fd.Mutex(2))
    assert listed.label_counts().tolist() in ([[5, 0], [0, 5]], [[0, 5], [5, 0]])
    keyed = FederatedDataModule({i: (torch.zeros(1), i % 2) for i in range(10)}, fd.Mutex(2))
    assert keyed.client_sizes.tolist() == [5, 5]


def test_ready_parts():
    parts = [[0, 5, 7], torch.tensor([1, 2]), []]
    data = FederatedDataModule(make(10, 0), parts, val=make(6, 1))
    assert [data.train_dataloader().indices(i).tolist() for i in range(3)] == [[0, 5, 7], [1, 2], []]
    assert used(data.val_dataloader()) == list(range(6))
    with pytest.raises(ValueError, match="each sample at most once"):
        FederatedDataModule(make(10, 0), [[0, 1], [1]]).train_dataloader()
    with pytest.raises(ValueError, match="found 'independent'"):
        FederatedDataModule(make(10, 0), parts, evaluation="independent")


def test_labels_from_an_argument():
    class Told(Dataset):
        def __init__(self, n, offset):
            self.n, self.offset = n, offset
            self.domain = [(i + offset) % 2 for i in range(n)]

        def __len__(self):
            return self.n

        def __getitem__(self, index):
            return {"x": torch.zeros(2), "kind": (index + self.offset) % 2}

    for labels in ("domain", lambda sample: sample["kind"]):
        data = FederatedDataModule(Told(10, 0), fd.Mutex(2), val=Told(6, 1), labels=labels)
        assert {tuple(row) for row in data.label_counts().tolist()} == {(5, 0), (0, 5)}
        first = int(data.client_labels(0)[0])
        assert data.val_dataloader().indices(0).tolist() == [i for i in range(6) if (i + 1) % 2 == first]
    vector = FederatedDataModule(Told(10, 0), fd.Mutex(2), labels=[0] * 4 + [1] * 6)
    assert sorted(vector.client_sizes.tolist()) == [4, 6]
    with pytest.raises(ValueError, match="labels must be found in each sample"):
        FederatedDataModule(Told(10, 0), fd.Mutex(2)).train_dataloader()


@pytest.mark.parametrize("partition", [fd.Dirichlet(4, 0.5), [range(20), [30]]])
def test_errors_about_evaluation_labels_name_the_stage_and_a_remedy_that_works(partition):
    def numbers(n):
        return TensorDataset(torch.randn(n, 3), torch.randn(n))

    vector, val = torch.arange(40) % 3, numbers(20)
    words = r"the labels of the val data \(TensorDataset\) must be a vector of 20 integers, found float32 of shape"
    for labels in (vector, lambda sample: int(sample[1] > 0)):
        data = FederatedDataModule(numbers(40), partition, val=val, labels=labels)
        assert int(data.train_dataloader().sizes.sum()) > 0
        if labels is not vector:
            assert used(data.val_dataloader()) == list(range(20))
            continue
        with pytest.raises(ValueError, match=rf"{words} \[20\]: pass labels= as a function .* or evaluation='shared'"):
            data.val_dataloader()
    shared = FederatedDataModule(numbers(40), partition, val=val, labels=vector, evaluation="shared")
    assert len(shared.val_dataloader().indices(0)) == 20
    with pytest.raises(ValueError, match=r"each sample of the val data \(list\), found only Tensor: pass labels= as a"):
        FederatedDataModule(numbers(40), partition, val=[torch.zeros(3)] * 4, labels=vector).val_dataloader()


def test_holdout():
    data = FederatedDataModule(make(100, 0), fd.Dirichlet(5, 0.5), holdout=0.2, seed=3)
    whole = FederatedDataModule(make(100, 0), fd.Dirichlet(5, 0.5), seed=3)
    train, val = data.train_dataloader(), data.val_dataloader()
    assert sorted(used(train) + used(val)) == list(range(100))
    assert torch.equal(train.sizes + val.sizes, whole.client_sizes)
    assert torch.equal(data.client_sizes, train.sizes)
    assert int(val.sizes.sum()) in range(17, 24)
    assert (val.settings.shuffle, val.settings.drop_last) == (False, False)
    inner = FederatedDataModule(Module(), fd.IID(5), holdout=0.5, holdout_stage="test", eval_batch_size=4)
    inner.setup("test")
    assert inner.test_dataloader().settings == fd.LoaderSettings(4)
    assert inner.test_dataloader().sizes.tolist() == [20] * 5
    with pytest.raises(ValueError, match=r"holdout must be 0 where data has val data of its own, found 0\.2"):
        FederatedDataModule(Evaluated(), fd.IID(5), holdout=0.2)


@pytest.mark.fit
def test_test_alone_sets_up_the_training_data_too():
    data = FederatedDataModule(Evaluated(), fd.Pathological(6, 2))
    net = Net()
    trainer().test(net, data, verbose=False)
    assert net.seen["test"] == 80
    assert data.data.calls == ["prepare", "setup test", "setup fit", "train", "teardown test"]


def test_clients_are_kept_from_fit_to_test_and_made_anew_by_the_next_fit():
    class Growing(Evaluated):
        n = 200

        def setup(self, stage):
            super().setup(stage)
            self.train = make(self.n, 5)

    data = FederatedDataModule(Growing(), fd.IID(4))
    data.setup("fit")
    before = data.train_dataloader().indices(0)
    data.setup("test")
    assert torch.equal(data.train_dataloader().indices(0), before)
    data.data.n = 300
    data.setup("validate")
    with pytest.raises(ValueError, match=r"as many samples as when clients were formed \(200\).*found 300"):
        data.train_dataloader()
    data.setup("fit")
    assert int(data.client_sizes.sum()) == 300


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.fit
def test_real_trainer_runs_every_stage():
    data, net, run = FederatedDataModule(Moved(), fd.Dirichlet(7, 0.5)), Net(), trainer()
    run.fit(net, data)
    sanity = net.seen["val"] - 60
    assert net.seen["train"] == sum(8 * (n // 8) if n >= 8 else n for n in data.client_sizes.tolist())
    assert net.seen["val"] == 60 + sanity
    assert 0 < sanity <= 32
    run.validate(net, data, verbose=False)
    run.test(net, data, verbose=False)
    run.predict(net, data)
    assert net.seen == {"train": net.seen["train"], "val": 120 + sanity, "test": 80, "predict": 10}
    calls = data.data.calls
    assert {"before", "transfer", "after True"} <= set(calls)
    assert [c for c in calls if str(c).startswith(("setup", "teardown"))] == [
        f"{what} {stage}" for stage in ("fit", "validate", "test", "predict") for what in ("setup", "teardown")
    ]
    assert data.data.trainer is run


@pytest.mark.filterwarnings("ignore:predict returned None")
@pytest.mark.fit
def test_predictions_of_a_dataset():
    data = FederatedDataModule(make(50, 0), fd.IID(4), predict=make(10, 3), eval_batch_size=8)
    net, run = Net(), trainer()
    run.predict(net, data)
    run.fit(net, data)
    run.predict(net, data)
    assert net.seen["predict"] == 20


@pytest.mark.fit
def test_without_the_strategy_one_sentence_says_what_is_missing():
    data = FederatedDataModule(Module(), fd.IID(4))
    with pytest.raises(TypeError, match=r"Trainer\(strategy=FederatedStrategy"):
        trainer("auto").fit(Net(), data)
    assert data.data.calls[-1] == "TypeError", "on_exception is forwarded"
    with pytest.raises(TypeError, match="FederatedStrategy"):
        trainer("auto").test(Net(), FederatedDataModule(Evaluated(), fd.IID(4)), verbose=False)


@pytest.mark.fit
def test_stages_that_the_wrapped_module_lacks_are_not_pretended():
    for data in (FederatedDataModule(Module(), fd.IID(4)), FederatedDataModule(make(40, 0), fd.IID(4))):
        net = Net()
        with pytest.warns(UserWarning, match="defined a `validation_step` but have no `val_dataloader`"):
            trainer().fit(net, data)
        assert net.seen["train"] > 0
        assert net.seen["val"] == 0
        for stage in ("validate", "test"):
            with pytest.raises(Exception, match=f"`{'val' if stage == 'validate' else stage}_dataloader` must be impl"):
                getattr(trainer(), stage)(net, data, verbose=False)
    offered = LightningDataModule.from_datasets(train_dataset=make(40, 0), val_dataset=make(20, 1), batch_size=5)
    net = Net()
    trainer(num_sanity_val_steps=0).fit(net, FederatedDataModule(offered, fd.IID(4)))
    assert net.seen["val"] == 20


@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
@pytest.mark.fit
def test_a_module_that_returns_no_loader():
    class Nothing(Module):
        def val_dataloader(self):
            return []

    net = Net()
    trainer().fit(net, FederatedDataModule(Nothing(), fd.IID(4)))
    assert net.seen["val"] == 0
    assert trainer().validate(net, FederatedDataModule(Nothing(), fd.IID(4)), verbose=False) == []


@pytest.mark.filterwarnings("ignore:You have overridden `transfer_batch_to_device`")
@pytest.mark.fit
def test_transfer_hooks_are_the_modules_where_the_data_module_has_none():
    class Mover(Net):
        moved = 0

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            self.moved += 1
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    net = Mover()
    trainer().fit(net, FederatedDataModule(Module(), fd.IID(4)))
    assert net.moved > 0


@pytest.mark.fit
def test_state_hyperparameters_and_attributes_are_the_wrapped_modules(tmp_path):
    data = FederatedDataModule(Evaluated(rate=0.25), fd.IID(4))
    assert data.num_classes == 4
    assert dict(data.hparams) == {"rate": 0.25}
    assert data.prepare_data_per_node is True
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = data.no_such_thing
    run = trainer()
    run.fit(Net(), data)
    run.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["FederatedDataModule"] == {"seen": 3}
    assert Evaluated.load_from_checkpoint(tmp_path / "a.ckpt").hparams.rate == 0.25
    trainer().fit(Net(), data, ckpt_path=tmp_path / "a.ckpt")
    assert ("load", {"seen": 3}) in data.data.calls


@pytest.mark.parametrize(
    ("twin", "early"), [(copy.deepcopy, False), (lambda data: pickle.loads(pickle.dumps(data)), True)]
)
@pytest.mark.fit
def test_copies_behave_like_the_original(twin, early):
    data = FederatedDataModule(Module(), fd.Dirichlet(5, 0.5), holdout=0.2, holdout_stage="test")
    if not early:
        data.setup("fit")
        data.train_dataloader()
    other = twin(data)
    assert other.data is not data.data
    assert torch.equal(other.client_sizes, data.client_sizes)
    with pytest.warns(UserWarning, match="no `val_dataloader`"):
        trainer().fit(Net(), other)
    net = Net()
    trainer().test(net, other, verbose=False)
    assert net.seen["test"] > 0


def test_summary(caplog):
    data = FederatedDataModule(make(100, 0), [list(range(10)), [20], list(range(30, 60))], seed=2)
    assert str(data) == repr(data) == "FederatedDataModule(StageLoaders, 3 index vectors, seed=2)"
    with caplog.at_level(logging.INFO):
        data.train_dataloader()
    sentence = "3 clients with 1 to 30 training samples each (median 10, together 41 of 100)."
    assert data.summary() == sentence
    assert str(data).endswith(sentence)
    assert sentence in caplog.text
    assert "Dirichlet(num_clients=5, alpha=0.1, min_size=1, capped=False)" in repr(
        FederatedDataModule(make(9, 0), fd.Dirichlet(5, 0.1))
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_loaders_keep_their_settings():
    joined = []

    def collate(samples):
        joined.append(len(samples))
        return torch.utils.data.default_collate(samples)

    train = DataLoader(make(40, 0), batch_size=4, shuffle=True, drop_last=True, collate_fn=collate)
    module = FederatedDataModule(train, fd.IID(2), val=DataLoader(make(20, 1), batch_size=5), test=make(8, 2))
    loaders = [module.train_dataloader(), module.val_dataloader(), module.test_dataloader()]
    assert [loader.batch_size for loader in loaders] == [4, 5, 32]
    assert loaders[0].settings.drop_last
    assert sum(size for _, size in loaders[0].batches(0, seed=0)) == 20
    assert joined == [4] * 5


def test_loaders_are_refused_by_the_argument_that_gave_them():
    odd = DataLoader(make(8, 0), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"^data must use batch_size=, found the custom batch sampler list"):
        FederatedDataModule(odd, fd.IID(2)).train_dataloader()
    with pytest.raises(ValueError, match=r"^val must use batch_size="):
        FederatedDataModule(make(8, 0), fd.IID(2), val=odd).val_dataloader()


class WithLoaders(Net):
    """A module that has its loaders with it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        self.set = make(40, 0)

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=4)

    def test_dataloader(self):
        return DataLoader(make(20, 1), batch_size=4)


@pytest.mark.fit
def test_a_modules_own_loaders():
    module = WithLoaders()
    data = FederatedDataModule(module, fd.IID(2))
    run = trainer(fl.FederatedStrategy())
    run.fit(module, data)
    assert module.calls == ["prepare", "fit"]  # by Lightning, once
    assert run.strategy.last_round.client_ids == (0, 1)
    run.test(module, data)
    assert module.calls[2:] == ["prepare", "test"]
    assert run.strategy.last_evaluation.client_ids == (0, 1)


@pytest.mark.fit
def test_own_loaders_are_set_up_where_lightning_does_not():
    module = WithLoaders()
    assert FederatedDataModule(module, fd.IID(4)).num_clients == 4
    assert module.calls == ["fit"]
    other = WithLoaders()  # trained on the first one's data
    trainer(fl.FederatedStrategy()).fit(other, FederatedDataModule(module, fd.IID(4)))
    assert module.calls == ["fit", "prepare", "fit"]
    assert other.calls == ["prepare", "fit"]


def test_errors_name_the_module_that_has_the_loader():
    module = WithLoaders()
    module.train_dataloader = lambda: [1]
    data = FederatedDataModule(module, fd.IID(2))
    with pytest.raises(TypeError, match=r"WithLoaders.train_dataloader\(\) must be one torch DataLoader, found list"):
        data.train_dataloader()


class NoTrain(LightningDataModule):
    def val_dataloader(self):
        return DataLoader(make(3, 0))


IID, PAIR = fd.IID(2), [DataLoader(make(9, 0))] * 2


@pytest.mark.parametrize(
    ("data", "options", "error", "match"),
    [
        (Stream(), {}, TypeError, "data must have a length and integer indices.*Stream"),
        (make(9, 0), {"val": Stream()}, TypeError, "val must have a length and integer indices"),
        (PAIR, {}, TypeError, "data must be one DataLoader, found 2"),
        (dict(zip("ab", PAIR, strict=True)), {}, TypeError, "data must be one DataLoader, found 2"),
        ({"a": make(9, 0)}, {}, TypeError, "integer indices, found dict"),
        (3, {}, TypeError, "data must be a LightningDataModule, .*found int"),
        ((np.zeros((9, 2)), np.zeros(9)), {}, TypeError, "wrap inputs and targets"),
        ([torch.zeros(9, 2), torch.zeros(9)], {}, TypeError, "TensorDataset"),
        (NoTrain(), {}, ValueError, "must define train_dataloader, found NoTrain without it"),
        (Module(), {"val": make(3, 0), "test": make(3, 0)}, ValueError, "val, test must come from the module Module"),
    ],
)
def test_refusals(data, options, error, match):
    with pytest.raises(error, match=match):
        FederatedDataModule(data, IID, **options)


def test_a_data_module_of_the_other_lightning_is_named():
    other = type("LightningDataModule", (), {"__module__": "pytorch_lightning.core.datamodule"})
    with pytest.raises(TypeError, match="found one of pytorch_lightning: set FL_LIGHTNING_TREE"):
        FederatedDataModule(type("Mine", (other,), {})(), fd.IID(2))
