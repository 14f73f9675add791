# SPDX-License-Identifier: Apache-2.0
"""When the clients of an evaluation are divided among processes, and what comes back; the other ranks are made up."""

from types import SimpleNamespace
from weakref import ref

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from support import fresh

from fl_lightning.core.errors import RankError
from fl_lightning.fit.evaluation import between_evaluations
from fl_lightning.fit.evaluation.between_evaluations import Division, batch_callback
from fl_lightning.fit.evaluation.client_parts import ClientParts
from fl_lightning.lightning.module.undefined_metrics import Noticed


class Says:
    """The second of some ranks; the others answer what they are given."""

    def __init__(self, *others, size=2):
        self.others, self.rank, self.size, self.said = others, 1, size, []

    def gather(self, value):
        self.said.append(value)
        return [*self.others[:1], value, *self.others[1:]]


class Notes:
    """What lasts between evaluations."""

    def __init__(self):
        self.memory, self.divisible, self.told = SimpleNamespace(names=set()), {}, []

    def inform(self, words):
        self.told.append(words)


class Batches(L.Callback):
    def on_validation_batch_end(self, *_):
        pass


class Starts(L.Callback):
    def on_test_batch_start(self, *_):
        pass


def made(ranks, stage="val", callbacks=(), share=None, **loader):
    module = fresh()
    trainer = SimpleNamespace(lightning_module=module, callbacks=list(callbacks), loggers=["a logger"])
    loader = SimpleNamespace(**{"share": share, "counts": [5, 0, 3, 4], "num_evaluated": 3, **loader})
    return Division(trainer, loader, stage, Notes(), ranks)


def parts(**found):
    return SimpleNamespace(**{"passed_on": [], "gathers": False, "adds_to_older_metrics": False, **found})


VALUES = SimpleNamespace(logs_steps=False)


@pytest.fixture(autouse=True)
def one_loader(monkeypatch):
    monkeypatch.setattr(between_evaluations, "num_loaders", lambda trainer: 1)


def test_the_next_evaluation_divides_the_clients():
    division = made(Says(None))
    assert not division.is_divided
    division.divide_next(parts(), VALUES)
    assert division.is_divided
    assert division._loader.share == [2, 3]  # the largest is the first rank's
    assert division._notices.divisible["val"]() is division._module


OBSTACLES = {
    "no parts": (None, VALUES, "is not the only one that runs"),
    "what passes": (parts(passed_on=["a", "b"]), VALUES, "carries on a, b from one client to the next"),
    "a list": (parts(gathers=True), VALUES, "carries on a list from one client to the next"),
    "older metrics": (parts(adds_to_older_metrics=True), VALUES, "depends on what earlier evaluations have left"),
    "steps": (parts(), SimpleNamespace(logs_steps=True), r"logs values of single batches (on_step=True)"),
}


def test_a_list_that_the_hook_at_the_end_has_emptied_is_an_obstacle():
    division, values = made(Says(None)), SimpleNamespace(share=dict, clear=dict, logs_steps=False)
    module = division._module
    module.outputs = []
    found = ClientParts(module, values, Noticed(), several=True)
    found.begin()
    module.outputs.append(1.0)
    found.after_batch()
    module.outputs.clear()
    division.divide_next(found, values)
    assert division._ranks.said == [OBSTACLES["a list"][2]]


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_in_any_process_is_one_in_all(name):
    found, values, words = OBSTACLES[name]
    division = made(Says(None))
    division.divide_next(found, values)
    assert division._loader.share is None
    assert division._ranks.said == [words]
    assert division._notices.told == [
        f"every process evaluates all clients, because Classifier.validation_step {words}"
    ]
    assert division._notices.divisible == {}
    elsewhere = made(Says("logs elsewhere"), "test")
    elsewhere.divide_next(parts(), VALUES)
    assert elsewhere._loader.share is None
    assert elsewhere._notices.told == [
        "every process evaluates all clients, because Classifier.test_step logs elsewhere"
    ]


def test_further_obstacles(monkeypatch):
    def obstacle(division):
        division.divide_next(parts(), VALUES)
        return division._ranks.said[0]

    remembering = made(Says(None))
    remembering._notices.memory.names.add("best")
    assert obstacle(remembering) == "depends on what earlier evaluations have left"
    writing = made(Says(None))
    with writing.watching():
        assert list(writing._trainer.loggers) == ["a logger"]
    assert obstacle(writing) == "writes to loggers itself"
    assert obstacle(made(Says(None), callbacks=[Batches()])) == "is watched by Batches"
    monkeypatch.setattr(between_evaluations, "num_loaders", lambda trainer: 2)
    assert obstacle(made(Says(None))) == "is not the only one that runs"


