# SPDX-License-Identifier: Apache-2.0
"""What the page for a hospital's data scientist says: its code runs, and its sites are as they are described."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

import fl_lightning as fl
from fl_lightning.lightning.names import LightningDataModule, LightningModule, Trainer

PAGE = (Path(__file__).parents[2] / "docs" / "hospital.md").read_text(encoding="utf-8")
COMPARISON, FILLED = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


class Scans(Dataset):
    """Three sites, of which Cork has no positives and Delft another scanner; a few values of Delft may be missing."""

    def __init__(self, gaps=0):
        dice = torch.Generator().manual_seed(0)
        self.site = [name for name in ("Bergen", "Cork", "Delft") for _ in range(33)]
        self.labels = (torch.rand(99, generator=dice) < 0.5).long()
        self.labels[33:66] = 0
        self.inputs = torch.randn(99, 4, generator=dice) + self.labels[:, None]
        self.inputs[66:] = 5 - 3 * self.inputs[66:]
        self.inputs[99 - gaps :, 0] = torch.nan

    def __len__(self):
        return len(self.site)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class MyDataModule(LightningDataModule):
    def __init__(self, train_gaps=0, val_gaps=0):
        super().__init__()
        self.gaps = train_gaps, val_gaps

    def train_dataloader(self):
        return DataLoader(Scans(self.gaps[0]), batch_size=32)  # a last batch of one at each site

    def val_dataloader(self):
        return DataLoader(Scans(self.gaps[1]), batch_size=33)


class MyLitModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.auroc, self.accuracy = BinaryAUROC(), BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.binary_cross_entropy_with_logits(self.net(batch[0])[:, 0], batch[1].float())

    def validation_step(self, batch, batch_idx):
        for metric in (self.auroc, self.accuracy):
            metric.update(self.net(batch[0])[:, 0], batch[1])
        self.log("val_auroc", self.auroc)
        self.log("val_acc", self.accuracy)
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluated(data, **options):
    """Every site's values after a round."""
    torch.manual_seed(0)
    strategy = fl.FederatedStrategy(fl.algorithms.FedAvg(), **options)
    trainer = Trainer(max_epochs=1, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(MyLitModule(), fl.FederatedDataModule(data, fl.data.ByKey("site")))
    return strategy.last_evaluation.values, strategy.last_round


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_comparison_runs_and_names_the_site_without_positives(tmp_path, monkeypatch, capsys):
    shorter, count = re.subn("max_epochs=50", "max_epochs=1", COMPARISON)
    assert count == 1
    monkeypatch.chdir(tmp_path)
    names = {"MyLitModule": MyLitModule, "MyDataModule": MyDataModule}
    exec(shorter, names)
    printed = capsys.readouterr().out
    assert "No run has a val_auroc of Cork" in printed
    assert re.search(r"\| Cork +\| - +\| - +\| - +\| not measured +\|", printed)
    audit = fl.audit(names["found"].records, {"client": 0.0, "alone": 1.0}, method="FedBN")
    assert {(one.limit, one.who) for one in audit.broken} == {("client", "Cork"), ("alone", "Cork")}


@pytest.mark.filterwarnings("ignore")
def test_missing_values_stop_training_and_are_quiet_in_validation():
    with pytest.raises(fl.ClientError, match=r"client 2 \('Delft'\) in round 0: its update is not finite"):
        evaluated(MyDataModule(train_gaps=1))
    _, left_out = evaluated(MyDataModule(train_gaps=1), on_client_error="drop")
    assert set(left_out.dropped) == {2}
    (whole, _), (gaps, _) = evaluated(MyDataModule()), evaluated(MyDataModule(val_gaps=9))
    assert bool(gaps["val_loss"].isnan()[2])
    assert bool(gaps["val_auroc"].isfinite()[2])
    assert gaps["val_auroc"][2] != whole["val_auroc"][2]
    assert whole["val_auroc"].isnan().tolist() == [False, True, False]


def test_the_function_that_fills_gaps():
    names = {"torch": torch}
    exec(FILLED, names)
    values, training = torch.tensor([1.0, torch.nan]), torch.tensor([2.0, torch.nan, 3.0, 4.0])
    assert torch.equal(names["filled"](values, training), torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
