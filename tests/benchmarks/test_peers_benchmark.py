# SPDX-License-Identifier: Apache-2.0
"""The race between packages: with the sides that need no other package, and its judgement on made-up rounds."""

import sys
from pathlib import Path

import pytest
from copies import Copied

from benchmarks._peers import environments
from benchmarks._peers import race as race_module
from benchmarks._peers.environments import PACKAGES, Package
from benchmarks._peers.race import ROOT, Lap, Side, race
from benchmarks._peers.races import HAND_WRITTEN, OURS, Race, races
from benchmarks._peers.report import rows, table
from benchmarks._rounds.shape import TINY


def laps(seconds, norm=1.0, accuracy=0.9, steps=TINY.steps, count=6):
    return [Lap(seconds, norm, accuracy, steps) for _ in range(count)]


# A side that needs no torch: it says what it was given.
QUICK = """
import json, os, sys
print('{"ready": true}', flush=True)
given = [*sys.argv[1:], os.environ["OMP_NUM_THREADS"], os.environ["PYTHONPATH"]]
for number, _ in enumerate(sys.stdin):
    lap = {"seconds": 0.1, "norm": number, "accuracy": 0.5, "ranks": given}
    print("a library says", json.dumps(lap), sep="\\n", flush=True)
"""


def test_sides_take_turns_and_say_why_they_ended():
    quick = Side("quick", (sys.executable, "-c", QUICK), "quick")
    broken = Side("broken", (sys.executable, "-m", "benchmarks._peers.side_nobody"), "broken")
    found, dropped = race([quick, broken], "tiny", rounds=2, warm_up=1, threads={"quick": 3, "broken": 1})
    given = ["--shape", "tiny", "--rounds", "3", "--threads", "3", "3", str(ROOT)]
    assert found == {"quick": [Lap(0.1, number, 0.5, None, given) for number in (1, 2)]}
    assert len(dropped) == 1
    assert "broken ended early" in dropped[0]
    assert "side_nobody" in dropped[0]


def test_sides_report_their_work(monkeypatch):
    monkeypatch.setattr(race_module.subprocess, "Popen", Copied)
    commands = {HAND_WRITTEN: ("hand_written",), OURS: ("ours", "--method", "fedfv")}
    sides = [
        Side(name, (sys.executable, "-m", f"benchmarks._peers.side_{module}", *arguments), name)
        for name, (module, *arguments) in commands.items()
    ]
    found, dropped = race(sides, "tiny", rounds=1, warm_up=1, threads=dict.fromkeys(commands, 1))
    assert (list(found), dropped) == ([HAND_WRITTEN, OURS], [])
    for (lap,) in found.values():
        assert lap.steps == 6
        assert min(lap.seconds, lap.norm) > 0
        assert 0 <= lap.accuracy <= 1


def test_ratios_and_doubts():
    names = (HAND_WRITTEN, OURS, "same", "lazy", "short", "wrong")
    sides = tuple(Side(name, (), name) for name in names)
    contest = Race("one", "one thread", "fedavg", sides, dict.fromkeys(names, 1))
    found = rows(
        contest,
        {
            "lazy": laps(0.1, steps=3), "short": laps(0.2, norm=0.5), "wrong": laps(0.2, accuracy=0.5),
            "same": laps(0.4, steps=None), OURS: laps(0.2), HAND_WRITTEN: laps(0.16),
        },
        TINY,
    )  # fmt: skip
    assert [row.side for row in found[:2]] == [HAND_WRITTEN, OURS]
    by_name = {row.side: row for row in found}
    assert by_name["same"].ours.value == pytest.approx(2.0)
    assert by_name["same"].loop.value == pytest.approx(2.5)
    assert (by_name["same"].doubts, by_name["same"].steps) == ("", None)
    assert by_name["lazy"].doubts == "[3] steps per round in place of 6"
    assert by_name["short"].doubts == "its steps are 0.50 times as long"
    assert by_name["wrong"].doubts == "its accuracy differs by 0.40"
    assert "| same | 400 | 2.00 (2.00 to 2.00) | 2.50 (2.50 to 2.50) | not counted |" in table(contest, found)
    with pytest.raises(RuntimeError, match="fl_lightning did not finish"):
        rows(contest, {"same": laps(0.4)}, TINY)


def test_races_take_the_packages_that_are_there(tmp_path):
    whole = races(tmp_path, PACKAGES, executor=True)
    assert [race.name for race in whole] == ["one", "one-flower", "both", "both-flower", "fedfv-one", "fedfv-both"]
    assert all(set(race.threads) == {side.name for side in race.sides} for race in whole)
    assert [race.name for race in races(tmp_path, (), executor=False)] == ["one", "both"]  # a Trainer per client
    fedfv = next(race for race in whole if race.name == "fedfv-both")
    assert all("fedfv" in one.command for one in fedfv.sides)


def test_interpreters_that_do_not_run_count_as_absent(tmp_path, monkeypatch):
    broken = tmp_path / "python9.9"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    package = Package("new", ("new==1.0",), "import new", ("python9.9", "python9"))
    reason = environments.prepare(tmp_path / "envs", package)
    assert reason == "new needs one of python9.9, python9, and none of them runs here."


@pytest.mark.slow
def test_what_cannot_be_installed_is_said_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    package = Package("none", ("no-such-package-for-this-test==1.0",), "import no_such_package")
    reason = environments.prepare(tmp_path, package)
    assert reason is not None
    assert reason.startswith("none cannot be installed here: ERROR: No matching distribution")
    assert "\n" not in reason
    assert Path(environments.python_of(tmp_path, package)).exists()
