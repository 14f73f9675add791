# SPDX-License-Identifier: Apache-2.0
"""BatchNorm statistics and other buffers, by hand and in fits."""

import pytest
import torch
from support import (
    FEATURES,
    Blobs,
    Classifier,
    blobs,
    federated_blobs,
    fresh,
    quiet_trainer,
    training_only,
    weights,
)
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat
from torch.utils.data import DataLoader, Subset
from torchmetrics import Metric

import fl_lightning as fl
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data import CohortSampler, Selection

SIZES = (3, 5, 5)


class Tally(Metric):
    """A metric with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values):
        self.calls += 1
        self.total += len(values)

    def compute(self):
        return self.total


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("table", torch.tensor([0.1, 1 / 3, -float("inf"), float("nan")]))
        self.register_buffer("exact", torch.linspace(0.1, 0.9, 50, dtype=torch.float64))
        self.register_buffer("low", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(4))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)
        self.inner = nn.BatchNorm1d(2)
        self.inner.alias = self.inner.running_mean  # plain attribute, not counted twice
        self.tally = Tally()


def visited(bank, module):
    """What three clients leave behind: they shift the buffers by 1, 2 and 3."""
    reports = []
    for k, size in enumerate(SIZES, 1):
        module.mean += k
        module.low += k
        module.count += k
        module.flag.copy_(torch.tensor([k == 2, True]))
        module.inner.running_var = module.inner.running_var * (1 + k)  # a new tensor in the buffer's place
        module.cache = torch.ones(k)
        reports.append(bank.report(size))
        bank.restore()
    return reports


def state(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_clients_start_from_the_global_buffers():
    module = Buffered()
    bank, before, objects = BufferBank(module, "mean"), state(module), dict(module.named_buffers())
    reports = visited(bank, module)
    assert len(reports) == 3
    for name, value in state(module).items():
        assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7)), name
    assert all(module.get_buffer(name) is tensor for name, tensor in objects.items())


def test_mean_of_float_buffers_by_samples_and_integers_of_the_largest():
    module = Buffered()
    bank, before = BufferBank(module, "mean"), state(module)
    bank.commit(visited(bank, module))
    shift = (3 * 1 + 5 * 2 + 5 * 3) / 13
    assert torch.allclose(module.mean, torch.tensor([1.0, 2.0, 3.0]) + shift)
    assert torch.allclose(module.inner.running_var, torch.ones(2) + shift)
    assert torch.equal(module.low, torch.full((2,), shift, dtype=torch.float16))
    for constant in ("table", "exact"):
        assert torch.equal(module.get_buffer(constant).nan_to_num(7), before[constant].nan_to_num(7)), "bit for bit"
    assert module.count.item() == 4 + 2, "of the first among the largest"
    assert module.count.dtype == torch.int64
    assert module.flag.tolist() == [True, True]
    assert torch.equal(module.cache, before["cache"]), "a cache is nobody's statistic"
    assert torch.equal(module.inner.running_mean, before["inner.running_mean"])


def test_largest_and_global():
    module = Buffered()
    bank = BufferBank(module, "largest")
    bank.commit(visited(bank, module))
    assert module.mean.tolist() == [3.0, 4.0, 5.0]
    assert module.count.item() == 6
    module = Buffered()
    bank, before = BufferBank(module, "global"), state(module)
    bank.commit(visited(bank, module))
    for name, value in state(module).items():
        assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7)), name


def test_a_round_without_reports_changes_nothing():
    module = Buffered()
    bank = BufferBank(module, "mean")
    module.mean += 5
    bank.commit([])
    assert module.mean.tolist() == [1.0, 2.0, 3.0]


def test_finite_looks_at_what_changed():
    module = Buffered()
    bank = BufferBank(module, "mean")
    fine = bank.report(1)
    module.mean[1] = float("nan")
    broken = bank.report(1)
    bank.restore()
    module.table[0] = float("inf")
    worse = bank.report(1)
    assert bank.finite([fine, broken, worse, fine]).tolist() == [True, False, False, True]


def test_metrics_are_left_alone():
    module = Buffered()
    bank = BufferBank(module, "mean")
    assert bank.names == (
        "mean", "table", "exact", "low", "count", "flag",
        "inner.running_mean", "inner.running_var", "inner.num_batches_tracked",
    )  # fmt: skip
    module.tally.update([1, 2])
    bank.commit(visited(bank, module))
    assert module.tally.calls == 1
    assert module.tally.total == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.register_buffer("late", torch.zeros(2)), "late"),
        (lambda m: setattr(m, "mean", torch.zeros(4)), "mean"),
        (lambda m: setattr(m, "mean", torch.zeros(3, dtype=torch.float64)), "mean"),
        (lambda m: delattr(m, "count"), "count"),
    ],
)
def test_buffers_that_change_their_shape_are_refused(change, name):
    module = Buffered()
    bank = BufferBank(module, "global")
    change(module)
    with pytest.raises(
        ValueError, match=rf"must keep name, shape and dtype .* found changes in \['{name}'\]: register"
    ):
        bank.report(1)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_appear_or_grow_in_training_may_do_so_where_they_are_not_persistent(persistent):
    class Growing(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("grown", torch.zeros(0), persistent)

        def training_step(self, batch, batch_idx):
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(2), persistent)
            self.grown = torch.cat([self.grown, torch.ones(1)])
            self.longest = len(self.grown)
            return super().training_step(batch, batch_idx)

    modules = [fresh(Growing), fresh()]
    if persistent:
        with pytest.raises(fl.ClientError, match=r"\['grown', 'late'\]: .* or with persistent=False, where each visit"):
            training_only(fl.FederatedStrategy(), 2).fit(modules[0], federated_blobs())
        return
    with pytest.warns(UserWarning, match=r"put back after every client: late \(make it in __init__\)"):
        training_only(fl.FederatedStrategy(), 2).fit(modules[0], federated_blobs())
    training_only(fl.FederatedStrategy(), 2).fit(modules[1], federated_blobs())
    assert [torch.equal(*pair) for pair in zip(*(m.parameters() for m in modules), strict=True)] == [True] * 4
    assert len(modules[0].grown) == 0 < modules[0].longest < 12


def resized(bank, module, sizes):
    for size in sizes:
        module.mean.resize_(size).fill_(size)
        yield bank.report(size)
        bank.restore()


def test_a_buffer_that_all_clients_resize_in_place_has_their_shape():
    module = Buffered()
    bank, before = BufferBank(module, "mean"), module.mean
    bank.commit(list(resized(bank, module, (1, 1))))
    assert module.mean is before
    assert module.mean.tolist() == [1.0]
    bank.remember()
    with pytest.raises(ValueError, match=r"'mean' must have one shape .* found \[\(1,\), \(2,\)\]: .*persistent=False"):
        bank.commit(list(resized(bank, module, (1, 2))))


# ---- in fits


class Quantized(Classifier):
    """Trained with torch.ao's default configuration, whose observers resize their buffers."""

    def __init__(self):
        super().__init__()
        self.net.qconfig = get_default_qat_qconfig("fbgemm")
        prepare_qat(self.net.train(), inplace=True)


