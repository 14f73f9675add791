# SPDX-License-Identifier: Apache-2.0
"""All methods of the table, with the arguments of their papers or their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import fl_lightning as fl
from fl_lightning.algorithms import ServerRule
from fl_lightning.algorithms.torchjd import TorchJD

A = fl.algorithms
REFERENCE, UNIFORM, FAIR_ROW = "FedAvg", "FedAvg, uniform weights", "FedLF, fair row if needed"

TELLING = (REFERENCE, UNIFORM, "SCAFFOLD", "q-FedAvg", "AFL", "FedFV", "FedMDFG", "FedLF")
"""The methods of the smaller suites: one for each way to be fair, and what they are to be compared with."""

Rule = Callable[[], ServerRule]
Strategies = dict[str, fl.FederatedStrategy]


def server_rules(classes: int) -> Mapping[str, Rule]:
    """The methods that need nothing but a server rule, by name.

    Args:
        classes: how many there are.
    """
    return {
        REFERENCE: A.FedAvg,
        UNIFORM: partial(A.FedAvg, "uniform"),
        "FedProx": A.FedProx,
        "SCAFFOLD": A.SCAFFOLD,
        "FedDyn": A.FedDyn,
        "MOON": A.MOON,
        "FedProc": partial(A.FedProc, num_classes=classes),
        "FedProto": partial(A.FedProto, num_classes=classes),
        "FedCKA": A.FedCKA,
        "FedLF": A.FedLF,
        FAIR_ROW: partial(A.FedLF, fair_row="needed"),
        "FedMDFG": A.FedMDFG,
        "FedMDFG on updates": partial(A.FedMDFG, gradient_source="update"),
        "FedMGDA+": A.FedMGDAPlus,
        "FedMGDA+, epsilon 1": partial(A.FedMGDAPlus, 1.0),
        "UPGrad": A.UPGrad,
        "FairGrad": _fairgrad,
        "AdaFed": A.AdaFed,
        "FedFV": A.FedFV,
        "q-FedAvg": partial(A.QFedAvg, 1.0),
        "TERM": A.TERM,
        "FedFa": A.FedFa,
        "PropFair": A.PropFair,
        "FedISM": A.FedISM,
        "DRFL": A.DRFL,
        "FedGini": A.FedGini,
        "EAGLE": A.EAGLE,
        "AFL": A.AFL,
        "AAggFF": A.AAggFF,
        "MMPF": A.MMPF,
        "FedHEAL": A.FedHEAL,
        "FedPW": A.FedPW,
        "Ditto": A.Ditto,
        "Ditto, lambda 0": partial(A.Ditto, lam=0.0),  # alone, from the model that a client first receives
        "FedPer": A.FedPer,
    }


def _fairgrad() -> ServerRule:
    from torchjd.aggregation import FairGradWeighting  # tables are made without TorchJD

    return TorchJD(FairGradWeighting(alpha=1.0), layers="model")


def all_methods(classes: int, clients_per_round: int | float) -> Strategies:
    """Every method for clients without groups of people, FedAvg first.

    Args:
        classes: how many there are.
        clients_per_round: as for :class:`fl_lightning.FederatedStrategy`.
    """
    strategy = partial(_strategy, clients_per_round=clients_per_round)
    found = {name: strategy(rule()) for name, rule in server_rules(classes).items()}
    found["FedSGD"] = strategy(A.FedAvg(), full_gradients=True)
    # Its head has the first of two passes over the data; all others have one.
    found["FedRep, 2 epochs"] = strategy(A.FedRep(head_epochs=1), local_epochs=2)
    found["FedAvgM"] = strategy(A.FedAvg(), server_optimizer=partial(torch.optim.SGD, lr=1.0, momentum=0.9))
    found["FedAdam"] = strategy(A.FedAvg(), server_optimizer=partial(fl.optim.FedAdam, lr=0.01))
    found["FedYogi"] = strategy(A.FedAvg(), server_optimizer=partial(fl.optim.FedYogi, lr=0.01))
    return found


def telling_methods(classes: int, clients_per_round: int | float, *more: str) -> Strategies:
    """The methods of :data:`TELLING`.

    Args:
        classes: how many there are.
        clients_per_round: as for :class:`fl_lightning.FederatedStrategy`.
        more: names of further ones.
    """
    every = all_methods(classes, clients_per_round)
    return {name: every[name] for name in (*TELLING, *more)}


def for_domains(classes: int) -> Strategies:
    """The methods of :data:`TELLING`, FedLF's other form, and what is made for domains; all clients train every round.

    FedBN needs a network with BatchNorm.

    Args:
        classes: how many there are.
    """
    every = all_methods(classes, 1.0)
    chosen = {name: every[name] for name in (*TELLING, FAIR_ROW, "FedHEAL", "FedPW")}
    return {**chosen, "FedBN": _strategy(A.FedBN(), clients_per_round=1.0)}


def for_adapters() -> Strategies:
    """What there is to adapt one model for owners with different tasks; ``FedPer`` keeps the last block's adapters."""
    every = all_methods(1, 10)
    names = (REFERENCE, UNIFORM, "FedLF", "FedFV", "FedMDFG", "UPGrad", "AFL", "q-FedAvg", "Ditto")
    own = _strategy(A.FedPer(personal=["net.blocks.1"]), clients_per_round=10)
    return {**{name: every[name] for name in names}, "FedPer": own}


