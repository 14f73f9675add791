# SPDX-License-Identifier: Apache-2.0
"""Arguments of methods that are out of their ranges are refused, by name and with the value found.

Beside -1, 1.5, NaN, infinity and misspelt choices, which tests/arguments/test_public_arguments.py tries everywhere.
"""

import re
from math import nan

import pytest

from fl_lightning import algorithms as fl

OUT_OF_RANGE = {
    fl.Ditto: {"lam": [-1.0, nan], "personal_lr": [0.0]},
    fl.EAGLE: {"lam": [-1.0], "best_losses": [[], [nan]], "alone_epochs": [0], "alone_lr": [0.0]},
    fl.FA: {"bases": [[1.0], [[nan]]], "sigma": [0.0], "bound": [0.5], "tau": [-0.1], "penalty": [-1.0]},
    fl.FCFL: {
        "budget": [-0.1, (0.1, nan), []], "notion": ["ap"], "stage1_rounds": [-1], "tol": [-1.0], "delta": [0.0],
        "beta": [1.5], "sharpness": [0.0], "reading": ["both"], "num_groups": [1],
    },
    fl.FedCKA: {"mu": [-1.0, nan], "layers": [[], "net.0"], "num_layers": [0]},
    fl.FedDyn: {"alpha": [0, -1.0, nan]},
    fl.FedFB: {"alpha": [-0.1, nan], "num_groups": [1]},
    fl.FedFV: {
        "alpha": [-0.1, 1.1], "tau": [-1], "reading": ["both"], "max_history": [0], "history_device": ["no"],
    },
    fl.FedFa: {"beta": [-0.1, 1.1], "gamma": [1.0, -0.5]},
    fl.FedHEAL: {"tau": [1], "reading": ["library"], "beta": [1.5]},
    fl.FedISM: {"rho": [0.0], "alpha": [-1.0], "q": [-1.0], "beta": [0.0, 1.1]},
    fl.FedLF: {"reading": ["both"], "max_history": [0], "history_window": [-1], "fair_row": ["no"]},
    fl.FedMDFG: {"theta": [0.0, 2.0], "s": [-1], "beta": [-0.1, 1.0], "reading": [""]},
    fl.FedMGDAPlus: {"epsilon": [-0.1, 1.1], "server_lr": [0.0, -1.0]},
    fl.FedPW: {"drop_rate": [1.0, -0.1], "beta": [1.1, -0.1]},
    fl.FedPer: {"num_layers": [0], "personal": [[]]},
    fl.FedProc: {"rounds": [1], "temperature": [0], "num_classes": [-3]},
    fl.FedProto: {"lam": [-1.0, nan], "num_classes": [0]},
    fl.FedRep: {"head_epochs": [-1]},
    fl.MMPF: {"inner_rounds": [0], "iterations": [0], "patience": [0], "k_min": [0], "alpha": [1.0]},
    fl.MOON: {"mu": [-0.1, nan], "temperature": [0.0]},
    fl.PropFair: {"base": [0.0], "epsilon": [0.0]},
    fl.SCAFFOLD: {"server_lr": [0.0], "weighting": ["Samples"]},
    fl.TERM: {"t": [0.0, -1.0, nan], "ema_rate": [0.0, 1.1], "reading": ["sum"]},
}  # fmt: skip
BESIDE = {fl.FA: {"bases": [[0.0], [1.0]]}, fl.Ditto: {"directory": "own"}, fl.FedBN: {"directory": "own"}}


@pytest.mark.parametrize("method", OUT_OF_RANGE, ids=lambda method: method.__name__)
def test_values_out_of_range_are_refused_by_name(method):
    for name, values in OUT_OF_RANGE[method].items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=rf"^{name}(\[\d\])* of {method.__name__} must ") as error:
                method(**{**BESIDE.get(method, {}), name: value})
            assert re.search(r", found \S", str(error.value))


def test_arguments_that_exclude_each_other():
    with pytest.raises(ValueError, match="epsilon of PropFair must be"):
        fl.PropFair(base=1.0, epsilon=1.0)
    with pytest.raises(ValueError, match="notion of FCFL"):
        fl.FCFL(notion="ap", budget=None)
