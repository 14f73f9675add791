# SPDX-License-Identifier: Apache-2.0
"""Dishonest clients: what they send, measure and learn, alone or after they have agreed on it."""

from statistics import NormalDist

import pytest
import torch
from algorithm_cohorts import SIZES, random_rows
from cases import in_turn
from column_shards import Meeting
from support import Classifier, federated_blobs, fresh, training_only, weights
from torch.utils.data import default_collate
from watching import Recorder

import fl_lightning as fl
from fl_lightning.algorithms.attacks.colluding import hidden_deviations
from fl_lightning.core.updates import Columns

LIARS = (1, 4)


def fit(attack=None, rounds=1, **options):
    """What the method saw, the strategy and the weights."""
    rule, module = Recorder(losses=True, accuracies="full_gradients" not in options), fresh(Classifier)
    strategy = fl.FederatedStrategy(rule, attack=attack, seed=2, **options)
    training_only(strategy, rounds).fit(module, federated_blobs())
    return rule, strategy, weights(module)


def pairs(one, two):
    """Client by client, the first rows of two fits."""
    ids = one.cohorts[0].client_ids
    assert ids == two.cohorts[0].client_ids
    return list(zip(ids, one.rows[0], two.rows[0], strict=True))


ATTACKS = {
    "noise": fl.attacks.RandomUpdates(LIARS, std=0.5),
    "noise of the same length": fl.attacks.RandomUpdates(LIARS, match_norm=True),
    "enlarged": fl.attacks.ScaledUpdates(LIARS),
    "nothing": fl.attacks.ZeroUpdates(LIARS),
    "a random model": fl.attacks.RandomModels(LIARS, std=0.5),
    "a model of zeros": fl.attacks.RandomModels(LIARS, std=0.0),
}


@pytest.mark.fit
@pytest.mark.parametrize(("name", "full_gradients"), in_turn(ATTACKS, [False, True]))
def test_only_the_updates_of_dishonest_clients_change(name, full_gradients):
    options = {"full_gradients": True} if full_gradients else {}
    honest, attacked, start = fit(**options)[0], fit(ATTACKS[name], **options)[0], weights(fresh(Classifier))
    assert torch.equal(attacked.cohorts[0].losses, honest.cohorts[0].losses)
    for client, before, after in pairs(honest, attacked):
        if client not in LIARS:
            assert torch.equal(before, after)
        elif name == "nothing":
            assert not after.any()
        elif name == "enlarged":
            torch.testing.assert_close(after, 100 * before)
        elif name == "noise of the same length":
            assert float(after.norm()) == pytest.approx(float(before.norm()), rel=1e-5)
            assert abs(float(torch.cosine_similarity(before, after, dim=0))) < 0.5
        elif name == "a model of zeros":
            assert torch.equal(after, start)
        else:
            sent = after if name == "noise" else start - after
            assert 0.4 < float(sent.std()) < 0.6
            assert abs(float(sent.mean())) < 0.2


@pytest.mark.fit
@pytest.mark.parametrize("name", ["noise", "a random model"])
def test_noise_differs_between_clients_and_rounds_and_repeats_with_the_seed(name):
    one, _, theta = fit(ATTACKS[name], rounds=2)
    again, _, same = fit(ATTACKS[name], rounds=2)
    assert torch.equal(theta, same)
    noise = [
        cohort.params * (name != "noise") - rows[cohort.client_ids.index(client)]
        for cohort, rows in zip(one.cohorts, one.rows, strict=True)
        for client in LIARS
    ]
    assert all(not torch.allclose(a, b) for i, a in enumerate(noise) for b in noise[:i])
    assert torch.equal(one.rows[1], again.rows[1])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_noise_has_the_norm_of_updates_of_any_size(size):
    update = torch.linspace(-1, 1, 50) * size
    norm = float(update.double().norm())
    fl.attacks.RandomUpdates((), match_norm=True).replace(update, torch.zeros(50), seed=3)
    assert float(update.double().norm()) == pytest.approx(norm, rel=1e-5)


def test_fixed_ids():
    ids = fl.attacks.dishonest_clients(100, 0.1, seed=3)
    assert len(set(ids)) == 10
    assert ids == fl.attacks.dishonest_clients(100, 0.1, seed=3) == tuple(sorted(ids))
    assert ids != fl.attacks.dishonest_clients(100, 0.1, seed=4)
    assert fl.attacks.dishonest_clients(5, 0.0) == ()
    assert fl.attacks.dishonest_clients(5, 1.0) == (0, 1, 2, 3, 4)


@pytest.mark.fit
def test_bad_arguments():
    for made, words in (
        (
            lambda: fl.attacks.dishonest_clients(10, 2),
            "share of dishonest_clients must be .*, found 2",
        ),
        (
            lambda: fl.attacks.RandomUpdates((1,), std=0),
            "std of RandomUpdates must be a positive.* found 0",
        ),
        (
            lambda: fl.attacks.RandomModels((1,), std=-1),
            "std of RandomModels must be .* from 0 on, found -1",
        ),
        (
            lambda: fl.attacks.ScaledUpdates((1,), factor=float("inf")),
            "factor of ScaledUpdates must be a finite",
        ),
        (lambda: fit(fl.attacks.ZeroUpdates((0, 6))), r"clients of ZeroUpdates must be ids below 6, found \[6\]"),
    ):
        with pytest.raises(ValueError, match=words):
            made()
    with pytest.raises(TypeError, match="attack of FederatedStrategy must be None or an Attack such as"):
        fl.FederatedStrategy(attack=(1, 2))


