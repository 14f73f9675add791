# SPDX-License-Identifier: Apache-2.0
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fl_lightning.data as fd
from fl_lightning.data import label_counts
from fl_lightning.data.by_key import distinct_keys
from fl_lightning.data.partitions import deal

SEEDS = st.integers(0, 2**62)
LABELS = st.lists(st.sampled_from([-3, 0, 1, 2, 7, 100]), min_size=1, max_size=120)


def iid(n, clients, seed):
    return fd.IID(clients).split(torch.zeros(n), seed)


def dirichlet(labels, clients, alpha, seed, min_size=1, capped=False):
    return fd.Dirichlet(clients, alpha, min_size, capped).split(labels, seed)


def of(kind):
    """A partition by the arguments of its class, after the labels and before the seed."""
    return lambda labels, *arguments: kind(*arguments[:-1]).split(labels, arguments[-1])


dirichlet_classes, pathological, shards, mutex, unbalanced = map(
    of, (fd.DirichletClasses, fd.Pathological, fd.Shards, fd.Mutex, fd.Unbalanced)
)


def by_key(keys):
    return fd.ByKey(keys).split(torch.zeros(len(keys)), 0)


def assert_exactly_once(parts, n):
    assert all(part.dtype == torch.int64 and part.dim() == 1 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))
    assert all(bool((part.diff() > 0).all()) for part in parts)


def labels_10(n=2000, seed=0):
    return torch.randint(0, 10, (n,), generator=torch.Generator().manual_seed(seed))


def test_deal_leaves_clients_empty_when_samples_are_few():
    parts = deal(3, 10, 0)
    assert_exactly_once(parts, 3)
    assert sorted(len(part) for part in parts) == [0] * 7 + [1] * 3


