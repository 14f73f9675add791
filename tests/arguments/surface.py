# SPDX-License-Identifier: Apache-2.0
"""All public constructors and functions, each with valid arguments."""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch
from implementations import samples
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

import fl_lightning as fl
from fl_lightning.lightning.names import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "project"))
import public_api

NO_ARGUMENTS = {
    "fl_lightning.FederatedStrategy.register_strategies", "fl_lightning.ClientError", "fl_lightning.Comparison",
    "fl_lightning.Audit",
    "fl_lightning.guards.CannotGuardError", "fl_lightning.federation.nvflare.run_client",
}  # fmt: skip
"""What Lightning calls, exceptions, which take what exceptions take, what ``fl.compare`` and ``fl.audit`` return, and
what works in a process of NVFlare alone."""


class Callee(NamedTuple):
    """A public constructor or function.

    Attributes:
        name: where users find it.
        call: the class or function.
        hints: annotations of its arguments.
    """

    name: str
    call: Callable[..., Any]
    hints: dict[str, Any]

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments."""
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = inspect.signature(self.call).parameters.values()
        return [argument.name for argument in found if argument.kind not in variadic]

    def annotation(self, argument: str) -> Any:
        """An argument's annotation; that of a function without annotations is left open."""
        return self.hints.get(argument, Any)

    def valid(self) -> dict[str, Any]:
        """Valid arguments, made anew: those of its own, and the required ones by their names."""
        short = self.name.removeprefix("fl_lightning.")
        own = own_arguments().get(short, {})
        shared = shared_arguments()
        needed = {
            name: shared[name]
            for name, argument in inspect.signature(self.call).parameters.items()
            if argument.default is argument.empty and name in self.arguments and name not in own
        }
        return {**needed, **own}


def callees() -> Iterator[Callee]:
    """Every public class that can be made, its public class methods, and every public function, once."""
    seen: set[int] = set()
    for name, value in public_api.public_objects().items():
        if not callable(value) or id(value) in seen or name in NO_ARGUMENTS:
            continue
        seen.add(id(value))
        if not inspect.isclass(value):
            yield Callee(name, value, get_type_hints(value))
            continue
        if not inspect.isabstract(value):
            yield Callee(name, value, get_type_hints(value.__init__))
        for method, member in vars(value).items():
            whole = f"{name}.{method}"
            if isinstance(member, (classmethod, staticmethod)) and whole not in NO_ARGUMENTS and method[0] != "_":
                yield Callee(whole, getattr(value, method), get_type_hints(member.__func__))


def layout() -> fl.ParamLayout:
    return fl.ParamLayout.from_sizes((2, 1))


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))


def record() -> fl.EvaluationRecord:
    return fl.EvaluationRecord(0, "val", (0, 1), torch.tensor([3, 3]), {"acc": torch.tensor([0.5, 0.7])})


def shared_arguments() -> dict[str, Any]:
    """Valid values by the names of required arguments."""
    rows = torch.randn(2, 3)
    updates = fl.UpdateMatrix(rows, layout())
    cohort = fl.Cohort(torch.zeros(3), updates, None, torch.ones(2), (0, 1), 0)
    module = nn.Linear(2, 1)
    return {
        "alpha": 0.5, "availability": 0.5, "bases": [[0.0, 1.0], [1.0, 0.0]], "blocks": 1, "bound": 5.0,
        "bounds": torch.zeros(1),
        "buffers": {}, "classes_per_client": 1, "client": fl.algorithms.ClientRule(), "client_id": 0,
        "client_ids": (0, 1), "client_lr": 0.1, "clients": (0, 1), "cohort": cohort, "companions": {}, "conflicts": 0,
        "data": dataset(), "dataset": dataset(), "device": torch.device("cpu"), "directory": "checkpoints",
        "dishonest": 0.1,
        "dots": torch.ones(2, 3), "dropped": {}, "dtype": torch.float32, "eval_labels": torch.tensor([0, 1, 2]),
        "extras": {}, "flagged": False, "fraction": 0.1, "gram": torch.eye(2, dtype=torch.float64),
        "groups": ((0,), (1, 2)), "implementation": "torch", "keys": ["a", "b", "a"],
        "label_counts": torch.ones(2, 3, dtype=torch.int64), "labels": torch.tensor([0, 1, 2, 0, 1, 2]),
        "layer_conflicts": {}, "layer_names": ("a",), "layer_starts": (0, 3), "layers": {"a": 1}, "layout": layout(),
        "loader": torch.utils.data.DataLoader(dataset()), "loss": 0.5, "losses": torch.ones(2),
        "clip": 1.0, "noise_multiplier": 1.0, "num_classes": 3, "source": 0, "target": 1,
        "lower": torch.zeros(2), "lr": 0.1, "matrix": torch.zeros(1, 2), "merged": 0.0, "merged_layers": 0,
        "merged_or_flagged": 0.0, "method": "FedAvg with ClientRule", "metric_name": "acc", "model": 1,
        "module": module, "names": ("a",), "net": module, "num_clients": 3, "num_samples": 6,
        "objective": torch.zeros(2), "op": "layer_gram", "parameters": list(module.parameters()),
        "params": torch.zeros(3), "partition": fl.data.IID(2), "parts": [torch.arange(3), torch.arange(3, 6)],
        "radius": 1.0, "rates": [0.1, 0.2],
        "reason": "no compiler", "record": record(), "round": 0, "rounds": 1, "rows": rows,
        "rule": fl.algorithms.ClientRule(), "scalars": {}, "schedule": None, "seconds": 1.0, "seed": 0,
        "server": fl.algorithms.FedAvg(), "shapes": ((3,),), "shards_per_client": 2, "share": 0.5, "size": 3,
        "sizes": torch.ones(2), "stage": "val", "state": {"method": "FedAvg"}, "status": "optimal", "step_norm": 0.5,
        "train_labels": torch.tensor([0, 1, 2]), "train_loss": 0.5, "train_parts": [torch.arange(3)],
        "update": torch.zeros(3), "update_norms": torch.ones(2), "updates": updates, "upper": torch.ones(2),
        "v": torch.randn(3), "value": 0.5, "values": torch.tensor([0.5, 0.7]),
        "vectors": torch.ones(1, 2, dtype=torch.float64), "weights": torch.ones(2), "x": torch.zeros(2),
    }  # fmt: skip