def test_nothing_is_asked_where_nothing_can_be_divided():
    for division in (made(None), made(Says(None), share=[0]), made(Says(None, None, None, size=4))):
        share = division._loader.share
        division.divide_next(parts(), VALUES)
        assert division._loader.share == share
        assert division._ranks is None or division._ranks.said == []
    as_many = made(Says(None, None, size=3))
    as_many.divide_next(parts(), VALUES)
    assert as_many.is_divided
    assert not made(None, share=[0]).is_divided


def test_an_evaluation_is_divided_again_for_the_same_module(monkeypatch):
    def again(ranks=None, of=None, stage="val", **options):
        division = made(Says(None) if ranks is None else ranks, **options)
        module = division._module if of is None else of
        division._notices.divisible[stage] = ref(module)
        division.divide_again()
        return division._loader.share

    assert again() == [2, 3]
    assert again(of=fresh()) is None
    assert again(stage="test") is None
    assert again(Says(None, None, None, size=4)) is None
    assert again(Says(None, None, size=3)) is not None
    assert again(callbacks=[Batches()]) is None
    assert again(callbacks=[Starts(), EarlyStopping("val_loss")]) == [2, 3], "of other stages, and Lightning's own"
    alone = made(None)
    alone._notices.divisible["val"] = ref(alone._module)
    alone.divide_again()
    assert alone._loader.share is None
    monkeypatch.setattr(between_evaluations, "num_loaders", lambda trainer: 2)
    assert again() is None


def part(error=None):
    return SimpleNamespace(row=SimpleNamespace(error=error))


class LocalError(Exception):
    """Has what cannot travel."""

    def __init__(self):
        super().__init__("local")
        self.held = lambda: 0


def test_what_all_have_added_is_in_the_order_of_clients():
    own, theirs = {3: part(), 1: part()}, {2: part(), 0: part()}
    division = made(Says(theirs), share=[1, 3])
    found = division.of_all(own, parts(), VALUES)
    assert list(found) == [0, 1, 2, 3]
    assert found[1] is own[1]
    assert found[2] is theirs[2]
    failed = {1: part(LocalError())}
    division.of_all(failed, parts(), VALUES)
    assert "local" in str(failed[1].row.error)
    assert not hasattr(failed[1].row.error, "held"), "it goes to other processes"


def test_what_cannot_be_joined_any_more_is_an_error():
    division = made(Says({}), share=[1])
    with pytest.raises(RankError, match=r"Classifier.validation_step carries on a from .*it did not in the first eval"):
        division.of_all({}, parts(passed_on=["a"]), VALUES)


@pytest.mark.parametrize("look", [lambda loggers: loggers[0], lambda loggers: next(iter(loggers))])
def test_loggers_are_watched_around_a_step_alone(look):
    division = made(Says(None))
    trainer = division._trainer
    given, touched = trainer.loggers, []
    for step in (len, look, len):
        with division.watching():
            step(trainer.loggers)
        assert trainer.loggers is given
        touched.append(division._touches_loggers)
    assert touched == [False, True, True], "nobody has taken one; then somebody has, and it stays"


@pytest.mark.parametrize(("ranks", "share"), [(None, None), (Says(None), [1])])
def test_nobody_watches_where_nothing_is_to_be_found_out(ranks, share):
    division = made(ranks, share=share)
    given = division._trainer.loggers
    with division.watching():
        assert division._trainer.loggers is given


def test_callbacks_that_look_at_batches_are_found():
    trainer = SimpleNamespace(callbacks=[EarlyStopping("val_loss"), Batches(), Starts()])
    assert batch_callback(trainer, "val") == "Batches"
    assert batch_callback(trainer, "test") == "Starts"
    assert batch_callback(SimpleNamespace(callbacks=[EarlyStopping("val_loss")]), "val") is None
    if (kind := getattr(L.pytorch.callbacks, "EMAWeightAveraging", None)) is not None:  # since Lightning 2.6
        averages = kind(update_every_n_steps=1)
        assert batch_callback(SimpleNamespace(callbacks=[averages]), "val") == "EMAWeightAveraging"