class Ordered(Blobs):
    def train_dataloader(self):
        return DataLoader(blobs(40), batch_size=10)


@pytest.mark.filterwarnings("ignore")
def test_quantization_aware_training_with_one_client_is_plain_lightning():
    ends = []
    for strategy, data in (
        ("auto", Ordered()),
        (fl.FederatedStrategy(), fl.FederatedDataModule(Ordered(), [torch.arange(40)])),
    ):
        module = fresh(Quantized)
        training_only(strategy, 2).fit(module, data)
        ends.append(module.state_dict())
    assert ends[0]["net.0.weight_fake_quant.scale"].shape == (8,)
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-6), name


def seen_after(module, data, client, seed=0, drop_last_single=True):
    """BatchNorm statistics of one client by plain training from the module's state."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.train()
    for (x, y), _ in data.batches(
        client, seed=derive_seed(seed, "shuffle", 0, client, 0), merge_single=drop_last_single
    ):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return module.net[1]


@pytest.mark.parametrize("policy", ["mean", "global", "largest"])
def test_batch_norm_under_each_policy_equals_a_plain_loop(policy):
    module, strategy = fresh(norm=True), fl.FederatedStrategy(buffers=policy)
    data = federated_blobs()
    training_only(strategy, 1).fit(module, data)
    loaders = data.train_dataloader()
    clients = [seen_after(fresh(norm=True), loaders, client) for client in range(len(loaders))]
    sizes = loaders.sizes.double()
    if policy == "mean":
        expected = sum(float(s) * c.running_var.double() for s, c in zip(sizes, clients, strict=True)) / float(
            sizes.sum()
        )
    elif policy == "largest":
        expected = clients[int(sizes.argmax())].running_var.double()
    else:
        expected = torch.ones(8, dtype=torch.float64)
    assert torch.allclose(module.net[1].running_var.double(), expected, atol=1e-6, rtol=0)
    batches = 0 if policy == "global" else int(clients[int(sizes.argmax())].num_batches_tracked)
    assert module.net[1].num_batches_tracked.item() == batches
    assert module.net[1].num_batches_tracked.dtype == torch.int64


class Watching(Classifier):
    """Notes the buffers that each client's first batch meets, in its class, and fails where told."""

    def __init__(self, fail=()):
        super().__init__(norm=True)
        self.fail, Watching.started = fail, []
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        if batch_idx == 0 and self.training:
            self.started.append((self.net[1].running_mean.clone(), self.steps.item()))
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.training and len(self.started) in self.fail:
            raise RuntimeError("this client is broken")
        return loss