def compared_module() -> fl.ClientModule:
    return fl.ClientModule(nn.Linear(2, 3), num_classes=3)


def audited(seed: int) -> fl.report.FitRecord:
    values = fl.report.ClientValues(1, "test", (0, 1), (3, 3), {"acc": (0.5, 0.7)}, {"acc": "max"})
    return fl.report.FitRecord("FedAvg", seed, client_names=("a", "b"), client_sizes=(3, 3), evaluations=(values,))


def own_arguments() -> dict[str, dict[str, Any]]:
    """Valid arguments of what needs others than the shared ones."""
    parameters, ones = [nn.Parameter(torch.zeros(3))], torch.ones(3, dtype=torch.int64)
    found: dict[str, dict[str, Any]] = {
        "algorithms.per_client": {"kind": int},
        "algorithms.server_state": {"start": 0.0},
        "audit": {"records": [audited(seed) for seed in range(2)], "limits": {"mean": 0.1}},
        "testing.check_client_rule": {"make": fl.algorithms.ClientRule},
        "testing.check_executor": {"make": fl.executors.Sequential},
        "testing.check_server_rule": {"make": fl.algorithms.FedAvg, "skip": (*fl.testing.SERVER_RULE_CHECKS,)},
        "testing.check_partition": {"partition": fl.data.IID(2)},
        "compare": {
            "model": compared_module,
            "data": fl.FederatedDataModule(dataset(), fl.data.IID(2), val=dataset()),
            "strategies": {"FedAvg": fl.algorithms.FedAvg()},
            "seeds": 1,
            "bounds": "none",
            "trainer": partial(Trainer, max_epochs=1, accelerator="cpu", logger=False),
            "folder": tempfile.mkdtemp(),
        },
        "guards.CosineTrust": {"client": 0},
        "EvaluationRecord": {"values": {"acc": torch.ones(2)}},
        "ClientIntroduction": {"name": "a", "steps": 1, "description": {}, "frozen": "blake2b:"},
        "FederatedClient": {
            "module": fl.ClientModule(nn.Linear(2, 3)),
            "strategy": fl.FederatedStrategy(),
            "num_clients": 3,
        },
        "FederatedServer": {"module": fl.ClientModule(nn.Linear(2, 3)), "strategy": fl.FederatedStrategy()},
        "metrics.functional.ConflictCounts": {"model": torch.tensor(1), "layers": torch.ones(3)},
        "metrics.ByGroup": {"metric": MeanMetric()},
        "metrics.GroupFrame": {"by_group": torch.ones(2), "overall": torch.tensor(1.0)},
        "metrics.functional.demographic_parity": {"predictions": ones, "groups": ones},
        "metrics.functional.equal_opportunity": {"predictions": ones, "labels": ones, "groups": ones},
        "metrics.functional.equalized_odds": {"predictions": ones, "labels": ones, "groups": ones},
        "ParamLayout.from_sizes": {"sizes": (2, 1)},
        "callbacks.Report": {"path": Path(tempfile.mkdtemp()) / "report.html"},
        "report.Absence": {"count": 1, "first_round": 0, "last_round": 0},
        "report.ClientValues": {"sizes": (3, 3), "values": {"acc": (0.5, None)}, "modes": {"acc": "max"}},
        "report.MetricSeries": {"metric": "acc", "mode": "max", "rounds": (1,), "summaries": {"mean": (0.5,)}},
        "report.record_from_json": {"text": fl.report.record_to_json(fl.report.FitRecord("FedAvg"))},
        "report.record_to_json": {"record": fl.report.FitRecord("FedAvg")},
        "report.write_report": {
            "records": [fl.report.FitRecord("FedAvg")],
            "path": Path(tempfile.mkdtemp()) / "report.html",
        },
        **{f"optim.{name}": {"params": parameters} for name in ("FedAdam", "FedYogi", "FedAdagrad")},
    }
    if "fl_lightning.algorithms.torchjd.TorchJD" in public_api.public_objects():
        from torchjd.aggregation import MGDAWeighting

        found["algorithms.torchjd.TorchJD"] = {"weighting": MGDAWeighting()}
    if "fl_lightning.federation.nvflare.FederatedController" in public_api.public_objects():
        found["federation.nvflare.FederatedController"] = {"server": "task:server", "sites": ["site-1"]}
    for op, values in samples().items():
        function = getattr(fl.ops, op, None)
        if function is not None:
            names = list(inspect.signature(function).parameters)
            found[f"ops.{op}"] = dict(zip(names, values, strict=False))
    found["ops.layer_squares"] = found["ops.layer_gram"]
    return found
