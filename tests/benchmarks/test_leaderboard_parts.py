# SPDX-License-Identifier: Apache-2.0
"""The parts of the leaderboard: intervals, rankings, methods, data and messages."""

import hashlib
from math import isnan, nan
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from small_suite import TINY, blobs, federate, network
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.leaderboard import data, networks, standing, text, traffic
from benchmarks.leaderboard.bootstrap import difference, mean, worst_tenth
from benchmarks.leaderboard.learners import PeopleLearner
from benchmarks.leaderboard.methods import REFERENCE, TELLING, all_methods, server_steps, with_groups
from benchmarks.leaderboard.ranking import HeldAUROC
from benchmarks.papers.sources import MissingDataError
from fl_lightning.metrics import DemographicParity
from fl_lightning.report import ClientValues


def test_the_bootstrap_finds_a_known_interval():
    generator = np.random.default_rng(5)
    reference = generator.normal(0.7, 0.2, (1, 400))
    ours = reference + generator.normal(0.05, 0.1, (1, 400))
    found = difference(ours, reference, mean, draws=4000)
    gain = (ours - reference).ravel()
    width = 1.96 * gain.std() / 20  # the normal interval of a mean of 400
    assert found.difference == pytest.approx(gain.mean())
    assert found.low == pytest.approx(gain.mean() - width, abs=0.002)
    assert found.high == pytest.approx(gain.mean() + width, abs=0.002)
    assert not found.is_noise
    assert difference(ours, reference, mean) == difference(ours, reference, mean), "seeded"
    assert difference(reference, reference, worst_tenth) == (0.0, 0.0, 0.0), "paired"
    assert difference(reference, reference, mean).is_noise


def test_the_bootstrap_draws_seeds_as_well():
    reference = np.zeros((3, 50))
    ours = reference + np.array([[-0.1], [0.0], [0.4]])  # the seeds disagree, and clients say nothing
    found = difference(ours, reference, mean)
    assert found.difference == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(-0.1, abs=0.04), pytest.approx(0.4, abs=0.04))


def test_clients_without_a_value_are_left_out_and_misfits_refused():
    reference = np.array([[0.5, nan, 0.5, 0.5]])
    ours = np.array([[0.7, 0.9, nan, 0.7]])
    assert difference(ours, reference, mean).difference == pytest.approx(0.2)
    with pytest.raises(ValueError, match="must have all its values"):
        difference(reference, reference * nan, mean)
    with pytest.raises(ValueError, match="must be"):
        difference(ours, reference[:, :2], mean)


def test_the_worst_tenth_is_that_of_the_summary():
    values = np.random.default_rng(0).random((2, 37))
    expected = [fl.metrics.functional.worst_fraction(torch.tensor(row), 0.1) for row in values]
    assert worst_tenth(values) == pytest.approx(float(sum(expected)) / 2)


def test_auroc_counts_the_classes_that_a_client_has():
    logits = torch.tensor([[3.0, 1, 0], [2, 3, 0], [0, 2, 0], [1, 0, 9]])
    metric = HeldAUROC()
    metric.update(logits[:2], torch.tensor([0, 0]))
    assert isnan(metric.compute())
    metric.update(logits[2:], torch.tensor([1, 0]))
    scores = logits.softmax(1)
    first = float((scores[[0, 1, 3], 0] > scores[2, 0]).float().mean())
    second = float((scores[2, 1] > scores[[0, 1, 3], 1]).float().mean())
    metric = HeldAUROC()
    metric.update(logits, torch.tensor([0, 0, 1, 0]))
    assert metric.compute() == pytest.approx((first + second) / 2)
    binary = HeldAUROC()
    binary.update(torch.tensor([[0.0, 1], [0, 3], [0, 2]]), torch.tensor([0, 1, 0]))
    assert binary.compute() == 1.0


def test_every_method_trains_a_round_and_has_traffic(monkeypatch):
    monkeypatch.setattr(traffic, "ROUNDS", 2)  # the first of which does not count
    dataset = federate(None).data.train_dataloader().dataset
    bytes_up = {}
    for name, strategy in all_methods(3, 1.0).items():
        bytes_up[name] = traffic.measured(strategy, TINY.learner, dataset)
    row, numbers = 4 * sum(p.numel() for p in network().parameters()), 300  # among them what the schedule remembers
    assert row < bytes_up[REFERENCE].up < row + numbers
    assert row < bytes_up[REFERENCE].down < row + numbers
    assert bytes_up["SCAFFOLD"].up == bytes_up[REFERENCE].up + row
    assert bytes_up["FedMDFG"].down >= bytes_up[REFERENCE].down + row, "it asks again"
    assert bytes_up["FedPer"].up == bytes_up[REFERENCE].up, "what stays at the client is sent as zeros"
    assert set(TELLING) <= set(bytes_up)


