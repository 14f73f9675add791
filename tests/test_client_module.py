# SPDX-License-Identifier: Apache-2.0
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.client_module import ClientModule
from fl_lightning.lightning.names import ModelCheckpoint, Trainer


def digits_like(samples=24, features=5, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    return TensorDataset(inputs, torch.randint(classes, (samples,), generator=generator))


def loader(data, batch_size=10):
    return DataLoader(data, batch_size=batch_size)


def quiet_trainer(**arguments):
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{**defaults, "enable_checkpointing": False, **arguments})


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def test_the_default_is_plain_sgd_on_cross_entropy(net):
    data = digits_like(samples=6)
    inputs, targets = data.tensors
    reference = nn.Linear(5, 3)
    reference.load_state_dict(net.state_dict())
    nn.functional.cross_entropy(reference(inputs), targets).backward()
    quiet_trainer(max_epochs=1).fit(ClientModule(net), loader(data))
    for trained, start in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, start - 0.1 * start.grad)


def test_loss_and_accuracy_equal_hand_made_ones_on_uneven_batches(net):
    data = digits_like()  # batches of 10, 10 and 4: a mean of batch means would differ
    inputs, targets = data.tensors
    with torch.no_grad():
        scores = net(inputs)
    loss = nn.functional.cross_entropy(scores, targets).item()
    accuracy = (scores.argmax(1) == targets).double().mean().item()
    module = ClientModule(net, num_classes=3)
    for stage, run in (("val", Trainer.validate), ("test", Trainer.test)):
        (values,) = run(quiet_trainer(), module, loader(data), verbose=False)
        assert values == {
            f"{stage}_loss": pytest.approx(loss, rel=1e-6),
            f"{stage}_acc": pytest.approx(accuracy, rel=1e-6),
        }


def test_regression_with_another_metric_logs_no_accuracy():
    data = TensorDataset(torch.ones(8, 5), torch.arange(8.0).unsqueeze(1))
    net = nn.Linear(5, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    module = ClientModule(net, loss=nn.MSELoss(), metrics={"mae": MeanAbsoluteError()})
    (values,) = quiet_trainer().test(module, loader(data, 3), verbose=False)
    assert values == {"test_loss": pytest.approx(17.5), "test_mae": pytest.approx(3.5)}


def test_stages_do_not_share_metrics(net):
    given = MulticlassAccuracy(3)
    module = ClientModule(net, metrics={"macro": given})
    metrics = [module.val_metrics["macro"], module.test_metrics["macro"], given]
    assert len({id(metric) for metric in metrics}) == 3


def test_no_log_call_in_training(net, monkeypatch):
    calls = []
    monkeypatch.setattr(ClientModule, "log", lambda self, name, *args, **kwargs: calls.append(name))
    quiet_trainer(max_epochs=1).fit(ClientModule(net), loader(digits_like()))
    assert calls == []


def test_the_scheduler_steps_once_per_epoch(net):
    module = ClientModule(net, lr_scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5))
    trainer = quiet_trainer(max_epochs=3)
    trainer.fit(module, loader(digits_like()))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_the_optimizer_gets_only_what_is_trainable(net):
    net.bias.requires_grad_(False)
    optimizer = ClientModule(net).configure_optimizers()
    assert [p is net.weight for group in optimizer.param_groups for p in group["params"]] == [True]


@pytest.mark.parametrize(
    "wrap", [lambda x, y: (x, y), lambda x, y: [x], lambda x, y: x], ids=["pair", "single", "bare"]
)
def test_predict_takes_batches_with_and_without_targets(net, wrap):
    inputs, targets = digits_like().tensors
    torch.testing.assert_close(ClientModule(net).predict_step(wrap(inputs, targets), 0), net(inputs))


