# SPDX-License-Identifier: Apache-2.0
"""Clients that lie about numbers, train on wrong labels, or agree with each other on what to send."""

from statistics import NormalDist
from typing import NamedTuple

import pytest
import torch
from algorithm_cohorts import SIZES, random_rows
from column_shards import Meeting
from support import Classifier, federated_blobs, fresh, training_only
from torch.utils.data import default_collate
from watching import Recorder

import fl_lightning as fl
from fl_lightning.algorithms.attacks.colluding import hidden_deviations
from fl_lightning.core.updates import Columns


def first_round(attack=None, **options):
    """The cohort, its rows and the strategy."""
    rule = Recorder(losses=True, accuracies=True)
    strategy = fl.FederatedStrategy(rule, attack=attack, seed=2, **options)
    training_only(strategy, 1).fit(fresh(Classifier), federated_blobs())
    return Round(rule.cohorts[0], rule.rows[0]), strategy


class Round(NamedTuple):
    cohort: fl.Cohort
    rows: torch.Tensor


def apart(one, two):
    """Which clients differ between two rounds: in their updates, and in their losses."""
    ids = one.cohort.client_ids
    assert ids == two.cohort.client_ids
    rows = {client for k, client in enumerate(ids) if not torch.equal(one.rows[k], two.rows[k])}
    losses = {client for k, client in enumerate(ids) if one.cohort.losses[k] != two.cohort.losses[k]}
    return rows, losses


@pytest.mark.fit
def test_false_reports_change_numbers_and_nothing_else():
    honest, _ = first_round()
    lying, _ = first_round(fl.attacks.FalseReports((1, 4), loss_factor=3.0, accuracy=0.25))
    assert apart(honest, lying) == (set(), {1, 4})
    for k, client in enumerate(honest.cohort.client_ids):
        factor = 3.0 if client in (1, 4) else 1.0
        assert float(lying.cohort.losses[k]) == pytest.approx(factor * float(honest.cohort.losses[k]))
        told, truth = lying.cohort.extras["accuracy"][k], honest.cohort.extras["accuracy"][k]
        assert float(told) == (0.25 if client in (1, 4) else float(truth))


@pytest.mark.fit
def test_losses_asked_for_again_are_false_too():
    seen = []

    class Asking(fl.algorithms.FedAvg):
        needs = fl.algorithms.Needs(losses=True, requery=True)

        def aggregate(self, cohort):
            seen.append(cohort.losses_at(cohort.params) / cohort.losses)
            return super().aggregate(cohort)

    strategy = fl.FederatedStrategy(Asking(), attack=fl.attacks.FalseReports((1, 4)), seed=2)
    training_only(strategy, 1).fit(fresh(Classifier), federated_blobs())
    torch.testing.assert_close(seen[0], torch.ones(6, dtype=torch.float64))


@pytest.mark.fit
@pytest.mark.parametrize("attack", ["flip", "targeted"])
def test_wrong_labels_change_what_dishonest_clients_learn_and_measure(attack):
    made = {
        "flip": fl.attacks.LabelFlip((1, 4), num_classes=4),
        "targeted": fl.attacks.TargetedScaling((1, 4), source=0, target=2, factor=1.0),
    }[attack]
    data = federated_blobs()
    data.setup("fit")
    before = list(data.train_dataloader().dataset)
    honest, _ = first_round()
    flipped, _ = first_round(made)
    rows, losses = apart(honest, flipped)
    assert rows == losses
    assert rows
    assert rows <= {1, 4}
    again = federated_blobs()
    again.setup("fit")
    after = list(again.train_dataloader().dataset)
    assert all(torch.equal(torch.as_tensor(a[1]), torch.as_tensor(b[1])) for a, b in zip(before, after, strict=True))


@pytest.mark.fit
def test_model_replacement_enlarges_what_it_has_learned():
    plain, _ = first_round(fl.attacks.TargetedScaling((1, 4), source=0, target=2, factor=1.0))
    large, _ = first_round(fl.attacks.TargetedScaling((1, 4), source=0, target=2, factor=7.0))
    for k, client in enumerate(plain.cohort.client_ids):
        torch.testing.assert_close(large.rows[k], plain.rows[k] * (7.0 if client in (1, 4) else 1.0))


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ((torch.zeros(3, 2), torch.tensor([0, 1, 2])), -1),
        ([torch.tensor([0, 1, 2]), torch.zeros(3, 2)], 0),
        ({"x": torch.zeros(3, 2), "y": torch.tensor([0, 1, 2])}, "y"),
        (default_collate([{"y": 0}, {"y": 1}, {"y": 2}]), "y"),
    ],
)
def test_labels_are_found_and_the_batch_stays(batch, where):
    flipped = fl.attacks.LabelFlip((0,), num_classes=3, labels=where).change_batch(batch)
    assert type(flipped) is type(batch)
    assert flipped[where].tolist() == [2, 1, 0]
    assert batch[where].tolist() == [0, 1, 2]
    targeted = fl.attacks.TargetedScaling((0,), source=1, target=2, labels=where).change_batch(batch)
    assert targeted[where].tolist() == [0, 2, 2]


@pytest.mark.parametrize("batch", [(torch.zeros(3),), {"x": torch.zeros(3)}, torch.zeros(3), "text"])
def test_batches_without_labels(batch):
    with pytest.raises(TypeError, match="labels=-1 of LabelFlip must say where batches hold a tensor of integers"):
        fl.attacks.LabelFlip((0,), num_classes=3).change_batch(batch)