@pytest.mark.fit
def test_false_reports_change_numbers_and_nothing_else():
    honest, lying = fit()[0], fit(fl.attacks.FalseReports(LIARS, loss_factor=3.0, accuracy=0.25))[0]
    (one,), (two,) = honest.cohorts, lying.cohorts
    for k, (client, before, after) in enumerate(pairs(honest, lying)):
        assert torch.equal(before, after)
        assert float(two.losses[k]) == pytest.approx((3.0 if client in LIARS else 1.0) * float(one.losses[k]))
        truth = float(one.extras["accuracy"][k])
        assert float(two.extras["accuracy"][k]) == (0.25 if client in LIARS else truth)


@pytest.mark.fit
def test_losses_asked_for_again_are_false_too():
    seen = []

    class Asking(fl.algorithms.FedAvg):
        needs = fl.algorithms.Needs(losses=True, requery=True)

        def aggregate(self, cohort):
            seen.append(cohort.losses_at(cohort.params) / cohort.losses)
            return super().aggregate(cohort)

    strategy = fl.FederatedStrategy(Asking(), attack=fl.attacks.FalseReports(LIARS), seed=2)
    training_only(strategy, 1).fit(fresh(Classifier), federated_blobs())
    torch.testing.assert_close(seen[0], torch.ones(6, dtype=torch.float64))


@pytest.mark.fit
@pytest.mark.parametrize(
    "attack",
    [fl.attacks.LabelFlip(LIARS, num_classes=4), fl.attacks.TargetedScaling(LIARS, source=0, target=2, factor=1.0)],
    ids=["flip", "targeted"],
)
def test_wrong_labels_change_what_dishonest_clients_learn_and_measure(attack):
    honest, flipped = fit()[0], fit(attack)[0]
    losses = zip(honest.cohorts[0].losses, flipped.cohorts[0].losses, strict=True)
    differ = {}
    for (client, before, after), (one, two) in zip(pairs(honest, flipped), losses, strict=True):
        differ[client] = not torch.equal(before, after)
        assert differ[client] == bool(one != two)
    assert any(differ.values())
    assert not any(differ[client] for client in differ if client not in LIARS)


@pytest.mark.fit
def test_model_replacement_enlarges_what_it_has_learned():
    plain, large = (fit(fl.attacks.TargetedScaling(LIARS, source=0, target=2, factor=by))[0] for by in (1.0, 7.0))
    for client, before, after in pairs(plain, large):
        torch.testing.assert_close(after, before * (7.0 if client in LIARS else 1.0))


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


FLIP, TARGETED = fl.attacks.LabelFlip, fl.attacks.TargetedScaling


@pytest.mark.parametrize(
    ("batch", "attack", "error", "words"),
    [
        *(
            (
                batch,
                FLIP((0,), num_classes=3),
                TypeError,
                "labels=-1 of LabelFlip must say where",
            )
            for batch in ((torch.zeros(3),), {"x": torch.zeros(3)}, torch.zeros(3), "text")
        ),
        *(
            ((torch.tensor([True, False]),), attack, TypeError, r"labels=-1 of .*found a tensor of torch.bool")
            for attack in (FLIP((0,), num_classes=2), TARGETED((0,), source=0, target=1))
        ),
        *(
            (
                (torch.tensor([0, 255], dtype=torch.uint8),),
                attack,
                ValueError,
                "found torch.uint8 and the new label 299",
            )
            for attack in (FLIP((0,), num_classes=300), TARGETED((0,), source=0, target=299))
        ),
        (
            (torch.tensor([0, 3]),),
            FLIP((0,), num_classes=3),
            ValueError,
            "above all labels, found 3 and a label 3",
        ),
    ],
)
def test_batches_whose_labels_cannot_be_changed(batch, attack, error, words):
    with pytest.raises(error, match=words):
        attack.change_batch(batch)


def test_labels_that_losses_ignore_stay_and_narrow_ones_keep_their_type():
    labels = torch.tensor([0, -100, 2])
    assert FLIP((0,), num_classes=3).change_batch((labels,))[0].tolist() == [2, -100, 0]
    (flipped,) = FLIP((0,), num_classes=256).change_batch((torch.tensor([0, 1, 255], dtype=torch.uint8),))
    assert (flipped.dtype, flipped.tolist()) == (torch.uint8, [255, 254, 0])


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
    attack = fl.attacks.InnerProductManipulation(LIARS, epsilon=30.0)
    (honest, *_), (attacked, strategy, _) = fit(), fit(attack)
    found = pairs(honest, attacked)
    mean = torch.stack([before for client, before, _ in found if client not in LIARS]).mean(0)
    for client, before, after in found:
        torch.testing.assert_close(after, -30 * mean if client in LIARS else before)
    torch.testing.assert_close(strategy.last_round.update_norms, attacked.rows[0].double().norm(dim=1))
    guarded, strategy, _ = fit(attack, guard=fl.guards.MultiKrum(1, keep=3))
    assert {*LIARS} <= set(strategy.last_round.dropped)
    assert not {*LIARS} & set(guarded.cohorts[0].client_ids)
