# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a fit may go on from: those of the same fit, and of which others with a warning."""

import re
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resuming import ALGORITHMS, Project, assert_equal
from support import Blobs, blobs, federated_blobs, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader, random_split

import fl_lightning as fl
from fl_lightning.lightning.fit_description import remembers


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file of FedAvg after one round."""
    folder = tmp_path_factory.mktemp("written")
    Project(callbacks=lambda f: [ModelCheckpoint(f, filename="one")]).fit(folder, rounds=1)
    return folder / "one.ckpt"


def resume(file, algorithm="FedAvg", module=None, clients=6, **options):
    strategy = fl.FederatedStrategy(ALGORITHMS[algorithm](), **{"clients_per_round": 3, "seed": 5, **options})
    trainer = quiet_trainer(strategy, 2)
    trainer.fit(fresh() if module is None else module, federated_blobs(clients), ckpt_path=file)
    return trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "FedLF"}, "by another fit, method: FedAvg became FedLF: use"),
        ({"algorithm": "FedProx"}, "method: FedAvg became FedProx: use"),
        (
            {"client": fl.algorithms.SCAFFOLD(weighting="samples")},
            "method: FedAvg became FedAvg with client=SCAFFOLD: use",
        ),
        ({"server_optimizer": partial(torch.optim.SGD, lr=1.0)}, "server_optimizer: none became SGD"),
    ],
)  # fmt: skip
def test_other_fits_are_refused(written, options, message):
    with pytest.raises(ValueError, match=message):
        resume(written, **options)


def test_frozen_parameters_are_refused(written):
    module = fresh()
    module.net[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"parameter groups|layout: parameter 0: net\.0\.weight"):
        resume(written, module=module)


BLOCKS = [["net.0.weight", "net.0.bias"], ["net.2.weight", "net.2.bias"]]


@pytest.mark.parametrize(
    ("layers", "difference"),
    [
        (BLOCKS[::-1], r"parameter 0: net\.0\.weight \[8, 12\] became net\.2\.weight \[4, 8\]"),
        ("tensor", r"layer 0: net\.0 \[0:104\] became net\.0\.weight \[0:96\]"),
        ("model", r"layer 0: net\.0 \[0:104\] became model \[0:140\]"),
    ],
)
def test_another_layout_is_refused(tmp_path, layers, difference):
    def make(layers):
        return lambda: fl.algorithms.FedLF(layers=layers, history_window="none")

    client = {"client": fl.algorithms.SCAFFOLD()}
    Project(make("module"), strategy=client).fit(tmp_path, rounds=1).save(file := tmp_path / "one.ckpt")
    with pytest.raises(
        ValueError, match=rf"the checkpoint .*one\.ckpt was written by another fit, layout: {difference}: .*load_from"
    ):
        Project(make(layers), strategy=client).fit(tmp_path, rounds=2, ckpt_path=file)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"seed": 6}, "seed: 5 became 6"),
        ({"clients_per_round": 4}, "clients_per_round: 3 became 4"),
        ({"client_optimizer_state": "keep"}, "client_optimizer_state: reset became keep"),
        ({"buffers": "global"}, "buffers: mean became global"),
        ({"min_clients": 2}, "min_clients: 1 became 2"),
        ({"sampler": fl.data.AvailabilitySampler(1.0)}, r"sampler: UniformSampler\(\) became AvailabilitySampler\("),
        ({"attack": fl.attacks.ZeroUpdates((1,))}, r"attack: None became ZeroUpdates\(clients=\(1,\)\)"),
    ],
)
def test_other_settings_are_warned_of(written, options, change):
    with pytest.warns(UserWarning, match=f"other settings than the checkpoint .*one.ckpt was written with: {change}"):
        trainer = resume(written, **options)
    assert trainer.current_epoch == 2


def test_the_same_fit_is_not_warned_of(written, recwarn):
    resume(written)
    assert not [w for w in recwarn.list if "settings" in str(w.message)]


class Divided(Blobs):
    """Draws its training data from a larger set, as projects do with random_split."""

    def __init__(self, split: int, **options):
        super().__init__(**options)
        self.split = split

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.split)
        mine, _ = random_split(blobs(480), [240, 240], generator)
        return DataLoader(mine, batch_size=10, shuffle=True)


def of_iid(split):
    return fl.FederatedDataModule(Divided(split), fl.data.IID(6), seed=0)


def of_dirichlet(alpha=1.0, seed=0, **options):
    return fl.FederatedDataModule(Blobs(**options), fl.data.Dirichlet(6, alpha), seed=seed)


OTHER_DATA = {
    "alpha": (of_dirichlet(), of_dirichlet(10.0), "other sizes of the clients, other samples of the clients"),
    "seed": (of_dirichlet(), of_dirichlet(seed=1), "other sizes of the clients, other samples of the clients"),
    "half": (
        of_dirichlet(),
        of_dirichlet(train=120, batch_size=5),  # as many steps in a round
        "samples: 240 became 120, other sizes of the clients, .*, other labels",
    ),
    "split": (of_iid(0), of_iid(1), "other subset of the dataset, other labels"),
}
RULES_WITH_MEMORY = {
    "AFL": fl.algorithms.AFL,
    "FedLF": fl.algorithms.FedLF,
    "SCAFFOLD": fl.algorithms.SCAFFOLD,
    "MOON": fl.algorithms.MOON,
}


def go_on(folder, rule, data, other_rule=None, other_data=None, other_options=None, **options):
    """One round, saved, and another one with other things; returns the weights."""
    options = {"clients_per_round": 3, "seed": 5, **options}
    trainer = quiet_trainer(fl.FederatedStrategy(rule(), **options), 1)
    trainer.fit(fresh(momentum=0.9), data)
    trainer.save_checkpoint(folder / "one.ckpt")
    trainer = quiet_trainer(fl.FederatedStrategy((other_rule or rule)(), **{**options, **(other_options or {})}), 2)
    module = fresh(momentum=0.9)
    trainer.fit(module, data if other_data is None else other_data, ckpt_path=folder / "one.ckpt")
    return weights(module)


@pytest.mark.parametrize("kind", OTHER_DATA)
def test_other_data_are_warned_of_where_nothing_is_remembered(tmp_path, kind):
    data, other, words = OTHER_DATA[kind]
    with pytest.warns(
        UserWarning, match=f"goes on with other settings than .*one.ckpt was written with: data: {words}$"
    ):
        go_on(tmp_path, fl.algorithms.FedAvg, data, other_data=other)


@pytest.mark.parametrize(("kind", "name"), [*zip(OTHER_DATA, RULES_WITH_MEMORY, strict=True)])
def test_other_data_are_warned_of_where_something_is_remembered(tmp_path, kind, name):
    data, other, words = OTHER_DATA[kind]
    memory = "its client half" if name in ("SCAFFOLD", "MOON") else "the method"
    with pytest.warns(UserWarning, match=rf"data: {words}\. What {memory} remembers of clients stays theirs$"):
        go_on(tmp_path, RULES_WITH_MEMORY[name], data, other_data=other)


@pytest.mark.parametrize(
    ("value", "counts"),
    [(torch.zeros(2), True), (torch.zeros(0), False), ([{"row": torch.zeros(1)}], True), ([{}, ()], False), (0, False)],
)
def test_zeros_are_remembered_and_what_is_empty_is_not(value, counts):
    states = {"algorithm": {"rows": value}, "client_rule": {}, "client_optimizers": {}}
    assert remembers(states) == (["the method"] if counts else [])


def test_strict_resume_false_goes_on_with_a_warning(tmp_path):
    rule, other, words = OTHER_ARGUMENTS["FedLF"]
    with pytest.warns(UserWarning, match=f"goes on with other settings .*method: {words}$"):
        found = go_on(tmp_path, rule, of_dirichlet(), other_rule=other, strict_resume=False)
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", ["alpha", "split"])
def test_the_same_data_made_anew_are_the_same(tmp_path, recwarn, kind):
    make = {"alpha": of_dirichlet, "split": partial(of_iid, 3)}[kind]
    go_on(tmp_path, fl.algorithms.FedLF, make(), other_data=make())
    assert not [w for w in recwarn.list if "settings" in str(w.message)]


OTHER_ARGUMENTS = {
    "FedLF": (fl.algorithms.FedLF, partial(fl.algorithms.FedLF, max_history=3),
              r"FedLF\(max_history=None\) became FedLF\(max_history=3\)"),
    "AFL": (fl.algorithms.AFL, partial(fl.algorithms.AFL, 0.5), r"AFL\(lambda_lr=0.01\) became AFL\(lambda_lr=0.5\)"),
    "FedDyn": (fl.algorithms.FedDyn, partial(fl.algorithms.FedDyn, 0.5),
               r"FedDyn\(alpha=0.01\) became FedDyn\(alpha=0.5\)"),
    "FA": (ALGORITHMS["FA"], partial(fl.algorithms.FA, 3 * torch.eye(12), 4.0, tau=1.0),
           r"FA\(bases=.*, tau=0.05\) became FA\(bases=.*, tau=1.0\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_other_arguments_are_refused_where_something_is_remembered(tmp_path, name):
    rule, other, words = OTHER_ARGUMENTS[name]
    with pytest.raises(ValueError, match=f"one.ckpt was written by another fit, method: {words}: the memory of"):
        go_on(tmp_path, rule, of_dirichlet(), other_rule=other)


def test_other_arguments_are_warned_of_where_nothing_is_remembered(tmp_path):
    with pytest.warns(UserWarning, match=r"method: FedProx\(mu=0.01\) became FedProx\(mu=0.5\)$"):
        go_on(tmp_path, fl.algorithms.FedProx, of_dirichlet(), partial(fl.algorithms.FedProx, 0.5))
    with pytest.warns(UserWarning, match=r"method: FedProx\(mu=0.1\) became FedProx\(mu=0.2\)$"):
        go_on(
            tmp_path, fl.algorithms.FedAvg, of_dirichlet(), other_options={"client": fl.algorithms.FedProx(0.2)},
            client=fl.algorithms.FedProx(0.1),
        )  # fmt: skip


def test_where_things_are_kept_may_change(tmp_path, recwarn):
    rule = fl.algorithms.FedLF
    found = go_on(tmp_path, rule, of_dirichlet(), partial(rule, history_device="cpu"))
    assert torch.equal(found, go_on(tmp_path, rule, of_dirichlet()))
    assert not [w for w in recwarn.list if "settings" in str(w.message)]


def test_data_that_are_loaded_anew_may_change(tmp_path, recwarn):
    def fit(rounds, data, path=None):
        strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3, seed=5)
        trainer = quiet_trainer(strategy, rounds, reload_dataloaders_every_n_epochs=1)
        trainer.fit(fresh(), data, ckpt_path=path)
        return trainer

    fit(1, of_iid(0)).save_checkpoint(tmp_path / "one.ckpt")
    assert fit(2, of_iid(1), tmp_path / "one.ckpt").current_epoch == 2
    assert not [w for w in recwarn.list if "settings" in str(w.message)]


def test_versions_are_told(written, tmp_path):
    content = torch.load(written, weights_only=True)
    fit = content["callbacks"]["fl_lightning"]["fit"]
    kernels = fl.ops.backend()["puc_track"].implementation
    installed = {"fl_lightning": fl.__version__, "torch": torch.__version__, "lightning": L.__version__}
    assert fit["versions"] == {**installed, "kernels": kernels}
    fit["versions"]["torch"] = "1.13"
    torch.save(content, tmp_path / "old.ckpt")
    with pytest.warns(
        UserWarning, match=f"was written with: versions: torch: 1.13 became {re.escape(torch.__version__)}$"
    ):
        resume(tmp_path / "old.ckpt")


def test_files_of_earlier_versions_with_fewer_entries_load(written, tmp_path, recwarn):
    content = torch.load(written, weights_only=True)
    content["callbacks"]["fl_lightning"]["fit"] = {
        "method": "FedAvg with ClientRule", "clients": 6, "trainable parameters": 140, "server_optimizer": "none",
        "clients_per_round": 3, "local_epochs": 1, "local_steps": None, "client_optimizer_state": "reset",
        "buffers": "mean", "full_gradients": False, "seed": 5,
    }  # fmt: skip
    torch.save(content, tmp_path / "early.ckpt")
    assert resume(tmp_path / "early.ckpt").current_epoch == 2
    assert not [w for w in recwarn.list if "settings" in str(w.message)]
    with pytest.warns(UserWarning, match="was written with: seed: 5 became 6$"):
        resume(tmp_path / "early.ckpt", seed=6)
    with pytest.raises(ValueError, match="method: FedAvg with ClientRule became FedLF: use"):
        resume(tmp_path / "early.ckpt", algorithm="FedLF")


def test_a_strategy_describes_its_fit(written):
    strategy = fl.FederatedStrategy(fl.algorithms.FedProx(0.3), seed=7)
    assert strategy.fit_description is None
    quiet_trainer(strategy, 1).fit(fresh(), federated_blobs())
    found = strategy.fit_description
    assert found.method == "FedProx with ProximalTerm"
    assert found.arguments["FedProx"] == {"mu": 0.3, "weighting": "samples"}
    assert found.settings["seed"] == 7
    saved = torch.load(written, weights_only=True)["callbacks"]["fl_lightning"]["fit"]
    words = fl.FitDescription.from_state_dict(saved).difference(found)
    assert words.startswith("method: FedAvg became FedProx; clients_per_round: 3 became 6")


def test_kept_optimizers_are_forgotten_where_they_are_no_longer_wanted(tmp_path):
    project = Project(options={"momentum": 0.9}, strategy={"client_optimizer_state": "keep"}, rounds=1)
    project.fit(tmp_path).save(tmp_path / "kept.ckpt")
    with pytest.warns(UserWarning, match="client_optimizer_state: keep became reset"):
        trainer = resume(tmp_path / "kept.ckpt", module=fresh(momentum=0.9))
    assert trainer.strategy._fits.states()["client_optimizers"] == {}


def test_files_of_other_trainers_are_refused(tmp_path, written):
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    module = fresh()
    trainer.fit(module, Blobs())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    for name in ("plain", "weights"):
        with pytest.raises(ValueError, match=f"ckpt_path must be a checkpoint of a federated fit, found .*{name}.ckpt"):
            resume(tmp_path / f"{name}.ckpt")
    # To evaluate its weights any file will do.
    quiet_trainer(fl.FederatedStrategy()).validate(fresh(), federated_blobs(), ckpt_path=tmp_path / "plain.ckpt")


def test_files_of_other_versions_are_refused(tmp_path, written):
    content = torch.load(written, weights_only=True)
    content["callbacks"]["fl_lightning"]["version"] = 99
    torch.save(content, tmp_path / "future.ckpt")
    with pytest.raises(ValueError, match="federated state has version 99, and this fl_lightning reads version 1"):
        resume(tmp_path / "future.ckpt")


def test_a_file_saved_without_a_fit_starts_afresh(tmp_path):
    trainer = quiet_trainer(fl.FederatedStrategy(clients_per_round=3, seed=5))
    trainer.validate(fresh(), federated_blobs(), verbose=False)
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    project = Project(rounds=2)
    resumed, whole = project.fit(tmp_path, ckpt_path=tmp_path / "before.ckpt"), project.fit(tmp_path)
    assert_equal(resumed, whole, 0)
