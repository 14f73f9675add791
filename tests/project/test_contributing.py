# SPDX-License-Identifier: Apache-2.0
"""The worked example of a new method in CONTRIBUTING.md, taken from the page and put where the page says."""

import re
import shutil
from pathlib import Path

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"

BY_HAND = """
import torch
from algorithm_cohorts import make_cohort
from fl_lightning import ParamLayout, algorithms as fl
from fl_lightning.core.storage import rule_state

# Norms 5, 1 and 2: the median is 2, so the first update is cut to 2/5 and two of three fit.
rule = fl.AdaptiveClip(quantile=0.5, rate=0.3)
rows = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]])
step = rule.aggregate(make_cohort(rows, layout=ParamLayout.from_sizes([1, 1]), sizes=torch.ones(3)))
torch.testing.assert_close(step, torch.tensor([(1.2 + 1.0) / 3, (1.6 - 2.0) / 3]))
assert abs(rule_state.state_dict(rule)["bound"] - 2 * torch.exp(torch.tensor(-0.05)).item()) < 1e-6
"""


def test_whoever_follows_the_three_steps_passes_the_contract_suite(tmp_path, interpreter_with_lightning):
    section = PAGE.read_text(encoding="utf-8").split("\n## Add an algorithm\n")[1].split("\n## ")[0]
    file, export, entry = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    for folder in ("fl_lightning", "tests"):
        shutil.copytree(PAGE.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PAGE.parent / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "fl_lightning/algorithms/adaptive_clip.py").write_text(file, encoding="utf-8")
    insert(tmp_path / "fl_lightning/algorithms/__init__.py", "\n__all__ = [\n", f"{export}{{}}    'AdaptiveClip',\n")
    insert(tmp_path / "tests/algorithms/test_contract.py", "\nRULES = {\n", f"{{}}{entry}")
    suite = (tmp_path / "tests/algorithms").glob("*.py")
    files = [str(path) for path in suite if "RULES" in path.read_text(encoding="utf-8")]
    arguments = ["-q", "-p", "no:cacheprovider", *files, "-k", "AdaptiveClip"]
    code = f"import sys, pytest\nif __name__ == '__main__':\n    sys.exit(pytest.main({arguments}))"
    result = interpreter_with_lightning(code, cwd=tmp_path, path=(tmp_path,))
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 20
    result = interpreter_with_lightning(BY_HAND, cwd=tmp_path, path=(tmp_path, tmp_path / "tests"))
    assert result.returncode == 0, result.stdout + result.stderr


def insert(path, anchor, template):
    """Replaces an anchor, which must occur once, by the text made from it."""
    text = path.read_text(encoding="utf-8")
    assert text.count(anchor) == 1, anchor
    path.write_text(text.replace(anchor, template.format(anchor)), encoding="utf-8")
