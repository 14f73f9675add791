# SPDX-License-Identifier: Apache-2.0
"""The page as text: what it says, that it escapes, that its pictures are valid specifications of plotly.js."""

import base64
import json
import re
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from records import fit_record

from fl_lightning.report import (
    ClientValues,
    FitRecord,
    MetricSeries,
    RoundSeries,
    client_pictures,
    record_from_json,
    record_to_json,
    write_report,
)
from fl_lightning.report.conclusion import lede
from fl_lightning.report.number_formats import in_bytes
from fl_lightning.report.pictures import DARK, LIGHT, both_ends
from fl_lightning.report.runs_of_a_method import by_method, worst_first
from fl_lightning.report.tables import comparison, costs

pytest.importorskip("plotly")

STRANGE = (
    "<script>alert(1)</script>", "\"quo'te&amp;", "\U0001f3e5 emoji", "x" * 200, "مستشفى", "%{x} $y$ <b>", " ", "7",
    "@c0",
)  # fmt: skip
ALL = ("fares", "over-time", "mean-and-worst", "loss", "conflicts", "partition")


def written(tmp_path, *records, **options):
    return write_report(records, tmp_path / "report.html", **options).read_text(encoding="utf-8")


def pictures(text):
    """What the page draws; nothing in it can end the element that it is in."""
    data = re.search(r'<script id="pictures" type="application/json">(.*?)</script>', text, flags=re.DOTALL)[1]
    assert "<" not in data
    return json.loads(data)["figures"]


def without_library(text):
    """The page without the 5 MB of plotly.js."""
    return re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.DOTALL)


def numbers(column):
    """Those of a trace, which plotly writes as a list, or typed in base64."""
    return column if isinstance(column, list) else np.frombuffer(base64.b64decode(column["bdata"]), column["dtype"])


@pytest.mark.parametrize("clients", [4, 60])
def test_every_picture_has_data(tmp_path, clients):
    records = [fit_record(method, clients, 30, seed) for method in ("FedAvg", "FedLF") for seed in (0, 1)]
    found = pictures(written(tmp_path, *records))
    assert tuple(found) == ALL
    for figure in (figure for variants in found.values() for figure in variants):
        assert all(len(numbers(trace["x"])) for trace in figure["data"])


def test_names_are_escaped_and_shown_as_they_are(tmp_path):
    record = fit_record(STRANGE[0], clients=9, names=STRANGE)
    record = replace(record, class_names=(*STRANGE, "9"))
    text = written(tmp_path, record)
    page = without_library(text)
    assert "<script>alert" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&#34;quo&#39;te&amp;amp;" in page
    spec = json.dumps(pictures(text), ensure_ascii=False)
    assert "<script" not in spec  # plotly.js takes tags in texts for formatting
    assert "&lt;script&gt;" in spec
    assert "مستشفى" in spec


def test_a_page_asks_no_network(tmp_path):
    page = without_library(written(tmp_path, fit_record()))
    assert "http:" not in page
    assert "https:" not in page
    assert "default-src 'none'" in page


def test_pictures_without_data_are_left_out(tmp_path):
    found = pictures(written(tmp_path, FitRecord("pooled")))
    assert found == {}
    page = without_library(written(tmp_path, FitRecord("pooled")))
    assert "No evaluation has told the clients apart yet." in page
    full = fit_record()
    small = replace(full, rounds=RoundSeries(), class_names=(), class_counts=(), memory={})
    assert set(pictures(written(tmp_path, small))) == set(ALL) - {"loss", "conflicts", "partition"}


def test_it_says_so_where_nobody_was_missing(tmp_path):
    text = written(tmp_path, fit_record(rounds=4, absences=()))
    assert "Every client that was drawn took part, in all of 4 rounds." in text


def test_a_page_says_how_to_run_the_fit_again(tmp_path):
    text = without_library(written(tmp_path, fit_record("FedLF", status="interrupted"), title="Hospitals & co"))
    for words in ("<h1>Hospitals &amp; co</h1>", "python train.py --method FedLF", "method.FedLF.alpha", "2.15",
                  "interrupted", "dropped out", "its update is not finite"):  # fmt: skip
        assert words in text
    running = written(tmp_path, fit_record("FedLF", status="runs", rounds=7))
    assert "the fit runs, 7 rounds are planned: reload for news" in running


def test_large_fits_give_small_pages_that_say_what_is_left_out(tmp_path):
    record = fit_record(clients=1000, rounds=1000, per_round=20, every=20)
    text = written(tmp_path, record)
    assert len(text.encode()) < 10e6
    assert "Of 1,000 clients, the worst 200 and the best 200 are drawn." in text
    assert "test_acc of 200 clients (the worst and best of 1,000)" in text
    sizes = {key: len(json.dumps(value)) for key, value in pictures(text).items()}
    assert sum(sizes.values()) < 3e6
    one = fit_record(clients=1000, rounds=10, every=2)
    many = [replace(one, method=f"method {k}") for k in range(12)]
    assert len(written(tmp_path, *many).encode()) < 10e6


