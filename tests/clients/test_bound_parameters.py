# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_loop import federate, sgd
from support import CLASSES, FEATURES, Classifier, federated_blobs, fresh, quiet_trainer, train, training_only, weights
from torch import nn

import fl_lightning as fl
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.core.tensors import ALIGNMENT


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))


def test_binding_copies_nothing():
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    objects = list(module.parameters())
    binding = BoundParameters(module, "module")
    row = binding.theta.clone() + 1
    for vector in (binding.theta, row, binding.theta):
        binding.bind_flat(vector)
        for parameter, view in zip(module.parameters(), binding.layout.views(vector), strict=True):
            assert parameter.data_ptr() == view.data_ptr()
    assert all(p is q for p, q in zip(module.parameters(), objects, strict=True)), (
        "optimizers hold on to the parameters"
    )
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_what_happens_on_a_row_does_not_reach_the_global_vector():
    module = net()
    binding = BoundParameters(module, "tensor")
    theta, row = binding.theta.clone(), binding.theta.clone()
    binding.bind_flat(row)
    module(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert not torch.equal(row, theta)
    binding.bind_global()
    assert torch.equal(binding.theta, theta)
    assert all(p.grad is None for p in module.parameters()), "a client's gradients end with it"


def test_release_gives_every_parameter_a_storage_of_its_own():
    module = net()
    binding = BoundParameters(module, "module")
    binding.theta.add_(1)
    values = [p.detach().clone() for p in module.parameters()]
    binding.release()
    binding.theta.zero_()
    for parameter, value in zip(module.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


def test_release_brings_the_memory_format_back():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    value = conv.weight.detach().clone()
    binding = BoundParameters(conv, "module")
    assert torch.equal(conv.weight, value)
    binding.release()
    assert torch.equal(conv.weight, value)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_parameters_of_mixed_dtype_are_refused_by_name():
    module = net()
    module[2].double()
    with pytest.raises(ValueError, match="share one dtype and device") as error:
        BoundParameters(module, "module")
    assert "torch.float64 on cpu: '2.weight'" in str(error.value)
    assert "torch.float32 on cpu: '0.weight', '0.bias'" in str(error.value)


def test_complex_parameters_are_refused():
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"floating point, found torch\.complex64"):
        BoundParameters(module, "module")


def test_settle_fetches_parameters_that_were_given_another_storage():
    module = net()
    binding = BoundParameters(module, "module")
    row = binding.theta.clone()
    binding.bind_flat(row)
    module[0].weight.data = module[0].weight.data + 1
    module[2].weight.data = module[2].weight.data.T.contiguous().T * 2  # same numbers per index, other strides
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert not torch.equal(row, expected)
    binding.reclaim(binding.layout.views(row))
    assert torch.equal(row, expected)
    module[0].bias.data = torch.zeros(4)
    with pytest.raises(ValueError, match=r"'0\.bias' must keep its shape during a fit, found \(3,\) become \(4,\)"):
        binding.reclaim(binding.layout.views(row))


def test_what_is_assigned_while_the_module_is_global_is_kept():
    module = net()
    binding = BoundParameters(module, "module")
    module[0].weight.data = module[0].weight.data + 1
    with binding.showing(torch.zeros_like(binding.theta)):
        assert not module[0].weight.any()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    binding.bind_flat(torch.zeros_like(binding.theta))
    module[0].bias.data = torch.ones(3)  # of a client, which is bound to something else
    binding.bind_global()
    assert torch.equal(binding.theta, expected)
    module[2].weight.data = module[2].weight.data * 2
    module[0].bias.data = torch.zeros(4)  # check() refuses it; the end of a fit does not fail over it
    binding.release()
    assert torch.equal(module[2].weight.data.flatten(), 2 * expected[-6:])


def test_a_vector_that_starts_elsewhere_is_bound_at_a_boundary():
    binding = BoundParameters(net(), "module")
    shifted = torch.cat([torch.zeros(1), binding.theta])[1:]
    assert shifted.data_ptr() % ALIGNMENT
    binding.bind_flat(shifted)
    assert binding.parameters[0].data_ptr() % ALIGNMENT == 0
    assert torch.equal(binding.layout.flatten(binding.parameters), shifted)


# ---- in a fit


class Pruned(Classifier):
    """Sets small weights to zero in one hook."""

    def __init__(self, assign, **options):
        super().__init__(**options)
        self.assign = assign

    def prune(self, *args):
        weight = self.net[0].weight
        pruned = weight.data * (weight.data.abs() > 0.1)
        if self.assign:
            weight.data = pruned
        else:
            weight.data.copy_(pruned)


@pytest.mark.parametrize("hook", ["on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end"])
def test_weights_assigned_in_a_hook_count_as_those_changed_in_place(tmp_path, hook):
    files, ends = [], []
    for assign in (False, True):
        module_class = type("PrunedThere", (Pruned,), {hook: Pruned.prune})
        module = fresh(module_class, assign=assign)
        saver = ModelCheckpoint(tmp_path / str(assign), save_on_train_epoch_end=True)
        strategy = fl.FederatedStrategy(clients_per_round=3, seed=5)
        quiet_trainer(strategy, 3, callbacks=[saver], enable_checkpointing=True).fit(module, federated_blobs())
        ends.append(weights(module))
        files.append(torch.load(saver.best_model_path, weights_only=True)["state_dict"]["net.0.weight"])
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(files[0], files[1])
    assert bool((files[1] == 0).any()) == (hook != "on_train_end")
    assert bool((ends[1] == 0).any())


class Meddling(Classifier):
    """Changes its own parameters when round 1 ends."""

    def __init__(self, meddle, **options):
        super().__init__(**options)
        self.meddle = meddle

    def on_train_epoch_end(self):
        if self.current_epoch == 1:
            self.meddle(self)


def freeze(module):
    module.net[0].weight.requires_grad_(False)


def thaw(module):
    module.net[0].bias.requires_grad_(True)


def replace(module):
    module.net[0].weight = nn.Parameter(torch.zeros_like(module.net[0].weight))


def add(module):
    module.extra = nn.Parameter(torch.zeros(1))
    module.optimizers().add_param_group({"params": [module.extra]})


@pytest.mark.parametrize(
    ("meddle", "words"),
    [
        (freeze, r"must not change during a fit, found changes in \['net.0.weight'\]"),
        (thaw, r"must not change during a fit, found changes in \['net.0.bias'\]"),
        (replace, r"must stay the same objects during a fit, replaced: \['net.0.weight'\]"),
        (add, r"must not change during a fit, found changes in \['extra'\]"),
    ],
)
def test_parameters_that_change_in_mid_fit_give_a_clear_error(meddle, words):
    module = Meddling(meddle)
    if meddle is thaw:
        module.net[0].bias.requires_grad_(False)
    strategy = fl.FederatedStrategy(clients_per_round=2)
    with pytest.raises(ValueError, match=words):
        quiet_trainer(strategy, 4).fit(module, federated_blobs())
    assert strategy.last_round.round == 1


def ties(module):
    module.other = nn.Linear(FEATURES, 8)
    module.other.weight.data = module.net[0].weight.data


def flattens(module):
    module.flat = nn.Parameter(torch.zeros(200))
    module.net[0].weight.data = module.flat.data[:96].view(8, FEATURES)


def holds(module):
    module.held = {"rows": [module.net[0].weight.data[1]]}


def watches(module):
    module.weights = [p.detach() for p in module.net[0].parameters()]


def views(module):
    module.half = module.net[0].weight[:4]


def registers(module):
    module.register_buffer("start", module.net[0].weight.data)


def follows(module):
    module.teacher = nn.Linear(FEATURES, 8).requires_grad_(False)
    module.teacher.weight.data = module.net[0].weight.data


@pytest.mark.parametrize(
    ("meddle", "name"),
    [
        (ties, "other.weight"), (flattens, "flat"), (holds, "held"), (watches, "weights"), (views, "half"),
        (registers, "start"), (follows, "teacher.weight"),
    ],
)  # fmt: skip
def test_what_lies_in_the_memory_of_a_parameter_is_refused_by_name(meddle, name):
    module = fresh(Classifier)
    meddle(module)
    with pytest.raises(ValueError, match="nothing may lie in the memory of the trained parameter") as refusal:
        BoundParameters(module, "module")
    assert {f"'{name}'", "'net.0.weight'"} <= set(re.findall(r"'\S+'", str(refusal.value)))


def test_what_hooks_take_after_the_fit_has_begun_is_refused_too():
    class Late(Classifier):
        def on_train_start(self):
            watches(self)

    with pytest.raises(ValueError, match=r"memory of the trained parameter 'net.0.weight'.*found 'weights'"):
        train(fresh(Late), 1)


def test_parts_of_one_memory_that_do_not_overlap_are_as_good_as_others():
    module, memory = fresh(Classifier), torch.zeros(200)
    module.tied = module.net[0]
    module.net[0].weight.data, module.net[0].bias.data = memory[:96].view(8, FEATURES), memory[96:104]
    module.rest = memory[104:]
    module.normed = nn.utils.spectral_norm(nn.Linear(3, 3))  # keeps its weight beside weight_orig, until forward
    assert len(BoundParameters(module, "module").parameters) == 6


class Clipped(Classifier):
    """Keeps its weights in a box, by in-place changes or by new tensors."""

    def __init__(self, in_place):
        super().__init__(lr=0.5)
        self.in_place = in_place

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.parameters():
            if self.in_place:
                p.data.clamp_(-0.3, 0.3)
            else:
                p.data = p.data.clamp(-0.3, 0.3)


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.SCAFFOLD])
def test_parameters_that_move_to_another_storage_are_followed(algorithm):
    results = []
    for in_place in (True, False):
        module = fresh(Clipped, in_place=in_place)
        training_only(fl.FederatedStrategy(algorithm(), clients_per_round=3), 3).fit(module, federated_blobs())
        results.append(weights(module))
    assert torch.equal(*results)
    assert results[0].abs().max() <= 0.3 + 1e-6
    assert not torch.allclose(results[0], weights(fresh(Clipped, in_place=True)), atol=0.05)


