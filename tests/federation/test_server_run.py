# SPDX-License-Identifier: Apache-2.0
"""What a server's run writes down, shows and saves, without a transport, is what a fit does; answers come by hand."""

import logging
from math import nan

import pytest
import torch
from by_hand import WithTests
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from resuming import Rows
from support import Classifier, federated_blobs, fit, fresh
from test_federated_server import federation

from fl_lightning.algorithms import AFL, FedAvg, FedLF
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.federation.server_run import ServerRun, ServerTrainer, joined
from fl_lightning.report.callbacks import ClientTable, FitRecorder
from fl_lightning.report.callbacks.client_table import format_client_table

ROUNDS = 2
ORDER = (2, 0, 3, 1)


class Watches(FitRecorder):
    """Notes which hooks are called, and when."""

    def __init__(self):
        super().__init__()
        self.told = []


def _noting(name):
    def hook(self, trainer, module, *args):
        assert module is trainer.model
        self.told.append((name, *args, trainer.current_epoch, trainer.state.fn.value))
        getattr(FitRecorder, name)(self, trainer, module, *args)

    return hook


HOOKS = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_end",
    "on_test_end", "on_train_end", "on_fit_end", "on_exception",
)  # fmt: skip
for _name in HOOKS:
    setattr(Watches, _name, _noting(_name))


class Finalized(Rows):
    """Notes how it ends, and how often it was saved."""

    def __init__(self):
        super().__init__()
        self.ends, self.saves = [], 0

    def finalize(self, status):
        self.ends.append(status)

    def save(self):
        self.saves += 1


def begun(folder, rounds=ROUNDS, method=FedLF, loggers=(), callbacks=(), **options):
    """A run and its federation."""
    apart = federation(method, WithTests, rounds=rounds, clients_per_round=4, **options)
    return ServerRun(apart.server, folder, loggers, callbacks), apart


def evaluated(run, apart, stage):
    message, clients = apart.server.evaluation_message, apart.clients
    return run.evaluated([clients[k].evaluate(message(k), stage) for k in ORDER], stage, apart.server.round)


def finished(folder, rounds=ROUNDS, **options):
    """All rounds, each with a validation, then a test; what the checkpoint held, the run and the last records."""
    run, apart = begun(folder, rounds, **options)
    server = apart.server
    extra = run.resume()
    with run.running():
        while server.round < rounds:
            run.closed(apart.round())
            run.save({"rounds": server.round})
            validated = evaluated(run, apart, "val")
        tested = evaluated(run, apart, "test")
    return extra, run, (validated, tested)


def logged(rows):
    """By name and step, the numbers that this package logs."""
    return {
        (name, step): value
        for step, numbers in rows
        for name, value in numbers.items()
        if name.startswith("fed/") and "second" not in name
    }


