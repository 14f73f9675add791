# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fit compare and divide, where what the others say is made up here."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from support import Classifier, fit, fresh

import fl_lightning as fl
from fl_lightning.algorithms import MOON, SCAFFOLD, ClientRule, FedAvg, FedLF
from fl_lightning.core.errors import RankError
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.updates import Columns
from fl_lightning.fit import on_ranks
from fl_lightning.fit.on_ranks import Agreement, check_same_data, check_same_fit, check_same_start, whole_rows_reason


class Says:
    """Ranks of which the first is this process; ``others`` change what it says."""

    def __init__(self, *others, rank=0, num_nodes=1):
        self.others, self.rank, self.size, self.num_nodes, self.said = others, rank, 1 + len(others), num_nodes, []

    def gather(self, value):
        self.said.append(value)
        return [value, *(other(value) for other in self.others)]

    def gather_parts(self, part, sizes):
        return [part] * len(sizes)


def same(value):
    return value


def changed(**entries):
    return lambda value: {**value, **entries}


def test_data_that_differ_are_named():
    check_same_data(Says(same, same), "val", {"sizes": 1, "places": 2})
    words = r"rank 1 differs from rank 0 in the test data: other places, sizes\. Seed what draws"
    with pytest.raises(ValueError, match=words):
        check_same_data(Says(changed(sizes=0, places=7), same), "test", {"sizes": 1, "places": 2, "labels": 3})


def test_starts_that_differ_are_named():
    check_same_start(Says(same), {"a": 1})
    with pytest.raises(ValueError, match="rank 2 differs from rank 0 in a, b, c: pass the same ckpt_path"):
        check_same_start(Says(same, changed(a=0, b=0, c=0, d=0)), {"a": 1, "b": 2, "c": 3, "d": 4})
    with pytest.raises(ValueError, match="rank 1 differs from rank 0 in more"):
        check_same_start(Says(changed(more=5), same), {"a": 1})


RECORD = RoundRecord(
    4, (0, 2), {}, 0.5, None, 1.0, torch.ones(2), 1, {}, False, None, {"x": 1.0}, seconds=3.0, training_seconds=2.0
)


def account(**sums):
    """Another rank that comes to other sums, and took longer."""
    return lambda value: ({**value[0], **sums}, {name: 10 * took for name, took in value[1].items()})


def test_rounds_that_differ_are_named():
    ranks = Says(account(), account())
    agreement = Agreement(ranks)
    assert agreement.compared(RECORD, {"the global parameters": 5}) == RECORD
    sums, times = ranks.said[0]
    assert times == {"seconds": 3.0, "training_seconds": 2.0}
    assert sums["the global parameters"] == 5
    assert {"record.round", "record.client_ids.1", "record.train_loss", "record.scalars.x"} <= sums.keys()
    assert "record.seconds" not in sums
    for name in ("the global parameters", "record.step_norm", "the coefficients of the step"):
        with pytest.raises(RankError, match=f"after round 4, rank 2 must have {name} of rank 0, found others"):
            Agreement(Says(account(), account(**{name: 7}))).compared(RECORD, {"the global parameters": 5})


def test_a_round_has_the_times_of_the_first_rank():
    class Second(Says):
        def gather(self, value):
            return [(value[0], {"seconds": 1.0, "training_seconds": 0.5}), value]

    found = Agreement(Second(same)).compared(RECORD, {})
    assert (found.seconds, found.training_seconds) == (1.0, 0.5)
    assert replace(found, seconds=3.0, training_seconds=2.0) == RECORD


def test_coefficients_are_noted_one_after_the_other_and_for_one_round():
    def noted(*numbers):
        ranks = Says()
        agreement = Agreement(ranks)
        for number in numbers:
            agreement.note(torch.tensor(number))
        agreement.compared(RECORD, {})
        agreement.compared(RECORD, {})
        first, second = (sums["the coefficients of the step"] for sums, _ in ranks.said)
        assert second == 0
        return first

    assert len({noted(1.0), noted(2.0), noted(1.0, 2.0), noted(2.0, 1.0), noted(1.0, 1.0)}) == 5
    assert noted(*[1.5] * 99) != noted(2.5, *[1.5] * 98)
    assert 0 <= noted(*[1.5] * 99) < 2**64


def test_executors_with_processes_of_their_own_are_refused():
    on_ranks.check_executor(Says(same), fl.executors.Sequential())
    with pytest.raises(ValueError, match=r"executor=.*Parallel.* cannot be used with 2 processes"):
        on_ranks.check_executor(Says(same), fl.executors.Parallel(workers=2))


class Whole(FedAvg):
    columnwise = False


class Halves(ClientRule):
    """Has state in columns, and something at clients."""

    columnwise = True
    c = server_state(torch.Tensor, sent="all")
    own = at_clients()


def options_of(algorithm=None, client=None, guards=(), attack=None):
    algorithm = FedAvg() if algorithm is None else algorithm
    return SimpleNamespace(
        algorithm=algorithm, client_rule=client or algorithm.client_rule(), guards=guards, attack=attack
    )


class WholeGuard(fl.guards.NormClipping):
    columnwise = False


class WholeHalf(ClientRule):
    columnwise = False


class WholeAttack(fl.attacks.Attack):
    def conspire(self, updates, dishonest):
        return False