def test_a_dict_of_inputs_reaches_the_net():
    class Adder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, inputs):
            return self.layer(inputs["a"] + inputs["b"])

    inputs = {"a": torch.ones(3, 2), "b": torch.ones(3, 2)}
    loss = ClientModule(Adder()).training_step((inputs, torch.zeros(3, dtype=torch.long)), 0)
    assert math.isfinite(loss.item())


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"image": 1, "label": 2}, r"a mapping with the keys \['image', 'label'\]"),
        (torch.zeros(2, 5), "Tensor"),
        ((torch.zeros(2, 5),), "a tuple of Tensor"),
        ([torch.zeros(2, 5), torch.zeros(2), torch.zeros(2)], "a list of Tensor, Tensor, Tensor"),
        ((torch.zeros(2, 5), [0, 1]), "a tuple of Tensor, list"),
        ((), "a tuple of nothing"),
    ],
)
def test_other_batches_are_refused_with_what_was_found(net, batch, found):
    module = ClientModule(net, num_classes=3)
    for step in (module.training_step, module.validation_step, module.test_step):
        with pytest.raises(TypeError, match=rf"batch must be a pair \(inputs, targets\).* found {found}:"):
            step(batch, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes of ClientModule must be None or an integer from 2 on, found 1"),
        ({"num_classes": 3, "metrics": {"acc": MulticlassAccuracy(3)}}, "metrics must not use the name 'acc'"),
        ({"metrics": {"loss": MeanAbsoluteError()}}, "metrics must not use the name 'loss'"),
    ],
)
def test_bad_arguments_are_named(net, arguments, message):
    with pytest.raises(ValueError, match=message):
        ClientModule(net, **arguments)


def test_checkpoints_load_with_weights_only_and_with_load_from_checkpoint(net, tmp_path):
    module = ClientModule(
        net,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=0.01),
        num_classes=3,
    )
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="last")
    quiet_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[checkpoint]).fit(module, loader(digits_like()))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"num_classes": 3}
    again = ClientModule.load_from_checkpoint(tmp_path / "last.ckpt", net=nn.Linear(5, 3), loss=nn.CrossEntropyLoss())
    torch.testing.assert_close(again.net.weight, net.weight)
    assert again.num_classes == 3


# jsonargparse 4.43, which the extra allows, has instantiate_classes alone; later ones call it outdated.
older_name = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@older_name
def test_yaml_names_every_argument():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ClientModule, "model")
    config = parser.parse_string("""
        model:
          class_path: fl_lightning.ClientModule
          init_args:
            net: {class_path: torch.nn.Linear, init_args: {in_features: 5, out_features: 3}}
            loss: torch.nn.functional.mse_loss
            optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.3}}
            lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 2}}
            metrics: {mae: {class_path: torchmetrics.MeanAbsoluteError}}
    """)
    module = parser.instantiate_classes(parser.parse_string(parser.dump(config))).model
    made = module.configure_optimizers()
    assert isinstance(module.net, nn.Linear)
    assert module.loss is nn.functional.mse_loss
    assert made["optimizer"].param_groups[0]["lr"] == 0.3
    assert isinstance(made["lr_scheduler"], StepLR)
    assert isinstance(module.val_metrics["mae"], MeanAbsoluteError)


@older_name
def test_the_default_optimizer_can_be_adjusted_in_yaml():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(ClientModule, "model")
    net = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 5, "out_features": 3}}
    config = parser.parse_args(
        [f"--model={ClientModule.__module__}.ClientModule", f"--model.net={net}", "--model.optimizer.lr=0.7"]
    )
    module = parser.instantiate_classes(config).model
    assert module.loss is nn.functional.cross_entropy
    assert module.configure_optimizers().param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("function", ["fit", "validate"])
def test_other_classes_than_the_network_has_scores_are_named(function):
    module = ClientModule(nn.Linear(5, 2), num_classes=5)
    with pytest.raises(ValueError, match=r"^num_classes of ClientModule must be .* returns \[10, 2\], found 5$"):
        getattr(quiet_trainer(max_epochs=1), function)(module, loader(digits_like(classes=2)))
