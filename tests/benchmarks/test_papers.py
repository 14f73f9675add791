# SPDX-License-Identifier: Apache-2.0
"""The runner of the papers' tables, on a little noise in place of images."""

import json
import multiprocessing
import pickle
import statistics
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import fl_lightning as fl
from benchmarks.papers import __main__ as program
from benchmarks.papers import ledger, pages
from benchmarks.papers.catalog import EXPERIMENTS, experiment
from benchmarks.papers.experiment import Experiment, Job, Log
from benchmarks.papers.federated import FederatedCase, Training
from benchmarks.papers.networks import SoftmaxRegression, mlp, tiny_resnet
from benchmarks.papers.pages import DOCS, PLACES, Place
from benchmarks.papers.records import pack, read, slug
from benchmarks.papers.report import draw_curves, final, gather, rewritten, tables
from benchmarks.papers.sources import FASHION, MissingDataError
from benchmarks.papers.tables.fedlf import AFLByPlace
from benchmarks.papers.tables.fedlf_variants import Fragments
from benchmarks.papers.tables.fedmdfg_figures import MeanDirection, OneLength, overfit
from benchmarks.papers.tasks import Classes, Domains, Images, domain
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import UpdateMatrix

ORIGIN = {"commit": "c0ffee", "fl_lightning": "0", "torch": "1", "lightning": "2", "python": "3"}


def write_idx(path, tensor):
    head = bytes([0, 0, 8, tensor.dim()]) + b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    path.write_bytes(head + tensor.numpy().tobytes())


@pytest.fixture
def root(tmp_path):
    """A folder with a very small Fashion-MNIST."""
    folder = tmp_path / "data" / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    for half, size in (("train", 200), ("t10k", 100)):
        labels = (torch.arange(size) % 10).byte()
        images = (torch.rand(size, 28, 28) * 100 + labels[:, None, None] * 15).byte()
        write_idx(folder / f"{half}-images-idx3-ubyte", images)
        write_idx(folder / f"{half}-labels-idx1-ubyte", labels)
    return tmp_path / "data"


def case_of(**changes):
    case = FederatedCase(
        "Pat-2: FedLF",
        Images(FASHION, fl.data.Pathological(10, 2)),
        mlp,
        fl.algorithms.FedLF,
        Training(3, 10),
        rounds=5,
        every=2,
        published={"mean": 0.5},
    )
    return replace(case, **changes)


def job_of(case, root, out, rounds, seed=0):
    return Job("trial", case.name, seed, rounds, root, out, "cpu", ORIGIN)


def execute(case, job):
    case.execute(job, Log(job))
    return [{**line, "seconds": 0} for line in read(job.lines)]


@pytest.mark.parametrize("packing", [False, True], ids=["own file", "packed"])
def test_a_run_that_was_killed_writes_what_an_uninterrupted_one_does(root, tmp_path, packing):
    case = case_of()
    whole = execute(case, job_of(case, root, tmp_path / "a", 5))
    assert [line["round"] for line in whole] == [2, 4, 5]
    assert not job_of(case, root, tmp_path / "a", 5).checkpoint.exists(), "complete"

    stopped = job_of(case, root, tmp_path / "b", 4)
    assert execute(case, stopped) == whole[:2]
    with stopped.lines.open("a") as file:  # a line after the last checkpoint, and half of one
        file.write(json.dumps({**whole[2], "mean": -1.0}) + "\n" + json.dumps(whole[2])[:30])
    assert stopped.checkpoint.exists()
    if packing:
        pack(tmp_path / "b", "trial")
        assert not stopped.lines.exists()
    assert execute(case, job_of(case, root, tmp_path / "b", 5)) == whole
    line = whole[-1]
    assert 0 <= line["min"] <= line["mean"] <= line["max"] <= 1
    assert len(line["clients"]) == 10
    assert line["per_round_conflicts"] == line["per_round_block_conflicts"] == 0
    assert line["commit"] == "c0ffee"
    assert execute(case, job_of(case, root, tmp_path / "c", 5, seed=1))[-1]["clients"] != line["clients"]


