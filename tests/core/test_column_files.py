# SPDX-License-Identifier: Apache-2.0
"""What processes hold in columns comes back from files, for any number of processes."""

import shutil
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fl_lightning.core.columns import Columns
from fl_lightning.core.storage.column_files import (
    SECTION,
    ColumnPart,
    StoredColumns,
    copy_columns,
    drop_columns,
    for_columns,
    in_columns,
    joined,
    taken_out,
    with_stored,
    write_part,
)
from fl_lightning.lightning.checkpoint_io import STATE_KEY, AtomicCheckpointIO, newest_checkpoint
from fl_lightning.lightning.last_checkpoint import complete_last_checkpoints

TOTAL = 50_000
NAMES = ("momentum", "history.rows", "counts")


def state():
    generator = torch.Generator().manual_seed(0)
    return {
        "momentum": torch.randn(TOTAL, generator=generator, dtype=torch.float64),
        "history": {"rows": torch.randn(3, TOTAL, generator=generator), "gram": torch.eye(3)},
        "counts": {4: torch.arange(TOTAL).to(torch.uint8), 7: torch.ones(TOTAL, dtype=torch.uint8)},
        "empty": {},
        "round": 5,
    }


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    return torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, torch.Tensor) else one == two


def shares(number):
    return [Columns(Columns.cut(TOTAL, number), share) for share in range(number)]


def written(path, number):
    """The state, saved by so many processes."""
    for columns in shares(number):
        mine = for_columns(state(), NAMES, columns)
        marked, parts = taken_out(in_columns(mine, NAMES, columns))
        if parts:
            marked[SECTION] = write_part(path, "abc", parts)
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "callbacks": {STATE_KEY: marked}}, path)


def read(path, columns):
    loaded = torch.load(path, weights_only=True)["callbacks"][STATE_KEY]
    return for_columns(with_stored(loaded, path), NAMES, columns)


@pytest.mark.parametrize("before", [1, 2, 3, 9])
@pytest.mark.parametrize("after", [1, 2, 9])
def test_any_number_of_processes_reads_what_any_number_has_written(tmp_path, before, after):
    path = tmp_path / "a.ckpt"
    written(path, before)
    assert len(list(tmp_path.glob("a.ckpt.columns-abc/*.pt"))) == (0 if before == 1 else min(before, 7))
    section = {"token": "abc", "borders": Columns.cut(TOTAL, before)}
    assert before == 1 or sorted(StoredColumns.listed(path, section)) == sorted(
        tmp_path.glob("a.ckpt.columns-abc/*.pt")
    )
    for columns in shares(after):  # of seven slices, so that some of nine hold nothing
        assert same(read(path, columns), for_columns(state(), NAMES, columns))


def test_the_checkpoint_itself_holds_the_rest(tmp_path):
    written(tmp_path / "a.ckpt", 3)
    assert (tmp_path / "a.ckpt").stat().st_size < 20_000
    files = sorted(path.stat().st_size for path in tmp_path.glob("a.ckpt.columns-abc/*"))
    assert sum(files) < TOTAL * (8 + 3 * 4 + 2) * 1.1, "a share is saved without the rest of its rows"


def test_a_state_can_be_joined_without_files():
    meeting, slots = Barrier(2), [None, None]

    def gather(share):
        def exchange(mine, sizes):
            slots[share] = mine
            meeting.wait(20)
            found = list(slots)
            meeting.wait(20)
            return found

        return exchange

    def work(share):
        columns = Columns(Columns.cut(TOTAL, 2), share, gather(share))
        return joined(in_columns(for_columns(state(), NAMES, columns), NAMES, columns))

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, range(2)):
            assert same(found, state())


def test_missing_and_damaged_files_are_named(tmp_path):
    path = tmp_path / "a.ckpt"
    written(path, 3)
    file = sorted(tmp_path.glob("a.ckpt.columns-abc/*"))[1]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file.name} is damaged"):
        read(path, Columns.whole(TOTAL))
    with pytest.warns(UserWarning, match="is damaged"):
        assert newest_checkpoint(tmp_path) is None
    file.unlink()
    with pytest.raises(
        ValueError, match=r"needs what several processes have saved beside it, found no .*keep the folder"
    ):
        read(path, Columns.whole(TOTAL))
    with pytest.warns(UserWarning, match="keep the folder"):
        assert newest_checkpoint(tmp_path) is None


def test_newest_checkpoint_takes_one_with_its_columns(tmp_path):
    written(tmp_path / "a.ckpt", 3)
    assert newest_checkpoint(tmp_path) == tmp_path / "a.ckpt"


def test_files_go_and_come_with_their_checkpoint(tmp_path):
    path, other = tmp_path / "round=[1].ckpt", tmp_path / "last.ckpt"
    written(path, 2)
    copy_columns(path, other)
    shutil.copy(path, other)
    AtomicCheckpointIO().remove_checkpoint(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "last.ckpt.columns-abc"]
    assert same(read(other, Columns.whole(TOTAL)), state())
    drop_columns(other, keep=["abc"])
    assert StoredColumns(other, {"token": "abc", "borders": Columns.cut(TOTAL, 2)}).files
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, other)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_last_checkpoint_that_is_brought_up_to_date_keeps_no_older_files(tmp_path):
    newest, last = tmp_path / "newest.ckpt", tmp_path / "last.ckpt"
    written(newest, 2)

    old = tmp_path / "last.ckpt.columns-old"
    old.mkdir()
    callback = ModelCheckpoint(tmp_path, save_last=True)
    complete_last_checkpoints(SimpleNamespace(ckpt_path=newest, checkpoint_callbacks=[callback]))
    assert last.exists()
    assert sorted(path.name for path in tmp_path.glob("last.ckpt.columns-*")) == ["last.ckpt.columns-abc"]


def test_a_fit_goes_on_from_its_own_columns():
    for columns in shares(3):
        mine = for_columns(state(), NAMES, columns)
        marked = in_columns(mine, NAMES, columns)
        assert isinstance(marked["momentum"], ColumnPart)
        assert same(for_columns(marked, NAMES, columns), mine)