def test_heat_maps_have_one_scale_and_every_division_a_picture(tmp_path):
    first, second = fit_record("FedAvg", rounds=4), fit_record("FedLF", rounds=40)
    found = pictures(written(tmp_path, first, replace(second, seed=1)))
    one, other = ((spec["data"][0]["zmin"], spec["data"][0]["zmax"]) for spec in found["over-time"])
    assert one == other
    assert len(found["partition"]) == 1
    counts = replace(first, seed=1, class_counts=((1,) * 10,) * 4)
    assert len(pictures(written(tmp_path, first, counts))["partition"]) == 2
    both = [fit_record("FedAvg", rounds=4, seed=seed) for seed in (0, 1)]
    mean, _ = pictures(written(tmp_path, *both))["mean-and-worst"][0]["data"]
    ends = [fmean(record.last_values("val").values["val_acc"]) for record in both]
    assert numbers(mean["y"])[-1] == pytest.approx(fmean(ends))


@pytest.mark.parametrize("beside", [[], ["FedAvg"]])
def test_a_whole_page_is_about_the_clients_own_models(tmp_path, beside):
    record = fit_record("FedBN", own=True)
    text = written(tmp_path, *map(fit_record, beside), record)
    found, last = pictures(text), record.last_values
    (dots,) = (t for t in found["fares"][0]["data"] if t["mode"] == "markers" and "FedBN" in t["name"])
    assert sorted(numbers(dots["x"])) == pytest.approx(sorted(last("test").values["personal/test_acc"]))
    (curve,) = (t for t in found["mean-and-worst"][0]["data"] if t["name"][1:-1] in ("mean", "FedBN, mean"))
    assert numbers(curve["y"])[-1] == pytest.approx(fmean(last("val").values["personal/val_acc"]))
    heat = found["over-time"][-1]["data"][0]
    assert [name[1:-1] for name in heat["y"]] == [f"client {k}" for k in (3, 2, 1, 0)], "the worst on top"
    ends = numbers(heat["z"]).reshape(4, -1)[:, -1]
    assert ends == pytest.approx(last("val").values["personal/val_acc"][::-1])
    words = ("test_acc" if beside else "personal/test_acc", "test_loss" if beside else "personal/test_loss")
    assert re.findall("<summary>(.*?) of 4 clients", text) == list(words)
    assert len(found["fares"]) == 2
    worst = f"{min(last('test').values['personal/test_acc']):.3f}"
    lede = text.split('<div class="lede">')[1].split("</div>")[0]
    if beside:
        assert lede.startswith(
            "<p>With \u2068FedBN\u2069 instead of \u2068FedAvg\u2069, whoever is worst goes from test_acc"
        )
        assert f"to {worst} (may be chance)" in lede
    else:
        assert f"its personal/test_acc is {worst}" in lede
    assert "Clients have models of their own with FedBN: the values of these count everywhere." in text


def test_clients_without_a_value_have_empty_rows(tmp_path):
    text = written(tmp_path, fit_record(empty=(1,)))
    axis = pictures(text)["fares"][0]["layout"]["yaxis"]
    assert "client 1" in axis["ticktext"][-1]
    assert axis["ticktext"][-1].endswith("(0)")
    assert "<bdi>client 1</bdi></td><td><bdi>25</bdi></td><td><bdi>0</bdi></td><td><bdi>-</bdi>" in text
    assert "the mean of 3 clients is" in text
    assert "There is no value for \u2068client 1\u2069." in text


def test_clients_that_nobody_evaluated_come_last():
    values = ClientValues(1, "val", (0, 2), (1, 1), {"acc": (0.5, 0.4)}, {"acc": "max"})
    series = MetricSeries("acc", "val", "max", (1,), {})
    record = FitRecord(
        "A", client_names=("a", "b", "c"), client_sizes=(1, 1, 1), evaluations=(values,), metrics=(series,)
    )
    assert worst_first(record) == [2, 0, 1]


def test_means_are_over_all_clients_also_where_few_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(client_pictures, "MAX_DOTS", 8)
    record = fit_record(clients=60, rounds=2)
    (figure,) = pictures(written(tmp_path, record))["fares"][:1]
    assert len(numbers(figure["data"][0]["y"])) == 8
    assert figure["layout"]["shapes"][0]["y0"] == pytest.approx(fmean(record.last_values("test").values["test_acc"]))


def test_costs_are_means_over_the_seeds():
    seconds, memory = costs(by_method([fit_record(rounds=2), fit_record(rounds=4, seed=1)])).tables
    assert seconds.rows == [["FedAvg", "0.6 s", "0.3 s", "0.3 s", "1.2 s"]]
    assert [row[-1] for row in memory.rows] == ["160 bytes", "40 bytes", "200 bytes"]
    assert [in_bytes(count) for count in (1, 1536, 2**31)] == ["1 byte", "1.5 KiB", "2.0 GiB"]


XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
SIGHTS = np.array([  # nobody is colour-blind, or protanopia, deuteranopia, tritanopia (Machado et al. 2009)
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
])  # fmt: skip


