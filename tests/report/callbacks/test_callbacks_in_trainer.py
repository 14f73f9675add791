# SPDX-License-Identifier: Apache-2.0
"""The monitors in a real Trainer, on a stand-in strategy that makes up its records."""

import pytest
import torch
from callback_fakes import evaluation_record, fake_trainer

from fl_lightning.lightning.names import LightningModule, SingleDeviceStrategy, Trainer, lightning_module
from fl_lightning.report.callbacks import ClientTable, FitRecorder

CSVLogger = lightning_module("loggers").CSVLogger


class StandIn(SingleDeviceStrategy):
    last_round = None
    last_evaluation = None


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        pass

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_validation_epoch_end(self):
        number = self.current_epoch + 1
        self.trainer.strategy.last_evaluation = evaluation_record(number, acc=[0.1 * number, 0.2, 0.3])

    def on_test_epoch_end(self):
        self.trainer.strategy.last_evaluation = evaluation_record(self.current_epoch, stage="test")


def make_trainer(folder, rounds, callbacks, **options):
    return Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        strategy=StandIn(device=torch.device("cpu")),
        logger=CSVLogger(folder, name="run", version=0),
        callbacks=list(callbacks),  # Lightning adds its own to the list
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


def loader():
    return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


def rounds_in(path):
    return sorted({tuple(line.split(",")[:2]) for line in path.read_text().splitlines()[1:]})


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_fit_resume_and_test(tmp_path, capsys):
    trainer = make_trainer(tmp_path, 3, [ClientTable()])
    trainer.fit(Model(), loader(), loader())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    continued = make_trainer(tmp_path, 5, [ClientTable()])
    continued.fit(Model(), loader(), loader(), ckpt_path=tmp_path / "three.ckpt")
    file = tmp_path / "run" / "version_0" / "clients.csv"
    assert rounds_in(file) == [(str(n), "val") for n in range(1, 6)]  # the sanity check left nothing

    # Back to round 3: what the longer run wrote for rounds 4 and 5 belongs to another future.
    make_trainer(tmp_path, 4, [ClientTable()]).fit(Model(), loader(), loader(), ckpt_path=tmp_path / "three.ckpt")
    assert rounds_in(file) == [(str(n), "val") for n in range(1, 5)]

    capsys.readouterr()
    continued.test(Model(), loader(), verbose=False)
    assert "test after 5 rounds: 3 clients" in capsys.readouterr().out
    assert ("5", "test") in rounds_in(file)


def test_second_fit_continues_and_fast_dev_run_writes_nothing(tmp_path):
    file = tmp_path / "out" / "clients.csv"
    trainer, model = make_trainer(tmp_path, 2, [ClientTable(tmp_path / "out")]), Model()
    trainer.fit(model, loader(), loader())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, loader(), loader())
    assert rounds_in(file) == [(str(n), "val") for n in range(1, 5)]
    before = file.read_bytes()
    dry = make_trainer(tmp_path, 2, [ClientTable(tmp_path / "out"), ClientTable()], fast_dev_run=True)
    dry.fit(Model(), loader(), loader())
    assert file.read_bytes() == before


@pytest.mark.parametrize("make", [FitRecorder, ClientTable])
def test_other_strategies_are_refused_before_anything_runs(make):
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[make()])
    message = (
        rf"{make.__name__} needs Trainer\(strategy=FederatedStrategy\(...\)\), found strategy SingleDeviceStrategy"
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(Model(), loader())
    make().setup(fake_trainer(), None, "fit")
