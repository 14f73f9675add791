# SPDX-License-Identifier: Apache-2.0
"""Clients that train in one pass end up where they end up alone."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from stacked_modules import MODULES, Blob, records
from stacked_traps import TRAPS
from support import CLASSES, FEATURES, Blobs, blobs, federated_blobs, fresh, quiet_trainer, weights
from torch import nn
from torch.utils.data import Dataset

import fl_lightning as fl
from fl_lightning.executors import Sequential, Vectorized, _chunk, _levels

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, maximize=False),
    "Adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
}


class PlainChild(torch.optim.SGD):
    """A subclass may do anything."""


UNKNOWN = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "PlainChild": lambda p: PlainChild(p, lr=0.1),
}
if hasattr(torch.optim, "Muon"):
    UNKNOWN["Muon"] = lambda p: torch.optim.Muon(p, lr=0.01)


class Losses(L.Callback):
    """The mean loss of every client in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.seen.append((batch.client_id, float(outputs.get("loss", float("nan")))))


def run(executor, make=Blob, data=None, epochs=2, trainer=None, algorithm=None, **options):
    """Fits; returns module, strategy, trainer and the clients' losses."""
    module = fresh(make)
    strategy = fl.FederatedStrategy((algorithm or fl.algorithms.FedAvg)(), executor=executor, seed=3, **options)
    losses = Losses()
    given = dict(trainer or {})
    fit = quiet_trainer(strategy, epochs, **given, callbacks=[losses, *given.pop("more", [])])
    fit.fit(module, (data or federated_blobs)())
    return module, strategy, fit, losses.seen


def same(make=Blob, executor=None, tolerance=2e-6, **options):
    """Both ways give the same; returns the strategy of the vectorized fit."""
    one, s1, t1, l1 = run(None, make, **options)
    two, s2, t2, l2 = run(executor or Vectorized(), make, **options)
    assert torch.allclose(weights(one), weights(two), rtol=1e-4, atol=tolerance)
    assert [client for client, _ in l1] == [client for client, _ in l2]
    assert torch.allclose(torch.tensor([x for _, x in l1]), torch.tensor([x for _, x in l2]), rtol=1e-4, equal_nan=True)
    assert t1.global_step == t2.global_step
    assert s1.last_round.client_ids == s2.last_round.client_ids
    assert s1.last_round.dropped == s2.last_round.dropped
    assert torch.allclose(s1.last_round.update_norms, s2.last_round.update_norms, rtol=1e-4)
    return s2


def even():
    """Clients of the same size, with a smaller last batch."""
    return fl.FederatedDataModule(blobs(140), list(torch.arange(140).split(28)), batch_size=10)


# ---- where it is exact


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    strategy = same(MODULES[name], data=MODULES[name].data)
    assert strategy.detour is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    strategy = same(partial(Blob, optimizer=OPTIMIZERS[name]), tolerance=2e-5)
    assert strategy.detour is None


@pytest.mark.parametrize(("alpha", "size"), [(0.1, None), (0.1, 4), (100.0, None), (100.0, 1), (100.0, 5)])
def test_unequal_clients_in_chunks(alpha, size):
    data = partial(federated_blobs, 9, alpha, batch_size=7)
    strategy = same(executor=Vectorized(clients_at_once=size), data=data, local_epochs=2)
    assert strategy.detour is None


@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": 5},
        {"trainer": {"limit_train_batches": 2}, "local_epochs": 3},
        {"trainer": {"limit_train_batches": 0.5}},
        {"clients_per_round": 3, "epochs": 4},
        {"algorithm": partial(fl.algorithms.FedProx, mu=0.5)},
        {"algorithm": fl.algorithms.FedLF},
        {"algorithm": fl.algorithms.QFedAvg},
        {"attack": fl.attacks.RandomUpdates(clients=(1, 4))},
        {"server_optimizer": partial(torch.optim.SGD, lr=1.0, momentum=0.5)},
        {"sampler": fl.data.AvailabilitySampler(0.9, drop_out=0.4), "epochs": 4},
    ],
    ids=str,
)
def test_options(options):
    assert same(partial(Blob, optimizer=OPTIMIZERS["momentum"]), **options).detour is None


