# SPDX-License-Identifier: Apache-2.0
"""The table's text, and what stands below it."""

import csv
import io
from dataclasses import replace

import pytest
from made_records import ACCURACY, record, results_of

from fl_lightning.comparison import Comparison
from fl_lightning.comparison.plan import Plan, Run

PLAN = Plan(("FedAvg", "FedLF", "local only", "pooled"), (0.01, 0.1), (0, 1, 2))


def made(plan=PLAN, failures=None, names=("Aalborg", "Braga", "Cluj", "Dundee"), measure=ACCURACY):
    base = {"FedAvg": 0.7, "FedLF": 0.75, "local only": 0.6, "pooled": 0.8}
    results = {}
    for run in plan.grid():
        start = base.get(run.method, 0.5) + 0.01 * run.seed - (0.2 if run.learning_rate == 0.01 else 0.0)
        values = (start, start + 0.1, start + 0.06, start - (0.3 if run.method == "FedAvg" else 0.1))
        conflicts = (2, 1, 0) if run.method == "FedAvg" else (0, 0, 0)
        one = record({"val_acc": values, "test_acc": values}, conflicts=conflicts, names=names, seconds=12.34)
        if run not in (failures or {}):
            results[run] = one
    return Comparison(plan, results_of(results), failures or {}, measure)


TABLE = """\
| method     | lr  | mean          | worst 10 %    | worst client           | angle (rad)   | conflicts | time |
| ---------- | --- | ------------- | ------------- | ---------------------- | ------------- | --------- | ---- |
| FedAvg     | 0.1 | 0.675±0.010   | 0.410±0.010   | 0.410±0.010 (Dundee)   | 0.229±0.003   | 25.0 %    | 12 s |
| FedLF      | 0.1 | 0.775±0.010 + | 0.660±0.010 + | 0.660±0.010 + (Dundee) | 0.097±0.001 + | 0.0 %     | 12 s |
| local only | 0.1 | 0.625±0.010 - | 0.510±0.010 + | 0.510±0.010 + (Dundee) | 0.120±0.002 + | -         | 12 s |
| pooled     | 0.1 | 0.825±0.010 + | 0.710±0.010 + | 0.710±0.010 + (Dundee) | 0.091±0.001 + | -         | 12 s |"""


def test_the_table():
    assert made().table == TABLE


def test_below_it_stands_what_one_has_to_know():
    text = str(made())
    assert text.startswith(TABLE)
    words = " ".join(text.split())
    for sentence in (
        "Numbers: test_acc of the clients on test data, at the end of the fit.",
        "of 0.01, 0.1, each method has the one that is best by the mean over the clients of val_acc on validation data",
        "standard deviation over 3 seeds. + and -: better and worse than FedAvg; the 95 % interval",
        "The largest learning rate, 0.1, was picked for FedAvg, FedLF, local only, pooled: a larger one may be better.",
    ):
        assert sentence in words
    assert max(map(len, text.splitlines())) <= 120
    assert " ".join(text.split("\n\n")[2].split()).startswith(
        "With FedLF instead of local only, whoever is worst goes from test_acc 0.510 ± 0.010 to 0.660 ± 0.010 "
        "(better), and the mean from 0.625 ± 0.010 to 0.775 ± 0.010 (better)."
    )


def test_long_names_are_cut_and_bars_do_not_end_a_cell():
    plan = Plan(("FedAvg", "QFedAvg(q=2, momentum=0.9, and_so_on=True)", "local only"), (0.1,), (0, 1))
    table = made(plan, names=("A", "B", "C", "North | South")).table
    assert all(line.count("|") == 9 for line in table.splitlines())
    assert "| QFedAvg(q=2, momentum=0.9, and_so_on=Tr… |" in table
    assert "(North / South)" in table


def test_one_seed_has_no_deviation_and_says_so():
    text = str(made(Plan(("FedAvg", "FedLF"), (0.1,), (0,))))
    assert "±" not in text.split("\n\n")[0]
    assert "One seed says nothing about chance" in text


