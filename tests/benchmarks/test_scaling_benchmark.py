# SPDX-License-Identifier: Apache-2.0
"""The benchmark of several processes: a rehearsal on a tiny shape, its records, and its arithmetic on made-up turns."""

import dataclasses
import itertools
import json
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from copies import Copied

from benchmarks import scaling
from benchmarks._peers import race as race_module
from benchmarks._peers import traffic
from benchmarks._peers.race import Lap, turns
from benchmarks._peers.side_ours import uneven_sizes
from benchmarks._rounds.shape import TINY
from benchmarks._scaling.bounds import all_reduce_bytes, column_bytes, least_makespan, longest_first
from benchmarks._scaling.races import BARE, OURS, PFL, races
from benchmarks._scaling.records import Records
from benchmarks._scaling.report import rows, tables

PARAMETERS = 106  # 8 x 4 + 4 + 4 x 4 + 4 + 4 x 10 + 10


def lap(seconds=0.2, norm=1.0, accuracy=0.5, steps=TINY.steps, ranks=1, sent=0.0, **parts):
    parts = {name.replace("_", " "): (took, took) for name, took in parts.items()}
    rank = {"seconds": seconds, "cpu": seconds / 2, "sent": sent, "parts": parts, "steps": steps}
    return Lap(seconds, norm, accuracy, steps, [rank] * ranks)


def entries_of(name):
    """The sides of a race on one process and on two."""
    return next(race.entries for race in races(TINY, [1, 2], "cpu", None) if race.name == name)


def one_turn(entries):
    """What each side found in one turn, in the order of the entries."""
    names, dropped = [entry.side.name for entry in entries], []
    [turn] = turns([e.side for e in entries], "tiny", 1, 1, dict.fromkeys(names, 1), dropped)
    assert dropped == []
    assert len({found.steps for found in turn.values()}) == 1
    for found in turn.values():
        for rank in found.ranks:
            assert 0 < sum(seconds for seconds, _ in rank["parts"].values()) <= rank["seconds"] <= found.seconds
    return [turn[name] for name in names]


def test_sides_take_turns_on_one_process_and_on_two(monkeypatch):
    monkeypatch.setattr(race_module.subprocess, "Popen", Copied)
    one, two = one_turn(entries_of("evaluated"))
    assert one.steps == TINY.steps
    assert (one.norm, one.accuracy) == (two.norm, two.accuracy)
    assert {"training", "server step", "evaluation"} == set(one.ranks[0]["parts"])
    assert {"training", "exchange", "replay", "server step", "evaluation"} == {
        name for rank in two.ranks for name in rank["parts"]
    }
    assert sum(rank["sent"] for rank in two.ranks) > 2 * column_bytes(TINY.per_round, PARAMETERS, 2)


@pytest.mark.slow
def test_bare_processes_exchange_gradients():
    entries = entries_of("fedavg")
    one, bare = one_turn([entries[0], next(e for e in entries if (e.package, e.ranks) == (BARE, 2))])
    assert bare.norm != one.norm
    assert [rank["sent"] for rank in bare.ranks] == [all_reduce_bytes(PARAMETERS, 2)] * 2


@pytest.mark.slow
def test_clients_that_differ_in_size_bound_a_round():
    sizes = uneven_sizes(TINY)
    assert 0.9 * TINY.clients * TINY.samples < sum(sizes) <= TINY.clients * TINY.samples
    assert max(sizes) > 2 * min(sizes) > 0
    one, two = one_turn(entries_of("uneven"))
    assert one.least == 1.0
    assert 0.5 <= two.least < 1.0
    assert one.norm == two.norm