@given(LABELS, st.integers(1, 12), st.floats(1e-310, 1e4), SEEDS, st.integers(0, 4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_dirichlet_uses_every_sample_and_honours_min_size(labels, clients, alpha, seed, min_size, capped):
    if clients * max(min_size, 1 if min_size else 0) > len(labels):
        with pytest.raises(ValueError, match=r"min_size|num_clients"):
            dirichlet(labels, clients, alpha, seed, min_size, capped)
        return
    parts = dirichlet(labels, clients, alpha, seed, min_size, capped)
    assert_exactly_once(parts, len(labels))
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= min_size


@given(st.integers(1, 12), st.floats(1e-3, 1e2), SEEDS)
@settings(max_examples=40, deadline=None)
@example(2, 10.0, 1)  # one has just half of the samples before the last class
def test_capped_dirichlet_gives_nothing_more_to_those_who_have_their_part(clients, alpha, seed):
    labels = labels_10(500)
    held = label_counts(labels, dirichlet(labels, clients, alpha, seed, min_size=0, capped=True))
    for part in held:
        full = (part.cumsum(0) * clients >= 500).nonzero().flatten().tolist()
        assert not full or int(part[full[0] + 1 :].sum()) == 0


@pytest.mark.parametrize("divide", [dirichlet, dirichlet_classes])
def test_dirichlet_deals_the_samples_of_a_class_in_random_order(divide):
    parts = divide(torch.zeros(200, dtype=torch.int64), 2, 100.0, 0)
    assert all(int(part.max() - part.min()) > 150 for part in parts)


def test_clients_that_are_filled_get_what_the_donor_has_most_of():
    labels = torch.tensor([0] * 90 + [1] * 10)
    filled = 0
    for seed in range(20):
        before, after = (dirichlet(labels, 2, 1e-3, seed, min_size) for min_size in (0, 5))
        for had, has in zip(before, after, strict=True):
            if len(had) == 0:
                assert labels[has].tolist() == [0] * 5
                filled += 1
    assert filled > 3


def test_dirichlet_fills_small_clients_from_the_largest_one():
    labels = labels_10()
    free, filled = dirichlet(labels, 50, 0.05, 3, min_size=0), dirichlet(labels, 50, 0.05, 3, min_size=5)
    before = torch.tensor([len(part) for part in free])
    after = torch.tensor([len(part) for part in filled])
    assert bool((before < 5).any()), "the case must need filling"
    assert torch.equal(after[before < 5], torch.full_like(after[before < 5], 5))
    gave = before > after
    # Whoever gave ends level with the others that gave, and nobody smaller than them gave anything.
    assert int(after[gave].max()) - int(after[gave].min()) <= 1
    assert int(before[gave].min()) >= int(after[~gave & (before >= 5)].max())


@pytest.mark.parametrize("divide", [lambda labels, n, alpha, seed: iid(len(labels), n, seed), dirichlet_classes])
@given(LABELS, st.integers(1, 20), st.floats(1e-310, 1e4), SEEDS)
@settings(max_examples=40, deadline=None)
def test_every_sample_is_dealt_once_and_sizes_are_equal(divide, labels, clients, alpha, seed):
    if clients > len(labels):
        with pytest.raises(ValueError, match="num_clients"):
            divide(labels, clients, alpha, seed)
        return
    parts = divide(labels, clients, alpha, seed)
    assert_exactly_once(parts, len(labels))
    assert len(parts) == clients
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("alpha", [0.3, 1e6])
def test_dirichlet_over_classes_equals_draws_one_by_one(alpha):
    """Hsu et al. 2019: ``q ~ Dir(alpha p)`` for each client, and a class from ``q`` for each of its samples."""
    labels, clients, seeds = torch.tensor([0] * 60 + [1] * 30 + [2] * 30), 12, 300
    prior = np.array([0.5, 0.25, 0.25])
    rng = np.random.default_rng(0)

    def one_by_one():
        left, found = [60, 30, 30], np.zeros((clients, 3))
        for client in range(clients):
            q = rng.dirichlet(alpha * prior)
            while found[client].sum() < 10:
                among = [0.0 if left[c] == 0 else max(q[c], 1e-300) for c in range(3)]
                c = np.searchsorted(np.cumsum(among), rng.random() * sum(among), "right")
                left[c] -= 1
                found[client, c] += 1
        return found

    def held(seed):
        return label_counts(labels, dirichlet_classes(labels, clients, alpha, seed)).numpy()

    def moments(draws):
        """How uneven clients are, in a class that is large and in one that is small, and how seldom they lack one."""
        draws = np.stack(draws)
        found = [draws[:, :, 0].var(1), draws[:, :, 1].var(1), (draws == 0).mean((1, 2))]
        return np.array([[each.mean(), each.std() / seeds**0.5] for each in found])

    ours, theirs = moments([held(seed) for seed in range(seeds)]), moments([one_by_one() for _ in range(seeds)])
    apart = np.abs(ours[:, 0] - theirs[:, 0]) / np.hypot(ours[:, 1], theirs[:, 1]).clip(1e-12)
    assert (apart < 3.5).all(), (ours, theirs)


def test_dirichlet_class_shares_have_the_right_mean_and_variance():
    # Symmetric Dirichlet over N clients: mean 1/N, variance (N - 1) / (N^2 (N alpha + 1)).
    labels = torch.zeros(10_000, dtype=torch.int64)
    clients, alpha = 5, 0.3
    shares = torch.stack(
        [torch.tensor([len(p) for p in dirichlet(labels, clients, alpha, s, 0)]) for s in range(400)]
    ).double()
    shares /= 10_000
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert shares.mean(0).sub(1 / clients).abs().max() < 4 * (variance / 400) ** 0.5
    assert abs(float(shares.var()) / variance - 1) < 0.15


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 8])
def test_pathological_gives_exactly_k_classes_and_uses_all(classes):
    labels = torch.arange(classes).repeat(40)
    for clients, k, seed in product((*range(1, 13), 30), range(1, classes + 2), range(3)):
        if k > classes or clients * k < classes:
            with pytest.raises(ValueError, match=r"classes_per_client"):
                pathological(labels, clients, k, seed)
            continue
        parts = pathological(labels, clients, k, seed)
        assert_exactly_once(parts, len(labels))
        counts = label_counts(labels, parts)
        assert (counts > 0).sum(1).tolist() == [k] * clients
        holders = (counts > 0).sum(0)
        assert int(holders.max() - holders.min()) <= 1
        for column in counts.T:
            held = column[column > 0]
            assert int(held.max() - held.min()) <= 1


def test_pathological_copes_with_rare_classes():
    labels = torch.tensor([0] * 100 + [1] * 100 + [2] * 3)
    counts = label_counts(labels, pathological(labels, 20, 2, 0))
    assert (counts > 0).sum(1).tolist() == [2] * 20
    assert int((counts[:, 2] > 0).sum()) == 3
    with pytest.raises(ValueError, match=r"between 1 and 3, because the labels are \[0, 1, 2\], found 4"):
        pathological(torch.arange(12) % 3, 3, 4, 0)
    with pytest.raises(ValueError, match="leave each client a sample of each of its classes"):
        pathological(torch.tensor([0, 0, 1, 1, 1, 1, 1]), 4, 2, 0)


def test_pathological_pairs_are_random():
    labels = labels_10()

    def pairs(seed):
        counts = label_counts(labels, pathological(labels, 100, 2, seed))
        return {tuple(row.nonzero().flatten().tolist()) for row in counts}

    assert len(pairs(0)) > 25, "of the 45 pairs of 10 classes"
    assert pairs(0) != pairs(1)