def test_people_have_groups():
    torch.manual_seed(0)  # FCFL warns if the first weights predict one class for everybody
    module = PeopleLearner(_binary, 1, 0.1)
    people = blobs(120, 0).tensors
    labels, groups = (people[1] == 1).long(), torch.arange(120) % 2
    dataset = TensorDataset(people[0], labels, groups)
    dm = fl.FederatedDataModule(dataset, fl.data.IID(3), labels=labels, test=dataset, batch_size=20, holdout=0.2)
    for strategy in with_groups(2).values():
        trainer = fl_trainer(strategy)
        trainer.fit(module, dm)
        (found,) = trainer.test(module, dm, verbose=False)
        record = strategy.last_evaluation
        assert set(record.values) >= {"test_acc", "test_auroc", "test_dp_gap", "test_odds_gap"}
    parity = DemographicParity()
    parity.update(module(people[0]).argmax(1), groups)
    assert found["test_dp_gap"] == pytest.approx(float(parity.compute()), abs=1e-6)


def test_crossed_groups_are_compared_over_the_people_of_all_clients():
    module = PeopleLearner(_binary, 1, 0.1, num_groups=4)
    inputs = blobs(120, 0).tensors[0]
    labels, groups = torch.arange(120) % 2, torch.arange(120) % 7 % 3  # nobody in 3
    dataset = TensorDataset(inputs, labels, groups)
    dm = fl.FederatedDataModule(dataset, fl.data.IID(3), labels=labels, test=dataset, batch_size=20)
    strategies = with_groups(2, 4)
    assert "FairFed" not in strategies
    for strategy in strategies.values():
        trainer = fl_trainer(strategy)
        trainer.fit(module, dm)
        trainer.test(module, dm, verbose=False)
        predictions = module(inputs).argmax(1)
        rates = [float(predictions[groups == group].float().mean()) for group in range(3)]
        right = [float((predictions == labels)[groups == group].float().mean()) for group in range(3)]
        found = standing.people_together(ClientValues.of(strategy.last_evaluation))
        assert list(found.values()) == pytest.approx([max(rates) - min(rates), min(right)], abs=1e-6)


