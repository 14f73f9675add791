# SPDX-License-Identifier: Apache-2.0
"""The lists of mutations: each can still be planted, and has its row in the table."""

import shutil
from collections import Counter
from pathlib import Path

from mutations.change import NoLongerAppliesError
from mutations.lists import LISTS

ROOT = Path(__file__).parents[2]
MUTATIONS = [mutation for listed in LISTS.values() for mutation in listed]


def test_every_mutation_applies(tmp_path):
    for folder in ("fl_lightning", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    gone = []
    for mutation in MUTATIONS:
        assert mutation.old != mutation.new, mutation.name
        try:
            before = mutation.apply(tmp_path)
        except NoLongerAppliesError as error:
            gone.append(str(error))
        else:
            (tmp_path / mutation.file).write_text(before, encoding="utf-8")
    assert not gone, "\n".join(["change these in tests/mutations with the code:", *gone])


def test_every_mutation_has_one_row_in_the_table():
    lines = (ROOT / "tests" / "mutations" / "table.md").read_text(encoding="utf-8").splitlines()
    rows = Counter(line.removeprefix("| ").rsplit(" | ", 1)[0] for line in lines if line.startswith("| `"))
    assert rows == Counter(mutation.name for mutation in MUTATIONS), "run tests/mutate.py"
