# SPDX-License-Identifier: Apache-2.0
"""FedBN, FedPer and FedRep against deep copies of whole models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import pairwise
from client_rounds import Net, Rounds, client_data, flat, lost, partial
from method_fits import fit_method
from support import Classifier, federated_blobs, fresh, quiet_trainer
from torch import nn

import fl_lightning as fl
from fl_lightning.algorithms import AFL, Ditto, FedBN, FedHEAL, FedLF, FedPer, FedRep
from fl_lightning.core.storage import rule_state

LR, EPOCHS = 0.2, 3

METHODS = {
    "FedBN": (lambda **o: FedBN(**o), lambda name: name.startswith("encoder.1.")),
    "FedPer": (lambda **o: FedPer(**o), lambda name: name.startswith("head.")),
    "FedPer-two": (lambda **o: FedPer(num_layers=2, **o), lambda name: name.startswith(("encoder.1.", "head."))),
    "FedPer-named": (lambda **o: FedPer(["encoder"], **o), lambda name: name.startswith("encoder.")),
    "FedRep": (lambda **o: FedRep(head_epochs=2, **o), lambda name: name.startswith("head.")),
}
every_method = pytest.mark.parametrize("name", METHODS)


def made(name, folder=None):
    return METHODS[name][0](directory=None if folder is None else str(folder))


def federate(rounds, cohorts, data, name, lost, momentum):
    """Whole models by deep copy: what is personal stays in ``own``, the rest is averaged."""
    personal = METHODS[name][1]
    server, own = Net(), {}
    for t in range(rounds):
        ends, sizes = {}, {}
        for i in cohorts(t):
            net = copy.deepcopy(server)
            net.load_state_dict({**net.state_dict(), **own.get(i, {})})
            optimizer = torch.optim.SGD(net.parameters(), LR, momentum)
            for epoch in range(EPOCHS):
                for key, parameter in net.named_parameters():
                    parameter.requires_grad_(name != "FedRep" or personal(key) == (epoch < 2))
                for batch in data[i]:
                    optimizer.zero_grad()
                    net.loss(batch).backward()
                    optimizer.step()
            ends[i], sizes[i] = {k: v.detach().clone() for k, v in net.state_dict().items()}, 1.0
            if name.startswith("FedPer"):
                sizes[i] = float(sum(len(y) for _, y in data[i]))
        arrived = [i for i in cohorts(t) if i not in lost(t)]
        own |= {i: {k: v for k, v in ends[i].items() if personal(k)} for i in arrived}
        total = sum(sizes[i] for i in arrived)
        shared = [key for key, _ in server.named_parameters() if not personal(key)]
        mean = {key: sum(sizes[i] / total * ends[i][key] for i in arrived) for key in shared}
        server.load_state_dict({**server.state_dict(), **mean})
    return server, own


def unequal_data():
    data = client_data(seed=7)
    data[1] = data[1][:2]
    return data


@every_method
def test_layers_that_diverge_are_refused(name):
    rule = made(name)
    run = Rounds(rule, rule.client_rule(), client_data(), lr=1e308, epochs=EPOCHS)
    with pytest.raises(ValueError, match=f"the layers of client 1 diverged under {type(rule).__name__}"):
        run.train(1)


@pytest.mark.parametrize(("name", "in_files", "momentum"), pairwise(METHODS, [False, True], [0.0, 0.5]))
def test_equals_models_with_layers_of_their_own(name, in_files, momentum, tmp_path):
    """Late joiners, a drop-out, BatchNorm, three local epochs, a reload in the middle."""
    folder, data = tmp_path if in_files else None, unequal_data()
    method = made(name, folder)
    run = Rounds(method, method.client_rule(), data, lr=LR, epochs=EPOCHS, momentum=momentum)
    for t in range(5):
        if t == 3:
            state, run.server = rule_state.state_dict(run.client), made(name, folder)
            run.client = run.server.client_rule()
            rule_state.load_state_dict(run.client, state)
            run.begin()
        cohort, _ = run.round(partial(t), lost(t))
        personal = torch.cat([torch.full((p.numel(),), METHODS[name][1](k)) for k, p in Net().named_parameters()])
        assert not cohort.updates.rows[:, personal].any()
        assert (cohort.updates.rows[:, ~personal] != 0).any(1).all()
    server, own = federate(5, partial, data, name, lost, momentum)
    torch.testing.assert_close(run.params, flat(server), rtol=0, atol=1e-9)
    assert sorted(own) == [0, 1, 2, 3]
    for parameter, view in zip(run.parameters, run.layout.views(run.params), strict=True):
        parameter.data = view
    for i, expected in own.items():
        before = {key: value.clone() for key, value in run.module.state_dict().items()}
        model = run.client.personal_model(i).completed(run.module, run.parameters, run.layout)
        for key, value in run.module.state_dict().items():
            assert torch.equal(value, before[key])
        whole = {**server.state_dict(), **expected}
        torch.testing.assert_close(
            model.params, torch.cat([whole[k].flatten() for k, _ in server.named_parameters()]), rtol=0, atol=1e-9
        )
        buffers = model.buffers[: 2 * 6 * 8].clone().view(torch.float64)
        expected_buffers = torch.cat([whole["encoder.1.running_mean"], whole["encoder.1.running_var"]])
        torch.testing.assert_close(buffers, expected_buffers, rtol=0, atol=1e-9)
    assert run.client.personal_model(9) is None


@every_method
def test_what_a_client_sends_says_nothing_of_its_layers(name):
    method = made(name)
    run = Rounds(method, method.client_rule(), unequal_data(), lr=LR, epochs=EPOCHS)
    before = {k: v.clone() for k, v in run.buffers.items()}
    _, report, _, after = run.train(0)
    assert not report.extras
    assert not report.companions
    own = METHODS[name][1]
    for key, value in after.items():
        assert torch.equal(value, before[key]) == own(key)


def test_the_head_is_trained_before_the_representation():
    method = FedRep(head_epochs=1)
    run = Rounds(method, method.client_rule(), client_data(), lr=LR, epochs=2)
    moved, correct = [], run.client.correct_gradients

    def watch(work):
        correct(work)
        moved.append({n for n, p in zip(work.layout.names, work.parameters, strict=True) if p.grad is not None})

    run.client.correct_gradients = watch
    run.train(0)
    head = {"head.weight", "head.bias"}
    assert moved == 3 * [head] + 3 * [set(run.layout.names) - head]


@pytest.mark.parametrize("epochs", [1, 2])
def test_too_few_epochs_for_a_representation_are_named(epochs):
    method = FedRep(head_epochs=2)
    run = Rounds(method, method.client_rule(), client_data(), epochs=epochs)
    with pytest.raises(ValueError, match=rf"head_epochs=2\) needs more passes .* found {epochs}: set local_epochs"):
        run.train(0)


@pytest.mark.parametrize(
    ("method", "module", "words"),
    [
        (FedBN(), Net(norm=False), "FedBN needs a module with BatchNorm layers"),
        (FedPer(["hat"]), Net(), r"personal of FedPer must name submodules .* encoder.0, encoder.1, head; found 'hat'"),
        (FedPer(["encoder.2"]), Net(), "found 'encoder.2'"),
        (FedPer(num_layers=3), Net(), "FedPer needs more than 3 layers with parameters, found"),
        (FedPer(["encoder", "head"]), Net(), "FedPer must leave clients something to share"),
        (FedRep(["hea"]), Net(), "found 'hea'"),
    ],
)
def test_modules_that_do_not_fit(method, module, words):
    with pytest.raises(ValueError, match=words):
        method.client_rule().check_module(module, fl.ParamLayout.from_module(module))


class Tied(nn.Module):
    """Predicts with the vectors that it reads words by, as language models do."""

    def __init__(self, bias):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=bias)
        self.head.weight = self.words.weight
        self.alias = self.head


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", [FedPer(), FedPer(["head"]), FedPer(["words", "body"]), FedRep(["head"])])
def test_layers_that_share_a_parameter_stay_together(method, bias):
    """Half of a tied weight cannot stay at a client: what was called personal would be averaged, or the reverse."""
    module = Tied(bias)
    layout = fl.ParamLayout.from_module(module)
    with pytest.raises(ValueError, match=r"name all layers that share a parameter, found '(head|words)\.weight'"):
        method.client_rule().check_module(module, layout)
    layers = FedPer(["head", "words"]).client_rule().find(module, layout)
    assert layers.parameters == {"words.weight", "head.bias"} if bias else {"words.weight"}


@pytest.mark.parametrize("server", [FedLF, AFL])
def test_rules_that_ask_for_losses_at_the_global_model_are_refused(server):
    with pytest.raises(ValueError, match=f"keeps layers at the clients, and {server.__name__} asks for losses at the"):
        fl.FederatedStrategy(server(), client=FedPer())
    fl.FederatedStrategy(FedHEAL(), client=FedPer())


def test_memory_plan_counts_the_layers_alone():
    rule, module = FedPer().client_rule(), Net()
    layout = fl.ParamLayout.from_module(module)
    rule.check_module(module, layout)
    federation = fl.algorithms.Federation(10, layout, torch.device("cpu"), torch.float64, 3)
    assert rule.memory(federation, 3) == {"PersonalLayers.own": 13 * 8 * (6 * 4 + 4)}


# ---- in a trainer

FITS = {"FedBN": FedBN, "FedPer": FedPer, "FedRep": lambda **o: FedRep(head_epochs=1, **o)}


def own_values(strategy, module, stage, data):
    """Loss and accuracy of every client's own model on its data, with a copy of the module."""
    loaders, copied = getattr(data, f"{stage}_dataloader")(), copy.deepcopy(module).eval()
    layout, values = fl.ParamLayout.from_module(module), {}
    for client in range(len(loaders)):
        model = strategy.client_rule.personal_model(client)
        batches = [batch for batch, _ in loaders.batches(client, seed=None)]
        if model is None or not batches:
            continue
        if hasattr(model, "completed"):  # layers, to which those of the global model belong
            model = model.completed(module, layout.parameters(module), layout)
        copied.load_state_dict(dict(zip(layout.names, layout.views(model.params), strict=True)), strict=False)
        sizes = [value.numel() * value.element_size() for value in copied.buffers()]
        for value, part in zip(copied.buffers(), model.buffers.split(sizes), strict=True):
            value.copy_(part.clone().view(value.dtype).view(value.shape))
        x, y = (torch.cat(column) for column in zip(*batches, strict=True))
        with torch.no_grad():
            logits = copied(x)
        values[client] = float(F.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())
    return values


