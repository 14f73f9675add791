# SPDX-License-Identifier: Apache-2.0
"""TorchJD's weightings as server rules."""

import importlib
import sys
from itertools import pairwise

import pytest
import torch
from algorithm_cohorts import COLUMNS, SIZES, make_cohort, random_rows
from support import Classifier, federated_blobs, fresh, training_only, weights

import fl_lightning as fl

aggregation = pytest.importorskip("torchjd.aggregation")
from fl_lightning.algorithms.torchjd import DualCone, TorchJD  # noqa: E402


def upgrad():
    return aggregation.UPGradWeighting(projector=DualCone())


WEIGHTINGS = {
    "UPGrad": upgrad,
    "DualProj": lambda: aggregation.DualProjWeighting(projector=DualCone()),
    "MGDA": aggregation.MGDAWeighting,
    "AlignedMTL": aggregation.AlignedMTLWeighting,
    "IMTLG": aggregation.IMTLGWeighting,
    "PCGrad": aggregation.PCGradWeighting,
    "Mean": aggregation.MeanWeighting,
}
STARTS = [sum(SIZES[:i]) for i in range(len(SIZES) + 1)]


@pytest.mark.parametrize("name", ["UPGrad", "DualProj", "MGDA"])
def test_passes_the_public_checks(name):
    fl.testing.check_server_rule(lambda: TorchJD(WEIGHTINGS[name]()))


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("layers", ["module", "model"])
def test_every_layer_as_the_weighting_on_its_own(name, layers):
    rows = random_rows(5, 0)
    layout = fl.ParamLayout.from_sizes(SIZES) if layers == "module" else fl.ParamLayout.from_sizes((COLUMNS,))
    rule = TorchJD(WEIGHTINGS[name](), layers=layers)
    step = rule.aggregate(make_cohort(rows, layout=layout))
    again = TorchJD(WEIGHTINGS[name](), layers=layers).aggregate(make_cohort(rows, layout=layout))
    assert torch.equal(step, again)
    if name == "PCGrad":  # draws its orders
        return
    edges = STARTS if layers == "module" else [0, COLUMNS]
    for start, end in pairwise(edges):
        part = rows[:, start:end]
        gram = part @ part.T
        expected = WEIGHTINGS[name]()(gram / gram.diagonal().mean()) @ part
        torch.testing.assert_close(step[start:end], expected, rtol=1e-9, atol=1e-12)


def test_the_projector_agrees_with_quadprog():
    pytest.importorskip("quadprog")
    pytest.importorskip("qpsolvers")
    rows = random_rows(6, 3)
    gram = rows @ rows.T / rows.square().sum(1).mean()
    exact, theirs = DualCone()(torch.eye(6).double(), gram), aggregation.UPGradWeighting().projector
    close = type(theirs)(reg_eps=1e-12)(torch.eye(6).double(), gram)
    torch.testing.assert_close(exact, close, rtol=1e-6, atol=1e-6)


def test_degenerate_cohorts():
    rule, one, still = TorchJD(upgrad()), random_rows(1, 0), random_rows(3, 0)
    torch.testing.assert_close(rule.aggregate(make_cohort(one)), one[0])
    still[:, : SIZES[0]] = 0
    step = rule.aggregate(make_cohort(still))
    assert not step[: SIZES[0]].any()
    assert step[SIZES[0] :].any()


class Drawn(aggregation.Weighting):
    """Weighs at random, and remembers what it saw and gave."""

    def __init__(self):
        super().__init__()
        self.seen, self.given = [], []

    def forward(self, gram):
        self.seen.append(gram)
        self.given.append(torch.rand(len(gram), dtype=gram.dtype))
        return self.given[-1]


def test_what_a_weighting_sees_and_draws_and_what_it_comes_to():
    still = random_rows(3, 0)
    still[:, : SIZES[0]] = 0

    def weighed(seed, when):
        rule = TorchJD(Drawn(), "tensor", seed)
        rule.aggregate(make_cohort(still, when=when))
        return rule

    rule = weighed(0, 0)
    assert rule.layers == "tensor"
    assert [float(gram.diagonal().mean()) for gram in rule.weighting.seen] == pytest.approx([1.0] * (len(SIZES) - 1))
    drawn = torch.stack(rule.weighting.given)
    coeff = torch.cat((torch.full((1, 3), 1 / 3, dtype=torch.float64), drawn))  # alike where nobody moved
    torch.testing.assert_close(rule.report.weights, torch.tensor(SIZES).double() @ coeff / COLUMNS)
    assert torch.equal(torch.stack(weighed(0, 0).weighting.given), drawn)
    for seed, when in ((1, 0), (0, 1)):
        assert not torch.equal(torch.stack(weighed(seed, when).weighting.given), drawn)


def test_refusals():
    with pytest.raises(TypeError, match=r"must be a TorchJD weighting .* found UPGrad"):
        TorchJD(aggregation.UPGrad(projector=DualCone()))
    with pytest.raises(ValueError, match="must not keep state: GradVacWeighting keeps it by row"):
        TorchJD(aggregation.GradVacWeighting())
    with pytest.raises(RuntimeError, match=r"must return 5 finite weights, found .* in layer 'layer0'"):
        TorchJD(aggregation.ConstantWeighting(torch.tensor([float("nan")] * 5))).aggregate(
            make_cohort(random_rows(5, 0))
        )


@pytest.mark.fit
def test_in_a_trainer():
    def run():
        module = fresh(Classifier, norm=True)
        strategy = fl.FederatedStrategy(TorchJD(upgrad()), clients_per_round=4, seed=1)
        training_only(strategy, 3).fit(module, federated_blobs())
        return weights(module), strategy.last_round

    first, record = run()
    assert torch.equal(first, run()[0])
    assert record.conflicts == 0
    assert not any(record.layer_conflicts.values())


def test_without_torchjd_the_import_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchjd"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fl_lightning.algorithms.torchjd")
    with pytest.raises(ImportError, match=r"needs TorchJD: pip install '.\[torchjd\]' in a checkout"):
        importlib.import_module("fl_lightning.algorithms.torchjd")