@pytest.mark.parametrize(
    "changes",
    [
        {"task": Images(FASHION, fl.data.Dirichlet(10, 0.1, min_size=10), merged=True)},
        {"task": Classes(FASHION, (6, 2, 0)), "training": Training(1.0, 1000)},
        {
            "task": Classes(FASHION, (6, 2, 0), recorded=True),
            "training": Training(1.0, 1000),
            "network": SoftmaxRegression,
            "classes": 3,
        },
        {"rule": partial(fl.algorithms.Ditto, 0.1)},
        {"rule": fl.algorithms.FedHEAL, "client": fl.algorithms.SCAFFOLD},
        {"attack": lambda seed: fl.attacks.ZeroUpdates((0, 1))},
    ],
    ids=["merged", "classes", "recorded", "Ditto", "FedHEAL with SCAFFOLD", "attack"],
)
def test_kinds_of_cases(root, tmp_path, changes):
    case = case_of(rounds=1, **changes)
    case.check(root)
    (line,) = execute(case, job_of(case, root, tmp_path / "out", 1))
    assert 0 <= line["mean"] <= 1
    assert len(line["clients"]) == (3 if "training" in changes else 10)
    assert ("personal_mean" in line) == (case.name == "Ditto" or "Ditto" in str(changes))


def test_merged_data_and_classes(root):
    merged = Images(FASHION, fl.data.Pathological(10, 2), merged=True).federate(root, 0, 10)
    train, kept = merged.train_dataloader(), merged.val_dataloader()
    assert int(train.sizes.sum() + kept.sizes.sum()) == 300
    assert 35 <= int(kept.sizes.sum()) <= 50
    assert not set(train.indices(3).tolist()) & set(kept.indices(3).tolist())
    three = Classes(FASHION, (6, 2, 0)).federate(root, 0, 1000)
    assert three.client_sizes.tolist() == [20, 20, 20]
    images = FASHION.load(root).train
    shirts = images.tensors[0][images.tensors[1] == 6]
    batch, _ = next(three.train_dataloader().batches(0, seed=None))
    assert torch.equal(batch[0], shirts)
    recorded = Classes(FASHION, (6, 2, 0), recorded=True).federate(root, 0, 1000)
    assert recorded.client_sizes.tolist() == [24, 24, 24], "80 % of 30"
    assert recorded.val_dataloader().sizes.tolist() == [3, 3, 3]
    pixels = torch.cat([batch[0] for client in range(3) for batch, _ in loader_batches(recorded, client)])
    raw = images.tensors[0].float()
    middle = (raw[images.tensors[1] == 2].mean() - raw.mean()) / raw.std()
    assert abs(pixels[24:48].mean() - middle) < 0.1


def test_tests_of_equal_size_leave_training_as_it_is(root):
    partition = fl.data.Dirichlet(10, 0.3, min_size=5)
    plain, own = (Images(FASHION, partition, tests=size).federate(root, 3, 10) for size in (0, 10))
    for data in (plain, own):
        data.setup("fit")
    counts = plain.label_counts()
    tests = own.val_dataloader()
    assert torch.equal(own.label_counts(), counts)
    assert all(torch.equal(plain.train_dataloader().indices(i), own.train_dataloader().indices(i)) for i in range(10))
    assert tests.sizes.tolist() == [10] * 10
    images = FASHION.load(root).test.tensors[0].flatten(1).tolist()
    for client in range(10):
        (batch, _), *rest = tests.batches(client, seed=None)
        drawn = torch.bincount(batch[1], minlength=10)
        assert not rest
        assert (drawn - 10 * counts[client] / counts[client].sum()).abs().max() < 1
        chosen = [images.index(image) for image in batch[0].flatten(1).tolist()]
        assert len(set(chosen)) == 10


def loader_batches(data, client):
    return data.train_dataloader().batches(client, seed=None)


def test_domains_are_tested_whole_and_once(tmp_path):
    image = pytest.importorskip("PIL.Image")
    names = ("amazon", "caltech10")
    for number, name in enumerate(names):
        for label in ("bike", "mug"):
            folder = tmp_path / "OfficeCaltech10" / name / label
            folder.mkdir(parents=True)
            for i in range(10):
                image.new("RGB", (30, 20), (100 * number + i,) * 3).save(folder / f"{i}.jpg")
    task = Domains(names, each=2, share=0.25, side=8, train=16, test=8)
    data = task.federate(tmp_path, 0, 4)
    assert data.client_sizes.tolist() == [4, 4, 4, 4]
    held = data.val_dataloader()
    assert held.sizes.tolist() == [4, 0, 4, 0], "two of ten images per class, all with the domain's first client"
    means = [batch[0].float().mean((1, 2, 3)) for client in range(4) for batch, _ in held.batches(client, seed=None)]
    assert (means[0] < 50).all()
    assert (means[1] > 90).all()
    (tmp_path / "OfficeCaltech10" / "amazon").rename(tmp_path / "elsewhere")
    with pytest.raises(MissingDataError, match="Office-Caltech-10 is needed: --data-root must be a folder"):
        task.check(tmp_path)


