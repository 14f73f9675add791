# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from client_rounds import WIDTH, Net, Rounds, assign, by_rule, client_data, descend, flat, lost, partial
from method_fits import fit_method, trained
from resuming import differences
from support import (
    CLASSES,
    Blobs,
    Classifier,
    federated_blobs,
    fit,
    fresh,
    on_path,
    quiet_trainer,
    weights,
)
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl
from fl_lightning.algorithms import Ditto, FedAvg, FedLF

LAM, LR = 0.6, 0.2


def federate(data, personal_lr):
    """Algorithm 1 with deep copies: FedAvg on one branch, ``v_i`` on the other, on the same batches."""
    module, own = Net(), {}
    for t in range(6):
        w = flat(module)
        models, new = {}, {}
        for i in partial(t):
            local, v = copy.deepcopy(module), copy.deepcopy(own.get(i, module))
            for batch in data[i] * 2:
                objective = v.loss(batch) + LAM / 2 * sum(
                    (p - q.detach()).square().sum() for p, q in zip(v.parameters(), module.parameters(), strict=True)
                )
                descend(v, objective, personal_lr)
                descend(local, local.loss(batch), LR)
            models[i], new[i] = flat(local), v
        arrived = [i for i in partial(t) if i not in lost(t)]
        own |= {i: new[i] for i in arrived}
        assign(module, w + sum(models[i] - w for i in arrived) / len(arrived))
    return flat(module), own


@pytest.mark.parametrize(("in_files", "personal_lr"), [(False, None), (True, 0.05)])
def test_equals_algorithm_1(in_files, personal_lr, tmp_path):
    """Late joiners, a drop-out, BatchNorm, two local epochs, a reload in the middle."""
    make = lambda: Ditto(LAM, personal_lr, directory=str(tmp_path) if in_files else None)  # noqa: E731
    data = client_data(seed=7)
    _, run = by_rule(make, data, lr=LR, epochs=2)
    expected, own = federate(data, personal_lr or LR)
    torch.testing.assert_close(run.params, expected, rtol=0, atol=1e-9)
    assert sorted(own) == [0, 1, 2, 3]
    for i, net in own.items():
        model = run.client.personal_model(i)
        torch.testing.assert_close(model.params, flat(net), rtol=0, atol=1e-9)
        mean = model.buffers[: 6 * 8].clone().view(torch.float64)
        torch.testing.assert_close(mean, net.encoder[1].running_mean, rtol=0, atol=1e-9)
        assert (model.params - run.params).norm() > 1e-2


def test_every_step_draws_for_itself_and_alike_whoever_trained_before():
    drawn = []

    class Drawn(Net):
        def loss(self, batch):
            drawn.append(float(torch.rand(())))
            return super().loss(batch)

    method, seen = Ditto(), []
    run = Rounds(method, method.client_rule(), client_data(clients=2), module=Drawn())
    for client in (0, 1):
        torch.manual_seed(3)
        run.train(client)
        seen.append(drawn[::2])  # before each step of the global branch
        drawn.clear()
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == len(seen[0]) == 3


@pytest.mark.parametrize("in_files", [False, True])
def test_memory_plan_counts_the_models_of_a_round(in_files, tmp_path):
    rule, module = Ditto(directory=str(tmp_path) if in_files else None).client_rule(), Net()
    layout = fl.ParamLayout.from_module(module)
    rule.check_module(module, layout)
    federation = fl.algorithms.Federation(10, layout, torch.device("cpu"), torch.float64, 3, buffers=2 * 8 * WIDTH + 8)
    model = 8 * layout.numel + 2 * 8 * WIDTH + 8  # with the mean, variance and count of BatchNorm
    assert rule.memory(federation, 3) == {"PersonalModels.own": (3 if in_files else 13) * model}


# ---- in a trainer


class Drawing(Classifier):
    """Uses random numbers, in training also a metric and BatchNorm."""

    def __init__(self, **options):
        super().__init__(dropout=0.3, norm=True, log=True, **options)
        self.seen = MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.update(self(x), y)
        self.log("train_seen", self.seen)
        return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        super().validation_step((x + 0.1 * torch.randn_like(x), y), batch_idx)


@pytest.mark.fit
def test_the_global_model_is_fedavg_bit_for_bit_and_both_paths_agree_on_personal_ones():
    found = []
    for options in (on_path(True), on_path(False)):
        module, strategy = fit_method(Ditto(), module=fresh(Drawing, momentum=0.5), **options)
        plain, _ = fit_method(FedAvg("uniform"), module=fresh(Drawing, momentum=0.5), **options)
        assert torch.equal(weights(module), weights(plain))
        ours, theirs = module.trainer.callback_metrics, plain.trainer.callback_metrics
        same = [name for name in theirs if name != "fed/seconds"]
        assert all(torch.equal(ours[name], theirs[name]) for name in same)
        assert {name for name in ours if name not in theirs} == {n for n in ours if n.startswith("fed/personal/")}
        found.append(strategy.client_rule.own)
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 3
    for client, model in found[0].items():
        torch.testing.assert_close(model.params, found[1][client].params, rtol=0, atol=1e-6)