def test_failed_runs_and_methods_are_named():
    plan = Plan(("FedAvg", "FedLF"), (0.1,), (0, 1, 2))
    failures = {Run("FedAvg", 0.1, 1): "ValueError: no\nluck", **{Run("FedLF", 0.1, s): "OSError" for s in range(3)}}
    text = str(made(plan, failures))
    assert "FedAvg has 2 of 3 seeds: the others failed." in text
    assert "No run of FedLF came to its end." in text
    assert "4 of 6 runs failed:\n  FedAvg, lr 0.1, seed 1: ValueError: no luck\n" in text


def test_it_says_so_where_rows_are_not_of_the_same_clients():
    found = made(Plan(("FedAvg", "FedPer"), (0.1,), (0, 1)))
    assert [row.without_value for row in found.rows] == [0, 0]
    results = dict(found.results)
    for method, values in (("FedPer", (0.9, None, 0.9, None)), ("FedAvg", (0.5, 0.5, 0.5, None))):
        results[Run(method, 0.1, 1)] = record({"test_acc": values})
    found = Comparison(found.plan, results_of(results), {}, ACCURACY)
    assert [row.without_value for row in found.rows] == [1, 2]
    words = " ".join(str(found).split())
    assert "FedAvg leaves out 1 client that other rows count, in one run or more: a client that never trained" in words
    assert "FedPer leaves out 2 clients that other rows count" in words


def test_it_names_clients_that_no_row_counts():
    plan = Plan(("FedAvg", "FedLF"), (0.1,), (0, 1))
    results = {run: record({"test_acc": (0.5, None, 0.9, None)}) for run in plan.grid()}
    assert "No run has a test_acc of Braga and Dundee" in str(Comparison(plan, results_of(results), {}, ACCURACY))
    results[Run("FedLF", 0.1, 1)] = record({"test_acc": (0.5, 0.5, 0.9, 0.5)})
    assert "No run has" not in str(Comparison(plan, results_of(results), {}, ACCURACY))


def test_it_says_so_where_selection_and_report_use_the_same_data():
    text = str(made(measure=replace(ACCURACY, reported_on="val", metric="val_acc")))
    words = " ".join(text.split())
    assert "learning rates are picked and reported on the same data, and the numbers flatter all methods" in words


def test_the_csv_file_has_a_row_per_run(tmp_path):
    failures = {Run("FedLF", 0.01, 2): "ValueError: no luck"}
    comparison = made(failures=failures)
    assert {path.name for path in comparison.write(tmp_path)} >= {"table.md", "runs.csv"}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    assert len(rows) == len(PLAN) == 24
    by_run = {(row["method"], float(row["learning_rate"]), int(row["seed"])): row for row in rows}
    failed = by_run["FedLF", 0.01, 2]
    assert (failed["status"], failed["error"], failed["mean"]) == ("failed", "ValueError: no luck", "")
    good = by_run["FedAvg", 0.1, 1]
    assert float(good["mean"]) == pytest.approx((0.71 + 0.81 + 0.77 + 0.41) / 4)
    assert (good["worst_client"], good["picked"], float(good["conflicts"])) == ("Dundee", "1", 0.25)
    assert by_run["FedAvg", 0.01, 1]["picked"] == "0"
    assert by_run["pooled", 0.1, 0]["conflicts"] == ""
    table, notes, conclusion, joining, first, best, other = str(comparison).split("\n\n")
    assert (first, other) == ("FedAvg: 3 better off, 1 worse off", "FedLF: 4 better off")
    assert "| Dundee  | 0.510 | 0.410   | -0.100 ± 0.000 | worse off     |" in best
    written = (tmp_path / "table.md").read_text()
    assert written.startswith("\n\n".join([table, notes, conclusion, joining, first, best, other]) + "\n\n| client")
    assert "| Dundee  | 0.510 | 0.660   | +0.150 ± 0.000 | better off    |" in written


def test_runs_of_other_clients_are_refused():
    plan = Plan(("FedAvg",), (0.1,), (0, 1))
    results = {**made(plan).results, Run("FedAvg", 0.1, 1): record({"test_acc": (1.0,)}, names=("Aalborg",))}
    with pytest.raises(ValueError, match=r"found others in \(FedAvg, lr 0.1, seed 1\) than in \(FedAvg, lr 0.1, "):
        Comparison(plan, results, {}, ACCURACY)