@pytest.mark.filterwarnings("ignore:clients that train and have nothing to be evaluated on")
def test_made_up_domains_are_digits(root, tmp_path):
    pair = domain(root, "rendered", 8)
    images, labels = pair.train.tensors
    assert images.shape == (10000, 3, 8, 8)
    grey = images.float().mean(1).flatten(1)
    grey = (grey - grey.mean(1, keepdim=True)).abs()  # whatever the colours are
    means = torch.stack([grey[:6000][labels[:6000] == digit].mean(0) for digit in range(10)])
    right = (torch.cdist(grey[6000:], means).argmin(1) == labels[6000:]).float().mean()
    assert right > 0.15, "the digits differ"
    task = Domains(("uci", "rendered"), each=2, share=0.01, side=8, train=148, test=40, least=60, tests=20)
    data = task.federate(root, 0, 4)
    assert data.client_sizes.tolist() == [60, 60, 100, 100]
    assert data.val_dataloader().sizes.tolist() == [20, 0, 20, 0]
    case = case_of(task=task, network=tiny_resnet, rounds=1, training=Training(1.0, 60))
    (line,) = execute(case, job_of(case, root, tmp_path / "out", 1))  # where two clients have no test data
    assert line["sample_std"] == pytest.approx(statistics.stdev(line["clients"]), abs=1e-4)
    assert len(line["clients"]) == 2


def test_a_client_that_overfits_comes_first(root, tmp_path):
    case = case_of(task=Images(FASHION, fl.data.Mutex(10)), training=Training(1.0, 200), rounds=1, start=overfit)
    (line,) = execute(case, job_of(case, root, tmp_path / "out", 1))
    assert max(line["clients"]) > 0.9
    assert line["mean"] < 0.3


@pytest.mark.parametrize("rule", [MeanDirection(), OneLength()], ids=["M1", "M2"])
def test_parts_of_fedmdfg(rule):
    rows, layout = torch.randn(4, 30, dtype=torch.float64), fl.ParamLayout.from_sizes([30])
    cohort = fl.Cohort(
        params=torch.zeros(30, dtype=torch.float64),
        updates=fl.UpdateMatrix(rows, layout),
        losses=torch.arange(1.0, 5.0, dtype=torch.float64),
        sizes=torch.ones(4),
        client_ids=(0, 1, 2, 3),
        round=0,
        client_lr=0.1,
        losses_at=lambda params: torch.arange(1.0, 5.0, dtype=torch.float64) * (params.norm() > 1),
    )
    step = rule.aggregate(cohort)
    alike = rows / rows.norm(dim=1, keepdim=True) * rows.norm(dim=1).mean()
    if isinstance(rule, MeanDirection):
        torch.testing.assert_close(step / step.norm(), alike.mean(0) / alike.mean(0).norm())
    else:
        assert rule.report.scalars["evaluations"] == 1
        torch.testing.assert_close(step.norm(), alike.mean(0).norm())


def test_fragments_have_no_conflicts():
    rule, layout = Fragments(3), fl.ParamLayout.from_sizes([50, 40])
    rule.begin_fit(fl.algorithms.Federation(4, layout, torch.device("cpu"), torch.float32))
    rows = torch.randn(4, 90, generator=torch.Generator().manual_seed(0))
    cohort = fl.Cohort(
        params=torch.zeros(90),
        updates=fl.UpdateMatrix(rows, layout),
        losses=torch.arange(1.0, 5.0),
        sizes=torch.ones(4),
        client_ids=(0, 1, 2, 3),
        round=0,
    )
    step = rule.aggregate(cohort)
    for piece in range(3):
        part = slice(30 * piece, 30 * piece + 30)
        assert (rows[:, part] @ step[part] >= 0).all()


