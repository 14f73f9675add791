# SPDX-License-Identifier: Apache-2.0
"""Fits that go on with other clients: who stays, or comes back, has what the method remembers of it; others begin."""

from copy import deepcopy
from functools import partial

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS, Rows, SaveAt, differences
from sites import Sites, of
from support import Classifier, fresh, training_only, weights

import fl_lightning as fl
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.declared import Container


class Began(L.Callback):
    """Takes the states with which the first round begins."""

    def on_train_epoch_start(self, trainer, module):
        if not hasattr(self, "states"):
            self.states = deepcopy(trainer.strategy._fits.states())


def fit(make, data, rounds, path=None, **options):
    began = Began()
    strategy = fl.FederatedStrategy(make(), seed=5, **options)
    trainer = training_only(strategy, rounds, callbacks=[began])
    trainer.fit(module := fresh(norm=True, momentum=0.5), data, ckpt_path=path)
    return strategy, module, began.states


def by_name(strategy, states):
    """What rules and optimizers remember of each client."""
    called = dict(enumerate([*states["fit"]["names"], *states["gone"]]))
    found = {}
    for part, rule in (("algorithm", strategy.algorithm), ("client_rule", strategy.client_rule)):
        for name in rule_state.declared(rule):
            state = states[part].get(name)
            if isinstance(state, dict) and "rows" in state:
                state = {client: state["rows"][slot] for client, slot, _ in state["clients"].tolist()}
            elif isinstance(state, dict) and "files" in state:
                state = {client: row for client, *row in state["files"].tolist()}
            if isinstance(state, dict):
                found[part, name] = {called[client]: value for client, value in state.items()}
    found["optimizers"] = {called[client]: value for client, value in states["client_optimizers"].items()}
    return found


def remembers_clients(rule):
    return any(isinstance(e, Container) for e in rule_state.declared(rule).values())


REMEMBERING = [name for name, rule in ALGORITHMS.items() if any(map(remembers_clients, (rule(), rule().client_rule())))]


@pytest.mark.parametrize("name", ["FedAvg", *REMEMBERING])
def test_clients_keep_what_is_theirs(name, tmp_path):
    options = {} if ALGORITHMS[name]().needs.full_gradients else {"client_optimizer_state": "keep"}
    strategy, module, _ = fit(ALGORITHMS[name], of("abc"), 2, **options)
    module.trainer.save_checkpoint(tmp_path / "two.ckpt")
    before = by_name(strategy, strategy._fits.states())
    go_on = partial(fit, ALGORITHMS[name], **options)
    with pytest.warns(UserWarning, match=r"goes on with other settings .*clients: 'd' joined, 'b' left; data: "):
        strategy, module, states = go_on(of("acd"), 3, tmp_path / "two.ckpt")
    found = by_name(strategy, states)
    if name == "AFL":  # lambda sums to 1 over those who are here
        (_, lam), (_, old) = next(iter(found.items())), next(iter(before.items()))
        assert lam["a"] + lam["c"] + 1 / 3 == pytest.approx(1)
        assert lam["a"] / lam["c"] == pytest.approx(old["a"] / old["c"])
        old.update(lam)
    assert not differences(found, before)
    module.trainer.save_checkpoint(tmp_path / "three.ckpt")
    after = by_name(strategy, strategy._fits.states())
    assert all(not value or value.keys() >= set("acd") for value in after.values())  # a window may leave b out
    with pytest.warns(UserWarning, match="clients: 'b' joined"):
        strategy, _, states = go_on(of("abcd"), 4, tmp_path / "three.ckpt")
    if name != "AFL":
        assert not differences(by_name(strategy, states), after)


def scaffold_by_hand(states):
    c_i = states["client_rule"]["c_i"]
    states["client_rule"] = {"c": c_i[0] * (1 / 3) + c_i[2] * (1 / 3), "c_i": {0: c_i[0], 1: c_i[2]}}


def ditto_by_hand(states):
    own = states["client_rule"]["own"]
    states["client_rule"]["own"] = {0: own[0], 1: own[2]}