@pytest.mark.parametrize(("name", "in_files"), pairwise([*FITS, "Ditto"], [False, True]))
@pytest.mark.fit
def test_clients_are_evaluated_with_their_own_models(name, in_files, tmp_path):
    folder, data = {"directory": str(tmp_path / "own")} if in_files else {}, federated_blobs()
    make = (FITS | {"Ditto": Ditto})[name]
    module, strategy = fit_method(make(**folder), 2, data=data, clients_per_round=2, local_epochs=2)
    for stage in ("val", "test"):
        if stage == "test":
            module.trainer.test(module, data, verbose=False)
        record, expected = strategy.last_evaluation, own_values(strategy, module, stage, data)
        assert 2 < len(expected) < 6  # some were never drawn
        for place, client in enumerate(record.client_ids):
            found = [float(record.values[f"personal/{stage}_{kind}"][place]) for kind in ("loss", "acc")]
            assert found == pytest.approx(expected.get(client, (float("nan"),) * 2), abs=1e-6, nan_ok=True)
        metrics = module.trainer.callback_metrics
        assert metrics[f"fed/personal/{stage}_acc/clients"] == len(expected)
        accuracies = [acc for _, acc in expected.values()]
        assert metrics[f"fed/personal/{stage}_acc/mean"] == pytest.approx(sum(accuracies) / len(accuracies), abs=1e-6)
        assert metrics[f"fed/personal/{stage}_acc/min"] == pytest.approx(min(accuracies), abs=1e-6)
        assert f"fed/personal/{stage}_loss/angle" not in metrics
    # A checkpoint in a process that has not trained.
    module.trainer.save_checkpoint(path := tmp_path / "two.ckpt")
    trainer = quiet_trainer(fl.FederatedStrategy(make(**folder), local_epochs=2))
    trainer.test(fresh(Classifier, seed=9, norm=True), federated_blobs(), ckpt_path=path, verbose=False)
    again = trainer.strategy.last_evaluation.values
    assert torch.equal(again["personal/test_acc"].nan_to_num(9), record.values["personal/test_acc"].nan_to_num(9))
