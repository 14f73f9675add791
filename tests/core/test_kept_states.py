# SPDX-License-Identifier: Apache-2.0
"""What a client keeps of its visits: the state of the last one that counted, and no other."""

import pytest
import torch

from fl_lightning.core.storage.files import KeptStates


@pytest.mark.parametrize("in_files", [False, True])
def test_states_of_visits_that_did_not_count_are_gone(in_files, tmp_path):
    kept = KeptStates(5, tmp_path if in_files else None)
    other = KeptStates(6, tmp_path if in_files else None)
    for when in (0, 1, 10, 2, 3):
        kept.put(when, {"value": torch.tensor(when)})
    other.put(2, {"value": torch.tensor(6)})
    assert kept.settle(2) == {"value": torch.tensor(2)}
    assert len(list(tmp_path.rglob("*.pt"))) == 2 * in_files
    assert other.settle(2) == {"value": torch.tensor(6)}
    assert other.settle(None) is None
    for when in (1, 3, 10):
        with pytest.raises(FileNotFoundError, match="what client 5 kept of round"):
            kept.settle(when)
    kept.put(4, {"value": torch.tensor(4)})
    assert kept.settle(None) is None
    assert not list(tmp_path.rglob("*.pt"))


def test_unfinished_files_of_a_killed_process_are_deleted(tmp_path):
    kept = KeptStates(5, tmp_path)
    kept.put(0, {})
    (partial := next(tmp_path.rglob("*.pt")).with_name("round-000001.pt.part")).touch()
    assert kept.settle(0) == {}
    assert not partial.exists()
