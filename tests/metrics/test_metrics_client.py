# SPDX-License-Identifier: Apache-2.0
import copy
import math
import pickle

import pytest
import torch

from fl_lightning.metrics import BestFraction, ClientStd, EqualizedOdds, FairnessAngle, WorstFraction, functional

METRICS = [
    (lambda: FairnessAngle(6), functional.fairness_angle),
    (lambda: ClientStd(6), functional.std),
    (lambda: WorstFraction(6, 0.4), lambda v: functional.worst_fraction(v, 0.4)),
    (lambda: BestFraction(6, 0.4), lambda v: functional.best_fraction(v, 0.4)),
    (lambda: WorstFraction(6, 0.4, False), lambda v: functional.worst_fraction(v, 0.4, False)),
    (lambda: BestFraction(6, 0.4, False), lambda v: functional.best_fraction(v, 0.4, False)),
]


def samples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(count, generator=generator)
    ids = torch.randint(0, 5, (count,), generator=generator)  # client 5 never has a sample
    return values, ids


def by_hand(values, ids):
    return torch.stack([values[ids == i].double().mean() for i in range(6)])


@pytest.mark.parametrize(("make", "function"), METRICS)
def test_batches_give_the_function_of_the_clients_averages(make, function):
    values, ids = samples(101)
    metric = make()
    for batch_values, batch_ids in zip(values.split(10), ids.split(10), strict=True):
        metric.update(batch_values, batch_ids)
    assert float(metric.compute()) == pytest.approx(float(function(by_hand(values, ids))), rel=1e-5)
    assert math.isnan(metric.client_values()[5])
    metric.reset()
    assert int(metric.counts.sum()) == 0


@pytest.mark.parametrize(("make", "function"), METRICS)
def test_processes_add_up(make, function):
    values, ids = samples(64)
    shards = [make(), make()]
    shards[0].update(values[:20], ids[:20])
    shards[1].update(values[20:], ids[20:])
    frozen = [{"sums": s.sums.clone(), "counts": s.counts.clone()} for s in shards]

    def gather(state, group=None):
        name = "counts" if state.dtype == torch.int64 else "sums"
        return [other[name] for other in frozen]

    metric = shards[0]
    metric.dist_sync_fn, metric.distributed_available_fn = gather, lambda: True
    assert float(metric.compute()) == pytest.approx(float(function(by_hand(values, ids))), rel=1e-5)
    assert torch.equal(metric.counts, frozen[0]["counts"])  # the process keeps its own part


def test_one_id_for_all_values_and_forward():
    metric = ClientStd(3)
    metric.update(torch.tensor([1.0, 0.0]), 0)
    assert float(metric(torch.tensor([True, True]), 2)) == 0.0
    assert float(metric.compute()) == pytest.approx(0.25)
    assert metric.client_values()[[0, 2]].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("values", "ids", "message"),
    [
        (torch.ones(2), torch.tensor([0, 3]), r"client_ids must be in \[0, 3\), found \[3\]"),
        (torch.ones(2), torch.tensor([-1, 0]), r"client_ids must be in \[0, 3\), found \[-1\]"),
        (torch.ones(2), torch.tensor([0.0, 1.0]), "client_ids must be integers, found dtype torch.float32"),
        (torch.ones(2), torch.tensor([0, 1, 2]), "client_ids must be one id, or one per value, 2, found 3"),
        (
            torch.tensor([1.0, float("nan")]),
            torch.tensor([0, 1]),
            r"values must be finite, found others for clients \[1\]",
        ),
    ],
)
def test_bad_updates_change_nothing(values, ids, message):
    metric = FairnessAngle(3)
    with pytest.raises(ValueError, match=message):
        metric.update(values, ids)
    assert int(metric.counts.sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_samples_of_a_client_all_count(dtype):
    # The pixels of some pictures are as many; a float32 that counts by ones stops at 2 ** 24, a bfloat16 at 256.
    metric = torch.nn.Sequential(WorstFraction(2, 1.0)).to(dtype)[0]
    metric.sums += 2.0**24
    metric.counts += 2**24
    for _ in range(300):
        metric.update(torch.ones(1), 0)
    assert metric.client_values().tolist() == [1.0, 1.0]
    assert metric.sums.tolist() == [2**24 + 300, 2**24]
    metric.reset()
    metric.update(torch.ones(2), 1)
    assert metric.sums.tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("make", "values"),
    [(lambda: WorstFraction(6, 0.4), samples(30)), (EqualizedOdds, torch.randint(0, 2, (3, 30)))],
)
def test_copies_and_checkpoints(make, values):
    metric, restored = make(), make()
    metric.update(*values)
    for twin in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert float(twin.compute()) == float(metric.compute())
    for one in (metric, restored):
        one.persistent(True)
    restored.load_state_dict(metric.state_dict())
    assert restored.client_values().nan_to_num().equal(metric.client_values().nan_to_num())