def _binary():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def fl_trainer(strategy):
    return L.Trainer(
        max_epochs=1, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_adult_is_divided_by_age(tmp_path):
    row = "{}, Private, 1, Bachelors, 13, Never-married, Sales, Husband, White, {}, 0, 0, 40, Cuba, {}"
    ages = [17, 24, 25, 29, 30, 64, 65, 90] * 3
    lines = [row.format(age, ("Male", "Female")[k % 2], (">50K", "<=50K")[k % 3 == 0]) for k, age in enumerate(ages)]
    (tmp_path / "Adult").mkdir()
    for name in ("adult.data", "adult.test"):
        (tmp_path / "Adult" / name).write_text("\n".join(lines) + "\n")
    assert data.people(tmp_path, ("race", "sex")).data.train_dataloader().dataset[0][0].shape == (92,)
    dm = data.people(tmp_path, ("sex",))
    assert sorted(dm.client_names) == ["17-24", "25-29", "30-34", "60-64", "65+"]
    assert set(dm.test_dataloader().sizes.tolist()) == {3, 6}
    (inputs, _, groups), _ = next(dm.train_dataloader().batches(0, seed=None))
    assert inputs.shape[1] == 97
    assert inputs.sum(1).tolist() == [7.0] * len(inputs)
    assert set(groups.tolist()) <= {0, 1}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library."""
    parts = {
        "small.py": b"x = 1\n",
        "module.py": b"import sys\n" * 40,
        "package/first.py": b"def f(x):\n    return x\n" * 10,
        "package/second.py": b"# \xc3\xa9 ~\t" * 20,
        "package/tests/test_first.py": b"assert True\n" * 50,
        "_sysconfigdata_here.py": b"path\n" * 100,
    }
    for name, content in parts.items():
        path = tmp_path / "stdlib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(text, "SMALLEST", 100)
    monkeypatch.setattr(text, "LARGEST", 420)
    module, package = parts["module.py"][:420], (parts["package/first.py"] + parts["package/second.py"])[:420]
    monkeypatch.setattr(text, "DIGEST", hashlib.sha256(module + package).hexdigest())
    return {"module": module, "package": package}


def test_modules_of_the_standard_library_are_clients(library, tmp_path):
    assert text.corpus(tmp_path) == library
    dm = data.modules(tmp_path, 5)
    assert dm.client_names == ("module", "package")
    windows = len(library["module"]) // 17
    train, test = dm.train_dataloader(), dm.test_dataloader()
    assert int(train.sizes[0] + dm.val_dataloader().sizes[0]) == windows - windows // 5
    assert int(test.sizes[0]) == windows // 5
    (contexts, following), _ = next(test.batches(0, seed=None))
    assert networks.characters()(contexts).shape == (len(following), text.CHARACTERS)
    assert following.max() < text.CHARACTERS
    (tmp_path / "stdlib" / "module.py").write_text("import os\n" * 40)
    with pytest.raises(MissingDataError, match=r"standard library of CPython 3\.11\.7 is needed: .* found another"):
        text.corpus(tmp_path)


def test_windows_are_read_back_as_the_text():
    written = "".join(map(chr, [*range(32, 127), 10])) * 2 + "\t\x80"
    contexts, following = text.windows(written.encode("latin-1"))
    classes = torch.cat([contexts, following[:, None]], 1).flatten().tolist()
    characters = ["\n", *map(chr, range(32, 127)), "?"]
    read = "".join(characters[each] for each in classes)
    assert len(read) == len(written) // 17 * 17
    assert read == written.replace("\t", "?").replace("\x80", "?")[: len(read)]
    assert contexts.shape == (len(written) // 17, 16)


def test_server_steps_are_taken():
    found = {}
    for name, strategy in server_steps(1.0).items():
        torch.manual_seed(0)
        module, data = TINY.learner(lr=0.1), federate(None)
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        fl_trainer(strategy).fit(module, data)
        found[name] = before - nn.utils.parameters_to_vector(module.parameters()).detach()
    plain = found[REFERENCE]
    for name, times in (("server rate 0.5", 0.5), ("server rate 2", 2.0), ("rate 0.3, momentum 0.9", 0.3)):
        assert torch.allclose(found[f"FedAvg, {name}"], times * plain, atol=1e-6)
    assert torch.allclose(found["FedMGDA+, server rate 16"], 4 * found["FedMGDA+, server rate 4"], atol=1e-5)
    assert torch.equal(found["FedFV without memory"], found["FedFV"]), "in the first round"


def test_domains_share_nothing(monkeypatch, tmp_path):
    halves = {"a": (40, 20), "b": (20, 10)}

    def domain(root, name, side):
        return [
            TensorDataset(torch.arange(n)[:, None] + 1000 * (name == "b"), torch.arange(n) % 2) for n in halves[name]
        ]

    monkeypatch.setattr(data, "domain", domain)
    dm = data.domains(("a", "b"), 2, 0.5, 8, tmp_path, 4)
    assert dm.client_names == ("a 1", "a 2", "b 1", "b 2")
    train, test = dm.train_dataloader(), dm.test_dataloader()
    assert (train.sizes + dm.val_dataloader().sizes).tolist() == [20, 20, 10, 10]
    assert test.sizes.tolist() == [10, 10, 5, 5]
    seen = [set(loader_values(test, k)) for k in range(4)]
    assert not seen[0] & seen[1]
    assert data.domains(("a",), 1, 1.0, 8, tmp_path, 4).client_names == ("a",)


def loader_values(loaders, client):
    return [int(v) for batch, _ in loaders.batches(client, seed=None) for v in batch[0].flatten()]


def test_data_whose_samples_are_drawn_are_drawn_anew(tmp_path):
    pair = SimpleNamespace(train=blobs(120, 0), test=blobs(60, 1))
    source = SimpleNamespace(load=lambda root: pair)
    whole = data.images(source, fl.data.IID(4), tmp_path)
    own = data.images(source, fl.data.IID(4), tmp_path, tests=10)
    for one in (whole, own):
        again, other = one.divided_anew(0), one.divided_anew(1)
        trained = [each.train_dataloader().indices(0).tolist() for each in (one, again, other)]
        assert trained[0] == trained[1] != trained[2]
        tested = [[batch for batch, _ in each.test_dataloader().batches(0, seed=None)] for each in (one, again, other)]
        values = [torch.cat([batch[0] for batch in batches]) for batches in tested]
        assert torch.equal(values[0], values[1])
        assert values[0].shape != values[2].shape or not torch.equal(values[0], values[2])
        assert isinstance(other, data.Drawn)
