# SPDX-License-Identifier: Apache-2.0
import csv
import math
from types import SimpleNamespace

import pytest
from callback_fakes import evaluation_record, fake_trainer, validate
from lightning.pytorch.loggers import CSVLogger
from support import federated_blobs, fresh, quiet_trainer

import fl_lightning as fl
from fl_lightning.lightning.names import TrainerFn
from fl_lightning.report.callbacks import ClientTable, format_client_table


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def keys(path):
    return [(int(r["round"]), r["stage"]) for r in rows(path)[::6]]  # three clients, two metrics


def table_of(folder, rounds, **trainer_fields):
    table, trainer = ClientTable(folder), fake_trainer(**trainer_fields)
    table.on_fit_start(trainer, None)
    for number in rounds:
        validate(table, trainer, evaluation_record(number))
    return table, trainer


def run_test(table, number):
    trainer = fake_trainer(state=SimpleNamespace(fn=TrainerFn.TESTING))
    trainer.strategy.last_evaluation = evaluation_record(number, stage="test")
    table.on_test_end(trainer, None)
    return trainer


def test_file_has_a_row_per_client_and_metric_with_all_digits(tmp_path):
    table, trainer = ClientTable(tmp_path / "new" / "folder"), fake_trainer()
    record = evaluation_record(7, ids=(4, 9), sizes=(3, 5), acc=[1 / 3, float("nan")], loss=[1e-17, 2.0])
    validate(table, trainer, record)
    text = (tmp_path / "new" / "folder" / "clients.csv").read_text().splitlines()
    assert text == [
        "round,stage,client,samples,metric,value,name",
        f"7,val,4,3,acc,{1 / 3!r},4",
        "7,val,9,5,acc,nan,9",
        "7,val,4,3,loss,1e-17,4",
        "7,val,9,5,loss,2.0,9",
    ]
    assert float(text[1].split(",")[5]) == 1 / 3


def test_rounds_append_and_a_test_adds_rows_and_prints(tmp_path):
    table, _ = table_of(tmp_path, [1, 2, 3])
    trainer = run_test(table, 3)
    assert keys(tmp_path / "clients.csv") == [(1, "val"), (2, "val"), (3, "val"), (3, "test")]
    assert len(trainer.printed) == 1
    assert "worst client" in trainer.printed[0]
    run_test(table, 3)
    assert len(rows(tmp_path / "clients.csv")) == 24  # a repeated test replaces its rows


def test_resume_drops_the_rows_of_later_rounds_and_a_row_cut_short(tmp_path):
    table, _ = table_of(tmp_path, [1, 2, 3, 4])
    run_test(table, 2)
    run_test(table, 4)
    with (tmp_path / "clients.csv").open("a") as file:
        file.write("5,val,0,1")
    table_of(tmp_path, [3, 4, 5], ckpt_path="round2.ckpt", current_epoch=2)
    assert keys(tmp_path / "clients.csv") == [(1, "val"), (2, "val"), (2, "test"), (3, "val"), (4, "val"), (5, "val")]
    assert len(rows(tmp_path / "clients.csv")) == 36
    assert [path.name for path in tmp_path.iterdir()] == ["clients.csv"]


def test_a_fresh_fit_keeps_only_the_untrained_model(tmp_path):
    trainer = fake_trainer(state=SimpleNamespace(fn=TrainerFn.VALIDATING))
    table, _ = table_of(tmp_path, [1, 2, 3])
    validate(table, trainer, evaluation_record(0))
    table.on_fit_start(fake_trainer(), None)
    assert len(rows(tmp_path / "clients.csv")) == 24  # nothing is lost before something replaces it
    validate(table, fake_trainer(), evaluation_record(5))
    assert keys(tmp_path / "clients.csv") == [(0, "val"), (5, "val")]