def test_who_needs_whole_rows_is_named():
    assert whole_rows_reason(options_of(FedLF())) is None
    assert whole_rows_reason(options_of(FedLF(), SCAFFOLD().client_rule())) is None, "nothing at clients"
    assert whole_rows_reason(options_of(MOON())) is None, "no columns"
    for options, name in (
        (options_of(Whole()), "Whole"),
        (options_of(client=WholeHalf()), "WholeHalf"),
        (options_of(attack=WholeAttack()), "WholeAttack"),
        (options_of(guards=[fl.guards.NormClipping(1.0), WholeGuard(1.0)]), "WholeGuard"),
    ):
        assert whole_rows_reason(options) == f"{name} does not say that it works on columns (columnwise)"
    assert whole_rows_reason(options_of(client=Halves())) == "Halves has state in columns and clients that keep some"


NOTED = []


def shared(size, **options):
    layout = fl.ParamLayout.from_sizes([30_000])
    binding = SimpleNamespace(theta=torch.zeros(30_000), layout=layout)
    ranks, agreement = Says(*[same] * (size - 1), rank=1), SimpleNamespace(note=NOTED.append)
    return on_ranks.shared_work(ranks, options_of(**options), binding, 5, agreement)


def test_columns_are_divided_where_both_halves_can_do_with_a_share():
    divided = shared(3)
    assert divided.columns.spans == [(0, 8192), (8192, 16384), (16384, 30000)]
    assert (divided.columns.shard, divided.state) == (1, None)
    assert divided.columns.joined(torch.ones(8192)).shape == (3 * 8192,)
    whole = shared(3, algorithm=Whole())
    assert (whole.columns.spans, whole.columns.shard, whole.state) == ([(0, 30000)], 0, None)
    rule = SCAFFOLD().client_rule()
    state = shared(3, client=rule).state
    assert state.server is rule
    assert state.visiting is not rule
    assert state.federation.num_clients == 5
    NOTED.clear()
    for work in (divided, whole):
        work.columns.note(work)
    assert [divided, whole] == NOTED


def said_of(caplog, ranks, sizes, rows=2, algorithm=None, columns=None):
    caplog.clear()
    columns = Columns(Columns.cut(30_000, ranks.size), 0) if columns is None else columns
    found = SimpleNamespace(values=torch.zeros(rows, 10), columns=columns)
    of = type("Rows", (), {"__len__": lambda self: rows, "values": found.values, "columns": columns})()
    with caplog.at_level(logging.INFO):
        on_ranks.say_processes(ranks, options_of(algorithm), sizes, of)
    return caplog.text


def test_processes_say_what_they_can_do(caplog):
    said = said_of(caplog, Says(same, same), [10, 20, 30])
    assert "3 processes on 1 machine: with 2 clients per round, the largest of which trains as long as 30 " in said
    assert "at most 1.3 times as fast as one" in said  # 2 clients of 20 on average, in the time that 30 take
    assert f"Updates take {(2 * 13616 + 30_000) * 4:,} B in each process, which holds a shard" in said
    said = said_of(caplog, Says(same, num_nodes=2), [10], rows=1)
    assert "2 processes on 2 machines: with 1 client per round" in said
    assert "at most 1.0 times" in said
    assert "at most 2.0 times" in said_of(caplog, Says(same), [10, 10], rows=9), "no more than there are processes"
    assert "at most 1.0 times" in said_of(caplog, Says(same), [0, 0])
    assert "at most 1.0 times" in said_of(caplog, Says(same), [10, 30], rows=1), "no slower than one"
    whole = said_of(caplog, Says(same), [10], algorithm=Whole(), columns=Columns((0, 30_000)))
    assert f"{2 * 30_000 * 4:,} B in each process, which holds them whole because Whole does not say" in whole


class Watched(L.Callback):
    pass


def described(**options):
    found = fit(fresh(Classifier, momentum=options.pop("momentum", 0.0)), 1, **options)
    return found.strategy.fit_description, found.trainer


def test_settings_of_a_trainer_are_plain():
    _, trainer = described(gradient_clip_val=0.5, callbacks=[Watched()], momentum=0.5)
    found = on_ranks.trainer_settings(trainer)
    assert (found["gradient_clip_val"], found["max_epochs"]) == (0.5, 1)
    assert "Watched" in found["callbacks"]
    assert found["callbacks"] == sorted(found["callbacks"])
    assert "Classifier" in found["module"]
    assert "SGD" in repr(found["optimizers"])
    groups = found["options of the optimizers"]
    assert "'momentum': 0.5" in groups
    assert "params" not in groups


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (changed(callbacks=[]), "rank 2 differs from rank 0 in callbacks: "),
        (
            changed(method="FedLF with ClientRule"),
            "rank 2 differs from rank 0 in method: FedAvg with ClientRule became",
        ),
        (
            lambda said: {**said, "data": dict.fromkeys(said["data"], 0)},
            r"rank 2 differs from rank 0 in data: .*\. Seed what draws",
        ),
    ],
)
def test_fits_that_differ_are_named(other, words):
    description, trainer = described()
    ranks = Says(same, same)
    check_same_fit(ranks, description, trainer)
    versions = ranks.said[0]["versions"]
    assert {"python", "threads", "kernels", "torch"} <= versions.keys()
    with pytest.raises(ValueError, match=words) as raised:
        check_same_fit(Says(same, other), description, trainer)
    with pytest.raises(ValueError, match="rank 1 differs from rank 0 in local_epochs: 1 became 2"):
        check_same_fit(Says(changed(local_epochs=2)), description, trainer)
    assert ("Seed" in str(raised.value)) == ("data" in words)
