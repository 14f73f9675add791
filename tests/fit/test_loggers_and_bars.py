# SPDX-License-Identifier: Apache-2.0
"""What loggers write, what bars show, and what else is printed."""

import csv
import re
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from plain_loop import evaluate
from resuming import ALGORITHMS
from support import Adapted, Classifier, federated_blobs, fit, fresh, quiet_trainer, train
from watching import Records

import fl_lightning as fl
from fl_lightning import guards

TABLE = Path(__file__).parents[2] / "docs" / "logged_names.md"


def fit_logging(rounds=3, norm=False, kind=Classifier, **options):
    """A fit of a module that logs its loss."""
    return fit(fresh(kind, log=True, norm=norm), rounds, **options)


def csv_rows(logger):
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def by_name(rows):
    """``{name: [(step, epoch, value), ...]}``"""
    found = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "epoch"):
                found[name].append((row["step"], row["epoch"], value))
    return found


# ---- loggers


def test_csv_has_every_number_of_every_round_once(tmp_path):
    logger, seen = CSVLogger(tmp_path), Records()
    module, _, trainer = fit_logging(logger=logger, callbacks=[seen], num_sanity_val_steps=2)
    records = zip(seen.rounds, seen.evaluations[-3:], strict=True)
    logged = by_name(csv_rows(logger))
    for name, values in logged.items():
        if name.startswith(("fed/", "val_")):
            # One value per round, at the step of the round's last client.
            assert [(step, epoch) for step, epoch, _ in values] == [(2, 0), (5, 1), (8, 2)], name
    last = {name: values[-1][2] for name, values in logged.items()}
    for index, (round_, evaluation) in enumerate(records):
        assert logged["fed/step_norm"][index][2] == pytest.approx(round_.step_norm, rel=1e-5)
        assert logged["fed/conflicts"][index][2] == round_.conflicts
        assert [logged[f"fed/client/{place}"][index][2] for place in range(3)] == list(round_.client_ids)
        weights = [logged[f"fed/weight/{place}"][index][2] for place in range(3)]
        assert weights == pytest.approx(round_.weights.tolist())
        assert sum(weights) == pytest.approx(1)
        for client, value in zip(evaluation.client_ids, evaluation.values["val_acc"].tolist(), strict=True):
            assert logged[f"fed/val_acc/client/{client}"][index][2] == pytest.approx(value)
    clients, (loss, accuracy, _) = evaluate(module)
    assert last["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert last["val_acc"] == pytest.approx(accuracy, rel=1e-5)
    assert {c: last[f"fed/val_acc/client/{c}"] for c in clients} == pytest.approx({c: v[1] for c, v in clients.items()})
    assert not [name for name in trainer.callback_metrics if re.match("fed/val_.*/client/", name)]


class LogsEpochs(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss


def test_training_values_of_an_epoch_are_means_over_the_rounds_samples(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(fresh(LogsEpochs, log=True), logger=logger)
    logged = by_name(csv_rows(logger))
    assert len(logged["mean_loss"]) == 3
    assert [v for *_, v in logged["mean_loss"]] == pytest.approx([v for *_, v in logged["fed/train_loss"]], rel=1e-5)
    assert len(logged["train_loss"]) == 3 * 3  # once per client, of its last step


class LogsClients(Callback):
    """Logs once per client, before and after its training."""

    def __init__(self):
        self.sizes = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.log("before", float(batch.client_id), on_step=False, on_epoch=True)
        self.sizes.setdefault(trainer.current_epoch, {})[batch.client_id] = batch.num_samples

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("after", float(batch.client_id), on_step=False, on_epoch=True)
        module.log("once", float(batch.client_id), on_step=False, on_epoch=True, batch_size=1)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("executor", [None, fl.executors.Parallel(2)])
def test_what_callbacks_log_per_client_counts_as_much_as_the_clients_samples(tmp_path, executor, log):
    logger, callback = CSVLogger(tmp_path), LogsClients()
    strategy = fl.FederatedStrategy(clients_per_round=3, executor=executor)
    quiet_trainer(strategy, 3, logger=logger, callbacks=[callback]).fit(fresh(log=log), federated_blobs())
    logged = by_name(csv_rows(logger))
    for index, sizes in callback.sizes.items():
        assert len(set(sizes.values())) > 1
        expected = sum(client * size for client, size in sizes.items()) / sum(sizes.values())
        assert logged["before"][index][-1] == pytest.approx(expected, rel=1e-5)
        assert logged["after"][index][-1] == pytest.approx(expected, rel=1e-5)
        assert logged["once"][index][-1] == pytest.approx(sum(sizes) / len(sizes), rel=1e-5)


def table():
    """The names in the first column of the documented table, with their last columns."""
    rows = [
        re.split(r" ?\| ?", line) for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    return {row[1].strip("`"): row[3] for row in rows}


def folders(name):
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def pattern(name):
    kinds = {
        "<layer>": r"[\w.]+",
        "<guard>": r"(?!AdaptiveNormClipping/bound)\w+",
        "<metric>": r"(val|test)_(loss|acc)",
        "<place>": r"\d+",
        "<id>": r"\d+",
        "<summary>": r"[a-z_0-9]+(/\d+)?",
    }
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(kinds.get(part, re.escape(part)) for part in parts))


def test_the_documented_table_is_what_is_logged(tmp_path):
    names = set()
    needed = partial(fl.algorithms.FedLF, fair_row="needed")
    for method, algorithm in {**ALGORITHMS, "FedLF where needed": needed}.items():
        logger = CSVLogger(tmp_path, version=method)
        module, _, trainer = fit_logging(
            2 if method == "MMPF" else 1, norm=method == "FedBN", algorithm=algorithm(), logger=logger
        )
        names |= {name for row in csv_rows(logger) for name in row}
        names |= set(trainer.callback_metrics) | set(trainer.progress_bar_metrics)
        trainer.test(module, federated_blobs(), verbose=False)
        names |= {name for row in csv_rows(logger) for name in row} | set(trainer.callback_metrics)
    defended = {"guard": [guards.AdaptiveNormClipping(), guards.GeometricMedian(rows="own"), guards.CosineTrust(0)]}
    private = fl.algorithms.DifferentialPrivacy(clip=1.0, noise_multiplier=2.0)
    noisy = {"client": private, "algorithm": fl.algorithms.FedAvg("uniform")}
    always = {"sampler": fl.data.UniformSampler(always=(0,)), "clients_per_round": 5}
    for version, options in {"guards": defended | always, "private": noisy, "adapters": {"kind": Adapted}}.items():
        logger = CSVLogger(tmp_path, version=version)
        trainer = fit_logging(1, logger=logger, **options).trainer
        names |= {name for row in csv_rows(logger) for name in row} | set(trainer.callback_metrics)
    ours = names - {"step", "epoch", "train_loss", "val_loss", "val_acc", "test_loss", "test_acc"}
    documented = table()
    patterns = {name: pattern(name) for name in documented}
    matches = {name: [d for d, p in patterns.items() if p.fullmatch(name)] for name in ours}
    assert {name: found for name, found in matches.items() if len(found) != 1} == {}
    assert set(documented) - {found for (found,) in matches.values()} == set()
    # A store of plain files, as MLflow's, has a file per name: none may also be the folder of others.
    every = names | set(documented)
    assert every & {folder for name in every for folder in folders(name)} == set()
    bar_only = {name for name, where in documented.items() if "progress bar only" in where}
    assert bar_only == {name for name in ours if not name.startswith("fed/")}


# ---- bars


class Shown(Callback):
    """What the bar is given to show, at the moments when it is drawn, and what it should be."""

    def __init__(self):
        self.after_client, self.after_round = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        shown = trainer.progress_bar_callback.get_metrics(trainer, pl_module)
        self.after_client.append((shown["round"], shown["client"]) == (str(batch.round), str(batch.client_id)))

    def on_train_epoch_end(self, trainer, pl_module):
        shown = trainer.progress_bar_callback.get_metrics(trainer, pl_module)
        values = trainer.strategy.last_evaluation.values["val_acc"]
        expected = fl.metrics.functional.fairness_angle(values)
        self.after_round.append(shown["angle"] == pytest.approx(float(expected), rel=1e-5))


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_bars_show_round_client_and_angle(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # Rich breaks a line of 80 between a name and its number if the rate is long
    shown = Shown()
    trainer = fit_logging(2, callbacks=[kind(), shown], enable_progress_bar=True).trainer
    assert (shown.after_client, shown.after_round) == ([True] * 6, [True] * 2)
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    last = trainer.strategy.last_round
    sign = "=" if kind is TQDMProgressBar else ": "
    for text in ("round", 1), ("client", last.client_ids[-1]), ("conflicts", last.conflicts), ("angle", "0."):
        assert f"{text[0]}{sign}{text[1]}" in printed
    assert "3/3" in printed  # clients


# ---- other lines


def test_a_fit_prints_nothing_that_misleads(tmp_path, caplog, recwarn):
    strategy = fl.FederatedStrategy(clients_per_round=3)
    with caplog.at_level("INFO"):
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", strategy=strategy, logger=CSVLogger(tmp_path), enable_progress_bar=False,
            reload_dataloaders_every_n_epochs=1,
        )  # fmt: skip
        trainer.fit(fresh(), federated_blobs())
        trainer.test(fresh(), federated_blobs(), verbose=False)
    ours = [m for m in caplog.messages if re.search("client|ederated|batch|path", m)]
    plan = [m for m in ours if m.startswith("Federated fit on cpu, lean path. Memory beside the module: ")]
    assert len(plan) == 1
    assert "update matrix (3 x 140) 1,728 B" in plan[0]
    assert all(m in plan or m.startswith("Federated data: 6 clients with ") for m in ours)
    # Lightning's own deprecations aside.
    messages = [str(w.message) for w in recwarn if not issubclass(w.category, (DeprecationWarning, FutureWarning))]
    assert [m for m in messages if "LeafSpec" not in m] == []


@pytest.mark.parametrize(
    ("norm", "options"),
    [(True, {}), (False, {}), (True, {"algorithm": fl.algorithms.FedBN()}), (True, {"buffers": "global"})],
)
def test_a_fit_says_that_statistics_are_averaged(norm, options, caplog):
    with caplog.at_level("INFO"):
        train(fresh(norm=norm), 1, **options)
    said = [m for m in caplog.messages if m.startswith("1 BatchNorm layer has the mean of the clients' statistics")]
    assert len(said) == (norm and not options)
    assert all(m.endswith("docs/methods/fedbn.md") for m in said)


@pytest.mark.filterwarnings("ignore:log_every_n_steps=50 counts clients:UserWarning")
def test_warnings_are_heard_again_after_the_fit(tmp_path):
    fit_logging(logger=CSVLogger(tmp_path), log_every_n_steps=50)
    assert not [entry for entry in warnings.filters if entry[1] is not None and "training batches" in entry[1].pattern]
    plain = quiet_trainer("auto", 1, logger=CSVLogger(tmp_path), log_every_n_steps=50)
    with pytest.warns(UserWarning, match="The number of training batches"):
        plain.fit(fresh(), federated_blobs().data)


def test_the_table_after_a_test_lists_the_clients(capsys):
    module, _, trainer = fit_logging(1)
    trainer.test(module, federated_blobs(), verbose=False)
    printed = capsys.readouterr().out
    clients, _ = evaluate(module, "test")
    for client, (loss, accuracy, samples) in clients.items():
        assert re.search(rf"^{client} +{samples} +{loss:.4f} +{accuracy:.4f}$", printed, re.MULTILINE)
    # Data without clients has no table, and no earlier one is printed in its place.
    trainer.test(module, federated_blobs().data, verbose=False)
    assert "worst 5 %" not in capsys.readouterr().out
    assert trainer.strategy.last_evaluation is None
