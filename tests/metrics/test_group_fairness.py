# SPDX-License-Identifier: Apache-2.0
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchmetrics.classification import BinaryAUROC

import fl_lightning as fl
from fl_lightning.lightning.names import LightningModule
from fl_lightning.metrics import DemographicParity, EqualizedOdds, EqualOpportunity, functional

CLIENTS = 5
METRICS = {"dp": DemographicParity, "eo": EqualOpportunity, "odds": EqualizedOdds}


def people(count=300, seed=0, num_groups=2):
    """Predictions, labels, groups, client ids; client 3 has group 0 alone, and client 4 has no data."""
    draw = torch.Generator().manual_seed(seed)
    predictions, labels = (torch.randint(0, 2, (count,), generator=draw) for _ in range(2))
    groups, ids = (torch.randint(0, high, (count,), generator=draw) for high in (num_groups, 4))
    return predictions, labels, torch.where(ids == 3, 0, groups), ids


def rates_by_loop(predictions, labels, groups, given):
    """Rates by group, of the groups that have samples with that label."""
    counts = {}
    for predicted, label, group in zip(predictions.tolist(), labels.tolist(), groups.tolist(), strict=True):
        if given is None or label == given:
            hits, total = counts.get(group, (0, 0))
            counts[group] = hits + predicted, total + 1
    return {group: hits / total for group, (hits, total) in counts.items()}


def gap_by_loop(predictions, labels, groups, given=None, signed=False):
    rates = rates_by_loop(predictions, labels, groups, given)
    if len(rates) < 2:
        return math.nan
    return rates[1] - rates[0] if signed else max(rates.values()) - min(rates.values())


def fed(kind, predictions, labels, groups, ids, **options):
    metric = METRICS[kind](num_clients=CLIENTS, **options)
    for p, y, a, k in zip(*(part.split(17) for part in (predictions, labels, groups, ids)), strict=True):
        metric.update(*((p, a) if kind == "dp" else (p, y, a)), client_ids=k)
    return metric


@pytest.mark.parametrize(("kind", "given"), [("dp", None), ("eo", 1)])
@pytest.mark.parametrize("num_groups", [2, 3])
def test_values_per_client_and_pooled_are_those_of_a_plain_loop(kind, given, num_groups):
    predictions, labels, groups, ids = people(num_groups=num_groups)
    metric = fed(kind, predictions, labels, groups, ids, num_groups=num_groups)
    shares = [tuple(part[ids == k] for part in (predictions, labels, groups)) for k in range(CLIENTS)]
    expected = [gap_by_loop(*share, given) for share in shares]
    assert metric.client_values().tolist() == pytest.approx(expected, nan_ok=True, abs=1e-15)
    assert math.isnan(expected[3])
    assert math.isnan(expected[4])
    assert float(metric.pooled()) == pytest.approx(gap_by_loop(predictions, labels, groups, given), abs=1e-15)
    assert float(metric.compute()) == pytest.approx(max(expected[:3]), abs=1e-15)
    frame = metric.frame()
    assert dict(enumerate(frame.by_group.tolist())) == pytest.approx(
        rates_by_loop(predictions, labels, groups, given), abs=1e-15
    )
    assert metric.client_frames().by_group.shape == (CLIENTS, num_groups)
    function = functional.demographic_parity if kind == "dp" else functional.equal_opportunity
    alone = function(*((predictions.bool(), groups) if kind == "dp" else (predictions.bool(), labels, groups)))
    assert torch.equal(alone.by_group, frame.by_group)
    assert torch.equal(alone.overall, frame.overall)
    metric.reset()
    assert int(metric.totals.sum()) == 0


