# SPDX-License-Identifier: Apache-2.0
"""EMA teachers and memory banks: frozen parameters and non-persistent buffers that local training changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from by_hand import Federation
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support import FEATURES, Classifier, blobs, federated_blobs, fresh, on_path, train, training_only, weights
from torch import nn
from torch.utils.data import DataLoader

import fl_lightning as fl
from fl_lightning.clients.buffers import BufferBank


class Byol(Classifier):
    """BYOL in short: a frozen teacher follows the student after every step, as in lightly's examples."""

    def __init__(self, keeps=0.9, rebinds=False):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.rate, self.rebinds = keeps, rebinds

    def training_step(self, batch, batch_idx):
        x, _ = batch
        noise = torch.linspace(-0.1, 0.1, x.numel()).view_as(x)
        with torch.no_grad():
            target = self.teacher(x + noise)
        return 1 - F.cosine_similarity(self.head(self.student(x - noise)), target).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for student, teacher in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if self.rebinds:
                teacher.data = teacher.data * self.rate + student.data * (1 - self.rate)
            else:
                teacher.data.mul_(self.rate).add_(student.data, alpha=1 - self.rate)


class Moco(Classifier):
    """A memory bank in a non-persistent buffer, with its place, as in lightly."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(40, 4), persistent=False)
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64), persistent=False)

    def training_step(self, batch, batch_idx):
        loss, out = super().training_step(batch, batch_idx), self(batch[0])
        loss = loss + 0.01 * (out @ self.bank.clone().T).exp().mean().log()
        at = int(self.place) % 40
        rows = out.detach()[: 40 - at]
        self.bank[at : at + len(rows)] = rows
        self.place += len(rows)
        return loss


def in_order(samples=40):
    return DataLoader(blobs(samples), 10)


@pytest.mark.parametrize(("kind", "lean"), [(Byol, True), (Moco, False)])
def test_one_client_that_holds_all_data_is_plain_lightning(kind, lean):
    def trained(strategy, data):
        module = fresh(kind)
        training_only(strategy, 4, limit_val_batches=0, **on_path(lean)).fit(module, data)
        return module

    plain = trained("auto", in_order())
    module = trained(fl.FederatedStrategy(), fl.FederatedDataModule(in_order(), fl.data.IID(1)))
    torch.testing.assert_close(weights(module), weights(plain), rtol=0, atol=1e-6)
    for (name, found), (_, expected) in zip(module.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6, msg=name)
    assert not torch.allclose(weights(module), weights(fresh(kind)), atol=1e-3)


def by_hand(module, data, rounds):
    """Clients start from the server's teacher, and teachers are averaged by samples."""
    loaders = data.train_dataloader()
    shares = loaders.sizes.double() / loaders.sizes.sum()
    for _ in range(rounds):
        states = []
        for client in range(len(loaders)):
            own = copy.deepcopy(module).train()
            optimizer = own.configure_optimizers()
            for batch, _ in loaders.batches(client, seed=None):
                loss = own.training_step(batch, 0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                own.on_train_batch_end(None, batch, 0)
            states.append(own.state_dict())
        new = {name: sum(share * state[name].double() for share, state in zip(shares, states, strict=True))
               for name, value in module.state_dict().items() if value.is_floating_point()}  # fmt: skip
        module.load_state_dict({name: value.float() for name, value in new.items()}, strict=False)
    return module


@pytest.mark.parametrize(("executor", "rebinds"), [(None, True), (fl.executors.Parallel(2), False)])
def test_teachers_are_averaged_by_samples(executor, rebinds):
    def data():
        return fl.FederatedDataModule(in_order(90), [range(40), range(40, 60), range(60, 90)])

    module = fresh(Byol, rebinds=rebinds)
    strategy = fl.FederatedStrategy(executor=executor)
    training_only(strategy, 3).fit(module, data())
    assert strategy.executor_fallback is None
    expected = by_hand(fresh(Byol), data(), 3)
    for name, value in expected.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=1e-5, msg=name)
    assert not torch.equal(module.teacher[0].weight, fresh(Byol).teacher[0].weight)