def evaluated(trainer, module, path):
    """Per-client values of a validation that loads a file, those of personal models alone."""
    trainer.validate(module, federated_blobs(), ckpt_path=path, verbose=False)
    values = trainer.strategy.last_evaluation.values
    return {name: value for name, value in values.items() if name.startswith("personal/")}


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.fit
def test_a_checkpoint_is_evaluated_with_its_own_personal_models(in_files, tmp_path):
    make = lambda: Ditto(directory=str(tmp_path / "own") if in_files else None)  # noqa: E731
    first, strategy = fit_method(make(), 1)
    expected = {n: v for n, v in strategy.last_evaluation.values.items() if n.startswith("personal/")}
    assert set(expected) == {"personal/val_loss", "personal/val_acc"}
    first.trainer.save_checkpoint(one := tmp_path / "one.ckpt")
    module, strategy = fit_method(make(), 3, ckpt_path=one)
    module.trainer.save_checkpoint(three := tmp_path / "three.ckpt")
    before = copy.deepcopy(strategy._fits.states())
    later = evaluated(module.trainer, module, None)
    torch.testing.assert_close(evaluated(module.trainer, module, one), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(evaluated(module.trainer, module, three), later, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(later["personal/val_loss"], expected["personal/val_loss"])
    assert not differences(dict(strategy._fits.states()), before)
    # The trainer's next fit goes on as if it had not evaluated.
    module.trainer.fit_loop.max_epochs = 4
    module.trainer.fit(module, federated_blobs(), ckpt_path=three)
    assert torch.equal(weights(module), trained(make(), rounds=4, ckpt_path=three, limit_val_batches=1.0))


@pytest.mark.fit
def test_a_checkpoint_without_the_personal_models_is_evaluated_without(tmp_path):
    module, _ = fit_method(Ditto(directory=str(tmp_path / "own")), 1)
    module.trainer.save_checkpoint(files := tmp_path / "files.ckpt")
    module, _ = fit_method(FedAvg(), 1)
    module.trainer.save_checkpoint(plain := tmp_path / "plain.ckpt")
    module, _ = fit_method(FedLF(layers="tensor"), 1, client=Ditto())
    module.trainer.save_checkpoint(tensors := tmp_path / "tensors.ckpt")
    reasons = (
        (files, "the checkpoint has the personal models in files: give the method the same directory"),
        (plain, "it holds another method, and this is PersonalModels"),
        (tensors, "its layout is another one, layer "),
    )
    strategy = fit_method(Ditto(), 1)[1]  # with models of its own
    trainer = quiet_trainer(strategy)
    for path, reason in reasons:
        with pytest.warns(UserWarning, match=f"personal models are not evaluated with the .*ckpt: {reason}"):
            assert not evaluated(trainer, fresh(norm=True), path)
    for file in (tmp_path / "own").rglob("round-000000.pt"):
        file.unlink()
    trainer = quiet_trainer(fl.FederatedStrategy(Ditto(directory=str(tmp_path / "own"))))
    with pytest.warns(UserWarning, match="are not evaluated with the .* is gone, the model of client"):
        assert not evaluated(trainer, fresh(norm=True), files)


@pytest.mark.fit
def test_files_of_the_last_checkpoints_stay(tmp_path):
    make = lambda: Ditto(directory=str(tmp_path / "own"))  # noqa: E731
    module, _ = fit_method(make(), 1)
    module.trainer.save_checkpoint(path := tmp_path / "one.ckpt")
    with pytest.raises(
        ValueError, match="checkpoint has the personal models in files: give the method the same directory"
    ):
        fit_method(Ditto(), 2, ckpt_path=path)
    for rounds in (3, 3):  # a fit that is killed in its third round, and starts anew
        fit_method(make(), rounds, module=fresh(Classifier, norm=True, momentum=0.5), ckpt_path=path)
    for file in (tmp_path / "own").rglob("round-000000.pt"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"is gone, the model of client \d after round 0 .*the two newest"):
        fit_method(make(), 2, ckpt_path=path)


@pytest.mark.fit
def test_a_personal_model_that_diverges_is_named():
    with pytest.raises(fl.ClientError, match="personal model of client 0 diverged: lower personal_lr or lam"):
        fit_method(Ditto(lam=1e30, personal_lr=1e30), 1, clients_per_round=6, local_epochs=2)


@pytest.mark.fit
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_personal_models_take_as_many_steps_as_the_global_one(accumulate):
    """One client without a pull: its own model is the global one, accumulated gradients or not."""

    class Places(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 7 else None  # within a group of three or four

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + batch_idx % 2)

    data = fl.FederatedDataModule(Blobs(train=50), fl.data.IID(1))
    module, strategy, _ = fit(
        fresh(Places), 2, data=data, algorithm=Ditto(lam=0.0), clients_per_round=1, local_epochs=2,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    own = strategy.client_rule.personal_model(0)
    torch.testing.assert_close(own.params.double(), weights(module), rtol=0, atol=1e-6)