@pytest.mark.parametrize(("kind", "given"), [("dp", None), ("eo", 1)])
def test_signed_values_are_group_1_less_group_0(kind, given):
    predictions, labels, groups, ids = people(seed=3)
    metric = fed(kind, predictions, labels, groups, ids, compare="signed")
    shares = [tuple(part[ids == k] for part in (predictions, labels, groups)) for k in range(CLIENTS)]
    expected = [gap_by_loop(*share, given, signed=True) for share in shares]
    assert metric.client_values().tolist() == pytest.approx(expected, nan_ok=True, abs=1e-15)
    assert min(expected[:3]) < 0 < max(expected[:3])
    assert float(metric.compute()) == pytest.approx(max(expected[:3], key=abs), abs=1e-15)
    assert metric.higher_is_better is None
    with pytest.raises(ValueError, match="compare='signed' of DemographicParity needs num_groups=2, found 3"):
        DemographicParity(3, compare="signed")


def test_the_worst_ratio_is_the_smallest():
    metric = fed("odds", *people(), compare="ratio")
    values = metric.client_values()
    assert metric.compute() == values[:3].min()
    assert metric.higher_is_better
    assert not EqualizedOdds().higher_is_better


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("compare", ["difference", "ratio"])
def test_one_group_alone_makes_no_number(kind, compare):
    groups, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    metric = fed(kind, ones, ones, groups, groups, compare=compare)
    assert math.isnan(metric.compute())
    assert math.isnan(metric.pooled())
    assert math.isnan(getattr(functional.demographic_parity(ones, groups), compare)("to_overall"))
    assert math.isnan(functional.demographic_parity(ones[:0], groups[:0]).overall)


def test_equalized_odds_leave_out_a_rate_that_is_undefined():
    predictions, labels = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([1, 1, 0, 0, 0])
    groups = torch.tensor([0, 1, 0, 1, 1])  # nobody with label 1 is predicted 1: the ratio of zeros
    odds = EqualizedOdds(compare="ratio")
    odds.update(predictions, labels, groups)
    assert float(odds.compute()) == 0.5
    mean = EqualizedOdds(agg="mean")
    mean.update(predictions, labels, groups)
    assert float(mean.compute()) == 0.25
    positives = EqualizedOdds()
    positives.update(predictions[:2], labels[:2], groups[:2])
    assert float(positives.compute()) == 0.0
    assert positives.frame().by_group.isnan().tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([0.5]), torch.tensor([1])), r"predictions must be 0 or 1, found \[0.5\]"),
        ((torch.tensor([1]), torch.tensor([2])), r"groups must be integers from 0 to below num_groups=2, found \[2\]"),
        ((torch.tensor([1]), torch.tensor([0.5])), r"groups must be integers from 0 to .*, found \[0.5\]"),
        ((torch.tensor([1]), torch.tensor([1, 0])), r"groups must be a vector .* \[1\], found \[2\]"),
        ((torch.tensor([[1]]), torch.tensor([[1]])), r"predictions must be a vector"),
        ((torch.tensor([1]), torch.tensor([1]), 3), r"client_ids must be in \[0, 3\), found \[3\]"),
        ((torch.tensor([1]), torch.tensor([1]), torch.tensor([0.0])), r"client_ids must be integers"),
        ((torch.tensor([1]), torch.tensor([1]), torch.tensor([0, 1])), r"client_ids must be one id, or one per"),
    ],
)
def test_bad_input_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        DemographicParity(num_clients=3).update(*arguments)


def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "groups.md").read_text(encoding="utf-8")
    module, frame, clients = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    predictions, labels, groups, ids = people(num_groups=3)
    names = {"fl": fl, "L": SimpleNamespace(LightningModule=LightningModule), "BinaryAUROC": BinaryAUROC}
    names |= {"predictions": predictions, "labels": labels, "groups": groups, "ids": ids}
    for block in (module.replace("...", "super().__init__()"), frame, clients):
        exec(block, names)
    assert names["metric"].client_frames().by_group.shape == (4, 3)
    judge, logged = names["MyLitModule"](), {}
    judge.net, judge.log = torch.nn.Linear(2, 1), lambda name, metric: logged.update({name: float(metric.compute())})
    judge.validation_step((torch.randn(300, 2), labels, groups), 0)
    assert set(logged) == {"val_parity_gap", "val_odds_ratio", "val_auroc_gap"}
    assert all(0 <= value <= 1 for value in logged.values())
