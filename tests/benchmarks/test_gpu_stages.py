# SPDX-License-Identifier: Apache-2.0
"""The stages of benchmarks/gpu.sh, on a machine without a GPU: what the script does, and everything that it runs."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import device_bandwidth as bandwidth
from benchmarks import device_rounds
from benchmarks._kernels.timing import Spread

ROOT = Path(__file__).parents[2]
STAGES = ("correct", "bandwidth", "sanitize", "train", "profile")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash")

# Notes its arguments, and prints what the real program might.
STAND_IN = """#!/bin/sh
case "$*" in
  *"-m benchmarks._gpu.facts"*) printf -- '- device: stand-in%s\\n- date: now\\n' "$DRIVER"; exit ;;
  "-c "* | "-W ignore"*) exit ;;
esac
printf '%s\\0' "${{0##*/}}" "$@" "$(printf '\\1')" >>'{record}'  # in one write: two run at a time
echo "called it; ERROR SUMMARY: 0 errors; 3 of 3 targets are met; == 7 passed in 2 s =="
case "$*" in *"${{FAILS:-nothing fails}}"*) exit 1 ;; esac
"""


@pytest.fixture
def script(tmp_path):
    """Runs gpu.sh with a stand-in for Python and CUDA's tools: its exit status, its report, and the commands."""
    tools, record = tmp_path / "tools", tmp_path / "record"
    tools.mkdir()
    for name in ("python", "compute-sanitizer", "ncu"):
        (tools / name).write_text(STAND_IN.format(record=record))
        (tools / name).chmod(0o755)

    def run(*arguments, **environment):
        record.unlink(missing_ok=True)
        command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--out", str(tmp_path / "out"), *arguments]
        path = f"{tools}:{os.environ['PATH']}"
        done = subprocess.run(
            command,
            env=os.environ | {"PATH": path, "PYTHON": str(tools / "python")} | environment,
            capture_output=True,
            text=True,
        )
        report = tmp_path / "out" / "gpu.md"
        noted = record.read_text().split("\1\0")[:-1] if record.exists() else []
        commands = [command.split("\0")[:-1] for command in noted]
        return done, report.read_text() if report.exists() else "", commands

    return run


def results_of_bandwidth(folder):
    (folder / "out").mkdir()
    for name in ("device-bandwidth-cuda.json", "device-bandwidth-cpu-quick.json"):
        (folder / "out" / name).write_text("{}")


def test_all_stages_run_in_order_and_a_failed_step_shows(script, tmp_path):
    results_of_bandwidth(tmp_path)
    done, report, commands = script(FAILS="racecheck")
    assert done.returncode == 1
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")][1:]
    assert list(dict.fromkeys(row[0].removeprefix("| ") for row in rows)) == list(STAGES)
    assert {row[1]: row[2] for row in rows if row[2] != "passed"} == {"racecheck": "failed"}
    assert "- device: stand-in" in report
    tools = [command[2] for command in commands if command[0] == "compute-sanitizer"]
    assert sorted(tools) == ["initcheck", "memcheck", *["racecheck"] * 14, "synccheck"]
    assert commands[-1][0] == "ncu"
    called = [command for command in commands if "every_path" in " ".join(command)]
    assert all("--device cuda" in " ".join(command) for command in called)
    assert {command[-1] for command in called if "--part" in command} == {f"{part}/14" for part in range(1, 15)}