def test_a_continued_fit_keeps_earlier_rounds(tmp_path):
    table, trainer = table_of(tmp_path, [1, 2])
    trainer.current_epoch = 2
    table.on_fit_start(trainer, None)
    validate(table, trainer, evaluation_record(3))
    validate(table, trainer, evaluation_record(3))  # a second validation within the round
    assert keys(tmp_path / "clients.csv") == [(1, "val"), (2, "val"), (3, "val")]


def test_where_the_file_goes(tmp_path):
    logged = fake_trainer(loggers=[object()], log_dir=str(tmp_path / "logs"))
    validate(ClientTable(), logged, evaluation_record(1))
    assert (tmp_path / "logs" / "clients.csv").exists()
    validate(ClientTable(), fake_trainer(log_dir=str(tmp_path / "default_root")), evaluation_record(1))  # no logger
    validate(ClientTable(), fake_trainer(loggers=[object()]), evaluation_record(1))  # a logger without a folder
    for trainer in (
        fake_trainer(fast_dev_run=True),
        fake_trainer(is_global_zero=False),
        fake_trainer(sanity_checking=True),
    ):
        validate(ClientTable(tmp_path / "skipped"), trainer, evaluation_record(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def fitted(rounds, table, path=None, **options):
    """A trainer after a fit."""
    trainer = quiet_trainer(fl.FederatedStrategy(), rounds, callbacks=[table], num_sanity_val_steps=1, **options)
    trainer.fit(fresh(), federated_blobs(3, train=60), ckpt_path=path)
    return trainer


def test_real_fits_resume_go_on_and_are_tested(tmp_path, capsys):
    logger, file = CSVLogger(tmp_path, name="run", version=0), tmp_path / "run" / "version_0" / "clients.csv"
    fitted(2, ClientTable(), logger=logger).save_checkpoint(tmp_path / "two.ckpt")
    trainer = fitted(4, ClientTable(), tmp_path / "two.ckpt", logger=logger)
    assert keys(file) == [(n, "val") for n in (1, 2, 3, 4)]  # the sanity check left nothing
    # Back to round 2: what the longer run wrote for rounds 3 and 4 belongs to another future.
    fitted(3, ClientTable(), tmp_path / "two.ckpt", logger=logger)
    assert keys(file) == [(n, "val") for n in (1, 2, 3)]
    trainer.fit_loop.max_epochs = 5
    trainer.fit(fresh(), federated_blobs(3, train=60))
    assert keys(file) == [(n, "val") for n in (1, 2, 3, 5)]
    trainer.test(fresh(), federated_blobs(3, train=60), verbose=False)
    assert "test after 5 rounds: 3 clients" in capsys.readouterr().out
    before = file.read_bytes()
    fitted(2, ClientTable(file.parent), fast_dev_run=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("make", [fl.callbacks.FitRecorder, ClientTable])
def test_other_strategies_are_refused_before_anything_runs(make):
    make().setup(fake_trainer(), None, "fit")
    message = (
        rf"{make.__name__} needs Trainer\(strategy=FederatedStrategy\(...\)\), found strategy SingleDeviceStrategy"
    )
    with pytest.raises(ValueError, match=message):
        quiet_trainer("auto", callbacks=[make()]).fit(fresh(), federated_blobs(3))


def test_a_foreign_file_is_not_touched(tmp_path):
    path = tmp_path / "clients.csv"
    path.write_text("name,address\nsomebody,somewhere\n")
    with pytest.raises(ValueError, match=r"must have the columns round,stage,.*, found name,address"):
        table_of(tmp_path, [1])
    assert path.read_text() == "name,address\nsomebody,somewhere\n"
    assert [p.name for p in tmp_path.iterdir()] == ["clients.csv"]


def test_table_of_few_clients():
    assert format_client_table(evaluation_record(3, stage="test")).splitlines() == [
        "test after 3 rounds: 3 clients",
        "client         samples  test_acc  test_loss",
        "-------------------------------------------",
        "0                   10    0.5000     1.5000",
        "1                   20    0.7500     1.0000",
        "2                   30    1.0000     0.2500",
        "-------------------------------------------",
        "mean                      0.7500     0.9167",
        "weighted mean             0.8333     0.7083",
        "std                       0.2041     0.5137",
        "angle (rad)               0.2657          -",
        "worst client              0.5000     1.5000",
        "best client               1.0000     0.2500",
    ]


def test_few_samples_are_noted():
    sizes, accuracy = [1, 40, 9, *[10] * 21], [1.0, 0.5, 0.2, *[0.6] * 21]
    text = format_client_table(evaluation_record(1, ids=range(24), sizes=sizes, acc=accuracy)).splitlines()
    summary = {line[:13].strip(): line.split()[-1] for line in text[28:-1]}
    assert [summary[name] for name in ("best client", "best 10 %", "worst client", "worst 10 %", "mean")] == [
        "1.0000", "0.8000", "0.2000", "0.3500", "0.5958",
    ]  # fmt: skip
    assert text[-1] == "fewer than 10 samples: 0 (1), 2 (9). The best and the worst may be theirs by chance"
    many = format_client_table(evaluation_record(1, ids=range(24), sizes=[3] * 24, acc=accuracy)).splitlines()[-1]
    assert "8 (3), 9 (3) and 14 more. The" in many


@pytest.mark.parametrize("clients", [1, 14, 15, 29, 30])
def test_rows_of_the_summary_differ(clients):
    """No two rows are the same number by their definition: how many values, of all distinct ones, a row rests on."""
    record = evaluation_record(1, ids=range(clients), sizes=[20] * clients, acc=[k / 64 for k in range(clients)])
    rows = format_client_table(record).splitlines()[-8:]
    found = {row[:13].strip(): row.split()[-1] for row in rows if row.startswith(("worst", "best", "min", "max"))}
    assert ("worst 10 %" in found, "min" in found) == (clients >= 15, clients >= 30)
    assert len(set(found.values())) == (len(found) if clients > 1 else 1)


def listed(text):
    lines = text.splitlines()
    marks = [i for i, line in enumerate(lines) if set(line) == {"-"}]
    return [line.split()[0] for line in lines[marks[0] + 1 : marks[1]]]


def test_table_of_many_clients_shows_both_ends():
    n = 60
    accuracy = [((i * 7) % n) / n for i in range(n)]  # distinct values in a scrambled order
    accuracy[11] = math.nan
    order = sorted((a, i) for i, a in enumerate(accuracy) if not math.isnan(a))
    names = [str(100 + i) for _, i in order]
    record = evaluation_record(1, ids=range(100, 100 + n), sizes=[5] * n, loss=[0.0] * n, acc=accuracy)
    text = format_client_table(record)
    assert listed(text) == [*names[:10], "...", *names[-10:]]
    assert text.splitlines()[0] == "val after 1 round: 60 clients, the worst and the best by acc"
    own = evaluation_record(1, ids=range(n), sizes=[5] * n, acc=accuracy, **{"personal/acc": [k / n for k in range(n)]})
    assert listed(format_client_table(own)) == [*map(str, range(10)), "...", *map(str, range(50, 60))]


def test_table_orders_a_loss_from_the_highest():
    record = evaluation_record(1, ids=range(50), sizes=[1] * 50, loss=[float(i) for i in range(50)])
    assert listed(format_client_table(record))[:2] == ["49", "48"]


def test_table_edge_cases():
    empty = evaluation_record(1, ids=(), sizes=(), acc=[])
    assert format_client_table(empty) == "val after 1 round: 0 clients, no values"
    huge = evaluation_record(1, ids=(0,), sizes=(1,), acc=[123456.0])
    assert "1.235e+05" in format_client_table(huge)
    few_values = [math.nan] * 48 + [0.5, 0.25]
    sparse = evaluation_record(1, ids=range(50), sizes=[1] * 50, acc=few_values)
    assert listed(format_client_table(sparse)) == ["49", "48"]
