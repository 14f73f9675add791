# SPDX-License-Identifier: Apache-2.0
"""Federated methods, one file each: a server rule, with its client rule where local training changes.

Uses ``lightning``, ``core``, ``ops`` and ``arguments``. ``base`` is the protocol that a method implements,
``_shared`` what several methods compute alike.
"""

from __future__ import annotations

from fl_lightning.algorithms._shared.weighting import data_weights, uniform_weights, weighted_mean
from fl_lightning.algorithms.aaggff import AAggFF
from fl_lightning.algorithms.adafed import AdaFed
from fl_lightning.algorithms.afl import AFL
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.differential_privacy import DifferentialPrivacy
from fl_lightning.algorithms.ditto import Ditto
from fl_lightning.algorithms.drfl import DRFL
from fl_lightning.algorithms.eagle import EAGLE
from fl_lightning.algorithms.fa import FA
from fl_lightning.algorithms.fairfed import FairFed
from fl_lightning.algorithms.fairreg import FairReg
from fl_lightning.algorithms.fcfl import FCFL
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.fedbn import FedBN
from fl_lightning.algorithms.fedcka import FedCKA
from fl_lightning.algorithms.feddyn import FedDyn
from fl_lightning.algorithms.fedfa import FedFa
from fl_lightning.algorithms.fedfb import FedFB
from fl_lightning.algorithms.fedfv import FedFV
from fl_lightning.algorithms.fedgini import FedGini
from fl_lightning.algorithms.fedheal import FedHEAL
from fl_lightning.algorithms.fedism import FedISM
from fl_lightning.algorithms.fedlf import FedLF
from fl_lightning.algorithms.fedmdfg import FedMDFG
from fl_lightning.algorithms.fedmgda import FedMGDAPlus
from fl_lightning.algorithms.fedper import FedPer
from fl_lightning.algorithms.fedproc import FedProc
from fl_lightning.algorithms.fedproto import FedProto
from fl_lightning.algorithms.fedprox import FedProx
from fl_lightning.algorithms.fedpw import FedPW
from fl_lightning.algorithms.fedrep import FedRep
from fl_lightning.algorithms.mmpf import MMPF
from fl_lightning.algorithms.moon import MOON
from fl_lightning.algorithms.propfair import PropFair
from fl_lightning.algorithms.qfedavg import QFedAvg
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs, StepReport
from fl_lightning.algorithms.scaffold import SCAFFOLD
from fl_lightning.algorithms.term import TERM
from fl_lightning.algorithms.upgrad import UPGrad
from fl_lightning.core.cohort import mean_rate
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client

__all__ = [
    "AFL",
    "DRFL",
    "EAGLE",
    "FA",
    "FCFL",
    "MMPF",
    "MOON",
    "SCAFFOLD",
    "TERM",
    "AAggFF",
    "AdaFed",
    "ClientReport",
    "ClientRule",
    "DifferentialPrivacy",
    "Ditto",
    "FairFed",
    "FairReg",
    "FedAvg",
    "FedBN",
    "FedCKA",
    "FedDyn",
    "FedFB",
    "FedFV",
    "FedFa",
    "FedGini",
    "FedHEAL",
    "FedISM",
    "FedLF",
    "FedMDFG",
    "FedMGDAPlus",
    "FedPW",
    "FedPer",
    "FedProc",
    "FedProto",
    "FedProx",
    "FedRep",
    "Federation",
    "LocalWork",
    "Needs",
    "PropFair",
    "QFedAvg",
    "ServerRule",
    "StepReport",
    "UPGrad",
    "at_clients",
    "data_weights",
    "mean_rate",
    "per_client",
    "server_state",
    "uniform_weights",
    "weighted_mean",
]