@pytest.mark.parametrize(("name", "by_hand"), [("SCAFFOLD", scaffold_by_hand), ("Ditto", ditto_by_hand)])
def test_rounds_are_those_of_a_state_made_by_hand(name, by_hand, tmp_path):
    make, path = ALGORITHMS[name], tmp_path / "two.ckpt"
    fit(make, of("abc"), 2)[1].trainer.save_checkpoint(path)
    with pytest.warns(UserWarning, match="clients: 'd' joined, 'b' left"):
        strategy, module, _ = fit(make, of("acd"), 4, path)
    content = torch.load(path, weights_only=True)
    states = content["callbacks"]["fl_lightning"]
    by_hand(states)
    states["fit"] = strategy.fit_description.state_dict()
    torch.save(content, path)
    _, expected, _ = fit(make, of("acd"), 4, path)
    assert torch.equal(weights(module), weights(expected))


@pytest.mark.parametrize("rule", [fl.algorithms.Ditto, fl.algorithms.FedBN])
def test_models_in_files_stay_their_clients(rule, tmp_path):
    def own(strategy, names):
        models = {name: strategy.client_rule.own.get(place) for place, name in enumerate(names)}
        return {name: [model.params, model.buffers] for name, model in models.items() if model is not None}

    make = partial(rule, directory=str(tmp_path / "own"))
    strategy, module, _ = fit(make, of("abc"), 2)
    before = own(strategy, "abc")
    module.trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.warns(UserWarning, match="'d' joined"):
        strategy, module, _ = fit(make, of("acd"), 3, tmp_path / "two.ckpt")
    assert own(strategy, "acdb").keys() == set("abcd")
    assert not differences(own(strategy, "acdb")["b"], before["b"])
    module.trainer.save_checkpoint(tmp_path / "three.ckpt")
    after = own(strategy, "acdb")
    again = fl.FederatedStrategy(make())
    with pytest.warns(UserWarning, match="'b' joined"):
        training_only(again, 3).fit(fresh(norm=True, momentum=0.5), of("dcba"), ckpt_path=tmp_path / "three.ckpt")
    assert not differences(own(again, "abcd"), after)


def test_clients_without_names_are_told_by_their_numbers(tmp_path):
    def numbered(count):
        data = Sites("abcd"[:count])
        data.train_dataloader()
        return fl.FederatedDataModule(data, [[i for i, k in enumerate(data.keys) if k == n] for n in data.names])

    rule = fl.algorithms.SCAFFOLD
    strategy, module, _ = fit(rule, numbered(3), 2)
    module.trainer.save_checkpoint(tmp_path / "two.ckpt")
    before = dict(strategy.client_rule.c_i)
    with pytest.warns(UserWarning, match="clients: 3 became 2"):
        strategy, module, _ = fit(rule, numbered(2), 3, tmp_path / "two.ckpt")
    assert strategy.client_rule.c_i.keys() == {0, 1}
    module.trainer.save_checkpoint(tmp_path / "three.ckpt")
    with pytest.warns(UserWarning, match="clients: 2 became 4"):
        strategy, _, states = fit(rule, numbered(4), 4, tmp_path / "three.ckpt")
    assert torch.equal(states["client_rule"]["c_i"][2], before[2])
    mean = torch.stack(list(strategy.client_rule.c_i.values())).mean(0)
    torch.testing.assert_close(strategy.client_rule.c, mean, rtol=1e-4, atol=1e-6)


class Cyclic(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_rounds_count_as_before_where_data_grow(tmp_path):
    def go_on(rounds, more, path=None, **options):
        strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), seed=5, **options)
        trainer = training_only(strategy, rounds)
        trainer.fit(fresh(Cyclic), of("abc", more=more), ckpt_path=path)
        return trainer

    trainer = go_on(2, 0)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.warns(UserWarning, match="data: samples: 45 became 135, .*theirs$"):
        grown = go_on(4, 30, tmp_path / "two.ckpt")
    assert grown.global_step == 2 * trainer.global_step
    with pytest.raises(ValueError, match=r"by another fit, steps_per_round: . became .: use"):
        go_on(4, 0, tmp_path / "two.ckpt", local_epochs=2)


class Evaluated(Sites):
    val_dataloader = Sites.train_dataloader


def evaluated(names):
    sites = Evaluated(names)
    sites.train_dataloader()
    return fl.FederatedDataModule(sites, fl.data.ByKey({"train": sites.keys, "val": sites.keys}), seed=0)


