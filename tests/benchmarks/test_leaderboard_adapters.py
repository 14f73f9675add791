# SPDX-License-Identifier: Apache-2.0
"""The suite about adapters: its tasks, its clients, and what it counts, on a small standard library."""

import hashlib
from dataclasses import replace

import pytest
import torch
from small_suite import TINY
from test_leaderboard_parts import fl_trainer

import fl_lightning as fl
from benchmarks.leaderboard import adapter_tasks, adapters, text
from benchmarks.leaderboard.adapter_tasks import LENGTH, TASKS, TEST, TRAIN, OneTaskEach, kinds, owners, windows
from benchmarks.leaderboard.methods import for_adapters
from benchmarks.leaderboard.records import failed, finished
from benchmarks.leaderboard.report import _accuracies, tables
from benchmarks.leaderboard.runs import carry_out
from benchmarks.leaderboard.standing import Standing

LETTERS = "\n" + "".join(map(chr, range(32, 127)))


def read(symbols):
    return "".join(LETTERS[each] for each in symbols.flatten().tolist())


def test_kinds_are_those_of_tokens():
    assert kinds(b'def f(x, y=3):\n    """Two\n    lines."""\n    return x  # ok\n').decode() == (
        "aaa a+a+ a+0++ " + "    " + '"' * 20 + " " + "    aaaaaa a  #### "
    )
    assert kinds(b"x = (1,\n").decode() == "a + +0+ "
    assert kinds(b"y = 2\nx = '''no end\n").decode().startswith("a + 0 ")


@pytest.mark.parametrize("task", TASKS)
def test_windows_ask_for_what_follows(task):
    content = b"def first(x):\n    return X  # a note\n" * 400
    inputs, asked = windows(content, task)
    used = content[: (TRAIN + TEST) * LENGTH]
    written = {"back": used[::-1], "case": used.swapcase()}.get(task, used).decode()
    assert inputs.shape == asked.shape == (TRAIN + TEST, LENGTH)
    assert set(inputs[:, 0].tolist()) == {text.CHARACTERS + TASKS.index(task)}
    lines = [written[start : start + LENGTH] for start in range(0, len(written), LENGTH)]
    assert [read(row) for row in inputs[:, 1:]] == [line[:-1] for line in lines]
    assert read(asked) == (kinds(used).decode() if task == "kind" else written)


