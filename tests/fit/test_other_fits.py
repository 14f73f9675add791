# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a fit may go on from: those of the same fit, and of which others with a warning."""

import re
from functools import cache, partial

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS, Project, assert_equal
from support import Blobs, blobs, federated_blobs, fit, fresh, quiet_trainer, train
from torch.utils.data import DataLoader, random_split

import fl_lightning as fl
from fl_lightning.lightning.fit_description import remembers


class Divided(Blobs):
    """Draws its training data from a larger set, as projects do with random_split."""

    def __init__(self, split):
        super().__init__()
        self.split = split

    def train_dataloader(self):
        mine, _ = random_split(blobs(480), [240, 240], torch.Generator().manual_seed(self.split))
        return DataLoader(mine, batch_size=10, shuffle=True)


def of_iid(split):
    return partial(fl.FederatedDataModule, Divided(split), fl.data.IID(6), seed=0)


def of_dirichlet(alpha=1.0, seed=0, **options):
    return partial(fl.FederatedDataModule, Blobs(**options), fl.data.Dirichlet(6, alpha), seed=seed)


METHODS = {name: {"algorithm": method} for name, method in ALGORITHMS.items()}
FIRST = {
    **METHODS,
    "IID": {"data": of_iid(0)},
    "FedLF, IID": {"algorithm": fl.algorithms.FedLF, "data": of_iid(0)},
    "MOON, IID": {"algorithm": fl.algorithms.MOON, "data": of_iid(0)},
    "client": {"client": partial(fl.algorithms.FedProx, 0.1)},
    "layers": {"algorithm": partial(fl.algorithms.FedLF, history_window="none"), "client": fl.algorithms.SCAFFOLD},
    "loaded anew": {"algorithm": fl.algorithms.FedLF, "data": of_iid(0), "reload_dataloaders_every_n_epochs": 1},
    "kept": {"client_optimizer_state": "keep"},
}
"""Options of a fit; methods and data are made anew."""


