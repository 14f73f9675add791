# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules that step within visits: one client is plain Lightning, many end on the same rate."""

from __future__ import annotations

from math import inf
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, TQDMProgressBar
from plain_loop import client_batches
from schedules import (
    SCHEDULES,
    ByHand,
    ByHandLast,
    Counted,
    Glue,
    Inner,
    Noam,
    OneCycle,
    Ordered,
    Rated,
    Wrapped,
    final_rate,
    hooked,
    one_client_fit,
    plain_fit,
)
from support import Classifier, fit, fresh, on_path, place_of_client, quiet_trainer, train, weights

import fl_lightning as fl


@pytest.mark.parametrize(
    ("module", "lean"), [*((each, True) for each in (*SCHEDULES, Inner, Counted)), (Glue, False), (ByHand, False)]
)
def test_one_client_is_plain_lightning_bit_for_bit(module, lean):
    module = module if lean else hooked(module)
    plain, ours = fresh(module), fresh(module)
    expected = plain_fit(plain, Ordered(), 5)
    found = one_client_fit(ours, Ordered(), 5)
    assert ours.seen.rows == plain.seen.rows
    assert ours.seen.batches == plain.seen.batches == {11}
    assert ours.seen.after == plain.seen.after
    assert len(plain.seen.after) == (0 if lean else 55)
    assert torch.equal(weights(ours), weights(plain))
    assert final_rate(found) == final_rate(expected)
    assert found.global_step == expected.global_step == 55
    assert len({rate for rate, *_ in plain.seen.rows}) > 2


