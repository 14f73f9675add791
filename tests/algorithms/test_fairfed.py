# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import Net, Rounds, client_data

import fl_lightning as fl
from fl_lightning.algorithms import FairFed, FedAvg

BETA = 0.7


class Form:
    """The weights, from the paper's steps, with dicts and plain numbers."""

    def __init__(self, total):
        self.w, self.total = {}, total

    def weights(self, ids, sizes, predicted, hits):
        def disparity(counts):
            (ones0, ones1), (n0, n1) = counts
            return None if 0 in (n0, n1) else ones0 / n0 - ones1 / n1

        pooled = [[sum(c[row][g] for c in predicted) for g in (0, 1)] for row in (0, 1)]
        accuracy = sum(right for right, _ in hits) / sum(n for _, n in hits)
        gaps = []
        for counts, (right, n) in zip(predicted, hits, strict=True):
            own, common = disparity(counts), disparity(pooled)
            gaps.append(abs(right / n - accuracy) if None in (own, common) else abs(own - common))
        for i, size, gap in zip(ids, sizes, gaps, strict=True):
            self.w[i] = max(self.w.get(i, size / self.total) - BETA * (gap - sum(gaps) / len(gaps)), 0.0)
        return [self.w[i] / sum(self.w[j] for j in ids) for i in ids]


@pytest.mark.parametrize("known", [True, False])
def test_equals_the_papers_steps(known):
    generator = torch.Generator().manual_seed(1)
    rule, undefined = FairFed(BETA), 0
    form = Form(200.0 if known else None)
    for when in range(8):
        ids = torch.randperm(5, generator=generator)[:3].tolist()
        sizes = [10.0 * (i + 1) for i in ids]
        count = torch.randint(0, 4, (3, 2), generator=generator)
        ones = (torch.rand(3, 2, generator=generator) * count).floor()
        right = torch.randint(3, 9, (3,), generator=generator)
        extras = {
            "group_predictions": torch.stack([ones, count.float()], 1).double(),
            "right_predictions": torch.stack([right, torch.full((3,), 9)], 1).double(),
        }
        undefined += int((count == 0).any(1).sum())
        rows = random_rows(3, when)
        form.total = form.total if known else sum(sizes)
        expected = form.weights(ids, sizes, *(extras[name].tolist() for name in extras))
        samples = 200 if known else None
        cohort = make_cohort(rows, ids=ids, sizes=sizes, when=when, extras=extras, num_samples=samples)
        step = rule.aggregate(cohort)
        torch.testing.assert_close(rule.report.weights, torch.tensor(expected).double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(step, rule.report.weights @ rows)
    assert undefined > 2


@pytest.mark.parametrize("notion", ["eo", "dp"])
def test_clients_count_what_the_global_model_predicts(notion):
    """In evaluation mode, whatever training then does; BatchNorm's statistics and the update are FedAvg's."""
    data, server = client_data(seed=5), FairFed(notion=notion)
    run = Rounds(server, server.client_rule(), data, module=Net(dropout=0.4))
    plain = Rounds(FedAvg(), fl.algorithms.ClientRule(), data, module=Net(dropout=0.4))
    torch.manual_seed(2)
    row, report, _, after = run.train(1)
    torch.manual_seed(2)
    expected, _, _, buffers = plain.train(1)
    assert torch.equal(row, expected)
    assert all(torch.equal(after[name], buffers[name]) for name in buffers)
    module = Net(dropout=0.4).eval()
    with torch.no_grad():
        asked = [module.federated_groups(batch) for batch in data[1]]
    z, y, a = (torch.cat(column) for column in zip(*asked, strict=True))
    kept = torch.ones_like(y) if notion == "dp" else y
    for group in (0, 1):
        chosen = (kept == 1) & (a == group)
        found = report.extras["group_predictions"][:, group].tolist()
        assert found == [float((z[chosen] > 0).sum()), float(chosen.sum())]
    assert report.extras["right_predictions"].tolist() == [float(((z > 0) == (y == 1)).sum()), float(len(y))]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"extras must hold 'group_predictions' \[m, 2, 2\] for FairFed"):
        FairFed().aggregate(make_cohort(random_rows(2, 1), extras={}))
    with pytest.raises(ValueError, match="beta of FairFed must be"):
        FairFed(beta=-1.0)