def test_a_checkpoint_is_evaluated_with_the_personal_models_of_its_clients(tmp_path):
    def values(names):
        strategy = fl.FederatedStrategy(fl.algorithms.Ditto())
        trainer = training_only(strategy, 1, limit_val_batches=1.0)
        trainer.validate(fresh(norm=True), evaluated(names), ckpt_path=tmp_path / "two.ckpt", verbose=False)
        record = strategy.last_evaluation
        return dict(zip(record.client_names, record.values["personal/val_loss"].tolist(), strict=True))

    fit(fl.algorithms.Ditto, of("abc"), 2)[1].trainer.save_checkpoint(tmp_path / "two.ckpt")
    found, whole = values("acd"), values("abc")
    assert found["d"] != found["d"]
    assert {name: found[name] for name in "ac"} == {name: whole[name] for name in "ac"}


def test_records_tell_clients_by_their_names(tmp_path):
    def recorded(names, rounds, path=None):
        recorder = fl.callbacks.Report(tmp_path / "report.html")
        trainer = training_only(fl.FederatedStrategy(seed=5), rounds, callbacks=[recorder], limit_val_batches=1.0)
        trainer.fit(fresh(), evaluated(names), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "now.ckpt")
        return recorder.record

    def by_client(record, rounds):
        names = record.client_names
        values = [
            {names[k]: (size, loss) for k, size, loss in zip(e.client_ids, e.sizes, e.values["val_loss"], strict=True)}
            for e in record.evaluations[:rounds]
        ]
        return values, dict(zip(names, record.client_sizes, strict=True))

    before = by_client(recorded("abc", 2), 2)
    with pytest.warns(UserWarning, match="'d' joined, 'b' left"):
        record = recorded("acd", 3, tmp_path / "now.ckpt")
    assert record.client_names == tuple("acdb")
    values, sizes = by_client(record, 2)
    assert values == before[0]
    assert {name: sizes[name] for name in "abc"} == before[1]
    assert record.evaluations[-1].client_ids == (0, 1, 2)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_end", "on_train_epoch_end"])
def test_checkpoints_of_any_moment_go_on(tmp_path, hook):
    save = SaveAt(tmp_path, 1, (hook,))
    trainer = training_only(
        fl.FederatedStrategy(fl.algorithms.FedLF(), seed=5), 2, limit_val_batches=1.0, callbacks=[save], logger=Rows()
    )
    trainer.fit(fresh(), evaluated("abc"))
    (path,) = tmp_path.glob(f"{hook}*1.ckpt") if "batch" in hook else tmp_path.glob("*.ckpt")
    for names in ("acde", "a"):
        strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), seed=5)
        with pytest.warns(UserWarning, match="'b'.* left"):
            training_only(strategy, 3, limit_val_batches=1.0).fit(fresh(), evaluated(names), ckpt_path=path)
        assert len(strategy.last_round.client_ids) == len(strategy.last_evaluation.client_ids) == len(names)


def test_another_fit_of_one_strategy_goes_on_with_other_clients():
    strategy = fl.FederatedStrategy(fl.algorithms.FedHEAL(), seed=5)
    trainer, module = training_only(strategy, 2), fresh()
    trainer.fit(module, of("abc"))
    before = dict(strategy.algorithm.rounds)
    trainer.fit_loop.max_epochs = 3
    with pytest.warns(UserWarning, match="than the last fit's state .*'d' joined, 'b' left"):
        trainer.fit(module, of("acd"))
    assert strategy.algorithm.rounds == {0: before[0] + 1, 1: before[2] + 1, 2: 1}


def test_vectors_of_ids_follow_the_clients(tmp_path):
    make = partial(fl.algorithms.AAggFF, "silo")
    strategy, module, _ = fit(make, of("abc"), 2)
    module.trainer.save_checkpoint(tmp_path / "two.ckpt")
    before = strategy.algorithm.gradient
    with pytest.warns(UserWarning, match="'d' joined, 'b' left"):
        strategy, _, states = fit(make, of("acd"), 3, tmp_path / "two.ckpt")
    assert states["algorithm"]["clients"].tolist() == [0, 3, 1]
    assert torch.equal(states["algorithm"]["gradient"], before)
    assert strategy.algorithm.clients.tolist() == [0, 3, 1, 2]
    assert strategy.algorithm.gradient[1] == before[1]  # b is absent, and counts as one without a loss
