# SPDX-License-Identifier: Apache-2.0
"""Comparisons of Python objects: runs in one and in several processes, resumed, failing, refused."""

import csv
import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
import watched
from support import Blobs, Classifier, federated_blobs
from watched import Watched

import fl_lightning as fl
from fl_lightning.comparison import files
from fl_lightning.comparison.plan import Run
from fl_lightning.comparison.runner import Runner

pytestmark = pytest.mark.filterwarnings("ignore:report.html is left out")
METHODS = {"FedAvg": fl.algorithms.FedAvg(), "FedLF": fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=2)}
TRAINER = partial(L.Trainer, max_epochs=2, accelerator="cpu", logger=False)


@pytest.fixture
def diary(tmp_path, monkeypatch):
    folder = tmp_path / "diary"
    folder.mkdir()
    monkeypatch.setenv(watched.DIARY, str(folder))
    return folder


def compared(folder, methods=METHODS, **changes):
    options = {"learning_rates": (0.02, 0.1), "seeds": 2, "trainer": TRAINER, "save_seconds": 0, "bounds": "none"}
    return fl.compare(Watched, federated_blobs(3, train=60), methods, folder=folder, **{**options, **changes})


def without_seconds(text):
    """The rows of runs.csv but for the time that they took."""
    return [{**row, "seconds": ""} for row in csv.DictReader(io.StringIO(text))]


def assert_same_results(one, other):
    ends = [{f.name: files.read_run(f).evaluations for f in (folder / "runs").iterdir()} for folder in (one, other)]
    assert ends[0] == ends[1]
    rows = [without_seconds((folder / "runs.csv").read_text()) for folder in (one, other)]
    assert rows[0] == rows[1]
    tables = [(folder / "table.md").read_text().split("\n\n")[0].splitlines() for folder in (one, other)]
    shown = [[line.split("|")[:-2] for line in lines] for lines in tables]  # but for the seconds
    assert shown[0] == shown[1]


