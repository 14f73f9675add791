# SPDX-License-Identifier: Apache-2.0
import torch
from fl_lightning.core.storage.numbers import ClientNumbers
from support import reload


def test_numbers_by_client():
    numbers = ClientNumbers()
    assert numbers.mean() == 0
    assert numbers.of([3, 1], 0.5).tolist() == [0.5, 0.5]
    assert len(numbers) == 0, "asking is not setting"
    numbers.set([3, 1], torch.tensor([2.0, 4.0]))
    assert numbers.of([1, 2, 5, 3], torch.tensor([7.0, 8.0, 9.5, 9.0])).tolist() == [4, 8, 9.5, 2]
    assert numbers.mean() == 3
    state = numbers.state_dict()
    numbers.set([3], torch.tensor([0.1], dtype=torch.float64))
    assert state == {3: 2.0, 1: 4.0}
    assert numbers.of([3, 4], 0.3).tolist() == [0.1, 0.3], "of 64 bits"
    other = ClientNumbers()
    other.set([8], torch.tensor([1.0]))
    other.load_state_dict(reload(numbers.state_dict()))
    other.set([1], torch.tensor([5.0]))
    assert other.state_dict() == {3: 0.1, 1: 5.0}
    assert numbers.state_dict() == {3: 0.1, 1: 4.0}
    numbers.clear()
    assert numbers.state_dict() == {}
