# SPDX-License-Identifier: Apache-2.0
"""The state of a client between visits: that of the last one that counted, and no other."""

import pytest
import torch

from fl_lightning.core.storage.at_clients import ClientStateStore


@pytest.mark.parametrize("in_files", [False, True])
def test_states_of_visits_that_did_not_count_are_gone(in_files, tmp_path):
    store = ClientStateStore(5, tmp_path if in_files else None)
    other = ClientStateStore(6, tmp_path if in_files else None)
    for when in (0, 1, 10, 2, 3):
        store.save(when, {"value": torch.tensor(when)})
    other.save(2, {"value": torch.tensor(6)})
    assert store.restore(2) == {"value": torch.tensor(2)}
    assert len(list(tmp_path.rglob("*.pt"))) == 2 * in_files
    assert other.restore(2) == {"value": torch.tensor(6)}
    assert other.restore(None) is None
    for when in (1, 3, 10):
        with pytest.raises(FileNotFoundError, match="the state of client 5 after round"):
            store.restore(when)
    store.save(4, {"value": torch.tensor(4)})
    assert store.restore(None) is None
    assert not list(tmp_path.rglob("*.pt"))


def test_unfinished_files_of_a_killed_process_are_deleted(tmp_path):
    store = ClientStateStore(5, tmp_path)
    store.save(0, {})
    (partial := next(tmp_path.rglob("*.pt")).with_name("round-000001.pt.part")).touch()
    assert store.restore(0) == {}
    assert not partial.exists()
