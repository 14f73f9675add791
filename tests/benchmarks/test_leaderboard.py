# SPDX-License-Identifier: Apache-2.0
"""The leaderboard on a little noise in place of real data: run, packed, gone on with, and reported."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from math import isnan
from types import SimpleNamespace

import pytest
from small_suite import METHODS, TINY

import fl_lightning as fl
from benchmarks.leaderboard import __main__ as program
from benchmarks.leaderboard import pictures, records, standing, suites
from benchmarks.leaderboard.bootstrap import Interval
from benchmarks.leaderboard.divisions import DIVISIONS, Divisions
from benchmarks.leaderboard.methods import REFERENCE
from benchmarks.leaderboard.records import failed, finished, pack, packed, packed_file, read_traffic, unpack
from benchmarks.leaderboard.report import PAGE, overview, tables
from benchmarks.leaderboard.standing import Standing, rounds_to, training_seconds
from benchmarks.leaderboard.suites import SUITES, suite
from benchmarks.papers.records import read
from benchmarks.papers.report import rewritten
from fl_lightning.comparison.files import read_run
from fl_lightning.comparison.runner import Runner
from fl_lightning.core.errors import ClientError

figures = pytest.importorskip("matplotlib.figure")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "SUITES", (TINY,))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- overview -->\nold\n<!-- end of overview -->\nAfter.\n")
    return tmp_path


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory):
    """What the suite's runs with the first seed leave."""
    folder = tmp_path_factory.mktemp("suite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "SUITES", (TINY,))
        call("run", folder, "out", "--seeds", "1")
    return folder / "out"


@pytest.fixture
def begun(tiny, ran_once):
    """A folder of one's own with it."""
    shutil.copytree(ran_once, tiny / "out")
    return tiny


def call(command, folder, out="out", *more):
    given = [command, "tiny", "--out", str(folder / out), *more]
    given += ["--data-root", str(folder)] if command in ("run", "divisions", "traffic") else []
    given += ["--page", str(folder / "page.md")] if command == "report" else []
    program.main(given)


def shown(folder, out):
    """The tables but for the seconds."""
    call("report", folder, out)
    text = re.sub(r"They took .* of one core", "", (folder / out / "tiny.md").read_text())
    numbers, costs = text.split("| method | rounds to 95 %")
    return [*numbers.splitlines(), *(line.split(" | ")[:2] for line in costs.splitlines()[1:])]


def test_a_suite_runs_is_packed_and_goes_on_elsewhere(tiny, ran_once, capsys):
    with pytest.raises(ValueError, match=r"only must name methods of tiny, found \['FedL'\]: there are \['FedAvg'"):
        call("run", tiny, "out", "--only", "FedL")
    shutil.copytree(ran_once, tiny / "out", dirs_exist_ok=True)
    call("pack", tiny)
    assert "6 runs in" in capsys.readouterr().out
    (tiny / "elsewhere").mkdir()
    packed_file(tiny / "out" / "tiny").rename(tiny / "elsewhere" / "tiny.jsonl.xz")
    call("report", tiny, "elsewhere")
    assert "6 of 15 runs are finished; 3 failed." in (tiny / "elsewhere" / "tiny.md").read_text()
    assert "results/tiny.md) | 6 of 15 | 3 | " in (tiny / "page.md").read_text()
    assert set(failed(tiny / "elsewhere" / "tiny").values()) == {"ValueError: too fast"}
    call("run", tiny, "elsewhere")
    said = capsys.readouterr().err
    assert "3 methods x (3 learning rates x 1 seed, 2 seeds more with the picked one) = 15 runs, of which 6 are" in said
    call("run", tiny, "out", "--only", "FedLF")
    assert "2 methods x (3 learning rates" in capsys.readouterr().err
    call("run", tiny, "out")
    whole = shown(tiny, "out")
    assert shown(tiny, "elsewhere") == whole
    assert "Four clients. 2 rounds; complete; 3 failed." in "\n".join(map(str, whole))
    assert "![Differences of the methods to FedAvg, with intervals](tiny.png)" in whole
    assert (tiny / "out" / "tiny.png").stat().st_size > 10_000
    call("pack", tiny, "elsewhere")
    for path in (tiny / "elsewhere" / "tiny" / "runs").glob("*"):
        path.unlink()
    assert shown(tiny, "elsewhere") == whole, "from the packed file alone"


def test_what_is_packed_is_what_the_tables_need(begun, monkeypatch):
    folder = begun / "out" / "tiny"
    before = Standing(TINY, finished(folder), failed(folder)).rows
    pack(folder)
    runs = packed(folder)
    path = next((folder / "runs").glob("FedLF*"))
    record, kept = read_run(path), runs[path.stem]
    assert record.configuration
    assert not kept.configuration
    assert kept.last_values("test").values["test_acc"] == record.last_values("test").values["test_acc"]
    assert len(json.dumps(kept, default=vars)) < len(path.read_text())
    path.unlink()
    unpack(folder)
    assert read_run(path) == kept
    after = Standing(TINY, finished(folder), failed(folder)).rows
    for one, other in zip(before, after, strict=True):
        assert replace(one.accuracy, seconds=0) == replace(other.accuracy, seconds=0)
        assert one.rounds == other.rounds or isnan(one.rounds)
        assert one.differences == other.differences
    assert before[0].differences == {}
    assert set(before[1].differences) == {("accuracy", "mean"), ("auroc", "mean")}, "four clients have no worst tenth"
    monkeypatch.setattr(standing, "FEW", 4)
    every = Standing(TINY, finished(folder), failed(folder)).rows[1].differences
    assert set(every) == {(m, k) for m in ("accuracy", "auroc") for k in ("mean", "worst 10 %")}
    assert Standing(TINY, {}, {}).rows == []
    assert Standing(TINY, {}, {}).missing == list(METHODS)


def test_the_suites_are_as_the_page_says():
    assert [len(each.methods()) for each in SUITES] == [40, 44, 4, 40, 40, 12, 12, 9, 8, 16, 7, 8, 10, 8]
    assert all(next(iter(each.methods())) == REFERENCE for each in SUITES)
    assert len({each.name for each in SUITES}) == len(SUITES)
    assert suite("adult").trainer.keywords["max_epochs"] == suite("adult").rounds
    assert all(tuple(sorted(each.rates)) == each.rates for each in SUITES)


def standing_of(each, monkeypatch):
    """A suite as its packed runs show it, and its divisions."""
    monkeypatch.setattr(records, "packed", cache(packed))  # the divisions read the runs of their suite again
    folder = program.RESULTS / each.name
    failures = {line["run"]: "" for line in read(packed_file(folder)) if "failed" in line}
    return Standing(each, records.packed(folder), failures), Divisions(each, program.RESULTS)


SMALL = ("digits", "office", "fmnist-fedfv", "adapters", "adult-rates", "adult-crossings", "text-rates")


@pytest.mark.parametrize(
    "each", [pytest.param(s, marks=() if s.name in SMALL else pytest.mark.slow, id=s.name) for s in SUITES]
)
def test_the_tables_are_those_of_the_packed_runs(each, monkeypatch):
    folder, (found, divisions) = program.RESULTS / each.name, standing_of(each, monkeypatch)
    written = folder.with_suffix(".md").read_text(encoding="utf-8")
    assert tables(found, read_traffic(folder), divisions.alone) == written, "python -m benchmarks.leaderboard report"
    table = divisions.folder.with_suffix(".md")
    assert divisions.page() == (table.read_text(encoding="utf-8") if table.exists() else "")


@pytest.mark.slow
def test_the_overview_is_that_of_the_packed_runs(monkeypatch):
    found = [standing_of(each, monkeypatch) for each in SUITES]
    alone = {standing.suite.name: divisions.alone for standing, divisions in found}
    page = PAGE.read_text(encoding="utf-8")
    anew = rewritten(page, "overview", overview([standing for standing, _ in found], alone))
    assert anew == page, "python -m benchmarks.leaderboard report"


def test_the_overview_has_means_and_worst_clients_and_marks_what_is_no_noise():
    def row(name, mean, tenth, client, *differences):
        figures = {"mean": mean, "worst_10": tenth, "worst": client}
        one = SimpleNamespace(method=name, **{key: SimpleNamespace(mean=value) for key, value in figures.items()})
        kinds = [("accuracy", "mean"), ("accuracy", "worst 10 %")]
        found = {kind: Interval(d, d - 0.1, d + 0.1) for kind, d in zip(kinds, differences, strict=False)}
        return SimpleNamespace(accuracy=one, differences=found)

    def of_suite(name, *rows):
        suite = SimpleNamespace(name=name, title=name.title())
        return SimpleNamespace(suite=suite, results=rows, plan=rows, failures=1, rows=rows, seconds=lambda: 90.0)

    many = of_suite("fmnist-pat1", row("A", 0.5, 0.25, 0.125), row("B", 1, 0.5, 0, 0.2, -0.2))
    few = of_suite("office", row("A", 0.75, 0, 0.5), row("C", 0.25, 0, 0.125, -0.05))
    own = SimpleNamespace(
        **{key: SimpleNamespace(mean=n) for key, n in {"mean": 1, "worst_10": 0.5, "worst": 0.25}.items()}
    )
    text = overview([many, few, of_suite("text", row("D", 1, 1, 1))], {"fmnist-pat1": own, "office": own, "text": None})
    first, second = text.split("\n\n")
    assert first.splitlines()[2] == (
        "| [Fmnist-Pat1](../benchmarks/leaderboard/results/fmnist-pat1.md) | 2 of 2 | 1 | 1 min 30 s |"
    )
    assert second.splitlines()[2:] == [
        "| A | .500 .250 | .750 .500 |", "| B | 1.000+ .500- |  |", "| C |  | .250 .125 |",
        "| local only | 1.000 .500 | 1.000 .250 |",
    ]  # fmt: skip


def test_pictures_show_what_is_noise(tmp_path, monkeypatch):
    drawn = {}

    def save(figure, path, **options):
        drawn["figure"] = figure

    monkeypatch.setattr(figures.Figure, "savefig", save)

    def row(name, seeds, differences):
        kinds = (("accuracy", "mean"), ("accuracy", "worst 10 %"), ("auroc", "mean"), ("auroc", "worst 10 %"))
        found = {kind: Interval(d, d - 0.1, d + 0.1) for kind, d in zip(kinds, differences, strict=False)}
        return SimpleNamespace(accuracy=SimpleNamespace(method=name, repetitions=seeds), differences=found)

    rows = [row("FedAvg", 3, ()), row("A", 3, (0.05, 0.2, 0, 0)), row("B", 1, (-0.2, 0.3, 0, -0.3))]
    pictures.draw(rows, "FedAvg", tmp_path / "x.png")
    panels = drawn["figure"].axes
    assert [panel.get_title("left") for panel in panels] == [
        "accuracy, mean, minus FedAvg", "accuracy, worst 10 %, minus FedAvg", "AUROC, worst 10 %, minus FedAvg",
    ]  # fmt: skip
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["A", "B (1 seed)"], "the best is on top"
    points = [[line for line in panel.lines if line.get_marker() == "o"] for panel in panels]
    assert [[line.get_xdata()[0] for line in each] for each in points] == [[0.05, -0.2], [0.2, 0.3], [0, -0.3]]
    noise, better, worse = pictures.NOISE, pictures.BETTER, pictures.WORSE
    assert [[line.get_color() for line in each] for each in points] == [[noise, worse], [better] * 2, [noise, worse]]
    drawn.clear()
    pictures.draw(rows[:1], "FedAvg", tmp_path / "x.png")
    assert not drawn, "there is nothing to show"


def test_the_pace_is_read_from_the_curve():
    series = fl.report.MetricSeries("val_acc", "val", "max", (2, 4, 6), {"mean": (0.1, 0.5, 0.7)})
    zeros = (0.0,) * 6
    rounds = fl.report.RoundSeries(
        tuple(range(6)), (4,) * 6, zeros, (0,) * 6, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), zeros, zeros
    )
    record = fl.report.FitRecord("A", rounds=rounds, metrics=(series,))
    assert rounds_to(record, 0.45) == 4
    assert isnan(rounds_to(record, 0.8))
    assert training_seconds(record) == 3.5