class TiedNet(Classifier):
    """An autoencoder-like classifier: one matrix used forwards and, transposed, backwards."""

    def __init__(self):
        super().__init__()
        hidden = 6
        self.net = nn.ModuleDict(
            {"down": nn.Linear(FEATURES, hidden, bias=False), "up": nn.Linear(FEATURES, hidden, bias=False),
             "head": nn.Linear(FEATURES, CLASSES)}
        )  # fmt: skip
        self.net["up"].weight = self.net["down"].weight

    def forward(self, x):
        hidden = self.net["down"](x).relu()
        return self.net["head"](hidden @ self.net["up"].weight)


class PartlyFrozen(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0].weight.requires_grad_(False)


class ChannelsLast(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, CLASSES)
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def forward(self, x):
        return self.net(x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("kind", [TiedNet, PartlyFrozen, ChannelsLast])
def test_unusual_modules_train_as_in_a_plain_loop(kind):
    module = fresh(kind)
    training_only(fl.FederatedStrategy(seed=0), 2).fit(module, federated_blobs())
    expected = federate(fresh(kind), 2, sgd(), cohort=6, seed=0)
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)
    assert not torch.allclose(weights(module), weights(fresh(kind)), atol=1e-2)
    if kind is TiedNet:
        assert module.net["up"].weight is module.net["down"].weight
    if kind is ChannelsLast:
        assert module.net[0].weight.is_contiguous(memory_format=torch.channels_last)


class Counts(Classifier):
    """Counts in a frozen parameter, which has the shape of no trained one."""

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.counter = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch, batch_idx):
        if self.count:
            self.counter.data.add_(1)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_frozen_parameters_that_clients_change_are_refused(policy):
    training_only(fl.FederatedStrategy(clients_per_round=2), 1).fit(Counts(False), federated_blobs())
    strategy = fl.FederatedStrategy(clients_per_round=2, on_client_error=policy)
    with pytest.raises(ValueError, match=r"found changes in 'counter'"):
        training_only(strategy, 1).fit(Counts(True), federated_blobs())