def made_up(out):
    case = case_of(published={"mean": 0.8, "angle": 0.1}, rounds=20)
    other = case_of(name="Pat-2: FedAvg", published={"mean": 0.7})
    trial = Experiment("trial", "Title", (case, other), last=2, deviations=("Less of all.",))
    for seed, offset in ((0, 0.0), (3, 0.02)):
        job = job_of(case, out, out, 20, seed)
        log = Log(job)
        log.cut(0)
        for rounds, mean in ((5, 0.1), (10, 0.8), (15, 0.82)):
            log.write(rounds, {"mean": mean + offset, "angle": 0.2}, 60.0)
    return trial


def test_report(tmp_path):
    trial = made_up(tmp_path)
    text = tables(trial, tmp_path)
    assert "| FedLF | 0.820 ± 0.014 | 0.800 | +0.020 | 0.200 ± 0.000 | 0.100 | +0.100 | 15 of 20 | 0, 3 | 1.0 |" in text
    assert final(read(job_of(trial.cases[0], tmp_path, tmp_path, 20).lines), "mean", 3) == 0.81, "not the first half"
    assert "- Less of all." in text
    assert "Not run (Pat-2): FedAvg." in text
    assert "at c0ffee" in text
    unknown = replace(trial, metrics=("mean", "kept"))
    assert "| FedLF | 0.820 ± 0.014 | 0.800 | +0.020 |  | 15 of 20" in tables(unknown, tmp_path)
    cut = tables(trial, tmp_path, rounds=10)
    assert "| FedLF | 0.810 ± 0.014 | 0.800 | +0.010 | 0.200 ± 0.000 | 0.100 | +0.100 | 10 of 20 | 0, 3 | 1.0 |" in cut
    assert "Not run for 16 rounds (Pat-2): FedLF, FedAvg." in tables(trial, tmp_path, rounds=16)
    draw_curves(gather(trial, tmp_path), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["papers", *map(str, arguments)])
    program.main()


def test_run_skip_and_report(tmp_path, monkeypatch, capsys):
    only = ("--only", "violating: l2 <= 0.8", "--out", tmp_path / "out")
    run = ("run", "fcfl-synthetic", "--data-root", tmp_path, *only)
    # A copy of this process need not import torch again; cases and jobs travel by pickle all the same.
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    command(monkeypatch, *run)
    said = capsys.readouterr().out
    assert "1 runs to do, about" in said
    assert "[1/1 runs" in said
    packed = (tmp_path / "out" / "fcfl-synthetic.jsonl.xz").read_bytes()
    assert not list((tmp_path / "out").glob("*/*.jsonl"))
    command(monkeypatch, *run)
    assert "0 runs to do" in capsys.readouterr().out
    command(monkeypatch, "pack", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "fcfl-synthetic.jsonl.xz").read_bytes() == packed
    command(monkeypatch, "report", "fcfl-synthetic", "--out", tmp_path / "out")
    assert "| l2 <= 0.8 | 0.412 | 0.412 |" in capsys.readouterr().out
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    assert set(written) == {"fcfl-synthetic.jsonl.xz", "fcfl-synthetic.md", "fcfl-synthetic.png"}
    command(monkeypatch, "report", "fcfl-synthetic", "--rounds", 5000, "--out", tmp_path / "out")
    assert "Not run for 5000 rounds" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")} == written


@pytest.mark.parametrize("name", ["fedlf-table1", "fcfl-adult"])
def test_missing_data_gives_one_sentence(tmp_path, monkeypatch, name):
    with pytest.raises(SystemExit, match=r"is needed: --data-root must be a folder that holds .*, found") as stop:
        command(monkeypatch, "run", name, "--data-root", tmp_path, "--out", tmp_path)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_case_can_be_made(experiment):
    assert len({slug(case.name) for case in experiment.cases}) == len(experiment.cases)
    for case in experiment.cases:
        assert case.seeds
        assert set(case.published) <= set(experiment.metrics)
        if isinstance(case, FederatedCase):
            assert isinstance(case.rule(), fl.algorithms.ServerRule)
            if case.client is not None:
                fl.FederatedStrategy(case.rule(), client=case.client())
            if case.guard is not None:
                fl.FederatedStrategy(case.rule(), guard=case.guard())
            if case.attack is not None:
                assert pickle.loads(pickle.dumps(case)).attack(3) == case.attack(3)  # runs are processes
            images = torch.zeros(2, *case.task.shape, dtype=torch.uint8)
            if case is experiment.cases[0]:
                assert case.network()(images).shape == (2, case.classes)


