# SPDX-License-Identifier: Apache-2.0
"""A client's training gives the same bits wherever its row lies: parameters and rows start at 64-byte boundaries."""

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from support import fresh, training_only
from torch import nn
from torch.utils.data import TensorDataset
from worker_processes import FORKS, TWO

import fl_lightning as fl
from fl_lightning.algorithms import ClientReport, ClientRule, FedAvg
from fl_lightning.core.processes import pack, unpack
from fl_lightning.core.tensors import ALIGNMENT
from fl_lightning.data.cohort_samplers import Selection

HERE = Path(__file__).parent
PLACES, CLIENT = 3, 2  # of clients 0 to 4, who come in the order of their ids
COHORTS = [(*range(k), CLIENT, *range(CLIENT + 1, CLIENT + PLACES - k)) for k in range(PLACES)]
PRECISIONS = ["32-true", "64-true", "bf16-mixed"]
EXECUTORS = {"sequential": fl.executors.Sequential(), "parallel": TWO}
*FORK, NO_PROCESS_IS_LEFT = FORKS
BOTH = ["sequential", pytest.param("parallel", marks=FORK)]
pytestmark = NO_PROCESS_IS_LEFT


def off_line(tensors):
    """By how many bytes the tensors miss the boundaries."""
    return {tensor.data_ptr() % ALIGNMENT for tensor in tensors} - {0}


class Odd(L.LightningModule):
    """Hardly a parameter of it fills whole lines; the last layers multiply matrices with vectors."""

    def __init__(self):
        super().__init__()
        self.conv, self.drop = nn.Conv2d(1, 3, 3), nn.Dropout(0.3)
        self.hidden, self.scale, self.out = nn.Linear(27, 77), nn.Linear(77, 1), nn.Linear(1, 13)

    def training_step(self, batch, batch_idx):
        assert off_line(self.parameters()) == set()
        x, y = batch
        features = self.drop(torch.relu(self.conv(x.to(self.conv.weight.dtype))).flatten(1))
        return F.cross_entropy(self.out(self.scale(torch.relu(self.hidden(features)))), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Chosen(fl.data.CohortSampler):
    """The same cohort in every round."""

    def __init__(self, clients):
        self.clients = clients

    def select(self, round, size, sizes, seed):  # noqa: A002
        return Selection(self.clients)


class Telling(ClientRule):
    """Clients send their parameters as well."""

    def end_client(self, work):
        return ClientReport(companions={"row": work.row})


class Keeping(FedAvg):
    """Keeps the rows of the last round, and looks where they lie."""

    def aggregate(self, cohort):
        matrices = (cohort.updates, *cohort.companions.values())
        assert [off_line(matrix.rows) for matrix in matrices] == [set()] * len(matrices)
        self.rows = dict(zip(cohort.client_ids, cohort.updates.rows.clone(), strict=True))
        return super().aggregate(cohort)


def updates(clients, executor, precision, **options):
    """The updates of these clients' first visits, by client."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 1, 5, 5, generator=generator), torch.randint(13, (30,), generator=generator)
    data = fl.FederatedDataModule(TensorDataset(x, y), list(torch.arange(30).split(6)), batch_size=1)
    rule = Keeping()
    options = {"clients_per_round": len(clients), "sampler": Chosen(clients), "executor": executor, **options}
    strategy = fl.FederatedStrategy(rule, **options)
    training_only(strategy, 1, precision=precision).fit(fresh(Odd), data)
    assert len(clients) == 1 or strategy.executor_fallback is None
    return rule.rows


def check_places(executor, precision, **options):
    """Trains one client alone and at every place of a cohort."""
    alone = updates((CLIENT,), EXECUTORS[executor], precision, **options)[CLIENT]
    assert alone.any()
    for place, cohort in enumerate(COHORTS):
        assert cohort.index(CLIENT) == place
        found = updates(cohort, EXECUTORS[executor], precision, **options)
        assert torch.equal(found[CLIENT], alone), f"place {place}, {executor}, {precision}"


@pytest.mark.parametrize(
    ("executor", "precision"),
    [*(("sequential", each) for each in PRECISIONS), pytest.param("parallel", "32-true", marks=FORK)],
)
def test_a_client_trains_to_the_same_bits_at_every_place_and_alone(executor, precision):
    check_places(executor, precision)


def test_a_full_gradient_has_the_same_bits_at_every_place_and_alone():
    check_places("sequential", "32-true", full_gradients=True)


@pytest.mark.process
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the variable is one of MKL")
def test_also_where_products_round_by_alignment(interpreter_with_lightning):
    """MKL's products of matrices and vectors do so with its oldest instructions, whatever the processor."""
    program = "from test_aligned_rows import check_places; check_places('sequential', '32-true')"
    result = interpreter_with_lightning(program, path=(HERE, *HERE.parents[:2]), MKL_ENABLE_INSTRUCTIONS="SSE4_2")
    assert result.returncode == 0, result.stderr


# ---- where things lie


@pytest.mark.parametrize("executor", BOTH)
def test_rows_and_companions_start_at_boundaries(executor):
    updates(COHORTS[2], EXECUTORS[executor], "32-true", client=Telling())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_of_messages_start_at_boundaries(dtype):
    sent = [torch.arange(n, dtype=torch.float64).to(dtype) for n in (1, 3, 65, 1000)]
    sent += [torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last), torch.ones(3, 5, dtype=dtype).T]
    found = unpack(pack(sent), torch.device("cpu"))
    assert off_line(found) == set()
    for before, after in zip(sent, found, strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()
