# SPDX-License-Identifier: Apache-2.0
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on a loaded two-core machine run several times slower than one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Lightning writes logs and checkpoints into the working directory."""
    monkeypatch.chdir(tmp_path)
