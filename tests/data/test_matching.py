# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data import Dirichlet, label_counts, matched_split


def exactly_once(parts, n):
    return torch.equal(torch.cat(parts).sort().values, torch.arange(n))


@given(
    st.lists(st.integers(0, 4), min_size=8, max_size=100),
    st.lists(st.integers(0, 6), max_size=60),
    st.integers(1, 8),
    st.integers(0, 2**40),
)
@settings(max_examples=40, deadline=None)
def test_every_sample_once_and_shares_are_proportional(train, evaluation, clients, seed):
    train, evaluation = torch.tensor(train), torch.tensor(evaluation, dtype=torch.int64)
    parts = Dirichlet(clients, 0.3).split(train, seed)
    split = matched_split(train, parts, evaluation, seed)
    assert len(split) == clients
    assert exactly_once(split, len(evaluation))
    held, given_ = (
        torch.stack([torch.bincount(labels[part], minlength=7) for part in several])
        for labels, several in ((train, parts), (evaluation, split))
    )
    held = held.double()
    total, wanted = held.sum(0), torch.bincount(evaluation, minlength=7)
    for column in range(7):
        if total[column] == 0:
            assert int(given_[:, column].max() - given_[:, column].min()) <= 1 + clients
            continue
        # Nobody gets a class that it does not train on, whatever was moved to small clients.
        assert bool((given_[held[:, column] == 0, column] == 0).all())
        ideal = held[:, column] / total[column] * wanted[column]
        assert bool(((given_[:, column] - ideal).abs() < 1 + clients).all())
    again = matched_split(train, parts, evaluation, seed)
    assert all(torch.equal(a, b) for a, b in zip(split, again, strict=True))


@given(st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_shares_are_within_one_of_proportional(seed):
    generator = torch.Generator().manual_seed(seed)
    train, evaluation = (
        torch.randint(0, 3, (300,), generator=generator),
        torch.randint(0, 3, (99,), generator=generator),
    )
    parts = Dirichlet(4, 5.0, min_size=20).split(train, seed)
    held = label_counts(train, parts).double()
    shares = label_counts(evaluation, matched_split(train, parts, evaluation, seed))
    ideal = held / held.sum(0) * torch.bincount(evaluation)
    assert bool(((shares - ideal).abs() < 1).all())


def test_a_class_without_training_samples_is_dealt_round_robin():
    split = matched_split(torch.tensor([0, 0, 0]), list(torch.arange(3).split(1)), torch.tensor([7] * 7 + [8] * 2), 0)
    assert exactly_once(split, 9)
    assert [len(part) for part in split] == [3, 3, 3]


def test_small_clients_get_a_sample_where_one_exists():
    # By shares alone client 0 gets all ten: the others have 1 % of class 0 each.
    train = torch.zeros(100, dtype=torch.int64)
    train[98] = 5
    parts = [torch.arange(97), torch.tensor([97]), torch.tensor([98]), torch.tensor([99]), torch.tensor([]).long()]
    split = matched_split(train, parts, torch.zeros(10, dtype=torch.int64), 0)
    # Client 2 trains on class 5, which the evaluation data does not have; client 4 trains on nothing.
    assert [len(part) for part in split] == [8, 1, 0, 1, 0]
    few = matched_split(train, parts, torch.zeros(1, dtype=torch.int64), 0)
    assert [len(part) for part in few] == [1, 0, 0, 0, 0]


def test_ties_do_not_favour_low_ids():
    train = torch.zeros(20, dtype=torch.int64)
    parts = list(torch.arange(20).split(1))
    winners = torch.zeros(20, dtype=torch.int64)
    for seed in range(200):
        split = matched_split(train, parts, torch.zeros(5, dtype=torch.int64), seed)
        winners += torch.tensor([len(part) for part in split])
    assert int(winners.min()) > 20
    assert int(winners.max()) < 85


def test_bad_arguments():
    labels, parts, none = torch.tensor([0, 1]), [torch.tensor([0]), torch.tensor([1])], torch.tensor([]).long()
    for arguments, match in (
        ((labels, [], labels), "train_parts must hold at least one client"),
        (
            (labels, parts, labels.float()),
            r"eval_labels must be a vector of integers, found a tensor of torch\.float32",
        ),
        ((labels[None], parts, labels), "train_labels"),
    ):
        with pytest.raises(ValueError, match=match):
            matched_split(*arguments, 0)
    assert [len(part) for part in matched_split(labels, parts, none, 0)] == [0, 0]


def test_a_large_client_gives_as_many_small_ones_a_sample_as_it_can():
    train = torch.zeros(42, dtype=torch.int64)
    parts = [torch.arange(40), torch.tensor([40]), torch.tensor([41])]
    found = matched_split(train, parts, torch.zeros(3, dtype=torch.int64), 0)
    assert [len(part) for part in found] == [1, 1, 1]
