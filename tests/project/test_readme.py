# SPDX-License-Identifier: Apache-2.0
"""The README's examples, taken from the page and run with the reader's own two classes filled in."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from test_commands import EXTRAS

import fl_lightning as fl
from benchmarks.papers.catalog import experiment
from fl_lightning.__main__ import main

PAGE = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DOCS = Path(__file__).parents[2] / "docs"

PROJECT = """
import torch
from fl_lightning.lightning.names import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class MyLitModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyDataModule(LightningDataModule):
    def _loader(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(900, 4, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=20)

    train_dataloader = val_dataloader = test_dataloader = _loader
"""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def my_project(tmp_path, monkeypatch):
    (tmp_path / "my_project.py").write_text(PROJECT, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_project", None)


def test_the_quick_start_runs(my_project, capsys):
    import my_project as project

    quick_start, replaced = re.subn("max_epochs=200", "max_epochs=2, accelerator='cpu'", blocks("python")[1])
    assert replaced == 1
    names = {"MyDataModule": project.MyDataModule, "MyLitModule": project.MyLitModule}
    exec(quick_start, names)
    assert names["trainer"].callback_metrics["test_acc"].isfinite()
    assert names["strategy"].last_round.round == 1
    assert "angle" in capsys.readouterr().out


def test_the_three_lines_are_those_of_the_quick_start():
    lines, quick_start = (ast.parse(block).body for block in blocks("python")[:2])
    made = {line.targets[0].id: line.value.func for line in quick_start if isinstance(line, ast.Assign)}
    assert {line.targets[0].id: ast.dump(line.value.func) for line in lines} == {
        name: ast.dump(made[name]) for name in ("data", "strategy", "trainer")
    }


def test_the_table_of_the_first_screen_names_experiments():
    head, *commands = re.findall(r"\| `([^`]+)` \|$", PAGE.split("## How it works")[0], flags=re.MULTILINE)
    assert head.startswith("python -m benchmarks.papers run ")
    assert len(commands) == 4
    for command in commands:
        name, *rest = shlex.split(command)
        assert rest[:1] in ([], ["--only"])
        cases = [case.name for case in experiment(name).cases]
        assert [text for text in rest[1:] if not any(text in case for case in cases)] == []


def test_the_yaml_runs(my_project, tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    (config,) = blocks("yaml")
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    arguments = ["fit", "--config", "config.yaml", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    monkeypatch.setattr(sys, "argv", ["fl_lightning", *arguments])
    assert main(arguments) == 0
    assert list(tmp_path.rglob("*.ckpt"))


def test_aggregate_runs_without_a_trainer():
    rows = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]])
    names = {
        "fl": fl,
        "theta": torch.zeros(3),
        "rows": rows,
        "layout": fl.ParamLayout.from_sizes([2, 1]),
        "losses": [0.5, 1.0],
        "sizes": [10, 20],
        "ids": [4, 7],
        "t": 0,
    }
    exec(blocks("python")[2], names)
    assert (rows @ names["step"] >= 0).all()


def server_rules():
    return [
        name
        for name, value in vars(fl.algorithms).items()
        if isinstance(value, type) and issubclass(value, fl.algorithms.ServerRule) and name != "ServerRule"
    ]


def test_the_tables_list_what_the_package_has():
    docs = Path(fl.__file__).parents[1] / "docs"
    tables = "".join((docs / name).read_text(encoding="utf-8") for name in ("methods/README.md", "data.md"))
    named = set(re.findall(r"^\| \[?`(\w+)`", tables, flags=re.MULTILINE))
    rules = set(server_rules())
    partitions = {
        name
        for name, value in vars(fl.data).items()
        if isinstance(value, type) and issubclass(value, fl.data.Partition) and name != "Partition"
    }
    samplers = {
        name
        for name, value in vars(fl.data).items()
        if isinstance(value, type) and issubclass(value, fl.data.CohortSampler) and name != "CohortSampler"
    }
    assert rules
    assert partitions
    assert samplers
    assert rules | partitions | samplers <= named


def test_the_number_of_methods_is_that_of_the_tables():
    counts = {int(count) for count in re.findall(r"(\d+) (?:published )?methods", PAGE)}
    assert counts == {len(server_rules())}
    table = (Path(fl.__file__).parents[1] / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| \[`\w+`\]\(", table, flags=re.MULTILINE)) == len(server_rules())
    rows = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    assert re.findall(rf"(?<!\[)`(?:{'|'.join(server_rules())})[`(]", rows) == []  # each name is a link to its page


def test_the_table_of_what_the_server_must_see_is_what_the_rules_say():
    page = (Path(fl.__file__).parents[1] / "docs" / "choose.md").read_text(encoding="utf-8")
    section = page.split("\n## What the server must see\n")[1].split("\n## ")[0]
    rows = re.findall(r'^\| .* \| `"(\w+)"` \| (.*) \|$', section, flags=re.MULTILINE)
    listed = {text: reads for reads, methods in rows for text in re.findall("`([^`]+)`", methods)}
    del listed["TorchJD"]  # tests/algorithms/test_torchjd.py
    arguments = {"FA": "([[0.0]])"}
    for text, reads in listed.items():
        call = text if "(" in text else text + arguments.get(text, "()")
        assert eval(call, vars(fl.algorithms)).reads == reads, text
    assert {name for name in listed if "(" not in name} == set(server_rules())
    for name in server_rules():
        rule = eval(name + arguments.get(name, "()"), vars(fl.algorithms))
        assert rule.client_rule().reads == "sums", name


def made(name):
    return getattr(fl.algorithms, name)(*([[[0.0]]] if name == "FA" else []))


def fits(rule, client):
    try:
        fl.FederatedStrategy(rule, client=client, local_epochs=11)
    except ValueError:
        return False
    return True


def halves():
    """The methods that change local training and whose client half others can borrow."""
    names = [name for name in server_rules() if type(made(name).client_rule()) is not fl.algorithms.ClientRule]
    return [name for name in names if fits(fl.algorithms.FedAvg("uniform"), made(name))]


def test_the_table_of_client_halves_says_which_do_not_fit():
    page = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    section = page.split("\n## Client halves\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", section, flags=re.MULTILINE)[1:]
    said = {name: refused.split(", ") for names, refused in rows for name in names.split(", ")}
    plain = [name for name in server_rules() if type(made(name).client_rule()) is fl.algorithms.ClientRule]
    assert said.keys() == set(plain) - {"FedAvg", "FedHEAL"}
    for name in plain:
        rule = fl.algorithms.FedMDFG(gradient_source="update") if name == "FedMDFG" else made(name)
        rule = fl.algorithms.FedAvg("uniform") if name == "FedAvg" else rule
        assert sorted(said.get(name, [])) == [half for half in halves() if not fits(rule, made(half))], name


def test_the_page_on_privacy_says_which_methods_it_fits():
    page = (DOCS / "privacy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", page.split("\n## Which methods")[1], flags=re.MULTILINE)[1:]
    words = {"FedMGDAPlus": "FedMGDA+", "QFedAvg": "q-FedAvg", "FedAvg": "FedAvg()"}
    for name in server_rules():
        rule = fl.algorithms.FedMDFG(gradient_source="update") if name == "FedMDFG" else made(name)
        listed = next(row for row in rows if words.get(name, name) in re.findall(r"[\w+()-]+", row[0]))
        for where, answer in zip(("central", "local"), listed[1:], strict=True):
            private = fl.algorithms.DifferentialPrivacy(1.0, 1.0, where=where)
            assert fits(rule, private) == answer.startswith("yes"), (name, where)


def test_install_names_every_extra_that_users_need():
    users = EXTRAS - {"build", "dist", "test", "docs", "lint", "mutants"}
    (sentence,) = re.findall(r"The optional extras are (.*?)\. Ask", (DOCS / "install.md").read_text(), flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == users
