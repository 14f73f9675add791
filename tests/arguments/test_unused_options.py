# SPDX-License-Identifier: Apache-2.0
"""Options that others leave without meaning are refused, not ignored; their defaults are not."""

from functools import partial

import pytest
from surface import compared_module, dataset

import fl_lightning as fl
from fl_lightning import algorithms, attacks
from fl_lightning.lightning.names import Trainer

strategy = fl.FederatedStrategy
data = partial(fl.FederatedDataModule, dataset(), fl.data.IID(2))
compare = partial(
    fl.compare, lambda lr=0.1: compared_module(), data(val=dataset()), {"FedAvg": fl.algorithms.FedAvg()},
    folder="none", seeds=1, trainer=partial(Trainer, max_epochs=1, accelerator="cpu", logger=False),
)  # fmt: skip

UNUSED = [
    (strategy, "local_epochs", 5, {"local_steps": 1}),
    (strategy, "client_optimizer_state", "keep", {"full_gradients": True}),
    (strategy, "fairness_mode", "min", {}),
    (data, "holdout_stage", "test", {}),
    (data, "evaluation", "shared", {"holdout": 0.5}),
    (data, "eval_batch_size", 8, {}),
    *((compare, name, value, {"learning_rates": rates})
      for name, value in (("tuning_seeds", 1), ("select", "worst_10")) for rates in (None, [0.1])),
    (algorithms.FedPer, "num_layers", 2, {"personal": ["head"]}),
    (algorithms.FedCKA, "num_layers", 3, {"layers": ["head"]}),
    (algorithms.FedHEAL, "tau", 0.4, {"filter_updates": False}),
    (algorithms.FedHEAL, "beta", 0.3, {"adapt_weights": False}),
    (algorithms.FedFV, "max_history", 5, {"tau": 0}),
    (algorithms.FedLF, "history_device", "cpu", {"history_window": "none"}),
    (algorithms.TERM, "ema_rate", 0.1, {}),
    (algorithms.FCFL, "notion", "eo", {"budget": None}),
    (algorithms.FCFL, "sharpness", 5.0, {"budget": None}),
    (algorithms.FCFL, "num_groups", 3, {"budget": None}),
    (algorithms.FCFL, "tol", 0.1, {"stage1_rounds": 0}),
    (partial(attacks.RandomUpdates, (0,)), "std", 2.0, {"match_norm": True}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "value", "beside"), UNUSED, ids=lambda value: str(value)[:30])
def test_an_option_that_others_leave_without_meaning_is_refused(make, name, value, beside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # nothing may have begun
    with pytest.raises(ValueError, match=rf"^{name}\b.* must be left out .*, found .*: it would change nothing$"):
        make(**{name: value}, **beside)
    assert list(tmp_path.iterdir()) == []
    if make is not compare:
        make(**beside)