def test_a_method_is_not_compared_before_all_its_rates_ran(ran_once):
    folder = ran_once / "tiny"
    runs = finished(folder)
    whole = {row.accuracy.method: row for row in Standing(TINY, runs, failed(folder)).rows}
    assert whole["FedLF"].differences
    lost = next(key for key in runs if key.startswith("FedLF") and "0.03" in key)
    part = {key: fitted for key, fitted in runs.items() if key != lost}
    rows = {row.accuracy.method: row for row in Standing(TINY, part, failed(folder)).rows}
    assert rows["FedLF"].tried == whole["FedLF"].tried - 1
    assert not rows["FedLF"].differences
    assert rows["FedAvg, uniform weights"].differences


def test_further_divisions_have_the_rates_of_the_suite_and_go_on(begun, capsys):
    call("report", begun)
    assert not (begun / "out" / "tiny-divisions.md").exists()
    capsys.readouterr()
    call("divisions", begun)
    said = capsys.readouterr().out
    divisions = Divisions(TINY, begun / "out")
    runs, picked = list(divisions.runs()), Standing(TINY, finished(begun / "out" / "tiny"), {}).picked
    assert len(runs) == len(divisions.results) == DIVISIONS * (len(METHODS) + 1)
    assert said.count("tiny: ") == len(runs) - len(METHODS), "the first division is the suite's"
    assert {run.learning_rate for run in runs if run.method in METHODS} == set(picked.values())
    assert {run.learning_rate for run in runs if run.method == "local only"} == {picked[REFERENCE]}
    clients = [divisions.results[run].last_values("test").sizes for run in runs if run.method == REFERENCE]
    assert len(set(clients)) == DIVISIONS
    page = divisions.page()
    assert "Not run yet" not in page
    assert [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")][2:] == [
        f"| {name:23}" for name in (*METHODS, "local only")
    ]
    call("divisions", begun)
    assert "tiny: " not in capsys.readouterr().out
    call("pack", begun)
    for path in (begun / "out" / "tiny-divisions" / "runs").glob("*"):
        path.unlink()
    call("report", begun)
    assert (begun / "out" / "tiny-divisions.md").read_text() == page


@pytest.mark.fit
def test_clients_that_diverge_alone_have_a_lower_rate_all_of_them(begun, capsys, monkeypatch):
    highest = Standing(TINY, finished(begun / "out" / "tiny"), {}).picked[REFERENCE]
    clients_alone = Runner._clients_alone

    def diverging(self, run, folder):
        if run.learning_rate == highest and run.division == 1:
            raise ClientError("its update is not finite")
        return clients_alone(self, run, folder)

    monkeypatch.setattr(Runner, "_clients_alone", diverging)
    capsys.readouterr()
    call("divisions", begun)
    assert "its update is not finite; once more with a lower rate" in capsys.readouterr().out
    alone = [run for run in Divisions(TINY, begun / "out").results if run.method == "local only"]
    lower = TINY.rates[TINY.rates.index(highest) - 1]
    assert [(run.division, run.learning_rate) for run in alone] == [(k, lower) for k in range(DIVISIONS)]
    call("report", begun)
    told = f"Alone, with as many passes as a client of every round and the learning rate {lower:g}, clients reach"
    assert told in (begun / "out" / "tiny.md").read_text()
