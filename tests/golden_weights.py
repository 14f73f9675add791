# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of whole fits, to show that a change of the code changes no bit of what it computes.

    python tests/golden_weights.py record FILE     before the change
    python tests/golden_weights.py compare FILE    after it, on the same machine

Every method trains with its defaults, one client after the other and in worker processes; further fits cover what
executors, optimizers, buffers, hooks and checkpoints can do, and methods on a model wide enough for its sums to be
divided. A fingerprint holds hashes of the final weights and of everything that was logged, by name, except times.
Beside FILE, the weights themselves lie in FILE.pt: of fits that differ, the largest difference is printed, divided by
the largest weight. Other machines and other releases of torch may round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from resuming import ALGORITHMS
from support import Classifier, federated_blobs, fresh, quiet_trainer, weights
from torch import nn

import fl_lightning as fl


class Digest(Logger):
    """Hashes what it is given, in order."""

    name, version = "digest", 0

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, Any] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name in sorted(metrics):
            if name != "fed/seconds":
                self.add(name, f"{step} ".encode() + struct.pack("<d", float(metrics[name])))

    def add(self, name: str, content: bytes) -> None:
        """Hashes content under a name."""
        self.hashes.setdefault(name, hashlib.sha256()).update(content)

    def digests(self) -> dict[str, str]:
        """What was hashed, by name."""
        return {name: found.hexdigest()[:12] for name, found in self.hashes.items()}


class Watching(L.Callback):
    """A hook that sends local training through Lightning's own optimization."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        pass


class Gathering(Classifier):
    """Collects outputs in a list, and logs when validation ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.outputs.append((self(x).argmax(1), y))

    def on_validation_epoch_end(self) -> None:
        right = torch.cat([p == y for p, y in self.outputs])
        self.log("val_acc", right.float().mean())
        self.outputs.clear()


class Wide(Classifier):
    """Has several times 8,192 parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        inputs, outputs = self.net[0].in_features, self.net[-1].out_features
        self.net = nn.Sequential(nn.Linear(inputs, 3001), nn.ReLU(), nn.Linear(3001, outputs))


class Manual(Classifier):
    """Steps its optimizer itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