def test_guards_work_and_dishonest_clients_do_not_count(root, tmp_path):
    case = case_of(training=Training(10, 10), attack=lambda seed: fl.attacks.ZeroUpdates((0, 1)))
    everybody = execute(case, job_of(case, root, tmp_path / "a", 2))[0]
    honest = replace(case, honest_only=True)
    counted = execute(honest, job_of(honest, root, tmp_path / "b", 2))[0]
    assert counted["clients"] == everybody["clients"][2:]
    assert counted["mean"] == pytest.approx(sum(everybody["clients"][2:]) / 8, rel=1e-3)
    guarded = replace(honest, guard=partial(fl.guards.MultiKrum, 3))
    assert execute(guarded, job_of(guarded, root, tmp_path / "c", 2))[0]["per_round_dropped"] == 3


def test_weights_by_place_stay_where_they_are_when_others_come():
    rule = AFLByPlace(0.5)

    def second_round(clients):
        rule_state.reset(rule)
        for ids, losses in (((7, 3), (2.0, 1.0)), (clients, (1.0, 1.0))):
            updates = UpdateMatrix(torch.eye(2), ParamLayout.from_sizes([2]))
            cohort = fl.Cohort(torch.zeros(2), updates, losses, (5, 5), ids, 0, num_clients=100)
            rule.aggregate(cohort)
        return rule.report.weights.tolist()

    assert second_round((7, 3)) == second_round((4, 9)) == [0.75, 0.25]


@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: one.name)
def test_the_tables_are_those_of_the_packed_lines(one):
    packed, page = (program.RESULTS / f"{one.name}{ending}" for ending in (".jsonl.xz", ".md"))
    assert packed.exists() == page.exists()
    if page.exists():  # one that has not run yet has neither
        assert tables(one, program.RESULTS) == page.read_text(encoding="utf-8"), "python -m benchmarks.papers report"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_the_tables_of_pages_are_those_of_the_packed_lines(place):
    page = (DOCS / place.page).read_text(encoding="utf-8")
    assert rewritten(page, place.name, place.text(program.RESULTS)) == page, "python -m benchmarks.papers report"


def test_the_ledger_on_its_page_is_that_of_the_packed_lines():
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    assert rewritten(page, "ledger", ledger.text(program.RESULTS)) == page, "python -m benchmarks.papers report"


def test_every_row_of_the_ledger_is_coded(tmp_path):
    for row in (row for rows in ledger.ROWS.values() for row in rows):
        assert bool(row.experiment) != bool(row.command)
        if row.experiment:
            names = [case.name for case in experiment(row.experiment).cases]
            assert all(any(text in name for name in names) for text in row.only), row
            assert row.state(tmp_path)[0] == "coded, not run"


def test_the_ledger_tells_whole_runs_from_short_ones(tmp_path, monkeypatch):
    trial = made_up(tmp_path)
    monkeypatch.setattr(ledger, "experiment", lambda name: trial)
    assert ledger.Row("Table 1", "trial").state(tmp_path) == ("reduced", "1 of 2 rows; 15 of 20 rounds; seeds: 2")


def test_a_table_of_a_page_has_published_figures_in_brackets(tmp_path, monkeypatch):
    trial = made_up(tmp_path)
    monkeypatch.setattr(pages, "experiment", lambda name: trial)
    place = Place("page.md", "trial", ("Pat-2", "Pat-1"), ("mean", "angle"))
    assert place.text(tmp_path).splitlines() == [
        "| method | Pat-2: mean | Pat-2: angle | Pat-1: mean | Pat-1: angle |",
        "|---|---|---|---|---|",
        "| FedLF | .820 (.800) | .200 (.100) |  |  |",
    ]
    one = replace(place, groups=("Pat-2",), metrics=("mean",), rows=("LF",)).text(tmp_path)
    assert one.splitlines()[2:] == ["| FedLF | .820 (.800) |"]
    assert replace(place, rows=("FV",)).text(tmp_path).count("\n") == 1
    monkeypatch.setattr(pages, "PLACES", (place,))
    (tmp_path / "page.md").write_text("a\n<!-- trial -->\n<!-- end of trial -->\nb\n")
    pages.write_pages(["another"], tmp_path, tmp_path)
    pages.write_pages(["trial"], tmp_path, tmp_path)
    assert "| FedLF | .820 (.800) |" in (tmp_path / "page.md").read_text()
