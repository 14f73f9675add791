# SPDX-License-Identifier: Apache-2.0
"""The runner of FCFL on a handful of people."""

from dataclasses import replace

import pytest
import torch

from benchmarks.papers import adult, eicu, fcfl
from benchmarks.papers import votes as votes_of
from benchmarks.papers.experiment import Job, Log
from benchmarks.papers.records import read
from benchmarks.papers.sources import MissingDataError
from benchmarks.papers.tables.fcfl import COMPARED, chosen
from benchmarks.papers.tables.fcfl_eicu import EICU

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
    crossed = adult.load(root / "Adult" / "adult.data", "race", "sex")
    assert crossed.groups.tolist() == [1, 1, 2, 0, 2, 3]
    assert crossed.width == by_sex.width - 5
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


def test_clients_alone_have_models_of_their_own(root):
    case = next(case for case in COMPARED.cases if case.name == "no budget: alone")
    job = Job("fcfl-baselines", case.name, 1, 30, root, root, "cpu", {})
    case.execute(job, Log(job))
    (line,) = read(job.lines)
    train = adult.load(root / "Adult" / "adult.data", "race")
    only = chosen(train, train.clients == 1)
    own = fcfl.execute(replace(case.run, rounds=(30, 0)), only, only, "library")
    assert line["others"] == own.accuracy[0]
    assert line["disparity 2"] == own.disparity[0]


def test_look_up_is_the_linear_layer(root):
    people = adult.load(root / "Adult" / "adult.data", "race")
    dense = torch.zeros(6, 95).scatter_(1, people.positions, 1.0)[:, :94]
    layer = fcfl.initial_layer(94)
    torch.testing.assert_close(fcfl.Income(94, 0.1, "dp")(people.positions), layer(dense).squeeze(1))


def test_made_up_hospitals_are_read_like_real_ones(tmp_path):
    eicu.write_made_up(tmp_path)
    long, dead = (eicu.load(tmp_path, outcome) for outcome in ("long stay", "death"))
    assert long.positions.shape == (sum(250 + 50 * k for k in range(11)), 1 + 9 + 2 + 3 + 2)
    assert torch.equal(long.positions, dead.positions)
    measured = long.positions[:, :10]
    torch.testing.assert_close(measured.mean(0), torch.zeros(10), rtol=0, atol=1e-4)
    assert (measured[:, 9] == 0).float().mean() > 0.14, "no albumin is the mean"
    assert long.ages[::250][0] == 90
    white = [float(long.groups[long.clients == k].float().mean()) for k in (0, 10)]
    assert white == pytest.approx([0.5, 0.9], abs=0.08)
    assert float(long.labels.mean()) == pytest.approx(0.36, abs=0.05)
    assert float(dead.labels.mean()) == pytest.approx(0.07, abs=0.04)
    shown = {group: float(measured[(long.clients == 5) & (long.groups == group), 8].mean()) for group in (0, 1)}
    assert shown[0] > shown[1] + 0.2, "people who are not white seem more ill there"


def test_runs_on_hospitals(tmp_path):
    cases = {case.name: case for case in EICU.cases}
    with pytest.raises(MissingDataError, match="eICU is needed: --data-root must be a folder that holds eicu/patient"):
        cases["budgets: FCFL .1"].check(tmp_path)
    for name in ("budgets: FA", "own budgets: 0.5 of the original", "no budgets, death: AFL"):
        case = cases[f"made-up hospitals, {name}"]
        case.check(tmp_path)
        job = Job("fcfl-eicu", case.name, 1, 2, tmp_path, tmp_path, "cpu", {})
        case.execute(job, Log(job))
        (line,) = read(job.lines)
        assert line["disparity"] == max(line["disparities"])
        assert line["min"] == min(line["clients"])
        assert len(line["clients"]) == 11


def test_clients_vote_for_what_they_can_live_with(capsys):
    found = {"all": [(0.9, 0.2), (0.8, 0.1)], ".5": [(0.88, 0.1), (0.79, 0.1)], ".2": [(0.88, 0.02), (0.7, 0.02)]}
    votes = votes_of.approvals(found)
    assert votes == {"all": [False, False], ".5": [True, False], ".2": [True, False]}
    assert votes_of.winner(found, votes) == ".5"
    votes_of.main()
    assert "The share .4 wins" in capsys.readouterr().out
