# SPDX-License-Identifier: Apache-2.0
"""What projects use beside a method works on several processes as in one, with the same bits and the same files."""

import csv
import sys

import pytest
import rank_runs
import rank_walk
from rank_runs import differences, folder_of, results

WALK = rank_runs.SESSION.with_name("rank_walk.py")

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def logged(folder):
    with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "fed/seconds"} for row in csv.DictReader(file)]


def test_everything_has_the_bits_and_the_files_of_one_process(tmp_path):
    rank_runs.session(tmp_path, 3, program=WALK)
    many = results(tmp_path)
    rank_runs.session(tmp_path, 1, program=WALK)
    (one,) = results(tmp_path)
    assert set(one) == set(rank_walk.cases(tmp_path))
    assert [differences(one, rank) for rank in many] == [{}, {}, {}]
    folders = [folder_of(tmp_path) / f"{ranks} ranks" for ranks in (1, 3)]
    assert files(folders[1]) == files(folders[0])
    assert logged(folders[1]) == logged(folders[0])
