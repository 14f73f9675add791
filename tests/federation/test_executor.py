# SPDX-License-Identifier: Apache-2.0
"""Executors that carry requests: the one of the documentation, and fits that no request can carry."""

import importlib
import logging
import multiprocessing
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support import Blobs, Classifier, fresh, train, weights
from torch.utils.data import DataLoader
from worker_processes import HERE, Failing

import fl_lightning as fl

PAGE = Path(__file__).parents[2] / "docs" / "executors.md"


# A forkserver imports torch once for all its processes.
@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_executor_of_the_page_gives_the_bits_of_clients_in_turn_when_one_of_its_processes_dies(
    tmp_path, monkeypatch, start
):
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if "Spawned" in block
    )
    assert code.count('"spawn"') == 1
    (tmp_path / f"by_{start}.py").write_text(code.replace('"spawn"', f'"{start}"'), "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    multiprocessing.set_forkserver_preload(["fl_lightning"])
    spawned, found = importlib.import_module(f"by_{start}").Spawned(), []
    for how, executor, reason in (("raise", None, "no such batch"), ("exit", spawned, "terminated abruptly")):
        module, options = (
            fresh(Failing, how=how, norm=True),
            {"client_optimizer_state": "keep", "on_client_error": "drop"},
        )
        with pytest.warns(UserWarning, match=rf"client \d+ is left out of round 1: .*{reason}"):
            strategy = train(
                module, 3, algorithm=fl.algorithms.SCAFFOLD(), executor=executor, clients_per_round=5, **options
            ).strategy
        assert strategy.executor_fallback is None
        found.append(weights(module))
    assert torch.equal(*found)


class Lambda(Classifier):
    def __init__(self, **options):
        super().__init__(**options)
        self.scale = lambda loss: 2 * loss

    def training_step(self, batch, batch_idx):
        return self.scale(super().training_step(batch, batch_idx))


class OwnBatches(Blobs):
    def train_dataloader(self):
        return DataLoader(
            super().train_dataloader().dataset, batch_size=10, collate_fn=lambda b: torch.utils.data.default_collate(b)
        )


@pytest.mark.parametrize(
    ("module", "data", "reason"),
    [
        (Lambda, Blobs, "between this process and its workers: "),
        (Classifier, OwnBatches, "the data cannot be pickled ("),
    ],
)
def test_what_cannot_be_pickled_trains_in_turn(caplog, module, data, reason):
    found = []
    for executor in (None, HERE):
        model, divided = fresh(module), fl.FederatedDataModule(data(), fl.data.IID(4), seed=0)
        with caplog.at_level(logging.INFO):
            strategy = train(model, 2, data=divided, executor=executor).strategy
        found.append(weights(model))
    assert reason in strategy.executor_fallback
    assert sum(strategy.executor_fallback in record.getMessage() for record in caplog.records) == 1
    assert torch.equal(*found)


def test_data_that_are_loaded_anew_train_in_turn():
    strategy = train(None, 1, executor=HERE, reload_dataloaders_every_n_epochs=1).strategy
    assert strategy.executor_fallback.endswith("reload_dataloaders_every_n_epochs loads them anew")


@dataclass(frozen=True)
class Odd(fl.executors.Executor):
    run: Any  # what its workers yield, of the right answers

    def start(self, work):
        return Oddly(work, self.run)


class Oddly(fl.executors.Workers):
    stopped = 0

    def __init__(self, work, run):
        self.work, self.answers = work, run

    def run(self, shared, requests):
        yield from self.answers([self.work(shared, request) for request in requests])

    def stop(self):
        Oddly.stopped += 1


def late():
    rounds = []
    return lambda answers: rounds.append(answers) or enumerate(rounds[0])


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda answers: (), "run of Oddly must yield an answer to each of the 3 requests, found none"),
        (lambda answers: enumerate(answers[:1]), "run of Oddly must yield an answer to each of the 3 requests, found"),
        (lambda answers: [(9, answers[0])], "what run of Oddly yields[0] must be an integer from 0 to 2, found 9"),
        (lambda answers: [answers[0]], "what run of Oddly yields must be 2 entries"),
        (lambda answers: [(0, "done")], "what run of Oddly yields[1] must be bytes or an Exception, found 'done'"),
        (lambda answers: enumerate(answers[::-1]), "run of Oddly must yield 0 with the answer to that request, found"),
        (late(), "run of Oddly must yield 0 with the answer to that request, found another's"),
    ],
)
def test_clients_train_here_where_workers_answer_wrongly_and_workers_are_stopped_once(monkeypatch, run, words):
    monkeypatch.setattr(Oddly, "stopped", 0)
    module, alone = fresh(), fresh()
    assert words in train(module, 2, executor=Odd(run)).strategy.executor_fallback
    train(alone, 2)
    assert torch.equal(weights(module), weights(alone))
    assert Oddly.stopped == 1


class Refusing(fl.executors.Executor):
    def start(self, work):
        raise ConnectionError("nobody there")


class Forgetful(fl.executors.Executor):
    def start(self, work):
        pass


def test_workers_that_cannot_be_started_end_the_fit():
    with pytest.raises(ConnectionError, match="nobody there"):
        train(None, 1, executor=Refusing())
    with pytest.raises(TypeError, match="what start of Forgetful returns must be a Workers, found None"):
        train(None, 1, executor=Forgetful())


class Asks(Classifier):
    """Depends on what a worker's trainer says of the fit, on the data module, and on how often hooks have run."""

    made = 0

    def configure_optimizers(self):
        self.made += 1
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        known = (
            trainer.max_epochs,
            trainer.estimated_stepping_batches,
            trainer.gradient_clip_val,
            len(trainer.loggers),
        )
        self.log("known", float(sum(known)) + self.trainer.datamodule.bonus + 100 * self.made)
        assert isinstance(self.logger, L.pytorch.loggers.CSVLogger)
        return super().training_step(batch, batch_idx) * (1 + sum(known) / 1000)


class Shifted(Blobs):
    bonus = 3

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1, batch[1]


def test_workers_know_trainer_logger_and_data(tmp_path):
    found = []
    for executor in (None, HERE):
        module, data = fresh(Asks), fl.FederatedDataModule(Shifted(), fl.data.IID(4), seed=0)
        logger = L.pytorch.loggers.CSVLogger(tmp_path)
        done = train(module, 2, data=data, executor=executor, logger=logger, gradient_clip_val=0.5)
        assert done.strategy.executor_fallback is None
        found.append((weights(module), done.trainer.callback_metrics["known"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
