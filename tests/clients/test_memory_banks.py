# SPDX-License-Identifier: Apache-2.0
"""Memory banks and their pointers come from one client; averages that move as a whole do not."""

import pytest
import torch
from support import Classifier, blobs, fresh, train

import fl_lightning as fl
from fl_lightning.clients.memory_banks import MemoryBanks, agreed


class Bank(Classifier):
    """A queue of features, as MoCo and its like keep it, with its pointer in one place or another."""

    rows, persistent, in_buffer, columns = 8, True, False, False

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer(
            "bank", torch.zeros(4, self.rows) if self.columns else torch.zeros(self.rows, 4), persistent=self.persistent
        )
        self.at = 0
        if self.in_buffer:
            del self.at
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        bank = self.bank.T if self.columns else self.bank
        SEEN.extend([[]] * (batch_idx == 0))
        SEEN[-1] = [*SEEN[-1], *torch.nn.functional.normalize(batch[0][:, :4])]
        for row in SEEN[-1][-len(batch[0]) :]:
            bank[int(self.at)] = row
            self.at = (self.at + 1) % self.rows
        return super().training_step(batch, batch_idx)


KINDS = {
    "an attribute": {},
    "a buffer": {"in_buffer": True},
    "columns": {"columns": True},
    "not saved": {"persistent": False, "in_buffer": True},
    "large": {"rows": 1000},
    "large, columns, not saved": {"rows": 1000, "columns": True, "persistent": False},
}


SEEN: list[list[torch.Tensor]] = []


@pytest.mark.parametrize("kind", KINDS)
def test_bank_and_pointer_are_those_of_the_largest_client(kind):
    SEEN.clear()
    module = fresh(type("Bank", (Bank,), KINDS[kind]))
    expected, at = torch.zeros(module.rows, 4), 0
    train(
        module,
        2,
        clients_per_round=2,
        data=fl.FederatedDataModule(blobs(60), torch.arange(60).split([23, 37]), batch_size=10),
    )
    for number in (0, 1):
        largest = max(SEEN[2 * number : 2 * number + 2], key=len)
        assert len(largest) == 37
        for row in largest:
            expected[at] = row
            at = (at + 1) % module.rows
    assert int(module.at) == at
    assert torch.equal(module.bank.T if module.columns else module.bank, expected)


class Average(Classifier):
    """Moves as a whole, beside a counter that is no pointer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(40, 12))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.updates += 1
        self.batches += 1
        self.mean.lerp_(batch[0].mean(0), 0.1)
        LEFT[:] = [*LEFT[: len(LEFT) - (batch_idx > 0)], self.mean.clone()]
        return super().training_step(batch, batch_idx)


LEFT: list[torch.Tensor] = []


def test_averages_beside_counters_are_averaged():
    LEFT.clear()
    module = fresh(Average)
    train(
        module,
        1,
        clients_per_round=2,
        data=fl.FederatedDataModule(blobs(60), torch.arange(60).split([23, 37]), batch_size=10),
    )
    sizes = [23, 37] if module.updates == 4 else None
    assert sizes is not None
    expected = {(first * LEFT[0] + (60 - first) * LEFT[1]) / 60 for first in sizes}
    assert any(torch.allclose(module.mean, value) for value in expected)
    assert module.batches == 4


class Rows(torch.nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.register_buffer("bank", torch.zeros(3, 8) if columns else torch.zeros(8, 3))
        self.at = 2


VOTES = {  # rows that were written, where the pointer is then, samples
    "under the pointer": ((2, 3, 4), 5, 3, "yes"),
    "around the end": ((6, 7, 0, 2, 3, 4, 5), 1, 7, "yes"),
    "all, and back": (range(8), 1, 7, "yes"),
    "twice around": (range(8), 5, 19, "perhaps"),
    "all, and a counter": (range(8), 5, 18, "no"),
    "counted on": ((2, 3, 4, 5, 6, 7, 0), 9, 7, "yes"),
    "counted on, elsewhere": ((1,), 9, 7, "no"),
    "elsewhere": ((2, 6), 5, 3, "no"),
    "nothing": ((), 5, 3, None),
    "with a pointer at rest": ((2, 3), 2, 3, None),
}


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("case", VOTES)
def test_what_is_written_where_tells_a_bank(case, columns):
    rows, end, samples, vote = VOTES[case]
    module = Rows(columns)
    before, banks = {"bank": module.bank.clone()}, MemoryBanks(module)
    banks.remember()
    (module.bank.T if columns else module.bank)[list(rows)] = 1.0
    module.at = end
    assert banks.votes(before, samples) == ({} if vote is None else {"bank": vote})


def test_no_client_may_say_no():
    votes = [{"a": "yes", "b": "yes", "c": "perhaps"}, {"a": "no", "b": "perhaps"}, {}]
    assert agreed(votes) == {"b", "c"}