@given(st.integers(20, 200), st.integers(1, 10), st.integers(1, 4), SEEDS)
@settings(max_examples=50, deadline=None)
def test_shards_are_equal_runs_of_the_sorted_labels(n, clients, per_client, seed):
    labels = torch.arange(n) % 5
    if clients * per_client > n:
        with pytest.raises(ValueError, match="shards_per_client"):
            shards(labels, clients, per_client, seed)
        return
    parts = shards(labels, clients, per_client, seed)
    assert_exactly_once(parts, n)
    low, high = n // (clients * per_client), -(-n // (clients * per_client))
    assert all(per_client * low <= len(part) <= per_client * high for part in parts)


def test_shards_of_one_class_each():
    labels = torch.arange(10).repeat_interleave(20)
    counts = label_counts(labels, shards(labels, 10, 2, 0))
    assert set(counts.flatten().tolist()) <= {0, 10, 20}
    assert counts.sum(1).tolist() == [20] * 10


def test_mutex_gives_one_class_and_shares_it_where_clients_abound():
    labels = labels_10()
    counts = label_counts(labels, mutex(labels, 13, 0))
    assert (counts > 0).sum(1).tolist() == [1] * 13
    assert sorted((counts > 0).sum(0).tolist()) == [1] * 7 + [2] * 3
    with pytest.raises(ValueError, match="to use every class, found 9"):
        mutex(labels, 9, 0)


def test_left_over_samples_do_not_favour_low_ids():
    labels = torch.zeros(10, dtype=torch.int64)
    for divide in (mutex, iid, lambda y, n, s: unbalanced(y, ((0,),) * n, s)):
        sizes = [[len(part) for part in divide(10 if divide is iid else labels, 4, seed)] for seed in range(30)]
        assert {tuple(sorted(row)) for row in sizes} == {(2, 2, 3, 3)}
        assert len({tuple(row) for row in sizes}) > 3


def test_unbalanced_groups():
    labels = torch.arange(4).repeat_interleave(10)
    parts = unbalanced(labels, ((0,), (1, 2), (2, 3)), 0)
    assert_exactly_once(parts, 40)
    assert label_counts(labels, parts).tolist() == [[10, 0, 0, 0], [0, 10, 5, 0], [0, 0, 5, 10]]
    with pytest.raises(ValueError, match=r"missing \[3\], unknown \[\]"):
        unbalanced(labels, ((0,), (1, 2)), 0)
    with pytest.raises(ValueError, match=r"missing \[\], unknown \[9\]"):
        unbalanced(labels, ((0, 1), (2, 3, 9)), 0)
    with pytest.raises(ValueError, match=r"groups\[1\] of Unbalanced must be a sequence that is not empty, found \(\)"):
        unbalanced(labels, ((0, 1, 2, 3), ()), 0)


def test_by_key_golden():
    assert [p.tolist() for p in by_key(["b", "a", "b", "c", "a"])] == [[1, 4], [0, 2], [3]]
    assert [p.tolist() for p in by_key(torch.tensor([30, 4, 30]))] == [[1], [0, 2]]
    assert [p.tolist() for p in by_key([("x", 2), ("x", 1)])] == [[1], [0]]
    assert distinct_keys(["a", 1, "a", (2,)]) == ["a", 1, (2,)]
    with pytest.raises(ValueError, match="keys of ByKey must be"):
        by_key([])


@pytest.mark.parametrize(
    "divide",
    [
        lambda y, s: iid(len(y), 7, s),
        lambda y, s: dirichlet(y, 7, 0.3, s),
        lambda y, s: dirichlet_classes(y, 7, 0.3, s),
        lambda y, s: pathological(y, 7, 3, s),
        lambda y, s: shards(y, 7, 2, s),
        lambda y, s: mutex(y, 13, s),
        lambda y, s: unbalanced(y, ((0, 1, 2, 3, 4), (4, 5, 6, 7, 8, 9)), s),
    ],
)
def test_seeds_decide_everything(divide):
    labels = labels_10(500)
    torch.manual_seed(1)
    first = divide(labels, 5)
    torch.manual_seed(2)
    again = divide(labels, 5)
    other = divide(labels, 6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("divide", [dirichlet, dirichlet_classes, pathological, shards])
@pytest.mark.parametrize(
    ("labels", "match"),
    [(torch.tensor([0.5, 1.0]), "float32"), (torch.zeros(2, 2, dtype=torch.int64), r"\[2, 2\]"), ([], "empty|float")],
)
def test_labels_must_be_a_vector_of_integers(divide, labels, match):
    with pytest.raises(ValueError, match=match):
        divide(labels, 2, 1, 0)


def test_label_counts():
    labels, parts = (
        torch.tensor([5, 9, 5, 9, 9]),
        [torch.tensor([0, 1]), torch.tensor([2, 3, 4]), torch.tensor([]).long()],
    )
    assert label_counts(labels, parts).tolist() == [[1, 1], [1, 2], [0, 0]]
