# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import pickle
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fl_lightning.data import IID, ClientIndices, ClientLoaders, LoaderSettings
from fl_lightning.data.division import loader_settings

X, Y = torch.arange(40.0).reshape(20, 2), torch.arange(20) % 3
PARTS = [[0, 3, 5, 7, 9, 11, 13], [1], [], [2, 4, 6, 8, 10, 12]]


class Plain(Dataset):
    """The same samples as the TensorDataset, one by one."""

    def __init__(self, x=X, y=Y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Noisy(Plain):
    def __getitem__(self, index):
        return self.x[index] + torch.rand(2), self.y[index]


class Bulk(Plain):
    def __getitem__(self, index):
        raise AssertionError("__getitems__ must be used")

    def __getitems__(self, indices):
        return [(self.x[i], self.y[i]) for i in indices]


def loaders(dataset=None, stage="train", parts=None, **kwargs):
    settings_ = LoaderSettings(**{"batch_size": 3, "shuffle": stage == "train", **kwargs})
    return ClientLoaders(dataset or TensorDataset(X, Y), PARTS if parts is None else parts, stage, settings_)


def rows(batches):
    """Sample numbers per batch."""
    return [(batch[0][:, 0] / 2).long().tolist() for batch, _ in batches]


def same(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for (a, n), (b, m) in zip(left, right, strict=True):
        assert type(a) is type(b) is list
        assert n == m == len(a[0])
        for u, v in zip(a, b, strict=True):
            assert torch.equal(u, v)
            assert u.dtype == v.dtype
            assert u.is_contiguous()


def test_one_pass_in_order():
    val = loaders(stage="val")
    assert len(val) == 4
    assert val.sizes.tolist() == [7, 1, 0, 6]
    assert val.sizes.dtype == torch.int64
    assert val.batch_size == 3
    assert val.stage == "val"
    assert [rows(val.batches(i, seed=5)) for i in range(4)] == [
        [[0, 3, 5], [7, 9, 11], [13]],
        [[1]],
        [],
        [[2, 4, 6], [8, 10, 12]],
    ]
    assert [[n for _, n in val.batches(i, seed=None)] for i in range(4)] == [[3, 3, 1], [1], [], [3, 3]]
    assert val.indices(3).tolist() == [2, 4, 6, 8, 10, 12]


def test_shuffling_depends_on_the_seed_alone():
    train = loaders()
    first = rows(train.batches(0, seed=1))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert rows(train.batches(0, seed=1)) == first
    assert torch.equal(torch.get_rng_state(), state), "the global generator must not move"
    assert sorted(number for batch in first for number in batch) == PARTS[0]
    assert any(rows(train.batches(0, seed=s)) != first for s in range(2, 5))
    assert rows(train.batches(0, seed=None)) == rows(loaders(stage="val").batches(0, seed=1))
    assert rows(loaders(shuffle=False).batches(0, seed=1)) == rows(train.batches(0, seed=None))


@given(
    st.integers(0, 30),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 2**62),
)
@settings(max_examples=60, deadline=None)
def test_both_paths_agree_and_follow_the_rules(n, step, drop, merge, override, seed):
    x, y = torch.arange(2.0 * n).reshape(n, 2), torch.arange(n)
    made = [
        ClientLoaders(data, [range(n)], "train", LoaderSettings(batch_size=step, shuffle=True, drop_last=drop))
        for data in (TensorDataset(x, y), Plain(x, y))
    ]
    fast, slow = (list(m.batches(0, seed=seed, batch_size=override, merge_single=merge)) for m in made)
    same(fast, slow)
    sizes = [size for _, size in fast]
    assert len(sizes) == made[0].num_batches(0, batch_size=override, merge_single=merge)
    size = override or step
    dropped = n % size if drop and override is None and n > size else 0
    assert sum(sizes) == n - dropped
    assert all(s == size for s in sizes[:-1])
    if merge and len(sizes) > 1 and size > 1:
        assert sizes[-1] > 1
    if sizes:
        assert sizes[-1] <= size + (1 if merge else 0)


def test_tensor_data_never_meets_a_dataloader(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("no DataLoader for tensors")

    nested = Subset(Subset(TensorDataset(X, Y), list(range(19, -1, -1))), range(1, 20))
    expected = list(loaders(Subset(Plain(), range(18, -1, -1)), parts=PARTS).batches(0, seed=4))
    monkeypatch.setattr("fl_lightning.data.client_loaders.DataLoader", fail)
    same(loaders(nested).batches(0, seed=4), expected)
    list(loaders(num_workers=2).batches(0, seed=0))
    with pytest.raises(AssertionError, match="no DataLoader"):
        list(loaders(Plain()).batches(0, seed=0))
    with pytest.raises(AssertionError, match="no DataLoader"):
        list(loaders(collate_fn=lambda samples: samples).batches(0, seed=0))


def test_large_data_is_gathered_in_pieces(monkeypatch):
    expected = list(loaders().batches(0, seed=3))
    monkeypatch.setattr("fl_lightning.data.client_indices._CHUNK_BYTES", 1)
    same(loaders().batches(0, seed=3), expected)
    monkeypatch.setattr("fl_lightning.data.client_indices._CHUNK_BYTES", 16 * 3 * 2 + 1)
    same(loaders().batches(0, seed=3, merge_single=True), loaders(Plain()).batches(0, seed=3, merge_single=True))


def test_batches_may_be_changed_in_place():
    x = X.clone()
    first, second, *_ = [batch for batch, _ in loaders(TensorDataset(x, Y)).batches(0, seed=0)]
    before = second[0].clone()
    first[0].zero_()
    assert torch.equal(x, X)
    assert torch.equal(second[0], before)
    assert second[0]._version == 0


def test_collate_and_getitems_are_kept():
    made = loaders(Bulk(), stage="val")
    same(made.batches(0, seed=0), loaders(stage="val").batches(0, seed=0))
    named = loaders(Plain(), stage="val", collate_fn=lambda samples: {"n": len(samples)})
    assert list(named.batches(0, seed=0)) == [({"n": 3}, 3), ({"n": 3}, 3), ({"n": 1}, 1)]
    both = ConcatDataset([Subset(Plain(), range(10)), Subset(Plain(), range(10, 20))])
    same(loaders(both).batches(0, seed=1), loaders().batches(0, seed=1))


def mark_worker(worker_id):
    torch.utils.data.get_worker_info().dataset.x += 100.0


def test_worker_settings_are_kept():
    made = loaders(Noisy(), num_workers=2, worker_init_fn=mark_worker, prefetch_factor=4, timeout=30.0)
    state = torch.get_rng_state()
    first = [batch[0] for batch, _ in made.batches(0, seed=9)]
    assert torch.equal(torch.get_rng_state(), state)
    again = [batch[0] for batch, _ in made.batches(0, seed=9)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "worker seeds follow from the seed"
    assert float(first[0].min()) >= 100.0


def test_iterating_the_whole_is_refused_when_a_batch_is_taken():
    everyone = iter(loaders())
    with pytest.raises(TypeError, match=r"Trainer\(strategy=FederatedStrategy"):
        next(everyone)
    with pytest.raises(TypeError, match="FederatedStrategy"):
        list(loaders())


def test_bad_calls():
    made = loaders()
    for client_id in (-1, 4):
        with pytest.raises(IndexError, match=f"client_id must lie between 0 and 3, found {client_id}"):
            made.batches(client_id, seed=0)
        with pytest.raises(IndexError):
            made.num_batches(client_id)
        with pytest.raises(IndexError):
            made.indices(client_id)
    with pytest.raises(ValueError, match="batch_size must be positive, found 0"):
        made.batches(0, seed=0, batch_size=0)


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ([], "parts of ClientIndices must hold at least one client, found"),
        ([[0, 20]], "parts must hold indices of the dataset's 20 samples, found 0 to 20"),
        ([[-1, 2]], "found -1 to 2"),
        ([[0, 1], [1]], "each sample at most once, found sample 1 twice"),
        ([[0.5]], r"parts\[0\] must be a vector of integers, found \[0.5\]"),
        ([torch.ones(20, dtype=torch.bool)], r"found a tensor of torch.bool and shape \[20\]"),
        ([[0], torch.zeros(2, 2, dtype=torch.int64)], r"parts\[1\].*\[2, 2\]"),
        (ClientIndices([[0]], 21), "made for the dataset's 20 samples, found 21"),
    ],
)
def test_bad_parts(parts, match):
    with pytest.raises(ValueError, match=match):
        loaders(parts=parts)


def test_shared_parts_are_stored_once():
    shared = ClientIndices.shared(20, 1000)
    made = loaders(stage="val", parts=shared)
    assert len(made) == 1000
    assert made.sizes.tolist() == [20] * 1000
    assert made.indices(0).data_ptr() == made.indices(999).data_ptr()
    assert shared.num_used == 20


def test_hold_out():
    parts = ClientIndices([range(10), [10], [11, 12], []], 20)
    kept, aside = parts.hold_out(0.25, 3)
    assert kept.sizes.tolist() == [8, 1, 1, 0]
    assert aside.sizes.tolist() == [2, 0, 1, 0]
    for before, left, gone in zip(parts, kept, aside, strict=True):
        assert sorted(left.tolist() + gone.tolist()) == before.tolist()
    other = parts.hold_out(0.25, 4)[1]
    assert any(parts.hold_out(0.25, s)[1][0].tolist() != other[0].tolist() for s in range(3))
    fewer = ClientIndices([range(10)], 20).hold_out(0.25, 3)[1]
    assert fewer[0].tolist() == aside[0].tolist(), "a client's draw must not depend on the other clients"
    alike = ClientIndices([range(100), range(100, 200)], 200).hold_out(0.5, 0)[1]
    assert alike[0].tolist() != (alike[1] - 100).tolist(), "clients draw independently"
    assert parts.hold_out(0.99, 0)[0].sizes.tolist() == [1, 1, 1, 0]
    assert parts.hold_out(0.001, 0)[1].sizes.tolist() == [1, 0, 1, 0]


def test_pickle_and_deepcopy():
    loader = DataLoader(Plain(), 3, shuffle=True, num_workers=1, multiprocessing_context="fork")
    made = ClientLoaders(loader.dataset, PARTS, settings=loader_settings(loader))
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert twin.settings == made.settings
        twin.settings = LoaderSettings(3, True)
        same(twin.batches(0, seed=2), loaders().batches(0, seed=2))
    assert repr(made) == "ClientLoaders(stage='train', clients=4, samples=14)"


def test_memory_of_two_thousand_clients():
    clients, n = 2_000, 12_000
    data, parts = (
        TensorDataset(torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64)),
        IID(clients).split(torch.zeros(n), 0),
    )
    parts = [part.tolist() for part in parts]
    gc.collect()
    before = _tensor_bytes()
    tracemalloc.start()
    made = ClientLoaders(data, parts, "train", LoaderSettings(shuffle=True))
    gc.collect()
    python_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # tracemalloc does not see torch's allocations: the tensors are counted by themselves.
    held = python_bytes + _tensor_bytes() - before
    assert held <= 8 * n + 1024 * clients
    assert held <= 8 * n + 64 * clients, "what is held is far below the promise; a growth should be noticed"
    assert sum(size for _, size in made.batches(clients - 1, seed=0)) == 6


def _tensor_bytes():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.layout is torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


class Ending(Dataset):
    """Reads from a stream that ends too early."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 7:
            next(iter(()))
        return torch.full((3,), float(index))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_is_named(workers):
    loaders = ClientLoaders(Ending(), [list(range(12))], settings=LoaderSettings(num_workers=workers))
    with pytest.raises(RuntimeError, match=r"^Ending, .* must raise IndexError .* StopIteration in batch 2 of 3"):
        list(loaders.batches(0, seed=None, batch_size=4))