@pytest.mark.parametrize("buffers", ["mean", "largest", "global"])
def test_buffers(buffers):
    assert same(MODULES["norm"], buffers=buffers).detour is None


def test_learning_rate_scheduler():
    class Scheduled(Blob):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    assert same(Scheduled, epochs=4).detour is None


def test_rate_of_every_batch():
    class Warm(Blob):
        def training_step(self, batch, batch_idx):
            for group in self.optimizers().param_groups:
                group["lr"] = 0.3 / (1 + batch_idx)
            return super().training_step(batch, batch_idx)

    assert same(Warm, data=even, local_epochs=2).detour is None
    detoured(Warm, "not all clients are at the same batch", local_epochs=2)


def test_logs(tmp_path):
    rows = [records(executor) for executor in (None, Vectorized())]
    assert len(rows[0]) == len(rows[1]) > 0
    for one, two in zip(*rows, strict=True):
        assert one[0] == two[0]
        assert one[1].keys() == two[1].keys()
        assert all(two[1][name] == pytest.approx(value, rel=1e-4) for name, value in one[1].items())


class Augmented(Dataset):
    """Samples one by one, each with a random shift, some with text."""

    def __init__(self, text: bool = False, broken: int | None = None) -> None:
        self.source, self.text, self.broken = blobs(200), text, broken

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("unreadable")
        x, y = self.source[index]
        sample = {"x": x + 0.1 * torch.randn(FEATURES), "y": y}
        return {**sample, "name": f"s{index}"} if self.text else sample


class Named(Blob):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


def samples(**options):
    parts = list(torch.arange(200).split([30, 30, 50, 45, 45]))
    return fl.FederatedDataModule(Augmented(**options), parts, batch_size=10)


@pytest.mark.parametrize("text", [False, True])
def test_data_that_is_not_in_memory(text):
    """Random augmentation belongs to the data: every client sees the same samples."""
    assert same(Named, data=partial(samples, text=text)).detour is None


def test_client_whose_data_cannot_be_read():
    strategy = same(Named, data=partial(samples, broken=70), on_client_error="drop")
    assert strategy.detour is None
    assert "unreadable" in strategy.last_round.dropped[2]
    with pytest.raises(fl.ClientError, match=r"client 2 .*unreadable"):
        run(Vectorized(), Named, partial(samples, broken=70))


def test_client_with_nan():
    def poisoned():
        data = blobs(120)
        data.tensors[0][25] = float("nan")
        return fl.FederatedDataModule(data, list(torch.arange(120).split(20)), batch_size=5)

    strategy = same(data=poisoned, on_client_error="drop")
    assert strategy.detour is None
    assert list(strategy.last_round.dropped) == [1]