@pytest.mark.filterwarnings("ignore:client .* is left out of round")
@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.FedLF])
def test_every_client_starts_from_the_same_buffers(algorithm):
    module = fresh(Watching, fail=(2, 5))
    strategy = fl.FederatedStrategy(algorithm(), clients_per_round=4, on_client_error="drop")
    training_only(strategy, 2).fit(module, federated_blobs())
    first, second = module.started[:4], module.started[4:]
    assert len(second) == 4
    for group in (first, second):
        for mean, steps in group:
            assert torch.equal(mean, group[0][0])
            assert steps == group[0][1], "also after a client broke, and after the pass that asks for its loss"
    assert not torch.equal(first[0][0], second[0][0])
    assert first[0][1] == 0


class Selecting(Classifier):
    """Keeps its best validation loss in a buffer: that changes between rounds, on the server."""

    def __init__(self):
        super().__init__()
        self.register_buffer("validations", torch.tensor(0.0))
        self.register_buffer("bound_anew", torch.tensor(0.0))
        self.seen = []

    def on_validation_epoch_end(self):
        self.validations += 1
        self.bound_anew = self.bound_anew + 1

    def training_step(self, batch, batch_idx):
        self.seen.append(self.validations.item())
        return super().training_step(batch, batch_idx)


def test_what_validation_writes_into_a_buffer_stays():
    module = fresh(Selecting)
    quiet_trainer(fl.FederatedStrategy(clients_per_round=2), 3).fit(module, federated_blobs())
    assert module.validations.item() == 3
    assert module.bound_anew.item() == 3
    assert sorted(set(module.seen)) == [0, 1, 2]


def batch_norm_parts(*sizes):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def test_one_trailing_sample_joins_the_batch_before_it():
    data = fl.FederatedDataModule(blobs(30), batch_norm_parts(11, 19), batch_size=10)
    module = fresh(norm=True)
    training_only(fl.FederatedStrategy(buffers="largest"), 1).fit(module, data)
    assert module.net[1].num_batches_tracked.item() == 2
    small = fl.FederatedDataModule(Subset(blobs(30), range(11)), [list(range(11))], batch_size=10)
    module = fresh(norm=True)
    training_only(fl.FederatedStrategy(), 1).fit(module, small)
    assert module.net[1].num_batches_tracked.item() == 1


class First(CohortSampler):
    """Always the first clients."""

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return Selection(tuple(range(cohort_size)))


def test_a_client_of_one_sample_cannot_train_batch_norm():
    data = fl.FederatedDataModule(blobs(30), batch_norm_parts(12, 1, 17), batch_size=10)
    with pytest.raises(fl.ClientError, match="client 1 in round 0: ValueError: Expected more than 1 value per channel"):
        training_only(fl.FederatedStrategy(sampler=First()), 1).fit(fresh(norm=True), data)
    module, strategy = fresh(norm=True), fl.FederatedStrategy(on_client_error="drop")
    with pytest.warns(UserWarning, match="client 1 is left out of round 0"):
        training_only(strategy, 1).fit(module, data)
    assert strategy.last_round.client_ids == (0, 2)
    assert module.net[1].num_batches_tracked.item() == 2
    assert torch.isfinite(weights(module)).all()
    plain = fl.FederatedDataModule(blobs(30), batch_norm_parts(12, 1, 17), batch_size=10)
    strategy = fl.FederatedStrategy()
    training_only(strategy, 1).fit(fresh(), plain)
    assert strategy.last_round.client_ids == (0, 1, 2), "without BatchNorm one sample is enough"


def test_buffers_that_are_not_finite_drop_their_client():
    class Exploding(Classifier):
        def __init__(self):
            super().__init__()
            self.register_buffer("peak", torch.zeros(FEATURES))

        def training_step(self, batch, batch_idx):
            self.peak = torch.maximum(self.peak, batch[0].abs().amax(0))
            if (batch[0] == 77.0).any():
                self.peak = self.peak * float("inf")
            return super().training_step((batch[0].clamp(max=5), batch[1]), batch_idx)

    dataset = blobs(30)
    dataset.tensors[0][3, 2] = 77.0
    data = fl.FederatedDataModule(dataset, batch_norm_parts(10, 10, 10), batch_size=10)
    module, strategy = fresh(Exploding), fl.FederatedStrategy(on_client_error="drop")
    with pytest.warns(UserWarning, match="its buffers are not finite"):
        training_only(strategy, 1).fit(module, data)
    assert strategy.last_round.dropped == {0: "its buffers are not finite"}
    assert module.peak.isfinite().all()
    with pytest.raises(fl.ClientError, match="client 0 in round 0: its buffers are not finite"):
        training_only(fl.FederatedStrategy(), 1).fit(fresh(Exploding), data)
    module = fresh(Exploding)
    training_only(fl.FederatedStrategy(buffers="global"), 1).fit(module, data)
    assert not module.peak.any()