@pytest.mark.parametrize(("kind", "policy"), [(Byol, "mean"), (Moco, "mean"), (Moco, "largest"), (Moco, "global")])
def test_clients_on_their_own_give_the_bits_of_a_fit(kind, policy):
    module, strategy = fresh(kind), fl.FederatedStrategy(buffers=policy)
    training_only(strategy, 3).fit(module, federated_blobs(4))
    apart = Federation(strategy, lambda seed: fresh(kind, seed)).run(3)
    assert torch.equal(weights(apart), weights(module))
    for (name, value), (_, other) in zip(module.named_buffers(), apart.named_buffers(), strict=True):
        assert torch.equal(value, other), name


def test_a_bank_and_its_place_are_those_of_the_client_with_most_samples():
    left = {}

    class Noted(Moco):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            left[int(self.place)] = self.bank.clone()

    module = fresh(Noted)
    data = fl.FederatedDataModule(blobs(60), torch.arange(60).split([23, 37]), batch_size=10)
    train(module, 1, data=data, clients_per_round=2, buffers="largest")
    assert int(module.place) == 37
    assert torch.equal(module.bank, left[37])
    assert not torch.equal(left[37], left[23])


def test_the_policy_global_keeps_the_servers_teacher():
    module = fresh(Byol)
    training_only(fl.FederatedStrategy(buffers="global"), 2).fit(module, federated_blobs())
    assert torch.equal(module.teacher[0].weight, fresh(Byol).teacher[0].weight)


@pytest.mark.parametrize(("kind", "executor"), [(Byol, None), (Moco, None), (Moco, fl.executors.Parallel(2))])
def test_a_fit_with_a_teacher_or_a_bank_resumes_from_any_place(kind, executor, tmp_path):
    class Saving(kind):
        def training_step(self, batch, batch_idx):
            if (
                path is None and executor is None and batch_idx == 1
            ):  # of each client, after a step that has moved the bank
                self.trainer.save_checkpoint(tmp_path / f"step-{self.current_epoch}.ckpt")
            return super().training_step(batch, batch_idx)

    def run():
        module = fresh(Saving)
        keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        train(module, 4, ckpt_path=path, executor=executor, callbacks=[keep], enable_checkpointing=True)
        return torch.cat([weights(module), *(buffer.double().flatten() for buffer in module.buffers())])

    path = None
    expected = run()
    for name in ("epoch=1", *(() if executor else ("step-0", "step-2"))):
        path = tmp_path / f"{name}.ckpt"
        assert torch.equal(run(), expected), name


def test_a_teacher_that_a_callback_moves_is_refused_with_a_way_out():
    class Follows(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            pl_module.teacher[0].weight.data.mul_(0.9)

    trainer = training_only(fl.FederatedStrategy(), 1, callbacks=[Follows()])
    with pytest.raises(ValueError, match=r"found changes in 'teacher\.0\.weight' after a client: a callback's"):
        trainer.fit(fresh(Byol, keeps=1.0), federated_blobs())


# ---- the bank by hand


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.still = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("grows", torch.zeros(1), persistent=False)
        self.register_buffer("place", torch.tensor(0), persistent=False)


def reports(module, bank):
    found = []
    for k, size in ((1, 3), (2, 5)):
        module.cache += k
        module.place += k
        module.grows = torch.zeros(k + 1)
        found.append(bank.report(size))
        bank.restore()
    return found


@pytest.mark.parametrize(("policy", "cache", "place"), [("mean", (3 + 10) / 8, 2), ("largest", 2, 2), ("global", 0, 0)])
def test_non_persistent_buffers_follow_the_policy(policy, cache, place):
    module = Caches()
    bank, still, grows = BufferBank(module, policy), module.still.weight.clone(), module.grows
    found = reports(module, bank)
    assert module.cache.tolist() == [0.0, 0.0]
    bank.commit(found)
    assert module.cache.tolist() == [cache, cache]
    assert int(module.place) == place
    assert module.grows is grows, "another shape: a cache"
    assert torch.equal(module.still.weight, still)
    assert all("still.weight" not in report.values for report in found), "what does not change is not sent"


def test_a_client_that_leaves_a_tensor_alone_counts_with_the_global_value():
    module = Caches()
    bank = BufferBank(module, "mean")
    module.still.weight.data.add_(1)
    moved = bank.report(1)
    bank.restore()
    before = module.still.weight.clone()
    bank.commit([moved, bank.report(3)])
    torch.testing.assert_close(module.still.weight, before + 0.25)