@pytest.mark.parametrize("by_name", [False, True])
def test_logs_records_and_tables_are_those_of_a_fit(tmp_path, caplog, by_name):
    options = {"fairness_metric": "val_acc", "log_client_names": by_name}
    rows, callbacks = Finalized(), [FitRecorder(), ClientTable(tmp_path / "ours")]
    with caplog.at_level(logging.INFO):
        _, run, (validated, tested) = finished(tmp_path, loggers=[rows], callbacks=callbacks, **options)
    said = caplog.text
    theirs, watched = Rows(), [FitRecorder(), ClientTable(tmp_path / "theirs")]
    inside = fit(
        fresh(), ROUNDS, data=federated_blobs(4), algorithm=FedLF(), clients_per_round=4, logger=theirs,
        callbacks=watched, **options,
    )  # fmt: skip
    last = inside.strategy.last_evaluation
    assert (validated.modes, validated.client_ids, validated.round) == (last.modes, last.client_ids, last.round)
    inside.trainer.test(inside.module, federated_blobs(4), verbose=False)
    of_fit = {key: value for key, value in logged(theirs.rows).items() if "test" not in key[0]}
    of_run = {key: value for key, value in logged(rows.rows).items() if "test" not in key[0]}
    assert of_run == pytest.approx(of_fit)  # Lightning keeps 32 bits of what a fit logs
    assert {numbers["epoch"] for step, numbers in rows.rows if step == 3} == {0}
    assert (rows.ends, rows.saves) == (["success"], len(rows.rows))
    tables = [(tmp_path / name / "clients.csv").read_text() for name in ("ours", "theirs")]
    assert tables[0] == tables[1]
    assert format_client_table(tested) in said
    ours, other = (found[0].record for found in (callbacks, watched))
    for name in (
        "method", "status", "planned_rounds", "seed", "client_names", "client_sizes", "learning_rate",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(other, name), name
    assert (ours.rounds.conflicts, ours.rounds.round) == (other.rounds.conflicts, other.rounds.round)
    assert ours.memory == dict(run.trainer.memory_plan) != {}
    ours, other = ({m.metric: m for m in found.metrics} for found in (ours, other))
    assert ours == other


def test_callbacks_hear_of_all_that_happens(tmp_path):
    watches = Watches()
    finished(tmp_path, 1, callbacks=[watches])
    assert watches.told == [
        ("setup", "fit", 0, "fit"), ("on_fit_start", 0, "fit"), ("on_train_start", 0, "fit"),
        ("on_train_epoch_start", 1, "fit"), ("on_train_epoch_end", 1, "fit"), ("on_validation_end", 1, "fit"),
        ("on_test_end", 1, "test"), ("on_train_end", 1, "fit"), ("on_fit_end", 1, "fit"),
    ]  # fmt: skip
    assert watches.record.status == "finished"


def test_a_run_that_ends_before_its_time_says_so(tmp_path):
    watches, rows, error = Watches(), Finalized(), KeyError("x")
    run, _ = begun(tmp_path, callbacks=[watches], loggers=[rows])
    with pytest.raises(KeyError), run.running():
        raise error
    assert watches.told[-1] == ("on_exception", error, 0, "fit")
    assert watches.record.status == "interrupted"
    assert rows.ends == ["failed"]


def test_a_run_goes_on_with_its_records_and_what_else_was_saved(tmp_path, caplog):
    one, whole = [FitRecorder(), ClientTable(tmp_path / "one")], [FitRecorder(), ClientTable(tmp_path / "whole")]
    assert finished(tmp_path / "one", 1, callbacks=one)[0] is None
    one = [FitRecorder(), ClientTable(tmp_path / "one")]
    with caplog.at_level(logging.INFO):
        extra, run, _ = finished(tmp_path / "one", 3, callbacks=one)
    assert extra == {"rounds": 1}
    assert (run.path, run.trainer.ckpt_path) == (tmp_path / "one" / "last.ckpt", str(tmp_path / "one" / "last.ckpt"))
    assert f"goes on from {run.path}: 1 of 3 rounds are done" in caplog.text
    _, other, _ = finished(tmp_path / "whole", 3, callbacks=whole)
    assert one[0].record.rounds.round == (0, 1, 2)
    assert one[0].record.rounds.conflicts == whole[0].record.rounds.conflicts
    tables = [(tmp_path / name / "clients.csv").read_text() for name in ("one", "whole")]
    assert tables[0].replace("1,test", "") != tables[1]
    same = zip(run.trainer.model.parameters(), other.trainer.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)


def test_a_run_goes_on_with_other_callbacks(tmp_path):
    """Each gets what one of its kind has kept; one that is new begins."""
    finished(tmp_path, 1, callbacks=[ClientTable(tmp_path / "a"), FitRecorder()])
    recorder, other, given = FitRecorder(), FitRecorder(), []
    recorder.load_state_dict = given.append
    finished(tmp_path, 2, callbacks=[recorder, other, ClientTable(tmp_path / "b")])
    assert given == [], "a table is no recorder"
    assert recorder.record.rounds.round == (1,)
    assert other.record.rounds.round == (0, 1)


def test_a_checkpoint_is_one_of_lightning(tmp_path):
    _, run, _ = finished(tmp_path, 2, method=AFL)
    loaded = Classifier.load_from_checkpoint(run.path)
    assert torch.load(run.path, weights_only=True)["pytorch-lightning_version"]
    same = zip(loaded.parameters(), run.trainer.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)


@pytest.mark.filterwarnings("ignore:client . is left out", "ignore:round 1 had 2")
def test_a_round_is_told_in_a_line(tmp_path, caplog):
    shown = {"fairness_metric": "val_acc", "fairness_mode": {"val_loss": "max"}}  # so that the loss has an angle, too
    run, apart = begun(tmp_path, method=FedAvg, min_clients=3, **shown)
    with caplog.at_level(logging.INFO):
        run.closed(apart.round(lost=[1]))
        numbers = evaluated(run, apart, "val").summary("val_acc")
        run.closed(apart.round(lost=[1, 2]))
    lines = [record.getMessage() for record in caplog.records]
    told = apart.server.last_round
    first, values, second = (line for line in lines if line.startswith(("round", "evaluation")))
    assert first.startswith("round 0 (1 of 2): 3 clients, without client 1 (lost on the way); training loss ")
    assert " in conflict with the step; " in first
    assert first.endswith(" s on the server")
    mean, worst, angle = (float(numbers[name]) for name in ("mean", "worst_10", "angle"))
    assert values == (
        f"evaluation after 1 round: 4 clients; val_acc mean {mean:.4g}, worst 10 % {worst:.4g}; "
        f"fairness angle {angle:.3f}"
    )
    assert second.startswith(f"round 1 (2 of 2) changed nothing: {told.skipped} (")


class Parting(FedAvg):
    """Has something to say when all is over."""

    def end_fit(self):
        return "that was it"


def test_a_test_is_told_in_a_line_and_a_table(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _, _, (_, tested) = finished(tmp_path, 2, method=Parting)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said if " after " in line and "clients;" in line] == [
        "evaluation after 1 round",
        "evaluation after 2 rounds",
        "test after 2 rounds",
    ]
    assert said.count(format_client_table(tested)) == 1
    assert len([line for line in said if "\n" in line]) == 1, "nobody asked for a table of validations"
    assert said[-1] == "that was it"


def found(client, round_index=1, sizes=5, modes=None, undefined=None, one_class=None, **values):
    values = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
    told = undefined or {}, modes or {}, ("x",), one_class or {}
    return EvaluationRecord(round_index, "val", (client,), torch.tensor([sizes]), values, *told)


def test_records_of_clients_are_joined():
    names = ("a", "b", "c", "d")
    assert joined([], "val", 1, names) is None
    record = joined(
        [
            found(3, sizes=7, acc=0.5, auc=0.25, modes={"acc": "min"}, undefined={"auc": {3: "one class"}}),
            found(0, sizes=9, acc=0.75, modes={"acc": "max"}, one_class={"acc": (0,)}),
            found(2, sizes=4, acc=1.0, modes={"acc": "max"}),
        ],
        "test", 6, names,
    )  # fmt: skip
    assert record.one_class == {"acc": (0,)}
    assert (record.round, record.stage) == (6, "test")
    assert (record.client_ids, record.client_names) == ((0, 2, 3), ("a", "c", "d"))
    assert record.sizes.tolist() == [9, 4, 7]
    assert record.values["acc"].tolist() == [0.75, 1.0, 0.5]
    torch.testing.assert_close(
        record.values["auc"], torch.tensor([nan, nan, 0.25], dtype=torch.float64), equal_nan=True
    )
    assert record.undefined == {"auc": {3: "one class"}}
    assert record.modes == {"acc": "max"}


def test_nothing_is_logged_where_nobody_has_evaluated(tmp_path):
    rows = Rows()
    run, apart = begun(tmp_path, loggers=[rows])
    assert run.evaluated([], "val", apart.server.round) is None
    assert rows.rows == []
    assert run.trainer.last_evaluation is None


def test_what_callbacks_read_of_the_server_s_trainer(tmp_path):
    class Elsewhere(Rows):
        log_dir, save_dir = None, "there"

    run, apart = begun(tmp_path, 7, loggers=[CSVLogger(tmp_path / "logs", "run", 0), Rows()])
    trainer, server = run.trainer, apart.server
    assert trainer.log_dir == str(tmp_path / "logs" / "run" / "version_0")
    assert ServerTrainer(server, [Elsewhere()], [], tmp_path).log_dir == "there"
    assert ServerTrainer(server, [], [], tmp_path).log_dir is None
    assert (trainer.max_epochs, trainer.default_root_dir, trainer.optimizers) == (7, str(tmp_path), [])
    assert trainer.root_device == torch.device("cpu")
    apart.round()
    assert trainer.optimizers[0].param_groups == [{"lr": server.learning_rate}]
    assert trainer.train_dataloader.loaders.names == ("0", "1", "2", "3")
    assert trainer.train_dataloader.loaders.sizes.tolist() == federated_blobs(4).train_dataloader().sizes.tolist()


def test_callbacks_that_need_a_trainer_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"callbacks must read records .*found EarlyStopping"):
        begun(tmp_path, callbacks=[FitRecorder(), EarlyStopping("val_loss")])
