# SPDX-License-Identifier: Apache-2.0
"""The runner of FCFL on a handful of people."""

from dataclasses import replace

import pytest
import torch

from benchmarks.papers import adult, fcfl

ROWS = """\
39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
50, Private, 83311, Doctorate, 13, Married-civ-spouse, Sales, Husband, White, Male, 0, 0, 13, United-States, >50K
38, ?, 215646, Doctorate, 9, Divorced, ?, Not-in-family, Black, Female, 0, 0, 40, ?, <=50K
53, Private, 234721, Doctorate, 7, Married-civ-spouse, Sales, Husband, Black, Male, 0, 0, 40, Mexico, >50K
28, Private, 338409, Masters, 13, Married-civ-spouse, Sales, Wife, Other, Female, 0, 0, 40, Cuba, >50K
31, Private, 45781, 7th-8th, 14, Never-married, Sales, Not-in-family, White, Female, 14084, 0, 50, United-States, >50K
"""


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "Adult"
    folder.mkdir()
    (folder / "adult.data").write_text(ROWS)
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + ROWS.replace("K\n", "K.\n"))
    return tmp_path


def test_adult_is_read_as_published(root):
    train, test = (adult.load(root / "Adult" / name, "race") for name in ("adult.data", "adult.test"))
    for one, two in zip(train, test, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(two))
    assert train.width == 94
    assert train.positions.shape == (6, 7)
    assert train.positions[1].tolist() == [0, 8 + 13, 24, 31 + 3, 45 + 2, 51 + 1, 53]
    assert train.positions[2].tolist() == [94, 8 + 13, 24 + 1, 94, 45 + 3, 51, 94], "unknown values are nowhere"
    assert train.labels.tolist() == [0, 1, 0, 1, 1, 1]
    assert train.groups.tolist() == [1, 1, 0, 0, 0, 1]
    assert train.clients.tolist() == [1, 0, 0, 0, 1, 1]
    by_sex = adult.load(root / "Adult" / "adult.data", "sex")
    assert by_sex.width == 97
    assert by_sex.groups.tolist() == [0, 0, 1, 0, 1, 1]
    (root / "Adult" / "adult.data").write_text(ROWS.replace("Masters", "Magister"))
    with pytest.raises(ValueError, match=r"adult.data must hold .* found \['Magister'\]"):
        adult.load(root / "Adult" / "adult.data", "race")


@pytest.mark.parametrize("forms", ["code", "library"])
def test_every_run_gives_two_accuracies_and_two_gaps(root, forms):
    train, test = (adult.load(root / "Adult" / name, "race") for name in ("adult.data", "adult.test"))
    for run in fcfl.RUNS:
        result = fcfl.execute(replace(run, rounds=(2, 2)), train, test, forms)
        assert [0 <= value <= 1 for value in result.accuracy] == [True, True]
        assert [-1 <= value <= 1 for value in result.disparity] == [True, True]


def test_look_up_is_the_linear_layer(root):
    people = adult.load(root / "Adult" / "adult.data", "race")
    dense = torch.zeros(6, 95).scatter_(1, people.positions, 1.0)[:, :94]
    layer = fcfl.initial_layer(94)
    torch.testing.assert_close(fcfl.Income(94, 0.1, "dp")(people.positions), layer(dense).squeeze(1))


@pytest.mark.parametrize("given", [[], ["--data-root", "nowhere"]])
def test_without_data_it_says_what_to_give(monkeypatch, capsys, given):
    monkeypatch.setattr("sys.argv", ["fcfl", *given])
    with pytest.raises(SystemExit) as stop:
        fcfl.main()
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "as --data-root DIR; found" in said.err