def test_several_runs_at_a_time_give_the_table_of_one(tmp_path, diary, capfd):
    threads, drawn = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        found = compared(tmp_path / "one", bounds="both", seeds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert set((diary / "threads").read_text().split()) == {"1"}
    assert [row.method for row in found.rows] == ["FedAvg", "FedLF", "local only", "pooled"]
    assert set(found.learning_rates.values()) <= {0.02, 0.1}
    compared(tmp_path / "two", bounds="both", seeds=1, jobs=2)
    assert_same_results(tmp_path / "one", tmp_path / "two")
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "4 methods x 2 learning rates x 1 seed = 8 runs, of which 0 are finished\n" in printed.err
    lines = re.findall(r"\[(\d)/8\] .*: test_acc mean 0.*, worst 10 % 0.* s\)(; about .* left)?\n", printed.err)
    assert [(int(place), bool(rest)) for place, rest in lines] == 2 * [(place, place < 8) for place in range(1, 9)]
    assert "client         samples" not in printed.err  # tables of single runs are in their logs
    assert "client         samples" in next((tmp_path / "one" / "logs").glob("FedLF*/log.txt")).read_text()


def test_each_division_of_the_data_runs_with_every_seed(tmp_path, diary, capfd):
    options = {"learning_rates": (0.1,), "seeds": 2, "divisions": 2, "bounds": "both"}
    found = compared(tmp_path / "two", **options)
    assert "4 methods x 1 learning rate x 4 repetitions = 16 runs" in capfd.readouterr().err
    runs = list(csv.DictReader(io.StringIO((tmp_path / "two" / "runs.csv").read_text())))
    assert len({(row["method"], row["division"], row["seed"]) for row in runs}) == 16
    # Division 1 is what the data say with a seed that is larger by 1.
    other = fl.FederatedDataModule(Blobs(train=60), fl.data.Dirichlet(3, 1.0), seed=1)
    alone = fl.compare(
        Watched, other, METHODS, folder=tmp_path / "one", trainer=TRAINER, learning_rates=(0.1,), seeds=1, bounds="both"
    )
    for run, record in alone.results.items():
        same = found.results[replace(run, division=1)]
        assert same.evaluations == record.evaluations
        assert same.client_sizes == record.client_sizes
    words = " ".join(str(found).split())
    assert "standard deviation over 2 divisions of the data with 2 seeds each." in words
    assert "(Student's t over the divisions)" in words
    compared(tmp_path / "again", jobs=2, **options)
    assert_same_results(tmp_path / "two", tmp_path / "again")


def test_divisions_by_no_seed_are_refused(tmp_path, diary):
    blobs = Blobs(train=60)
    given = fl.FederatedDataModule(blobs, [range(30), range(30, 60)], evaluation="shared")
    with pytest.raises(ValueError, match="divisions must be 1 where the seed of the data decides nothing"):
        fl.compare(Watched, given, METHODS, folder=tmp_path, trainer=TRAINER, divisions=2)


def test_fewer_seeds_pick_than_are_reported_also_after_an_interruption(tmp_path, diary, monkeypatch, capfd):
    options = {"seeds": 3, "tuning_seeds": 1, "bounds": "pooled"}
    whole = compared(tmp_path / "whole", **options)
    assert whole.plan.picking == ((0, 0),)
    expected = {Run(method, rate, 0) for method in whole.plan.methods for rate in (0.02, 0.1)}
    expected |= {Run(method, rate, seed) for method, rate in whole.learning_rates.items() for seed in (1, 2)}
    assert set(whole.results) == expected
    assert [row.repetitions for row in whole.rows] == [3, 3, 3]
    said = capfd.readouterr().err
    assert "3 methods x (2 learning rates x 1 seed, 2 seeds more with the picked one) = 12 runs, of which 0 are" in said
    assert all(f"[{number}/12] " in said for number in range(1, 13))
    assert "on average over 1 run, the first of 3: the others have run with it alone." in " ".join(str(whole).split())

    kept, end = [], Runner.carry_out

    def stopped(runner, run):
        if len(kept) in (3, 7):  # among the runs to pick from, and among the others
            kept.append(None)
            raise KeyboardInterrupt
        kept.append(run)
        end(runner, run)

    monkeypatch.setattr(Runner, "carry_out", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compared(tmp_path / "parts", **options)
    monkeypatch.undo()
    monkeypatch.setenv(watched.DIARY, str(diary))
    capfd.readouterr()
    resumed = compared(tmp_path / "parts", **options, jobs=2)
    assert "12 runs, of which 6 are finished" in capfd.readouterr().err
    assert_same_results(tmp_path / "parts", tmp_path / "whole")
    assert set(resumed.results) == expected
    more = compared(tmp_path / "parts", **{**options, "tuning_seeds": None})
    assert len(more.results) == 18


def test_finished_runs_are_kept_and_new_ones_added(tmp_path, diary):
    first = compared(tmp_path, {"FedAvg": fl.algorithms.FedAvg()}, seeds=1)
    before = watched.rounds(diary)
    again = compared(tmp_path, {"FedAvg": fl.algorithms.FedAvg()}, seeds=1)
    assert watched.rounds(diary) == before
    assert str(again) == str(first)
    more = compared(tmp_path, METHODS, seeds=1)
    added = watched.rounds(diary)[len(before) :]
    assert {line.split()[0] for line in added} == {"FedLFx3"}
    assert len(added) == 2 * 2  # two rounds with each learning rate
    assert more.results.items() >= first.results.items()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_is_named_at_the_end_and_tried_again(tmp_path, diary, jobs):
    (diary / "fail").write_text("FedLF 0.1 1\n")
    found = compared(tmp_path, jobs=jobs)
    assert [str(run) for run in found.failures] == ["FedLF, lr 0.1, seed 1"]
    assert len(found.results) == 7
    assert "1 of 8 runs failed:\n  FedLF, lr 0.1, seed 1: RuntimeError: no luck" in str(found)
    assert "Traceback" in (tmp_path / "logs" / "FedLF--lr-0.1--seed-1" / "log.txt").read_text()
    assert found.learning_rates["FedLF"] == 0.02
    (diary / "fail").unlink()
    assert len(compared(tmp_path, jobs=jobs).results) == 8


def test_a_folder_of_another_configuration_is_refused_by_name(tmp_path, diary):
    compared(tmp_path, seeds=1, learning_rates=[0.1])
    for changes, words in (
        (
            {"trainer": partial(TRAINER, max_epochs=3)},
            r"trainer.max_epochs of the project was 2 and is 3\. Take another folder",
        ),
        ({"trainer": partial(TRAINER, min_epochs=1)}, "trainer.min_epochs of the project was not given and is 1"),
        ({"methods": {**METHODS, "FedLF": fl.algorithms.FedLF()}}, "clients_per_round of FedLF was 2 and is not given"),
        ({"methods": {**METHODS, "FedAvg": fl.algorithms.QFedAvg()}}, "algorithm of FedAvg was .*FedAvg and is"),
    ):
        with pytest.raises(ValueError, match=f"holds runs of another configuration: .*{words}"):
            compared(tmp_path, **{"seeds": 1, "learning_rates": [0.1], **changes})
    with pytest.raises(ValueError, match=r"data.seed of the project was 0 and is 1"):
        fl.compare(
            Watched, fl.FederatedDataModule(federated_blobs(3, train=60).data, fl.data.Dirichlet(3, 1.0), seed=1),
            METHODS, trainer=TRAINER, folder=tmp_path,
        )  # fmt: skip


def test_a_folder_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PATIENCE", 0.2)
    with (
        files.owned(tmp_path),
        pytest.raises(RuntimeError, match="another comparison is at work"),
        files.owned(tmp_path),
    ):
        pass


def test_arguments_that_cannot_be_right_are_refused(tmp_path):
    good = {
        "model": Watched,
        "data": federated_blobs(3, train=60),
        "strategies": METHODS,
        "trainer": TRAINER,
        "folder": tmp_path,
    }
    for changes, error, words in (
        (
            {"model": Classifier()},
            TypeError,
            "model must be a function that makes a LightningModule.*every run starts with",
        ),
        ({"trainer": L.Trainer(logger=False)}, TypeError, "trainer must be a function that makes a Trainer"),
        ({"model": fl.ClientModule, "learning_rates": [0.1]}, ValueError, "model must take the learning rate"),
        ({"strategies": {}}, ValueError, "strategies must be a mapping with one method or more"),
        ({"strategies": {"pooled": fl.algorithms.FedLF()}}, ValueError, "strategies must have names other than"),
        ({"data": Blobs(train=60)}, TypeError, "data must be a FederatedDataModule, or a function"),
        ({"strategies": {"A": fl.FederatedStrategy(partition=fl.data.IID(3))}}, ValueError, "partition of A must"),
        ({"strategies": {"FedLF": "FedLF"}}, TypeError, "must be a FederatedStrategy, or a server rule such as"),
        ({"learning_rates": [0.1, 0.1]}, ValueError, "learning_rates must hold one or more different values"),
        ({"seeds": []}, ValueError, "seeds must hold one or more different values"),
        ({"seeds": 2**60}, ValueError, "seeds must be at most 1,000 seeds, found 1,152,921,504,606,846,976: a list"),
        ({"jobs": 0}, ValueError, "jobs of compare must be an integer from 1 to 1000, found 0"),
        ({"divisions": 2**60}, ValueError, "divisions of compare must be an integer from 1 to 1000"),
    ):
        with pytest.raises(error, match=words):
            fl.compare(**{**good, **changes})


def test_a_network_that_runs_would_share_is_refused(tmp_path):
    shared = partial(fl.ClientModule, torch.nn.Linear(12, 4))
    data = federated_blobs(3, train=60)
    found = fl.compare(shared, data, METHODS, trainer=TRAINER, folder=tmp_path, seeds=1, bounds="none")
    assert "model must make a new network in every call" in found.failures[Run("FedLF", None, 0)]


class StopsInItsFourthRound(L.Callback):
    """Remembers rounds of runs before, if it is not a new one in each."""

    rounds = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.rounds += 1
        trainer.should_stop |= self.rounds >= 4


def test_callbacks_are_new_in_every_run(tmp_path, diary):
    trainer = partial(TRAINER, max_epochs=3, callbacks=[StopsInItsFourthRound()])
    compared(tmp_path, {"FedAvg": fl.algorithms.FedAvg()}, learning_rates=[0.05], trainer=trainer)
    assert [line for line in watched.rounds(diary) if line.endswith(" 2")] == ["FedAvgx3 0.05 0 2", "FedAvgx3 0.05 1 2"]


def test_the_values_at_the_end_count_where_validation_is_rare(tmp_path, diary):
    trainer = partial(TRAINER, max_epochs=3, check_val_every_n_epoch=2)
    rare = compared(tmp_path / "rare", {"FedAvg": fl.algorithms.FedAvg()}, trainer=trainer, seeds=1)
    often = compared(
        tmp_path / "often", {"FedAvg": fl.algorithms.FedAvg()}, trainer=partial(TRAINER, max_epochs=3), seeds=1
    )
    for run, record in rare.results.items():
        assert [v.round for v in record.evaluations if v.stage == "val"] == [2, 3]
        other = often.results[run]
        assert record.last_values("val").values == other.last_values("val").values
        for series, expected in zip(record.metrics, other.metrics, strict=True):  # what the report shows
            assert series.rounds == ((2, 3) if series.stage == "val" else (3,))
            assert {name: v[-1] for name, v in series.summaries.items()} == {
                name: v[-1] for name, v in expected.summaries.items()
            }


def test_names_of_runs_are_names_of_files():
    names = ["FedLF", "QFedAvg(q=2)", "QFedAvg q=2", "FedÄvg", "a/../b", f"FA({[[0.0] * 99]})", f"FA({[[0.0] * 98]})"]
    keys = [Run(name, rate, 3).key for name in names for rate in (None, 0.1, 1e-7)]
    assert keys[1] == "FedLF--lr-0.1--seed-3"
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9_.=+-]{1,120}", key) for key in keys)


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path, diary, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    text, replaced = re.subn("max_epochs=50", "max_epochs=1", text)
    assert replaced == 1
    monkeypatch.chdir(tmp_path)
    exec(text, {"MyLitModule": Watched, "MyDataModule": Blobs})
    assert "| FedLF " in capsys.readouterr().out
    assert (tmp_path / "comparison" / "report.html").exists()