def test_the_programs_of_every_stage_run_on_the_cpu(script, tmp_path, monkeypatch, capsys):
    """With the arguments that the script gives them."""
    results_of_bandwidth(tmp_path)
    done, _, commands = script("--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    programs = [command[2:] for command in commands if command[1] == "-m" and command[2].startswith("benchmarks.")]
    assert [name for name, *_ in programs] == [
        "benchmarks.device_bandwidth", "benchmarks.device_step",
        "benchmarks._gpu.every_path", "benchmarks.device_rounds", "benchmarks._gpu.one_call",
    ]  # fmt: skip
    monkeypatch.chdir(ROOT)
    printed = {}
    for name, *arguments in programs:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        importlib.import_module(name).main()
        printed[name] = capsys.readouterr().out
    assert "targets are met" in printed["benchmarks.device_bandwidth"]
    assert "target 0.6 ms" in printed["benchmarks.device_step"]
    assert "called layer_gram" in printed["benchmarks._gpu.every_path"]
    assert printed["benchmarks.device_rounds"].count("| yes |") == 2
    assert printed["benchmarks._gpu.one_call"].count("called ") == 2
    for name in ("bandwidth", "step", "rounds"):
        table = (tmp_path / "out" / f"device-{name}-cpu-quick.md").read_text()
        assert "- device: " in table
        assert "- driver: " in table
        assert "- date: " in table


@pytest.mark.process
@pytest.mark.slow
def test_the_tests_of_the_stages_run_on_the_cpu(script):
    _, _, commands = script("--device", "cpu", "--quick", "correct", "train")
    suites = [command[1:] for command in commands if command[1:3] == ["-m", "pytest"]]
    assert len(suites) == 2
    environment = os.environ | {"FL_LIGHTNING_TEST_DEVICE": "cpu"}
    for arguments in suites:
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout


def line(op, seconds, bound=1e-3, **options):
    spread = Spread(seconds, seconds, seconds, 1)
    given = {"rows": 10, "dtype": "float32", "bytes": 10**9, "by": "memory", "target": 0.85} | options
    return bandwidth.Line(op, time=spread, bound=bound, **given)


def test_a_line_says_how_near_an_op_comes():
    cells = [cell.strip() for cell in line("layer_dots", 1.25e-3).markdown().split("|")]
    assert cells[4:6] == ["1000", "1.2500"]
    assert cells[7:12] == ["0.800", "80%", "memory", "85%", "**no**"]
    assert "yes" in line("layer_dots", 1.1e-3).markdown()
    assert len(cells) == len(bandwidth.HEAD.splitlines()[0].split("|"))


def test_the_worst_ops_are_those_whose_kernels_are_the_farthest_from_what_is_possible():
    lines = [
        line("layer_gram", 2e-3), line("layer_gram", 9e-3, rows=100), line("layer_dots", 3e-3),
        line("layer_combine", 4e-3), line("layer_combine after layer_gram", 1.0), line("min_norm", 1.0, by=""),
    ]  # fmt: skip
    assert [(x.op, x.rows) for x in bandwidth.worst(lines)] == [("layer_gram", 100), ("layer_combine", 10)]


def test_products_of_many_rows_are_bound_by_tensor_cores():
    shape, best = bandwidth.shapes(True)[0], bandwidth.Rates(1e12, {"float32": 1e6, "bfloat16": 1e6})
    lines = list(bandwidth.measure(shape, 33, torch.float32, torch.device("cpu"), best, 1))
    by = {x.op: x.by for x in lines}
    assert by["layer_gram"] == by["layer_cross_gram"] == "tensor cores"
    assert by["layer_combine"] == "memory"
    assert by["min_norm"] == ""
    more = bandwidth.measure(shape, 33, torch.float32, torch.device("cpu"), best, 1, last=False)
    assert by.keys() - {x.op for x in more} == {"puc_track"}, "one row whatever the number of clients"
    gram = next(x for x in lines if x.op == "layer_gram")
    assert gram.bound == pytest.approx(3 * shape.columns * 33 * 34 / 1e6)


def test_rounds_are_compared_pair_by_pair():
    """Medians of the sides would say 1.86."""
    result = device_rounds.Result("W1", "FedAvg", "cpu", [(2.0, 1.0), (5.0, 4.0), (8.0, 7.0), (9.0, 3.0)], 13, True)
    assert "| 6500.00 | 3500.00 | 1.62 (1.22 to 2.25) | 2 | yes |" in result.markdown()
