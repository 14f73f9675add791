# SPDX-License-Identifier: Apache-2.0
"""The simulation of rounds on many GPUs: what must be conserved, what must grow, and formulae beside known tables."""

import dataclasses
import sys
from statistics import fmean

import numpy as np
import pytest

from benchmarks import scaling_model
from benchmarks._scaling.bounds import all_reduce_bytes, column_bytes, least_makespan, longest_first
from benchmarks._scaling.measured import solve_time
from benchmarks._scaling.model import client_sizes, shares, simulate, solve_seconds
from benchmarks._scaling.rates import WORKLOADS, Rates

RESNET, VIT, LANGUAGE = WORKLOADS
RATES = Rates()


def sizes(clients, mean=600, seed=0):
    return np.random.default_rng(seed).permutation(client_sizes(10 * clients, mean, 0.1, seed))[:clients].tolist()


@pytest.mark.parametrize(
    ("work", "gpus"), [(RESNET, 1), (VIT, 2), (LANGUAGE, 8), (RESNET, 16), (VIT, 64), (LANGUAGE, 256)]
)
def test_nothing_is_lost(work, gpus):
    given = sizes(100, work.samples)
    found = simulate(work, RATES, given, gpus)
    step = work.batch * work.work / work.rate
    costs = [RATES.visit + -(-size // work.batch) * step for size in given]
    assert found.ideal * gpus == pytest.approx(sum(costs))
    assert (found.largest, found.training) == (max(costs), pytest.approx(longest_first(costs, gpus)[-1]))
    assert found.training >= least_makespan(costs, gpus) * (1 - 1e-12)
    assert found.sent == pytest.approx(column_bytes(100, work.parameters, gpus))
    assert found.seconds == pytest.approx(
        found.training + found.late + found.gram + found.sums + found.solve + found.combine + found.weights
    )
    assert (gpus == 1) == (found.sent == 0) == (found.late == 0) == (found.sums == 0)


@pytest.mark.parametrize(("work", "clients"), [(RESNET, 100), (VIT, 1000), (LANGUAGE, 1000)])
def test_more_gpus_have_less_to_do_each(work, clients):
    given = sizes(clients, work.samples)
    found = [simulate(work, RATES, given, gpus) for gpus in (8, 16, 32, 64, 128, 256)]
    for name in ("ideal", "training", "gram", "combine", "memory"):
        values = [getattr(one, name) for one in found]
        assert values == sorted(values, reverse=True), name
    assert all(one.training >= max(one.ideal, one.largest) for one in found)


def test_what_bounds_a_round():
    given = sizes(100)
    assert simulate(RESNET, RATES, given, 8).bound == "training"
    assert simulate(RESNET, RATES, given, 256).bound == "largest client"
    assert simulate(RESNET, RATES.changed({"network": 1e8}), given, 16).bound == "network"
    assert simulate(RESNET, RATES.changed({"solve_100": 1.0}), given, 8).bound == "server"
    assert simulate(LANGUAGE, RATES, sizes(100, 100), 8).bound == "memory"


def test_columns_and_sums_are_divided_as_the_package_divides_them():
    whole = shares(RESNET.parameters, 62, 1)
    assert (whole.columns, whole.matrices) == (RESNET.parameters, 62)
    for gpus in (2, 7, 64, 256):
        some = shares(RESNET.parameters, 62, gpus)
        assert RESNET.parameters / gpus <= some.columns <= RESNET.parameters / gpus + 2 * 65536
        assert 62 < some.matrices < 62 + 8 * gpus


@pytest.mark.parametrize(
    ("clients", "parameters", "gpus", "adding", "columns", "rows", "share"),
    [
        (10, 11.7e6, 8, 0.082, 0.092, 0.47, 0.12),
        (100, 86e6, 16, 0.65, 2.4, 34, 4.3),
        (1000, 86e6, 64, 0.68, 5.6, 344, 11),
        (1000, 1e9, 256, 8.0, 20, 4000, 31),
    ],
)
def test_bytes_worked_out_by_hand(clients, parameters, gpus, adding, columns, rows, share):
    """In GB, two digits: what a process sends to add up, and for columns; memory for all rows, and for its columns."""
    assert all_reduce_bytes(parameters, gpus) / 1e9 == pytest.approx(adding, rel=0.03)
    assert column_bytes(clients, parameters, gpus) / 1e9 == pytest.approx(columns, rel=0.03)
    assert clients * parameters * 4 / 1e9 == pytest.approx(rows, rel=0.03)
    work = dataclasses.replace(RESNET, parameters=int(parameters), layers=1)
    rates = RATES.changed({"weights_kept": 1e-9, "working_memory": 1e-9})
    sums = (shares(work.parameters, 1, gpus).matrices + 1) * clients**2 * 8
    held = simulate(work, rates, [600.0] * clients, gpus).memory - sums
    assert held / 1e9 == pytest.approx(share, rel=0.06)


@pytest.mark.parametrize(
    ("work", "clients", "gpus", "training", "slow", "fast"),
    [
        (RESNET, 100, 16, 0.4, 0.11, 0.03),
        (VIT, 100, 16, 2.0, 0.80, 0.20),
        (VIT, 1000, 64, 5.0, 3.2, 0.8),
        (LANGUAGE, 1000, 64, 12, 37, 9),
        (LANGUAGE, 1000, 256, 3, 12, 3),
    ],
)
def test_seconds_worked_out_by_hand(work, clients, gpus, training, slow, fast):
    """Clients of one size: all train; then columns and weights pass one card of 100 or 400 Gb/s per 8 GPUs."""
    given = [work.samples] * clients
    for rate, expected in ((1.25e10, slow), (5e10, fast)):
        rates = RATES.changed({"network": rate, "latency": 1e-12, "visit": 1e-12})
        found = simulate(work, rates, given, gpus, overlap=False)
        assert found.ideal == pytest.approx(training, rel=0.06)
        # On average over machines; the busiest trains more clients where they cannot be divided evenly.
        assert column_bytes(clients, work.parameters, gpus) * 8 * (gpus - 8) / (gpus - 1) / rate == pytest.approx(
            expected, rel=0.12
        )
        assert found.busy + found.weights == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize(
    ("registered", "clients", "gpus", "bound"),
    [(100, 10, 2, 1.00), (100, 10, 4, 1.13), (100, 10, 8, 2.23), (1000, 100, 16, 1.02), (1000, 100, 64, 3.16)],
)
def test_clients_of_skewed_labels_bound_a_round(registered, clients, gpus, bound):
    """The largest client by an even division, 600 samples on average, 10 classes, Dirichlet(0.1)."""
    found, reached = [], []
    for seed in range(200):
        every = client_sizes(registered, 600, 0.1, seed)
        costs = np.ceil(np.random.default_rng(seed).choice(every, clients, replace=False) / 32) + 0.5
        least = max(costs.sum() / gpus, costs.max())
        found.append(least / (costs.sum() / gpus))
        reached.append(longest_first(costs.tolist(), gpus)[-1] / least)
    assert fmean(found) == pytest.approx(bound, rel=0.06)
    assert fmean(reached) < 1.03


def test_sizes_of_clients():
    found = client_sizes(1000, 600, 0.1, 3)
    assert found.mean() == pytest.approx(600, rel=0.01)
    assert found.min() >= 1
    assert found.std() > 2 * client_sizes(1000, 600, 10.0, 3).std()
    assert np.array_equal(found, client_sizes(1000, 600, 0.1, 3))


def test_solves_pass_through_both_measured_times():
    assert solve_seconds(RATES, 100) == RATES.solve_100
    assert solve_seconds(RATES, 1000) == pytest.approx(RATES.solve_1000)
    assert RATES.solve_100 < solve_seconds(RATES, 300) < RATES.solve_1000


def test_the_time_of_solving_is_measured(monkeypatch, capsys):
    few, many = (solve_time(clients, layers=2, columns=256) for clients in (10, 200))
    assert 0 < few < many
    monkeypatch.setattr(scaling_model, "solve_time", lambda clients: clients / 1e4)
    run(monkeypatch, "--gpus", "8", "--clients", "100", "--models", "ViT-B", "--rounds", "1", "--measure")
    assert "| solve_1000 | 0.1 s | --set or --measure |" in capsys.readouterr().out


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["scaling_model", *arguments])
    scaling_model.main()


def test_tables_and_sources_are_printed(monkeypatch, capsys, tmp_path):
    path = tmp_path / "tables.md"
    few = ("--gpus", "16", "8", "--clients", "100", "--models", "ResNet-18", "--rounds", "3")
    run(monkeypatch, *few, "--set", "network=1e10", "visit=1", "--out", str(path))
    printed = capsys.readouterr().out
    assert printed == path.read_text()
    assert "| network | 1e+10 B/s | --set or --measure |" in printed
    assert "| gpu_memory | 8e+10 B | H100 SXM, data sheet |" in printed
    assert "Nothing here was run on GPUs." in printed
    head, *lines = [line for line in printed.splitlines() if line.startswith(("| GPUs", "| 8 ", "| 16 "))]
    assert [line.split()[1] for line in lines] == ["8", "16"]
    assert {line.count("|") for line in lines} == {head.count("|")}
    assert float(lines[0].split("|")[2]) > 12.5  # 100 visits of a second on 8 GPUs
