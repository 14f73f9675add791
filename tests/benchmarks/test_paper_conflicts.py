# SPDX-License-Identifier: Apache-2.0
"""The runner that counts conflicts, on noise instead of Fashion-MNIST."""

import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.papers import conflicts
from fl_lightning.algorithms import FedAvg, FedLF, FedMDFG


def noise(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(samples, 784, generator=generator), torch.arange(samples) % 10)


@pytest.mark.parametrize(("rule", "most"), [(FedLF, 0), (FedMDFG, 0), (FedAvg, 30)])
def test_counts(rule, most):
    result = conflicts.run(rule(), 1, noise(400, 0), noise(100, 1), rounds=3, lr=0.1, seed=0)
    assert result.rounds == 3
    assert result.model <= most
    assert result.as_required
    assert (result.history_rows > 0) == (rule is not FedAvg)
    if rule is FedLF:
        assert result.blocks == 0
    else:
        assert result.blocks > 0  # the count can be something else than zero


def test_a_conflict_fails():
    result = conflicts.run(FedMDFG(), 1, noise(400, 0), noise(100, 1), rounds=1, lr=0.1, seed=0)
    changed = {"model": 1, "rule": "FedLF"}
    for rule in ("FedMDFG", "FedLF"):
        assert not conflicts.Result(**{**vars(result), **changed, "rule": rule}).as_required
    assert conflicts.Result(**{**vars(result), "model": 1, "rule": "FedAvg"}).as_required


def test_without_data_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conflicts", "--data-root", str(tmp_path)])
    with pytest.raises(SystemExit, match="--data-root must be a folder that holds FashionMNIST/raw"):
        conflicts.main()
    monkeypatch.setattr(sys, "argv", ["conflicts"])
    with pytest.raises(SystemExit):
        conflicts.main()
    assert "--data-root" in capsys.readouterr().err