def test_bytes_of_every_exchange():
    ones, halves = torch.ones(12), [torch.ones(5), torch.ones(7), torch.ones(0)]
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 3)

    def count(name, *given):
        return traffic._COUNTS[name](group, *given)

    source, other = SimpleNamespace(rootRank=1), SimpleNamespace(rootRank=0)
    assert (count("broadcast", [ones], source), count("broadcast", [ones], other)) == (96, 0)
    assert (count("broadcast", ones, 1), count("broadcast", ones, 2)) == (96, 0)
    assert count("allgather", [[ones] * 3], [ones]) == count("all_gather_single", torch.ones(36), ones) == 96
    assert count("allreduce", [ones], None) == 64
    assert count("reduce_scatter", [ones], [[ones] * 3]) == 96
    assert count("alltoall", halves, halves) == 20
    assert count("all_to_all_single", ones, ones, [], []) == 32
    assert count("all_to_all_single", ones, ones, [4, 4, 4], [1, 8, 3]) == pytest.approx(16)
    assert (count("gather", [], [ones]), count("gather", [[ones] * 3], [ones])) == (48, 0)
    assert (count("scatter", [ones], [[ones] * 3]), count("scatter", [ones], [])) == (96, 0)
    assert count("send", [ones], 0, 0) == 48


def test_no_division_beats_the_bound_and_longest_first_comes_near():
    random.seed(0)
    for _ in range(60):
        processes, clients = random.randint(1, 4), random.randint(1, 7)
        costs = [random.choice((1.0, 2.0, 3.0, 5.0, 8.0)) for _ in range(clients)]
        best = min(
            max(sum(cost for cost, at in zip(costs, places, strict=True) if at == rank) for rank in range(processes))
            for places in itertools.product(range(processes), repeat=clients)
        )
        found = longest_first(costs, processes)
        assert sum(found) == sum(costs)
        assert least_makespan(costs, processes) <= best <= found[-1] <= (4 / 3 - 1 / (3 * processes)) * best + 1e-9
    assert least_makespan([1.0] * 10, 4) == 3.0
    assert least_makespan([9.0, 1.0, 1.0], 2) == 9.0


def test_the_races_and_their_programs():
    found = races(TINY, [1, 2, 4], "cuda", "/envs/pfl/bin/python")
    assert [race.name for race in found] == ["fedavg", "fedlf", "evaluated", "uneven", "fedavg-weak", "fedlf-weak"]
    strong, weak = found[0], found[4]
    assert [(e.package, e.ranks) for e in strong.entries] == [(p, r) for p in (OURS, BARE, PFL) for r in (1, 2, 4)]
    assert {e.per_round for e in strong.entries} == {3}
    assert [e.per_round for e in weak.entries[:3]] == [3, 6, 12]
    assert [e.least for e in strong.entries[:3]] == [3, 2, 1]
    command = strong.entries[7].side.command
    assert command[0] == "/envs/pfl/bin/python"
    assert "--nproc-per-node=2" in command
    assert command[-2:] == ("--device", "cuda")
    assert "fedlf" in found[1].entries[0].side.command
    assert PFL not in {e.package for race in races(TINY, [1, 2], "cpu", None) for e in race.entries}