def linear(color):
    parts = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(light):
    x, y, z = np.cbrt(XYZ @ light.clip(1e-3, 1) / (0.9505, 1, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colors_of_methods_stand_out_from_paper_and_from_each_other_for_the_colour_blind_too():
    light, dark, *colors = map(linear, (LIGHT.paper, DARK.paper, *LIGHT.colors))
    luminance = [0.05 + XYZ[1] @ color for color in (light, dark, *colors)]
    assert all(one / luminance[1] > 3 < luminance[0] / one for one in luminance[2:])
    for sight in SIGHTS:
        seen = [lab(sight @ color) for color in colors]
        assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 15


def test_places_that_are_drawn():
    assert both_ends(5, 10) == [0, 1, 2, 3, 4]
    assert both_ends(1000, 4) == [0, 1, 998, 999]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.html"
    write_report([fit_record()], path)
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr(Path, "replace", lambda *files: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        write_report([fit_record("FedLF")], path)
    assert path.read_text(encoding="utf-8") == before


def test_missing_plotly_names_the_extra(tmp_path, monkeypatch):
    from fl_lightning.report.callbacks import Report

    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    words = r"^reports need plotly: pip install '\.\[report\]' in a checkout, pip install 'fl-lightning\[report\]'"
    with pytest.raises(ImportError, match=words):
        write_report([FitRecord("FedAvg")], tmp_path / "report.html")
    with pytest.raises(ImportError, match=words):  # before a long fit, not after it
        Report(tmp_path / "report.html")


def cells(page, method):
    """The row of a method in the table of the clients' numbers."""
    return re.findall("<bdi>(.*?)</bdi>", re.search(f"<tr><td><bdi>{method}</bdi></td>.*?</tr>", page).group())


class TestSentences:
    def said(self, *records, stage="test"):
        methods = by_method(records)
        return lede(methods, stage, comparison(methods, stage))

    def test_who_is_worst_off_and_the_mean(self):
        (only,) = self.said(fit_record("FedLF", clients=10, rounds=40))
        assert only.startswith(
            "After 40 rounds of \u2068FedLF\u2069, \u2068client 0\u2069 (10 test samples) is worst off: its "
        )
        assert "the mean of 10 clients is" in only

    def test_bounds_have_no_conflicts_and_are_told_apart(self, tmp_path):
        first, pooled = fit_record("FedAvg", rounds=2), fit_record("pooled", rounds=3, is_bound=True)
        alone = replace(fit_record("local only", is_bound=True), rounds=RoundSeries())
        text = write_report([first, pooled, alone], tmp_path / "report.html").read_text()
        assert "1 method and 2 bounds" in text
        assert "No methods, but plain training to measure them by: pooled and local only." in text
        assert [cells(text, method)[-2] for method in ("pooled", "local only")] == ["-", "-"]
        assert cells(text, "local only")[-1] == "-"
        (conflicts,) = pictures(text)["conflicts"]
        (curve,) = conflicts["data"]
        assert "FedAvg" in curve["name"]

    def test_rounds_in_which_nobody_counted_have_no_conflicts(self, tmp_path):
        first, other = fit_record("FedAvg", rounds=2), fit_record("FedProx", rounds=2)
        other = replace(other, rounds=replace(other.rounds, conflicts=(None, None)))
        assert record_from_json(record_to_json(other)) == other
        text = write_report([first, other], tmp_path / "report.html").read_text()
        assert cells(text, "FedProx")[-2] == "-"
        (conflicts,) = pictures(text)["conflicts"]
        (curve,) = conflicts["data"]
        assert "FedAvg" in curve["name"]

    def test_seeds_that_divide_the_data_have_clients_of_their_own(self):
        first = fit_record(rounds=1)
        (method,) = by_method([first, replace(first, seed=1, client_sizes=(9, 9, 9, 9))])
        points = method.clients("test_acc", "test")
        assert [point.label for point in points[:2]] == ["client 0 (seed 0)", "client 0 (seed 1)"]
        assert len(points) == 8
        assert method.worst_client("test_acc", "test", "max") is None

    def test_values_near_zero_and_small_ones_count_as_good(self):
        record = fit_record(rounds=3)
        modes = {"gap": "abs"}
        values = replace(record.evaluations[-1], values={"gap": (-0.5, 0.1, 0.2, 0.0)}, modes=modes)
        metrics = tuple(replace(s, metric="gap", mode="abs") for s in record.metrics if s.metric == "test_acc")
        (first,) = self.said(replace(record, evaluations=(values,), metrics=metrics))
        assert "client 0\u2069 (10 test samples) is worst off: its gap is -0.500" in first


def test_learning_rates_of_one_method_are_told_apart():
    records = [fit_record("FedAvg"), replace(fit_record("FedAvg"), learning_rate=0.01), fit_record("FedLF")]
    assert [method.label for method in by_method(records)] == ["FedAvg, lr 0.1", "FedAvg, lr 0.01", "FedLF"]