def test_resume(tmp_path):
    make = partial(Blob, optimizer=OPTIMIZERS["Adam"])
    whole, *_ = run(Vectorized(), make, epochs=4)
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    half = run(Vectorized(), make, epochs=2, trainer=options)[2]
    half.save_checkpoint(tmp_path / "half.ckpt")
    module = fresh(make, seed=5)
    strategy = fl.FederatedStrategy(executor=Vectorized(), seed=3)
    quiet_trainer(strategy, 4).fit(module, federated_blobs(), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(weights(whole), weights(module))


def test_without_the_functions_of_functorch(monkeypatch):
    monkeypatch.setattr(_levels, "_by_hand", lambda: None)
    assert same(MODULES["gap"], data=MODULES["gap"].data).detour is None
    assert same(MODULES["norm"]).detour is None


def test_less_memory(monkeypatch):
    train, sizes = _chunk.Chunk.train, []

    def narrow(chunk):
        sizes.append(len(chunk._clients))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError
        train(chunk)

    monkeypatch.setattr(_chunk.Chunk, "train", narrow)
    assert same().detour is None
    assert sizes[:5] == [6, 3, 1, 1, 1]


def test_settings():
    with pytest.raises(ValueError, match="clients_at_once must be positive, found 0"):
        Vectorized(clients_at_once=0)
    assert fl.FederatedStrategy(executor=Sequential()).detour is None


# ---- where it is not


def detoured(make, reason, exact=True, **options):
    """The fit takes the sequential path for this reason, with the same bits and the same traces."""
    one, *_ = run(None, make, **options)
    two, strategy, *_ = run(Vectorized(), make, **options)
    assert strategy.detour is not None
    assert reason in strategy.detour
    assert torch.allclose(weights(one), weights(two), *((0, 0) if exact else (1e-4, 1e-6)))
    return one, two


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_optimizers(name):
    detoured(partial(Blob, optimizer=UNKNOWN[name], bias=False), reason=name if name != "LBFGS" else "hooks or options")


def test_wrong_on_stacked_clients(monkeypatch):
    """The list of optimizers matters: with Adafactor on it, the weights would be others."""
    from fl_lightning.executors import _elementwise

    monkeypatch.setattr(_elementwise, "ELEMENTWISE", (torch.optim.Adafactor,))
    make, data = partial(Blob, optimizer=UNKNOWN["Adafactor"]), even
    one, *_ = run(None, make, data)
    two, strategy, *_ = run(Vectorized(), make, data)
    assert strategy.detour is None
    assert not torch.allclose(weights(one), weights(two), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"client": fl.algorithms.SCAFFOLD()}, "ControlVariates takes part"),
        ({"algorithm": fl.algorithms.FedDyn}, "takes part in local training"),
        ({"client_optimizer_state": "keep"}, "client_optimizer_state='keep'"),
        ({"full_gradients": True}, "full gradients"),
        ({"trainer": {"gradient_clip_val": 0.5}}, "hooks or options"),
        ({"trainer": {"precision": "bf16-mixed"}}, "hooks or options"),
    ],
    ids=str,
)
def test_options_that_go_one_by_one(options, reason):
    detoured(Blob, reason, **options)


@pytest.mark.parametrize("name", TRAPS)
def test_modules_that_go_one_by_one(name):
    make, reason = TRAPS[name]
    one, two = detoured(make, reason, name != "late", epochs=3)
    assert len(one.seen) == len(two.seen)
    if name == "metric":
        assert one.metric._update_count == two.metric._update_count


def test_clients_one_at_a_time_are_compared_as_well():
    strategy = run(Vectorized(clients_at_once=1), TRAPS["cached"][0])[1]
    assert strategy.detour == "a pass over several clients gave other gradients than the clients alone"


def test_reason_is_logged_once(caplog):
    with caplog.at_level("INFO"):
        run(Vectorized(), TRAPS["item"][0], epochs=3)
    assert sum("one after the other" in record.message for record in caplog.records) == 1


def test_images_of_unequal_sizes():
    """Batches that cannot be stacked are taken one by one within the same pass."""

    class Sized(Dataset):
        def __len__(self):
            return 120

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            return torch.randn(1, 8 + index // 40, 8, generator=generator), index % CLASSES

    class Pooled(Blob):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))

    data = partial(fl.FederatedDataModule, Sized(), list(torch.arange(120).split(20)), batch_size=10)
    assert same(Pooled, data=data).detour is None


def test_data_module_with_transfer_hook():
    class Scaled(Blobs):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 0.5, batch[1]]

    data = lambda: fl.FederatedDataModule(Scaled(), fl.data.Dirichlet(6, 1.0), seed=0)  # noqa: E731
    assert same(data=data).detour is None


def test_benchmark():
    """A tiny case: both executors do the same work, and the gain is a ratio of times."""
    from benchmarks.vectorized import Case, measure

    case = Case("tiny", partial(nn.Linear, 6, 10), 6, 4, 20, 5, logs=True, unequal=True)
    result = measure(case, pairs=2, rounds=1, where="cpu", at_once=None)
    assert result.difference < 1e-6 < result.change
    assert result.gain.count == 2
    assert result.gain.value > 0