def server_steps(clients_per_round: int | float) -> Strategies:
    """FedAvg with other steps of the server, FedFV with other memories, and methods whose full step may be too short.

    Args:
        clients_per_round: as for :class:`fl_lightning.FederatedStrategy`.
    """
    strategy = partial(_strategy, clients_per_round=clients_per_round)

    def stepping(rule: ServerRule, lr: float = 1.0, momentum: float = 0.0) -> fl.FederatedStrategy:
        return strategy(rule, server_optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum))

    return {
        REFERENCE: strategy(A.FedAvg()),
        "FedAvg, server rate 0.5": stepping(A.FedAvg(), 0.5),
        "FedAvg, server rate 2": stepping(A.FedAvg(), 2.0),
        "FedAvg, momentum 0.5": stepping(A.FedAvg(), momentum=0.5),
        "FedAvg, momentum 0.9": stepping(A.FedAvg(), momentum=0.9),
        "FedAvg, rate 0.3, momentum 0.9": stepping(A.FedAvg(), 0.3, momentum=0.9),
        "FedFV": strategy(A.FedFV()),
        "FedFV without memory": strategy(A.FedFV(tau=0)),
        "FedFV, memory of 10 rounds": strategy(A.FedFV(tau=10)),
        "FedFV, rate 0.3, momentum 0.9": stepping(A.FedFV(), 0.3, momentum=0.9),
        "FedLF": strategy(A.FedLF()),
        "FedLF, rate 0.3, momentum 0.9": stepping(A.FedLF(), 0.3, momentum=0.9),
        "q-FedAvg, server rate 4": stepping(A.QFedAvg(1.0), 4.0),
        "q-FedAvg, server rate 16": stepping(A.QFedAvg(1.0), 16.0),
        "FedMGDA+, server rate 4": stepping(A.FedMGDAPlus(), 4.0),
        "FedMGDA+, server rate 16": stepping(A.FedMGDAPlus(), 16.0),
    }


def arguments_of_fedfv(clients_per_round: int | float) -> Strategies:
    """FedFV with other shares of clients that keep their updates, and other memories.

    Args:
        clients_per_round: as for :class:`fl_lightning.FederatedStrategy`.
    """
    rules = {
        REFERENCE: A.FedAvg(),
        "FedFV": A.FedFV(),
        "FedFV, alpha 0": A.FedFV(alpha=0.0),
        "FedFV, alpha 0.5": A.FedFV(alpha=0.5),
        "FedFV, tau 0": A.FedFV(tau=0),
        "FedFV, tau 3": A.FedFV(tau=3),
        "FedFV, tau 10": A.FedFV(tau=10),
    }
    return {name: _strategy(rule, clients_per_round=clients_per_round) for name, rule in rules.items()}


def with_groups(rounds: int, num_groups: int = 2) -> Strategies:
    """The methods that ask for so many groups of people; all clients take part in every round.

    FA is left out: the bases of its kernels have no published values.

    Args:
        rounds: of a run; half of them are FCFL's first stage.
        num_groups: how many groups there are; FairFed knows two.
    """
    rules = {
        "FCFL": A.FCFL(0.05, stage1_rounds=rounds // 2, num_groups=num_groups),
        "FairReg": A.FairReg(num_groups=num_groups),
        **({"FairFed": A.FairFed()} if num_groups == 2 else {}),
        "FedFB": A.FedFB(num_groups=num_groups),
    }
    return {name: _strategy(rule, clients_per_round=1.0) for name, rule in rules.items()}


def _strategy(rule: ServerRule, **options: Any) -> fl.FederatedStrategy:
    return fl.FederatedStrategy(rule, loss_batch_size=1000, **options)
