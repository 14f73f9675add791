# SPDX-License-Identifier: Apache-2.0
"""The runner of mutants: on a toy package one is noticed and one survives."""

import subprocess

import pytest

mutants = pytest.importorskip("mutants", exc_type=ImportError)

SOURCE = '"""Prose 1."""\n\n\ndef double(value: int = 3) -> int:\n    return value + value\n'
TEST = "from toy.room.doubling import double\n\n\ndef test_double():\n    assert double(5) == 10\n"


@pytest.fixture
def tree(tmp_path):
    for name, text in {
        "toy/room/doubling.py": SOURCE,
        "tests/room/test_doubling_more.py": TEST,
    }.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "root", check=True)
    return tmp_path / "root"


def test_one_mutant_is_noticed_and_one_survives(tree, tmp_path):
    judge = mutants.Judge(tree, tmp_path / "copy")
    found = {m.difference: judge.notices(m) for m in mutants.mutants(tree, "toy/room/doubling.py")}
    head = "--- toy/room/doubling.py\n"
    assert found == {
        f"{head}-def double(value: int = 3) -> int:\n+def double(value: int = 4) -> int:\n": False,
        f"{head}-    return value + value\n+    return value - value\n": True,
    }
    assert (tmp_path / "copy" / "toy" / "room" / "doubling.py").read_text() == SOURCE


def test_known_survivors_still_stand_in_their_files():
    text = mutants.EQUIVALENT.read_text(encoding="utf-8")
    for entry in text.split("--- ")[1:]:
        file, *lines = entry.splitlines()
        held = (mutants.ROOT / file).read_text(encoding="utf-8").splitlines()
        assert {line[1:] for line in lines if line.startswith("-")} <= set(held), file
