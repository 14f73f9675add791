# SPDX-License-Identifier: Apache-2.0
"""Several validation loaders, joined as docs/data.md says, against Lightning's own evaluation of them."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import Classifier, blobs, fresh, quiet_trainer
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import fl_lightning as fl


class OfSeveral(Classifier):
    """Validates on several loaders, as Lightning has it."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


def test_each_part_has_values_of_its_own_under_lightnings_name():
    page = (Path(fl.__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ConcatDataset(parts)" in block
    ]
    sources = [blobs(60, 1).tensors, blobs(25, 2).tensors]
    names = {"torch": torch, "F": F, "TensorDataset": TensorDataset, "ConcatDataset": ConcatDataset, "sources": sources}
    exec(code, names)
    module = fresh(type("Joined", (Classifier,), {"validation_step": names["validation_step"]}))
    data = fl.FederatedDataModule(blobs(90, 0), fl.data.IID(4), val=names["val"], batch_size=10, seed=0)
    strategy = fl.FederatedStrategy()
    (pooled,) = quiet_trainer(strategy).validate(module, data, verbose=False)
    plain = fresh(OfSeveral)
    loaders = [DataLoader(TensorDataset(*tensors), batch_size=10) for tensors in sources]
    expected, others = quiet_trainer("auto").validate(plain, loaders, verbose=False)
    for name, value in (expected | others).items():
        assert pooled[name] == pytest.approx(value, rel=1e-5)
    division, record = data.val_dataloader(), strategy.last_evaluation
    for client in range(4):
        samples = [division.dataset[i] for i in division.indices(client).tolist()]
        for k in (0, 1):
            inputs, targets = (torch.stack([s[place] for s in samples if s[0] == k]) for place in (1, 2))
            loss = F.cross_entropy(plain(inputs), targets).item()
            assert record.values[f"val_loss/dataloader_idx_{k}"][client].item() == pytest.approx(loss, rel=1e-5)