def test_ratios_parts_and_doubts():
    race = races(TINY, [1, 2], "cpu", "python")[0]
    turn = {
        f"{OURS} on 1": lap(0.3, training=0.2, server_step=0.05),
        f"{OURS} on 2": lap(0.24, ranks=2, sent=848.0, training=0.1, exchange=0.04),
        f"{BARE} on 1": lap(0.2),
        f"{BARE} on 2": lap(0.1, ranks=2, norm=0.5, sent=424.0),
        f"{PFL} on 1": lap(0.6, steps=3),
    }
    one, two, bare, bares, pfl = rows(race, [turn, turn], TINY)
    assert (one.by_one.value, one.least, two.by_one.value, two.least) == (1.0, 1.0, pytest.approx(0.8), 2 / 3)
    assert (two.cpu_by_one.value, bares.by_one.value) == (pytest.approx(0.8), 0.5)
    assert (bare.by_ours.value, bares.by_ours.value) == (pytest.approx(2 / 3), pytest.approx(0.1 / 0.24))
    assert two.parts["training"] == (0.1, 0.1, 0.1)
    assert two.parts["rest"][1] == pytest.approx(0.1)
    assert (two.formula, bares.formula) == (2.5 * PARAMETERS * 4 / 2, PARAMETERS * 4)
    assert (one.doubts, two.doubts, bare.doubts) == ("", "", "")
    assert bares.doubts == "its steps are 0.50 times as long"
    assert pfl.doubts == "[3] steps per round in place of 6"
    uneven = {name: dataclasses.replace(found, least=0.8) for name, found in turn.items()}
    assert [row.least for row in rows(race, [uneven, uneven], TINY)] == [0.8] * 5
    text = tables(race, [one, two, bare, bares, pfl])
    assert f"| {OURS} | 2 | 240 | 0.800 (0.800 to 0.800) | 0.667 | 1.20 |" in text
    assert f"| {OURS} | 2 | 100.0, 100.0 | 40.0, 40.0, 40.0 |" in text
    other = {**turn, f"{OURS} on 2": lap(norm=1.0 + 1e-7, ranks=2)}
    assert rows(race, [turn, other], TINY)[1].doubts == "other bits than one process"
    assert [row.side for row in rows(race, [turn, {f"{OURS} on 1": lap()}], TINY)] == [OURS]  # the others dropped out


def test_a_killed_run_goes_on_with_the_next_turn(tmp_path):
    path = tmp_path / "scaling.jsonl"
    records = Records(path, {"torch": "2"})
    records.add("W1", "fedavg", {"a": lap(0.1), "b": lap(0.2)})
    records.add("W1", "fedavg", {"a": lap(0.3)})
    records.drop("b ended early")
    with path.open("a") as file:
        file.write('{"shape": "W1", "race"')  # killed while it wrote
    again = Records(path, {"torch": "2"})
    assert again.turns == {("W1", "fedavg"): [{"a": lap(0.1), "b": lap(0.2)}, {"a": lap(0.3)}]}
    assert again.dropped == ["b ended early"]
    again.add("W1", "fedlf", {"a": lap(0.5)})
    assert [len(found) for found in Records(path, {"torch": "2"}).turns.values()] == [2, 1]
    with pytest.raises(ValueError, match="same settings to go on with it, found torch '2' in place of '3'"):
        Records(path, {"torch": "3"})


def run(monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["scaling", "--shapes", "tiny", "--out", str(folder), *arguments])
    scaling.main()


def test_a_run_is_written_as_it_goes_and_reported(tmp_path, monkeypatch, capsys):
    asked = []

    def made_up(sides, shape, rounds, warm_up, threads, dropped):
        asked.append(rounds)
        for _ in range(rounds):
            if len(asked) == 1 and len(done := (tmp_path / "scaling.jsonl").read_text().splitlines()) == 3:
                raise KeyboardInterrupt(f"after {len(done)} lines")
            yield {side.name: lap(ranks=int(side.name[-1]), sent=1e3, training=0.1) for side in sides}

    monkeypatch.setattr(scaling, "turns", made_up)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, "--rounds", "5", "--races", "fedavg", "fedlf")
    run(monkeypatch, tmp_path, "--rounds", "5", "--races", "fedavg", "fedlf")
    assert asked == [5, 3, 5]
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert [(row["race"], row["ranks"], row["seconds"]["count"]) for row in written["results"]] == [
        ("fedavg", 1, 5), ("fedavg", 2, 5), ("fedavg", 1, 5), ("fedavg", 2, 5), ("fedlf", 1, 5), ("fedlf", 2, 5),
    ]  # fmt: skip
    text = (tmp_path / "scaling.md").read_text()
    assert "### tiny: FedLF, 3 clients per round" in text
    assert "- pfl: left out: --envs was not given" in text
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--clients", "5")
    assert "choose another --name" in capsys.readouterr().err