def test_clients_have_one_task_and_modules_are_drawn():
    modules, clients = 30, 20
    labels = torch.zeros(modules * len(TASKS) * TRAIN)
    drawn = set()
    for seed in range(3):
        parts = OneTaskEach(clients).split(labels, seed)
        tested = OneTaskEach(clients).match(None, parts, None, seed)
        blocks = [set((part // TRAIN).tolist()) for part in parts]
        assert all(len(block) == 1 for block in blocks)
        assert [set((part // TEST).tolist()) for part in tested] == blocks
        assert [min(block) % len(TASKS) for block in blocks] == [client % len(TASKS) for client in range(clients)]
        assert len({min(block) // len(TASKS) for block in blocks}) == clients, "a module has one owner"
        assert [len(part) for part in parts[::4]] == [240, 168, 120, 84, 60]
        assert {len(part) for part in tested} == {TEST}
        drawn.add(tuple(min(block) for block in blocks))
    assert len(drawn) == 3


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Six modules for owners, and a small one that is general."""
    folder = tmp_path / "stdlib"
    folder.mkdir()
    for number in range(6):
        (folder / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}  # hm\n" * 400)
    (folder / "general.py").write_text("import sys\n" * 80)
    monkeypatch.setattr(text, "SMALLEST", 2000)
    large = b"".join((folder / f"m{number}.py").read_bytes() for number in range(6))
    monkeypatch.setattr(text, "DIGEST", hashlib.sha256(large).hexdigest())
    monkeypatch.setattr(text, "GENERAL_DIGEST", hashlib.sha256((folder / "general.py").read_bytes()).hexdigest())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapters, "STEPS", 2)
    monkeypatch.setattr(adapter_tasks, "TRAIN", 60)
    monkeypatch.setattr(adapter_tasks, "TEST", 30)
    adapters.base.cache_clear()
    yield tmp_path
    adapters.base.cache_clear()


def test_every_method_adapts_and_conflicts_in_products_are_counted(library, monkeypatch):
    data = owners(library, 4, batch_size=40)
    start, count = adapters.base().state_dict(), adapters.conflicts_in_products
    monkeypatch.setattr(adapters, "conflicts_in_products", lambda *given: 1 + 0 * count(*given))
    for name, strategy in for_adapters().items():
        torch.manual_seed(0)
        module = adapters.AdapterLearner(adapters.adapted, 1, 0.1)
        trainer = fl_trainer(strategy.with_arguments(clients_per_round=4))
        trainer.callbacks.append(adapters.ConflictCount())
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
        values = trainer.strategy.last_evaluation.values
        assert values["test_conflicts"].tolist() == [0.25] * 4
        assert ("personal/test_acc" in values) == (name in ("Ditto", "FedPer"))
        trained = [n for n, p in module.named_parameters() if p.requires_grad]
        assert len(trained) == 2 * 4 * adapters.BLOCKS
        assert all(".lora_" in each for each in trained)
        kept = {n.replace(".base", ""): p for n, p in module.net.state_dict().items() if "lora_" not in n}
        assert all(torch.equal(kept[n], p) for n, p in start.items()), "the base is frozen"


def test_conflicts_are_those_of_the_products_that_change():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(adapters.LoRALinear(torch.nn.Linear(5, 6)) for _ in range(2)))
    layout = fl.ParamLayout.from_module(layers)
    params, step, rows = torch.randn(layout.numel), torch.randn(layout.numel), torch.randn(24, layout.numel)

    def product(flat):
        a, b, c, d = layout.views(flat.double())
        return torch.cat([(b @ a).flatten(), (d @ c).flatten()])

    change = [product(params) - product(params - update) for update in (step, *rows)]
    found = [bool(each @ change[0] < 0) for each in change[1:]]
    cohort = fl.Cohort(params, fl.UpdateMatrix(rows, layout), None, torch.ones(24), tuple(range(24)), 0)
    assert adapters.conflicts_in_products(cohort, step) == sum(found)
    assert found != [bool(row @ step < 0) for row in rows], "otherwise counting in the factors would do"


def test_another_library_is_refused(library):
    (library / "stdlib" / "general.py").write_text("import os\n" * 80)
    with pytest.raises(text.MissingDataError, match=r"standard library of CPython 3\.11\.7 is needed: run with that"):
        text.general()


def test_divisions_and_clients_alone_are_in_the_table(tmp_path):
    suite = replace(TINY, seeds=1, divisions=2, bounds="local", rates=(0.1, 0.3))
    carry_out(suite, tmp_path, tmp_path / "tiny", only=["FedLF"])
    rows = {row.accuracy.method: row for row in Standing(suite, finished(tmp_path / "tiny"), {}).rows}
    assert set(rows) == {"FedAvg", "FedLF", "local only"}
    assert all(row.accuracy.repetitions == 2 for row in rows.values())
    assert rows["local only"].differences[("accuracy", "mean")].difference == pytest.approx(
        rows["local only"].accuracy.mean.mean - rows["FedAvg"].accuracy.mean.mean
    )
    written = tables(Standing(suite, finished(tmp_path / "tiny"), failed(tmp_path / "tiny")), {})
    (line,) = (line for line in written.splitlines() if line.startswith("| local only | 0.") and "±" in line)
    assert line.split(" | ")[2] == "2"
    assert "| local only | never |  |  |  |  |" in written
    assert "| minus FedAvg | divisions |" in written
    shown = replace(rows["FedLF"], others={"conflicts in products": 0.125})
    assert "12.5 %" in _accuracies([shown], 2, "divisions")
