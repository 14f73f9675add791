# SPDX-License-Identifier: Apache-2.0
"""The benchmark of evaluations, with few clients."""

import json
import logging
import sys

from benchmarks import evaluation


def test_both_sides_take_turns_and_it_is_written_down(monkeypatch, capsys, caplog, tmp_path):
    caplog.set_level(logging.ERROR, logger="lightning.pytorch")  # which the program sets, too
    monkeypatch.setattr(sys, "argv", ["evaluation", "--clients", "4", "--pairs", "3", "--out", str(tmp_path)])
    evaluation.main()
    written = json.loads((tmp_path / "evaluation.json").read_text())
    found = written["results"]
    assert written["environment"]["clients"] == 4
    assert {each["count"] for each in found.values()} == {3}
    assert found["ours"]["low"] / found["plain"]["high"] <= found["ratio"]["value"]
    assert found["ratio"]["value"] <= found["ours"]["high"] / found["plain"]["low"]
    assert (tmp_path / "evaluation.md").read_text() == capsys.readouterr().out
