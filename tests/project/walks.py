# SPDX-License-Identifier: Apache-2.0
"""How many files of the package somebody meets who follows one thing that it does.

    PYTHONPATH=tests python tests/project/walks.py            the table
    PYTHONPATH=tests python tests/project/walks.py CLOSING    calls of the walks with this word, by the file called

A walk counts the files whose functions run, and the calls from one file of the package into another one.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from support import Blobs, fresh, quiet_trainer
from torch.utils.data import DataLoader, Subset

import fl_lightning as fl
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.fit.fit import FederatedFit

PACKAGE = str(Path(fl.__file__).parent) + "/"
CLIENTS, SAMPLES, BATCH = 4, 80, 10  # so that each client has two batches


class Walk:
    """Counts while it is entered.

    Attributes:
        files: of the package, whose functions have run.
        entered: calls from other files of the package, by the file that is called.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.entered: Counter[str] = Counter()
        self._generators: dict[int, FrameType] = {}

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not file.startswith(PACKAGE) or id(frame) in self._generators:
            return
        if frame.f_code.co_flags & CO_GENERATOR:
            self._generators[id(frame)] = frame  # it is called again for every item
        self.files.add(file)
        if caller is not None and caller.f_code.co_filename.startswith(PACKAGE) and caller.f_code.co_filename != file:
            self.entered[file] += 1


@contextmanager
def counted(owner: type, name: str, walk: Walk) -> Iterator[None]:
    """Counts the calls of one method, the last call alone."""
    method: Callable[..., Any] = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        walk.files.clear()
        walk.entered.clear()
        with walk:
            return method(*args, **kwargs)

    with mock.patch.object(owner, name, called):
        yield


def data() -> fl.FederatedDataModule:
    """The blobs over four clients with two batches each."""
    return fl.FederatedDataModule(Blobs(train=SAMPLES, batch_size=BATCH), fl.data.IID(CLIENTS), seed=0)


def trainer_of(rounds: int, **options: Any) -> Any:
    """A trainer with FedLF."""
    return quiet_trainer(fl.FederatedStrategy(fl.algorithms.FedLF()), rounds, limit_val_batches=0, **options)


def a_fit(walk: Walk, method: str) -> None:
    """Two rounds, of which one method is counted."""
    with counted(FederatedFit, method, walk):
        trainer_of(2).fit(fresh(), data())


def gram(walk: Walk) -> None:
    """One Gram matrix."""
    matrix = UpdateMatrix(torch.randn(CLIENTS, 140), ParamLayout.from_module(fresh().net))
    with walk:
        matrix.gram()


def validate(walk: Walk) -> None:
    """Validation of four clients with two batches each."""
    module, trainer, own = fresh(), quiet_trainer(fl.FederatedStrategy(fl.algorithms.FedLF())), data()
    with walk:
        trainer.validate(module, own, verbose=False)


def resumed(walk: Walk) -> None:
    """A fit that goes on from its last checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(1)
        trainer.fit(fresh(), data())
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        module, trainer, own = fresh(), trainer_of(1), data()
        with walk:
            trainer.fit(module, own, ckpt_path=f"{folder}/last.ckpt")


def fresh_fit(walk: Walk) -> None:
    """A fit of one round."""
    module, trainer, own = fresh(), trainer_of(1), data()
    with walk:
        trainer.fit(module, own)


class Own(Blobs):
    """One client's data."""

    def __init__(self, client: int) -> None:
        super().__init__(SAMPLES, BATCH)
        self.client = client

    def train_dataloader(self) -> DataLoader[Any]:
        """A share of the blobs."""
        places = range(self.client, SAMPLES, CLIENTS)
        return DataLoader(Subset(super().train_dataloader().dataset, places), batch_size=BATCH)


def federation(walk: Walk, of_client: bool) -> None:
    """A round of a real federation, whose last client or whose server is counted."""
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=CLIENTS)
    server = fl.FederatedServer(fresh(), strategy, CLIENTS, rounds=2)
    clients = [
        fl.FederatedClient(fresh(), Own(k), strategy, k, CLIENTS, trainer={"accelerator": "cpu"})
        for k in range(CLIENTS)
    ]
    for client in clients:
        server.register(client.introduction())
    owner, name = (fl.FederatedClient, "train") if of_client else (fl.FederatedServer, "close_round")
    with counted(owner, name, walk):
        for _ in range(2):
            server.close_round({k: clients[k].train(server.message(k)) for k in server.open_round()})


WALKS: dict[str, Callable[[Walk], None]] = {
    "one client, two batches": lambda walk: a_fit(walk, "train_client"),
    "closing a round": lambda walk: a_fit(walk, "close_round"),
    "one UpdateMatrix.gram": gram,
    "trainer.validate": validate,
    "a resumed fit with nothing left to do": resumed,
    "a fresh fit of one round": fresh_fit,
    "FederatedClient.train": lambda walk: federation(walk, True),
    "FederatedServer.close_round": lambda walk: federation(walk, False),
}


def main(word: str = "") -> None:
    """Prints the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name, follow in WALKS.items():
        if word.casefold() in name.casefold():
            with open("/dev/null", "w") as nowhere, mock.patch("sys.stdout", nowhere):
                follow(Walk())  # what happens once in a process is not counted
                walk = Walk()
                follow(walk)
            print(f"{name}: {len(walk.files)} files, {walk.entered.total()} calls into another file")
            for file, calls in walk.entered.most_common() if word else ():
                print(f"    {calls:4}  {file.removeprefix(PACKAGE)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