class Scheduled(Classifier):
    """Halves its learning rate every second round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def digest(
    method: Callable[[], fl.algorithms.ServerRule] = fl.algorithms.FedAvg,
    module: Callable[..., L.LightningModule] = Classifier,
    options: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    resume: bool = False,
    **strategy: Any,
) -> tuple[dict[str, str], torch.Tensor]:
    """Trains three rounds, tests, and hashes; ``resume`` stops after two and goes on from a checkpoint."""
    logger = Digest()
    options, trainer = {"norm": True, "log": True, **(options or {})}, dict(trainer or {})

    def fit(rounds: int, **more: Any) -> tuple[L.Trainer, L.LightningModule]:
        built = fresh(module, 0, **options)
        federated = fl.FederatedStrategy(method(), **{"clients_per_round": 4, "seed": 3, **strategy})
        made = quiet_trainer(federated, rounds, logger=logger, **trainer)
        made.fit(built, federated_blobs(train=120), **more)
        return made, built

    with tempfile.TemporaryDirectory() as folder:
        if resume:
            path = Path(folder) / "two.ckpt"
            fit(2)[0].save_checkpoint(path)
            last, built = fit(3, ckpt_path=path, weights_only=True)
        else:
            last, built = fit(3)
    with redirect_stdout(StringIO()):  # the table of clients
        last.test(built, federated_blobs(train=120), verbose=False)
    logger.add("weights", weights(built).numpy().tobytes())
    return logger.digests(), weights(built)


def fits() -> dict[str, Callable[[], tuple[dict[str, str], torch.Tensor]]]:
    """Every fit by name."""
    parallel = {"executor": fl.executors.Parallel(2)}
    drops = {"sampler": fl.data.AvailabilitySampler(1.0, drop_out=0.25)}
    momentum = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
    some = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "Ditto", "FedFV", "FedMDFG", "FedLF", "FedHEAL", "FCFL", "MOON")
    found: dict[str, Callable[[], tuple[dict[str, str], torch.Tensor]]]
    found = {name: partial(digest, ALGORITHMS[name]) for name in ALGORITHMS}
    found |= {
        f"{name}, wide": partial(digest, method, Wide) for name, method in ALGORITHMS.items() if name != "FedBN"
    }  # no BatchNorm
    found |= {f"{name}, parallel": partial(digest, ALGORITHMS[name], **parallel) for name in some}
    found |= {
        f"{name}, hooks": partial(digest, ALGORITHMS[name], trainer={"callbacks": [Watching()]}) for name in some[:6]
    }
    found |= {f"{name}, resumed": partial(digest, ALGORITHMS[name], resume=True, **drops) for name in some}
    found |= {
        f"{name}, kept Adam": partial(
            digest, options={"optimizer": "Adam", "lr": 0.01}, client_optimizer_state="keep", **more
        )
        for name, more in (("sequential", {}), ("parallel", parallel))
    }
    found |= {
        "dropout": partial(digest, options={"dropout": 0.3, "momentum": 0.9}),
        "dropout, parallel": partial(digest, options={"dropout": 0.3, "momentum": 0.9}, **parallel),
        "gathering": partial(digest, module=Gathering),
        "manual": partial(digest, module=Manual),
        "scheduled": partial(digest, module=Scheduled, resume=True),
        "accumulated": partial(digest, trainer={"accumulate_grad_batches": 2}),
        "clipped": partial(digest, trainer={"gradient_clip_val": 0.1}),
        "limited": partial(digest, trainer={"limit_train_batches": 2, "limit_val_batches": 1}),
        "local steps": partial(digest, local_steps=7),
        "local epochs": partial(digest, ALGORITHMS["FedLF"], local_epochs=2),
        "full gradients": partial(digest, ALGORITHMS["FedFV"], full_gradients=True),
        "server momentum": partial(digest, server_optimizer=momentum, resume=True),
        "server Yogi": partial(digest, ALGORITHMS["FedLF"], server_optimizer=partial(fl.optim.FedYogi, lr=0.05)),
        "largest buffers": partial(digest, buffers="largest"),
        "global buffers": partial(digest, buffers="global", **drops),
        "attack": partial(digest, attack=fl.attacks.RandomUpdates(clients=(1, 2))),
        "FedHEAL with SCAFFOLD": partial(digest, ALGORITHMS["FedHEAL"], client=fl.algorithms.SCAFFOLD()),
        "bfloat16": partial(digest, trainer={"precision": "bf16-mixed"}),
        "double": partial(digest, ALGORITHMS["FedLF"], trainer={"precision": "64-true"}),
    }
    return found


def relative(new: torch.Tensor, old: torch.Tensor) -> float:
    """The largest difference, divided by the largest weight."""
    return float((new.double() - old.double()).abs().max() / old.double().abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found, trained = {}, {}
    for name, fingerprint in fits().items():
        found[name], trained[name] = fingerprint()
        print(f"{found[name]['weights']}  {name}", flush=True)
    beside = arguments.file.with_suffix(".pt")
    if arguments.action == "record":
        arguments.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        torch.save(trained, beside)
        return
    recorded, before = json.loads(arguments.file.read_text(encoding="utf-8")), torch.load(beside, weights_only=True)
    differing = 0
    for name in sorted(recorded.keys() | found.keys()):
        old, new = recorded.get(name, {}), found.get(name, {})
        if old != new:
            differing += 1
            print(f"{name} differs in", *sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key)))
            if old and new:
                print(f"    by {relative(trained[name], before[name]):.1e}")
    print(f"{len(found) - differing} of {len(found)} equal")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