@pytest.mark.parametrize(("module", "options"), [(Glue, {}), (OneCycle, {"accumulate_grad_batches": 4}), (ByHand, {})])
def test_local_epochs_are_passes_of_one_visit(module, options):
    ours = fresh(module)
    trainer = one_client_fit(ours, Ordered(), 2, {"local_epochs": 3}, **options)
    steps = -(-11 // options.get("accumulate_grad_batches", 1))
    assert ours.seen.batches == {33}
    assert [batch for _, _, batch, _ in ours.seen.rows] == 2 * list(range(33))
    assert [place for place, row in enumerate(ours.seen.rows) if row[3]] == [32, 65]
    assert trainer.global_step == 2 * 3 * steps
    if not options:
        plain = fresh(module)
        plain_fit(plain, Ordered(), 6)
        assert [row[:2] for row in ours.seen.rows] == [row[:2] for row in plain.seen.rows]


class Rates(L.Callback):
    """The learning rate after every epoch."""

    def __init__(self):
        self.after = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.after.append(final_rate(trainer))


@pytest.mark.parametrize("module", SCHEDULES)
def test_a_hundred_clients_end_on_the_rate_of_plain_lightning(module):
    # All clients have equally many batches, so a fit on one client's share has the length of a visit.
    federated, seen = fresh(module), [Rates(), Rates(), Rates()]
    trainer = quiet_trainer(fl.FederatedStrategy(clients_per_round=3), 6, limit_val_batches=0, callbacks=[seen[2]])
    trainer.fit(federated, fl.FederatedDataModule(Ordered(2000, 4), fl.data.IID(100)))
    plain = plain_fit(fresh(module), Ordered(20, 4), 6, callbacks=[seen[0]])
    one_client_fit(fresh(module), Ordered(20, 4), 6, callbacks=[seen[1]])
    assert final_rate(trainer) == final_rate(plain)
    assert seen[0].after == seen[1].after == seen[2].after
    assert trainer.global_step == plain.global_step == 6 * 5
    assert federated.seen.batches == {5}
    row = f"| {module.title} | {', '.join(f'{seen[0].after[place]:.3g}' for place in (1, 3, 5))} |"
    page = (Path(fl.__file__).parents[1] / "docs" / "schedules.md").read_text()
    assert row in page or module in (Noam, Wrapped), row  # the page has a row of every other kind


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "full"])
def test_every_visit_runs_at_the_ticks_of_its_round(lean):
    module = fresh(Glue)
    _, strategy, trainer = fit(module, 3, limit_val_batches=0, **on_path(lean))
    sizes = [-(-size // 10) for size in client_batches().sizes.tolist()]
    steps = -(-sum(sizes) // len(sizes))
    assert min(sizes) < steps < max(sizes)
    assert strategy.fit_description.steps_per_round == steps
    assert module.seen.batches == {steps}
    rates = torch.optim.lr_scheduler.LambdaLR
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    total = 3 * steps
    schedule = rates(optimizer, lambda s: s / 7 if s < 7 else max(0.0, (total - s) / (total - 7)))
    expected = []
    for _ in range(total + 1):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ends = [place for place, row in enumerate(module.seen.rows) if row[3]]
    assert len(ends) == 9
    for visit, (first, last) in enumerate(zip([0, *(end + 1 for end in ends)], ends, strict=False)):
        rows = module.seen.rows[first : last + 1]
        ticks = [visit // 3 * steps + min(step, steps - 1) for step in range(len(rows))]
        assert [row[1] for row in rows] == ticks
        assert [row[0] for row in rows] == [expected[tick] for tick in ticks]
    assert (trainer.global_step, final_rate(trainer)) == (total, expected[total])


def test_max_steps_let_the_schedule_end_with_the_round():
    _, strategy, trainer = fit(fresh(Glue), -1, max_steps=8, limit_val_batches=0)
    steps = strategy.fit_description.steps_per_round
    assert (trainer.global_step, trainer.estimated_stepping_batches) == (2 * steps, 2 * steps)
    assert 8 < 2 * steps < 8 + steps
    assert final_rate(trainer) == 0


@pytest.mark.filterwarnings("ignore:round .* had no usable report")
def test_failing_clients_and_empty_rounds_do_not_stop_the_clock():
    class Failing(Glue):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and self.current_epoch < 2:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    data = fl.FederatedDataModule(Ordered(90), fl.data.IID(3))
    options = {"on_client_error": "drop", "limit_val_batches": 0}
    with pytest.warns(UserWarning, match="is left out of round"):
        trainer = fit(fresh(Failing), 4, data=data, **options).trainer
    expected = fit(fresh(Glue), 4, data=data, **options).trainer
    assert trainer.strategy.last_round.skipped_rounds == 2
    assert (trainer.global_step, final_rate(trainer)) == (expected.global_step, final_rate(expected))


@pytest.mark.parametrize("module", [OneCycle, Wrapped, ByHand, Inner, Counted])
def test_workers_see_the_same_clock(module):
    ends = []
    for executor in (None, fl.executors.Parallel(2)):
        ours = fresh(module)
        ours.seen = None
        _, strategy, trainer = fit(ours, 2, executor=executor, limit_val_batches=0)
        assert strategy.executor_fallback is None
        ends.append((weights(ours), final_rate(trainer), trainer.global_step, strategy.last_round.local_steps))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1:] == ends[1][1:]


# ---- checkpoints


@pytest.mark.parametrize("module", [OneCycle, Wrapped, ByHand, ByHandLast])
def test_a_checkpoint_holds_the_schedule_where_the_round_began(module, tmp_path):
    class Saving(module):
        def on_train_batch_end(self, *_):  # in the middle of the second visit of the second round
            if self.current_epoch == place_of_client(self.trainer) == self.trainer.fit_loop.batch_idx == 1:
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")

    class Between(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 1):
                trainer.save_checkpoint(tmp_path / "between.ckpt")

    whole = fit(fresh(Saving), 3, limit_val_batches=0, callbacks=[Between()], client_optimizer_state="keep")
    for name in ("inside", "between"):
        path = tmp_path / f"{name}.ckpt"
        rest = fit(fresh(module, 7), 3, limit_val_batches=0, client_optimizer_state="keep", ckpt_path=path)
        assert torch.equal(weights(rest.module), weights(whole.module)), name
        assert final_rate(rest.trainer) == final_rate(whole.trainer)
        assert rest.trainer.global_step == whole.trainer.global_step > 0
        assert rest.strategy.last_round.local_steps == whole.strategy.last_round.local_steps


def test_a_resume_with_rounds_of_another_length_is_refused(tmp_path):
    before = fit(fresh(Glue), 2, limit_val_batches=0)
    before.trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(ValueError, match=r"written by another fit, steps_per_round: \d+ became \d+"):
        fit(fresh(Glue), 3, local_epochs=2, ckpt_path=tmp_path / "two.ckpt", limit_val_batches=0)


# ---- what is refused


def test_a_plateau_schedule_within_visits_is_refused_by_name():
    class Plateau(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            by_round = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [by_round, {"scheduler": plateau, "interval": "step", "monitor": "x"}]

    with pytest.raises(ValueError, match=r"ReduceLROnPlateau has interval='step'.*use interval='epoch'"):
        fit(fresh(Plateau))


def test_schedules_step_with_every_optimizer_step_of_an_accumulation_scheduler():
    ours, plain = fresh(Glue), fresh(Glue)
    one_client_fit(ours, Ordered(), 3, callbacks=[GradientAccumulationScheduler({0: 4})])
    plain_fit(plain, Ordered(), 3, accumulate_grad_batches=4)
    assert [row[:2] for row in ours.seen.rows] == [row[:2] for row in plain.seen.rows]
    assert torch.equal(weights(ours), weights(plain))


class EveryThird(ByHand):
    def training_step(self, batch, batch_idx):
        self.take(Rated.training_step(self, batch, batch_idx))
        if batch_idx % 3 == 2:
            self.lr_schedulers().step()


def test_a_scheduler_stepped_by_hand_every_third_batch_is_as_in_lightning():
    ours, plain = fresh(EveryThird), fresh(EveryThird)
    one_client_fit(ours, Ordered(), 3)
    plain_fit(plain, Ordered(), 3)
    assert ours.seen.rows == plain.seen.rows
    assert torch.equal(weights(ours), weights(plain))


class OnceAVisit(ByHand):
    def training_step(self, batch, batch_idx):
        self.take(Rated.training_step(self, batch, batch_idx))
        if batch_idx == 0:
            self.lr_schedulers().step()


def test_a_scheduler_stepped_by_hand_once_a_visit_steps_once_a_round_of_a_small_client():
    trainer = fit(fresh(OnceAVisit), 6, clients_per_round=1, limit_val_batches=0).trainer
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6


class Argued(ByHand):
    def training_step(self, batch, batch_idx):
        self.take(Rated.training_step(self, batch, batch_idx))
        self.lr_schedulers().step(self.current_epoch)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedulers_stepped_by_hand_with_an_argument_are_refused_by_name():
    with pytest.raises(ValueError, match="lr scheduler ExponentialLR must be stepped by hand without an argument"):
        one_client_fit(fresh(Argued), Ordered(), 2)


def test_two_optimizers_by_hand_have_a_clock_each():
    class Adversaries(ByHand):
        """One optimizer steps for every batch, the other one for every second."""

        def training_step(self, batch, batch_idx):
            loss = Rated.training_step(self, batch, batch_idx)
            first, second = self.optimizers()
            slow, fast = self.lr_schedulers()
            chosen = [(first, slow)] + [(second, fast)] * (batch_idx % 2)
            for optimizer, _ in chosen:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer, schedule in chosen:
                optimizer.step()
                schedule.step()

        def configure_optimizers(self):
            optimizers = [torch.optim.Adam(part.parameters(), 0.01) for part in (self.net[0], self.net[2])]
            exponential = torch.optim.lr_scheduler.ExponentialLR
            return optimizers, [exponential(optimizers[0], 0.97), exponential(optimizers[1], 0.9)]

    ours, plain = fresh(Adversaries), fresh(Adversaries)
    found, expected = one_client_fit(ours, Ordered(), 4), plain_fit(plain, Ordered(), 4)
    assert ours.seen.rows == plain.seen.rows
    assert torch.equal(weights(ours), weights(plain))
    assert found.global_step == expected.global_step == 4 * (11 + 5)
    ends = [[o.param_groups[0]["lr"] for o in trainer.optimizers] for trainer in (found, expected)]
    assert ends[0] == ends[1]


# ---- how long training seems to be


LENGTHS = {
    "loader": lambda trainer: None if trainer.train_dataloader is None else len(trainer.train_dataloader),
    "data": lambda trainer: len(trainer.datamodule.train_dataloader()),
    "batches": lambda trainer: trainer.num_training_batches,
    "most": lambda trainer: trainer.fit_loop.max_batches,
    "steps": lambda trainer: trainer.estimated_stepping_batches,
    "last": lambda trainer: trainer.is_last_batch,
}
HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step",
    "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


class Asking(Classifier):
    """Asks in every hook how long its training is."""

    def __init__(self):
        super().__init__()
        self.found = Found()

    def ask(self, hook, *names):
        self.found.setdefault(hook, []).append({name: LENGTHS[name](self.trainer) for name in names or LENGTHS})

    def configure_optimizers(self):
        self.ask("before", "loader", "data", "batches", "most")
        self.ask("after", "steps", *LENGTHS)
        return super().configure_optimizers()


class Found(dict):
    __deepcopy__ = __copy__ = __reduce__ = lambda self, *_: self


def asking(hook):
    def asks(self, *args):
        self.ask(hook)
        return getattr(Classifier, hook)(self, *args)

    return asks


for hook in HOOKS:
    setattr(Asking, hook, asking(hook))


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 4}, {"accumulate_grad_batches": 3}], ids=str)
def test_every_length_that_one_client_asks_for_is_that_of_plain_lightning(options):
    plain, ours = fresh(Asking), fresh(Asking)
    plain_fit(plain, Ordered(), 2, **options)
    one_client_fit(ours, Ordered(), 2, **options)
    assert {hook: len(rows) for hook, rows in plain.found.items()} == {h: len(rows) for h, rows in ours.found.items()}
    assert plain.found == ours.found


def test_every_length_that_one_of_several_clients_asks_for_is_that_of_a_visit():
    module = fresh(Asking)
    _, strategy, _ = train(module, 2, local_epochs=3)
    sizes = client_batches().sizes.tolist()
    batches = -(-sum(3 * -(-size // 10) for size in sizes) // len(sizes))
    assert strategy.fit_description.steps_per_round == batches
    expected = {"loader": batches, "data": batches, "batches": batches, "most": batches, "steps": 2 * batches}
    found = [row for hook in ("after", *HOOKS) for row in module.found[hook]]
    assert all({**row, **expected} == row for row in found)
    assert module.found["before"] == [{"loader": None, "data": batches, "batches": inf, "most": inf}]


@pytest.mark.parametrize("own", [False, True])
def test_nobody_iterates_over_the_trainers_loader(own):
    class Iterating(Classifier):
        def on_train_start(self):
            for _batch in self.trainer.datamodule.train_dataloader() if own else self.trainer.train_dataloader:
                pass

    with pytest.raises(TypeError, match=r"holds the batches of many clients .* whose training_step gets each batch"):
        train(fresh(Iterating), 1)


# ---- what callbacks see


def test_callbacks_and_bars_count_clients_and_modules_their_batches():
    class Seeing(L.Callback):
        def __init__(self):
            self.batches = {}

        def note(self, hook, trainer):
            self.batches.setdefault(hook, set()).add(trainer.num_training_batches)

        def on_train_start(self, trainer, pl_module):
            self.note("start", trainer)

        def on_train_epoch_start(self, trainer, pl_module):
            bar = next(c for c in trainer.callbacks if isinstance(c, TQDMProgressBar))
            self.batches.setdefault("bar", set()).add(bar.total_train_batches)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.note("batch", trainer)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.batches.setdefault("last", []).append(trainer.is_last_batch)

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            self.shown = (self.train_progress_bar.n, self.train_progress_bar.total)

    seeing, bar, module = Seeing(), Bar(), fresh(Rated)
    _, strategy, trainer = fit(module, 2, callbacks=[seeing, bar], enable_progress_bar=True, limit_val_batches=0)
    steps = strategy.fit_description.steps_per_round
    assert steps != 3
    assert seeing.batches == {"start": {steps}, "bar": {3}, "batch": {3}, "last": 2 * [False, False, True]}
    assert module.seen.batches == {steps} == {trainer.num_training_batches}
    assert bar.shown == (3, 3)
    ends = Bar()
    fit(fresh(), -1, max_steps=8, callbacks=[ends], enable_progress_bar=True, limit_val_batches=0)
    assert ends.shown == (3, 3)
    assert isinstance(trainer, L.Trainer)
    assert (type(trainer).__name__, type(bar).__name__) == ("Trainer", "Bar")
