# SPDX-License-Identifier: Apache-2.0
"""Sites keep their number and their name through training, validation and test, also those that training lacks."""

import logging
import re

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support import CLASSES, FEATURES, Classifier, fit, fresh, quiet_trainer, train
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl
from fl_lightning.report.conclusion import lede
from fl_lightning.report.runs_of_a_method import by_method
from fl_lightning.report.tables import comparison

SITES = ("basel", "chur", "davos", "elm")


def sited(sites, samples=24, seed=0):
    """Data of these sites, each with labels of its own making: a model of one site is wrong at the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples * len(sites), FEATURES, generator=generator)
    owner = torch.arange(len(x)) % len(sites)
    shift = torch.tensor([SITES.index(site) for site in sites])[owner]
    data = TensorDataset(x, (x[:, :CLASSES].argmax(1) + shift) % CLASSES)
    data.site = [sites[int(o)] for o in owner]
    return data


def divided(train=SITES, val=SITES, test=SITES, **options):
    options = {"evaluation": "independent", **options}
    return fl.FederatedDataModule(
        sited(train), fl.data.ByKey("site"), val=sited(val, seed=1), test=sited(test, seed=2), batch_size=8, **options
    )


class Measured(Classifier):
    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(1) == y).float().mean())


def test_a_site_that_training_lacks_does_not_shift_the_others(caplog):
    ditto = fl.algorithms.Ditto(lam=0.0)
    data = divided(train=("basel", "chur", "elm"))
    module, strategy, trainer = train(fresh(Measured), 40, algorithm=ditto, data=data, clients_per_round=1.0)
    with caplog.at_level(logging.INFO):
        trainer.test(module, data, verbose=False)
    assert "clients that are not in training, evaluated with the global model: 'davos'" in caplog.text
    record = strategy.last_evaluation
    assert record.client_names == ("basel", "chur", "elm", "davos")
    assert record.client_ids == (0, 1, 2, 3)
    personal = record.values["personal/test_acc"]
    assert personal.isnan().tolist() == [False, False, False, True]
    assert "personal/test_acc" not in record.undefined
    # Everybody's own model is good at home, and was tested there.
    assert personal[:3].mean() > record.values["test_acc"][:3].mean() + 0.2
    held = sited(SITES, seed=2)
    for client, site in enumerate(("basel", "chur", "elm")):
        here = torch.tensor([name == site for name in held.site])
        own = fresh(Measured).eval()
        torch.nn.utils.vector_to_parameters(strategy.client_rule.personal_model(client).params, own.parameters())
        x, y = held.tensors[0][here], held.tensors[1][here]
        assert float(personal[client]) == pytest.approx(float((own(x).argmax(1) == y).float().mean()))


def test_a_site_without_evaluation_data_keeps_its_number_and_has_an_empty_row(tmp_path, capsys):
    strategy, data, logger = fl.FederatedStrategy(), divided(test=("basel", "elm", "chur")), CSVLogger(tmp_path)
    said = re.escape("clients that train and have nothing to be evaluated on in test: 2 ('davos'). Their rows")
    with pytest.warns(UserWarning, match=said):
        quiet_trainer(strategy, logger=logger).test(fresh(Measured), data, verbose=False)
    quiet_trainer(strategy, logger=logger).test(fresh(Measured), data, verbose=False)  # it is said once
    record = strategy.last_evaluation
    assert (record.client_ids, record.client_names, record.sizes.tolist()) == ((0, 1, 2, 3), SITES, [24, 24, 0, 24])
    values, summary = record.values["test_acc"], record.summary("test_acc")
    assert values.isnan().tolist() == [False, False, True, False]
    assert (summary["mean"], summary["clients"]) == (pytest.approx(values[[0, 1, 3]].mean()), 3)
    printed = capsys.readouterr().out
    assert re.search(r"^davos +0 +-$", printed, re.MULTILINE)
    assert "nothing to be evaluated on: davos" in printed
    assert "fewer than 10 samples" not in printed
    assert not [name for row in logger.experiment.metrics for name in row if name.endswith("client/2")]


class Counting(Classifier):
    def __init__(self):
        super().__init__()
        self.score = MulticlassAccuracy(CLASSES)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.score(self(x), y)
        self.log("test_acc", self.score)
        self.log("test_loss", self(x).square().mean())


def test_a_site_all_of_whose_samples_get_one_class_is_marked(capsys):
    test = sited(SITES, seed=2)
    test.tensors[0][torch.tensor([site == "chur" for site in test.site])] = 0.5  # as statistics of others would do
    sites = fl.FederatedDataModule(sited(SITES), fl.data.ByKey("site"), test=test, evaluation="independent")
    recorder = fl.callbacks.FitRecorder()
    module, strategy, trainer = train(fresh(Counting), 1, data=sites, callbacks=[recorder])
    trainer.test(module, sites, verbose=False)
    assert strategy.last_evaluation.one_class == {"test_acc": (1,)}
    printed = capsys.readouterr().out
    assert re.search(r"^chur \* +24 ", printed, re.MULTILINE)
    assert "* one class for all samples, though they are of several (test_acc): chur" in printed
    record = fl.report.record_from_json(fl.report.record_to_json(recorder.record))
    assert record.last_values().one_class == {"test_acc": (1,)}
    (method,) = by_method([record])
    said = "With \u2068FedAvg\u2069, all samples of \u2068chur\u2069 get one class, though they are of several: "
    assert any(text.startswith(said) for text in lede([method], "test", comparison([method], "test")))


def test_names_are_where_people_look(tmp_path, capsys):
    data = divided()
    table = fl.callbacks.ClientTable(tmp_path)
    module, strategy, trainer = fit(fresh(Measured), 1, data=data, callbacks=[table], log_client_names=True)
    assert data.client_names == SITES
    assert repr(data.partition) == "ByKey('site')"
    assert set(strategy.last_round.client_names) <= set(SITES)
    assert [SITES[i] for i in strategy.last_round.client_ids] == list(strategy.last_round.client_names)
    capsys.readouterr()
    trainer.test(module, data, verbose=False)
    printed = capsys.readouterr().out
    assert all(f"\n{site} " in printed for site in SITES)
    rows = (tmp_path / "clients.csv").read_text()
    assert ",davos" in rows


@pytest.mark.parametrize("by_name", [False, True])
def test_logged_names(by_name, tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(fl.FederatedStrategy(log_client_names=by_name), logger=logger)
    trainer.test(fresh(Measured), divided(), verbose=False)
    logged = {name for row in logger.experiment.metrics for name in row} or set(
        next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    )
    assert ("fed/test_acc/client/davos" in logged) == by_name
    assert ("fed/test_acc/client/2" in logged) != by_name


def test_an_error_names_the_site():
    class Broken(Measured):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    with pytest.raises(fl.ClientError, match=r"client \d \('(basel|chur|davos|elm)'\) in round 0: .*broken"):
        fit(fresh(Broken), 1, data=divided())


class Directions(Classifier):
    """Logs numbers of which a name says nothing, or the wrong thing."""

    def __init__(self):
        super().__init__()
        self.score = MulticlassAccuracy(CLASSES)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.score(logits, y)
        self.log("my_error_rate_inverted", self.score)
        self.log("val_rec", logits.square().mean())
        self.log("val_dp", logits[:, 0].mean() - 0.5)
        self.log("val_kl", logits.exp().mean())

    def on_validation_epoch_end(self):
        self.log("late_loss_free", self.score.compute())


def test_which_end_of_a_metric_is_bad(caplog):
    strategy = fl.FederatedStrategy(fairness_metric="val_rec", fairness_mode={"val_rec": "min"})
    trainer = quiet_trainer(strategy)
    with caplog.at_level(logging.INFO):
        (results,) = trainer.validate(fresh(Directions), divided(), verbose=False)
        trainer.validate(fresh(Directions), divided(), verbose=False)
    record = strategy.last_evaluation
    assert record.modes == {
        "my_error_rate_inverted": "max", "val_rec": "min", "val_dp": "abs", "val_kl": "min", "late_loss_free": "max",
    }  # fmt: skip
    assert caplog.text.count("Good values of metrics, by their names: val_dp near 0, val_kl small. Where that is") == 1
    values = record.values
    assert results["fed/my_error_rate_inverted/worst_5"] == pytest.approx(float(values["my_error_rate_inverted"].min()))
    assert results["fed/val_rec/worst_5"] == pytest.approx(float(values["val_rec"].max()))
    assert results["fed/val_kl/worst_5"] == pytest.approx(float(values["val_kl"].max()))
    assert (values["val_dp"] < 0).any()
    assert results["fed/val_dp/worst_5"] == pytest.approx(float(values["val_dp"].abs().max()))
    assert results["fed/val_dp/mean"] == pytest.approx(float(values["val_dp"].abs().mean()))
