# SPDX-License-Identifier: Apache-2.0
"""The worked example of CONTRIBUTING.md, taken from the page and run."""

import inspect
import math
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import kept
from fl_lightning.core.updates import UpdateMatrix

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def blocks():
    """The three code blocks of "Add an algorithm": the file, the export line, the test entry."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Add an algorithm\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


@pytest.fixture(scope="module")
def source(blocks):
    return blocks[0]


@pytest.fixture
def rule_class(source, monkeypatch):
    module = types.ModuleType("fl_lightning.algorithms.adaptive_clip")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    (made,) = (
        value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
    )
    assert issubclass(made, ServerRule)
    return made


def test_names_that_a_rule_may_not_use_are_listed():
    listed = PAGE.read_text(encoding="utf-8").split("names that a fit uses itself:")[1].split("\n- ")[0]
    for kind, part in zip((ServerRule, ClientRule), listed.split("in a `ClientRule`"), strict=True):
        methods = {n for n, entry in vars(kind).items() if inspect.isfunction(entry) and n[0] != "_"}
        assert set(re.findall("`(\\w+)`", part)) == methods | {"report" if kind is ServerRule else "scalars"}


def cohort(rows, round_index=0):
    rows = torch.as_tensor(rows, dtype=torch.float32)
    updates = UpdateMatrix(rows, ParamLayout.from_sizes([1, 1]))
    m = len(rows)
    return Cohort(torch.zeros(2), updates, None, torch.ones(m), tuple(range(m)), round_index)


# Norms 5, 1 and 2: the median is 2, so the first update is cut to 2/5 and two of three fit.
ROWS = [[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]]


def test_the_example_clips_as_worked_out_by_hand(rule_class):
    rule = rule_class(quantile=0.5, rate=0.3)
    step = rule.aggregate(cohort(ROWS))
    torch.testing.assert_close(step, torch.tensor([(1.2 + 1.0) / 3, (1.6 - 2.0) / 3]))
    torch.testing.assert_close(rule.report.weights, torch.tensor([0.4, 1.0, 1.0], dtype=torch.float64) / 3)
    assert rule.report.scalars == {"bound": 2.0}
    assert kept.state(rule) == {"bound": pytest.approx(2.0 * math.exp(-0.3 * (2 / 3 - 1 / 2)))}


def test_the_example_goes_on_from_its_state_and_forgets_it_on_reset(rule_class):
    first, second = rule_class(), rule_class()
    first.aggregate(cohort(ROWS))
    kept.load(second, kept.state(first))
    torch.testing.assert_close(first.aggregate(cohort(ROWS, 1)), second.aggregate(cohort(ROWS, 1)), rtol=0, atol=0)
    assert first.report.scalars["bound"] < 2.0
    kept.reset(first)
    first.aggregate(cohort(ROWS))
    assert first.report.scalars["bound"] == 2.0


def test_the_example_is_homogeneous_and_survives_zero_updates(rule_class):
    scaled = cohort([[1e3 * x for x in row] for row in ROWS])
    torch.testing.assert_close(rule_class().aggregate(scaled), 1e3 * rule_class().aggregate(cohort(ROWS)))
    rule = rule_class()
    assert rule.aggregate(cohort([[0.0, 0.0], [0.0, 0.0]])).tolist() == [0.0, 0.0]
    assert rule.aggregate(cohort(ROWS)).isfinite().all()
    assert rule.aggregate(cohort([[3.0, 4.0]])).isfinite().all()


@pytest.mark.parametrize("arguments", [{"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}])
def test_the_example_refuses_what_its_docstring_says(rule_class, arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be"):
        rule_class(**arguments)


@pytest.mark.parametrize("command", [["check"], ["format", "--diff"]], ids=["check", "format"])
def test_the_example_passes_lint(source, command):
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", "fl_lightning/algorithms/adaptive_clip.py", "-"]
    result = subprocess.run(ruff, input=source, capture_output=True, text=True, cwd=PAGE.parent, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_whoever_follows_the_three_steps_passes_the_contract_suite(blocks, tmp_path, interpreter):
    file, export, entry = blocks
    for folder in ("fl_lightning", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PAGE.parent / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(PAGE.parent / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "fl_lightning/algorithms/adaptive_clip.py").write_text(file, encoding="utf-8")
    insert(tmp_path / "fl_lightning/algorithms/__init__.py", {"\n__all__ = [\n": f"{export}{{}}    'AdaptiveClip',\n"})
    insert(tmp_path / "tests/algorithms/test_contract.py", {"\nRULES = {\n": f"{{}}{entry}"})
    suite = (tmp_path / "tests/algorithms").glob("*.py")
    files = [file for file in suite if "RULES" in file.read_text(encoding="utf-8")]
    arguments = ["-q", "-p", "no:cacheprovider", *map(str, files), "-k", "AdaptiveClip"]
    code = f"import sys, pytest\nif __name__ == '__main__':\n    sys.exit(pytest.main({arguments}))"
    result = interpreter(code, cwd=tmp_path, path=(tmp_path,))
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 20


def insert(path, edits):
    """Replaces each anchor, which must occur once, by the text made from it."""
    text = path.read_text(encoding="utf-8")
    for anchor, template in edits.items():
        assert text.count(anchor) == 1, anchor
        text = text.replace(anchor, template.format(anchor))
    path.write_text(text, encoding="utf-8")