def go_on(name, rounds=2, path=None, module=None, **more):
    options = {"algorithm": fl.algorithms.FedAvg, "data": of_dirichlet(), **FIRST[name], **more}
    made = {key: options.pop(key)() for key in ("algorithm", "client", "data") if key in options}
    module = fresh(momentum=0.9) if module is None else module
    return train(module, rounds, ckpt_path=path, **made, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Gives the file of a fit after one round."""
    folder = tmp_path_factory.mktemp("written")

    @cache
    def write(name):
        go_on(name, 1).trainer.save_checkpoint(folder / f"{name}.ckpt")
        return folder / f"{name}.ckpt"

    return write


def layered(layers):
    return {"algorithm": partial(fl.algorithms.FedLF, layers=layers, history_window="none")}


LF = fl.algorithms.FedLF
REFUSED = [
    ("FedAvg", {"algorithm": LF}, "by another fit, method: FedAvg became FedLF: use"),
    ("FedAvg", {"algorithm": fl.algorithms.FedProx}, "method: FedAvg became FedProx: use"),
    (
        "FedAvg", {"client": partial(fl.algorithms.SCAFFOLD, weighting="samples")},
        "method: FedAvg became FedAvg with client=SCAFFOLD: use",
    ),
    ("FedAvg", {"server_optimizer": partial(torch.optim.SGD, lr=1.0)}, "server_optimizer: none became SGD"),
    (
        "layers", layered([["net.2.weight", "net.2.bias"], ["net.0.weight", "net.0.bias"]]),
        r"layout: parameter 0: net\.0\.weight \[8, 12\] became net\.2\.weight \[4, 8\]: .*load_from",
    ),
    ("layers", layered("tensor"), r"layout: layer 0: net\.0 \[0:104\] became net\.0\.weight \[0:96\]"),
    ("layers", layered("model"), r"layout: layer 0: net\.0 \[0:104\] became model \[0:140\]"),
    (
        "FedLF", {"algorithm": partial(LF, max_history=3)},
        r"by another fit, method: FedLF\(max_history=None\) became FedLF\(max_history=3\): the memory of",
    ),
    ("AFL", {"algorithm": partial(fl.algorithms.AFL, 0.5)}, r"AFL\(lambda_lr=0.01\) became AFL\(lambda_lr=0.5\): the"),
    ("FedDyn", {"algorithm": partial(fl.algorithms.FedDyn, 0.5)}, r"FedDyn\(alpha=0.01\) became FedDyn\(alpha=0.5\)"),
    (
        "FA", {"algorithm": partial(fl.algorithms.FA, 3 * torch.eye(12), 4.0, tau=1.0)},
        r"FA\(bases=.*, tau=0.05\) became FA\(bases=.*, tau=1.0\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "words"), REFUSED)
def test_other_fits_are_refused(written, name, more, words):
    with pytest.raises(ValueError, match=f"the checkpoint .*{name}.ckpt was written .*{words}"):
        go_on(name, path=written(name), **more)


def test_frozen_parameters_are_refused(written):
    module = fresh()
    module.net[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"parameter groups|layout: parameter 0: net\.0\.weight"):
        go_on("FedAvg", path=written("FedAvg"), module=module)


SIZES = "other sizes of the clients, other samples of the clients"
HALF = "samples: 240 became 120, other sizes of the clients, .*, other labels"
HALVED = {"data": of_dirichlet(train=120, batch_size=5)}  # as many steps in a round
SPLIT = "other subset of the dataset, other labels"
THEIRS = " remembers of clients stays theirs"
WARNED = [
    ("FedAvg", {"seed": 6}, "seed: 5 became 6"),
    ("FedAvg", {"clients_per_round": 4}, "clients_per_round: 3 became 4"),
    ("FedAvg", {"client_optimizer_state": "keep"}, "client_optimizer_state: reset became keep"),
    ("FedAvg", {"buffers": "global"}, "buffers: mean became global"),
    ("FedAvg", {"min_clients": 2}, "min_clients: 1 became 2"),
    ("FedAvg", {"sampler": fl.data.AvailabilitySampler(1.0)}, r"sampler: UniformSampler\(\) became AvailabilitySamp.*"),
    ("FedAvg", {"attack": fl.attacks.ZeroUpdates((1,))}, r"attack: None became ZeroUpdates\(clients=\(1,\)\)"),
    ("FedAvg", {"data": of_dirichlet(10.0)}, f"data: {SIZES}"),
    ("FedAvg", {"data": of_dirichlet(seed=1)}, f"data: {SIZES}"),
    ("FedAvg", HALVED, f"data: {HALF}"),
    ("IID", {"data": of_iid(1)}, f"data: {SPLIT}"),
    ("AFL", {"data": of_dirichlet(10.0)}, rf"data: {SIZES}\. What the method{THEIRS}"),
    ("FedLF", {"data": of_dirichlet(seed=1)}, rf"data: {SIZES}\. What the method{THEIRS}"),
    ("SCAFFOLD", HALVED, rf"data: {HALF}\. What its client half{THEIRS}"),
    ("MOON, IID", {"data": of_iid(1)}, rf"data: {SPLIT}\. What its client half{THEIRS}"),
    ("FedProx", {"algorithm": partial(fl.algorithms.FedProx, 0.5)}, r"method: FedProx\(mu=0.1\) became .*\(mu=0.5\)"),
    ("client", {"client": partial(fl.algorithms.FedProx, 0.2)}, r"method: FedProx\(mu=0.1\) became FedProx\(mu=0.2\)"),
    (
        "FedLF", {"algorithm": partial(LF, max_history=3), "strict_resume": False},
        r".*method: FedLF\(max_history=None\) became FedLF\(max_history=3\).*",
    ),
    ("kept", {"client_optimizer_state": "reset"}, "client_optimizer_state: keep became reset"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "words"), WARNED)
def test_other_settings_are_warned_of(written, name, more, words):
    said = f"goes on with other settings than the checkpoint .*{name}.ckpt was written with: {words}$"
    with pytest.warns(UserWarning, match=said):
        done = go_on(name, path=written(name), **more)
    assert done.trainer.current_epoch == 2
    if name == "kept":
        assert done.strategy._fits.states()["client_optimizers"] == {}


SAME = [
    ("FedAvg", {}),
    ("FedLF", {"data": of_dirichlet()}),
    ("FedLF, IID", {"data": of_iid(0)}),
    ("FedLF", {"algorithm": partial(LF, history_device="cpu")}),  # where things are kept may change
    ("loaded anew", {"data": of_iid(1)}),
]


@pytest.mark.parametrize(("name", "more"), SAME)
def test_the_same_fit_is_not_warned_of(written, name, more):
    assert go_on(name, path=written(name), **more).trainer.current_epoch == 2  # a warning is an error


@pytest.mark.parametrize(
    ("value", "counts"),
    [(torch.zeros(2), True), (torch.zeros(0), False), ([{"row": torch.zeros(1)}], True), ([{}, ()], False), (0, False)],
)
def test_zeros_are_remembered_and_what_is_empty_is_not(value, counts):
    states = {"algorithm": {"rows": value}, "client_rule": {}, "client_optimizers": {}}
    assert remembers(states) == (["the method"] if counts else [])


# ---- what a file says


def changed(written, path, change):
    """The file of FedAvg with other entries."""
    content = torch.load(written("FedAvg"), weights_only=True)
    change(content["callbacks"]["fl_lightning"])
    torch.save(content, path)
    return path


def test_versions_are_told(written, tmp_path):
    found = {}

    def older(state):
        found.update(state["fit"]["versions"])
        state["fit"]["versions"]["torch"] = "1.13"

    path = changed(written, tmp_path / "old.ckpt", older)
    kernels = fl.ops.backend()["puc_track"].implementation
    installed = {"fl_lightning": fl.__version__, "torch": torch.__version__, "lightning": L.__version__}
    assert found == {**installed, "kernels": kernels}
    with pytest.warns(UserWarning, match=f"with: versions: torch: 1.13 became {re.escape(torch.__version__)}$"):
        go_on("FedAvg", path=path)


def test_files_of_earlier_versions_with_fewer_entries_load(written, tmp_path):
    early = {"method": "FedAvg with ClientRule", "clients": 6, "server_optimizer": "none", "seed": 5}
    path = changed(written, tmp_path / "early.ckpt", lambda state: state.update(fit=early))
    assert go_on("FedAvg", path=path).trainer.current_epoch == 2
    with pytest.warns(UserWarning, match="was written with: seed: 5 became 6$"):
        go_on("FedAvg", path=path, seed=6)
    with pytest.raises(ValueError, match="method: FedAvg with ClientRule became FedLF: use"):
        go_on("FedLF", path=path)


def test_files_of_later_versions_are_refused(written, tmp_path):
    path = changed(written, tmp_path / "future.ckpt", lambda state: state.update(version=99))
    with pytest.raises(ValueError, match="federated state has version 99, and this fl_lightning reads version 1"):
        go_on("FedAvg", path=path)


def test_a_strategy_describes_its_fit(written):
    strategy = fl.FederatedStrategy(fl.algorithms.FedProx(0.3), seed=7)
    assert strategy.fit_description is None
    quiet_trainer(strategy, 1).fit(fresh(), federated_blobs())
    found = strategy.fit_description
    assert found.method == "FedProx with ProximalTerm"
    assert found.arguments["FedProx"] == {"mu": 0.3, "weighting": "samples"}
    assert found.settings["seed"] == 7
    saved = torch.load(written("FedAvg"), weights_only=True)["callbacks"]["fl_lightning"]["fit"]
    words = fl.FitDescription.from_state_dict(saved).difference(found)
    assert words.startswith("method: FedAvg became FedProx; clients_per_round: 3 became 6")


@pytest.mark.parametrize("weights_only", [False, True])
def test_files_of_other_trainers_are_refused(tmp_path, weights_only):
    trainer, path = quiet_trainer("auto", 1), tmp_path / "plain.ckpt"
    trainer.fit(fresh(), Blobs())
    trainer.save_checkpoint(path, weights_only=weights_only)
    with pytest.raises(ValueError, match=f"ckpt_path must be a checkpoint of a federated fit, found {path}"):
        fit(ckpt_path=path)
    # To evaluate its weights any file will do.
    quiet_trainer(fl.FederatedStrategy()).validate(fresh(), federated_blobs(), ckpt_path=path)


def test_a_file_saved_without_a_fit_starts_afresh(tmp_path):
    trainer = quiet_trainer(fl.FederatedStrategy(clients_per_round=3, seed=5))
    trainer.validate(fresh(), federated_blobs(), verbose=False)
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    project = Project(rounds=2)
    resumed, whole = project.fit(tmp_path, ckpt_path=tmp_path / "before.ckpt"), project.fit(tmp_path)
    assert_equal(resumed, whole, 0)