def test_labels_that_are_no_integers():
    batch = (torch.zeros(3), torch.tensor([True, False, True]))
    for attack in (fl.attacks.LabelFlip((0,), num_classes=2), fl.attacks.TargetedScaling((0,), source=0, target=1)):
        with pytest.raises(TypeError, match=rf"labels=-1 of {type(attack).__name__} .*found a tensor of torch.bool"):
            attack.change_batch(batch)


def test_new_labels_that_do_not_fit_the_type_are_refused():
    batch = (torch.zeros(3), torch.tensor([0, 1, 255], dtype=torch.uint8))
    for attack in (fl.attacks.LabelFlip((0,), num_classes=300), fl.attacks.TargetedScaling((0,), source=0, target=299)):
        with pytest.raises(ValueError, match=rf"of {type(attack).__name__} .*found torch.uint8 and the new label 299"):
            attack.change_batch(batch)
    flipped = fl.attacks.LabelFlip((0,), num_classes=256).change_batch(batch)[1]
    assert flipped.dtype == torch.uint8
    assert flipped.tolist() == [255, 254, 0]


def test_labels_that_losses_ignore_stay():
    labels = torch.tensor([0, -100, 2])
    assert fl.attacks.LabelFlip((0,), num_classes=3).change_batch((labels,))[0].tolist() == [2, -100, 0]


def test_more_classes_than_were_said():
    with pytest.raises(ValueError, match="num_classes of LabelFlip must be above all labels, found 3 and a label 3"):
        fl.attacks.LabelFlip((0,), num_classes=3).change_batch((torch.zeros(2), torch.tensor([0, 3])))


def matrix(rows):
    return fl.UpdateMatrix(rows, fl.ParamLayout.from_sizes(SIZES))


@pytest.mark.parametrize("knows", ["own", "honest"])
def test_a_little_is_enough(knows):
    rows = random_rows(9, 0)
    updates, seen = matrix(rows.clone()), [1, 5, 8] if knows == "own" else [0, 2, 3, 4, 6, 7]
    assert fl.attacks.ALIE((), z=1.5, knows=knows).conspire(updates, [1, 5, 8])
    expected = rows[seen].mean(0) - 1.5 * rows[seen].std(0, unbiased=False)
    for place in range(9):
        torch.testing.assert_close(updates.rows[place], expected if place in (1, 5, 8) else rows[place])


@pytest.mark.parametrize(("n", "m"), [(50, 12), (50, 24), (25, 5), (100, 20)])
def test_the_papers_deviations(n, m):
    s = n // 2 + 1 - m
    expected = NormalDist().inv_cdf((n - m - s) / (n - m))
    assert hidden_deviations(n, m) == pytest.approx(max(expected, 0))


@pytest.mark.parametrize(("n", "m"), [(10, 1), (3, 3), (4, 3), (10, 9)])
def test_deviations_where_the_formula_gives_none(n, m):
    assert 0 <= hidden_deviations(n, m) < 10


def test_inner_product_manipulation():
    rows = random_rows(7, 0)
    updates = matrix(rows.clone())
    assert fl.attacks.InnerProductManipulation((), epsilon=2.0).conspire(updates, [0, 3])
    honest = rows[[1, 2, 4, 5, 6]].mean(0)
    for place in range(7):
        torch.testing.assert_close(updates.rows[place], -2 * honest if place in (0, 3) else rows[place])
    assert not fl.attacks.InnerProductManipulation(()).conspire(matrix(rows.clone()), list(range(7)))


@pytest.mark.parametrize("attack", [fl.attacks.ALIE((), z=1.0), fl.attacks.InnerProductManipulation(())])
def test_shares_of_the_columns_agree(attack):
    layout = fl.ParamLayout.from_sizes((20_000, 13, 30_001))
    rows = random_rows(5, 1, torch.float32, layout.numel)
    whole = fl.UpdateMatrix(rows.clone(), layout)
    attack.conspire(whole, [0, 2])
    meeting, parts = Meeting(1), []
    for share in range(3):  # nothing is a sum over columns, so no share waits for another
        columns = Columns(Columns.cut(layout.numel, 3), share, lambda mine, sizes: meeting.gather(0, mine, sizes))
        part = fl.UpdateMatrix(rows[:, columns.span[0] : columns.span[1]].clone(), layout, columns)
        attack.conspire(part, [0, 2])
        parts.append(part.rows)
    assert torch.equal(torch.cat(parts, 1), whole.rows)


@pytest.mark.fit
def test_the_server_sees_what_was_agreed_on_and_guards_come_after():
    honest, _ = first_round()
    attack = fl.attacks.InnerProductManipulation((1, 4), epsilon=30.0)
    attacked, strategy = first_round(attack)
    places = [attacked.cohort.client_ids.index(client) for client in (1, 4)]
    others = [k for k in range(6) if k not in places]
    for k in places:
        torch.testing.assert_close(attacked.rows[k], -30 * honest.rows[others].mean(0))
    assert torch.equal(attacked.rows[others], honest.rows[others])
    torch.testing.assert_close(strategy.last_round.update_norms, attacked.rows.double().norm(dim=1))
    guarded, strategy = first_round(attack, guard=fl.guards.MultiKrum(1, keep=3))
    assert {1, 4} <= set(strategy.last_round.dropped)
    assert not {1, 4} & set(guarded.cohort.client_ids)
