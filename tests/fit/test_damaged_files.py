# SPDX-License-Identifier: Apache-2.0
"""Files that were cut short, changed, or could not be written: errors that name the file, the cause and a way on."""

import math
import os
import pickle
import resource
import stat
import zipfile
from functools import partial
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from support import federated_blobs, fresh, training_only

import fl_lightning as fl
from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.at_clients import ClientFiles, ClientStateStore
from fl_lightning.core.storage.files import read_whole, write_whole
from fl_lightning.lightning.checkpoint_io import AtomicCheckpointIO


def resumed(path, rounds=2, module=None):
    module = fresh() if module is None else module
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3, seed=5)
    training_only(strategy, rounds).fit(module, federated_blobs(), ckpt_path=path)
    return module


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one round, and an older one beside it."""
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=3, seed=5)
    trainer = training_only(strategy, 1)
    trainer.fit(fresh(), federated_blobs())
    for name, when in (("older.ckpt", 100), ("newer.ckpt", 200)):
        trainer.save_checkpoint(tmp_path / name)
        os.utime(tmp_path / name, (when, when))
    return tmp_path / "newer.ckpt"


def rewritten(path, change):
    content = torch.load(path, weights_only=True)
    change(content)
    AtomicCheckpointIO().save_checkpoint(content, path)


def spoil_weights(content):
    content["state_dict"]["net.0.weight"][0, 0] = math.nan


DAMAGE = {
    "cut short": (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "is damaged, it is cut short"),
    "empty": (lambda p: p.write_bytes(b""), "is damaged, it is empty"),
    "text": (lambda p: p.write_bytes(b"epoch,step\n1,2\n"), r"is no file of torch.save \("),
    "a flipped bit": (lambda p: flip(p, "net.0.weight"), "is damaged, the checksum of its part .* is wrong"),
    "NaN": (lambda p: rewritten(p, spoil_weights), "holds weights that are not finite, in net.0.weight"),
}


def flip(path, name):
    """Flips the lowest bit of a weight, wherever it lies in the file."""
    content = path.read_bytes()
    weight = torch.load(path, weights_only=True)["state_dict"][name]
    start = content.index(weight.numpy().tobytes())
    path.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_checkpoint_of_no_use_is_refused_with_a_way_on(saved, kind):
    damage, words = DAMAGE[kind]
    damage(saved)
    with pytest.raises(ValueError, match=rf"{saved} {words}.*: fl\.newest_checkpoint\('{saved.parent}'\) finds"):
        resumed(saved)
    os.utime(saved, (200, 200))
    with pytest.warns(UserWarning, match=f"skipping checkpoint {saved}: it"):
        assert fl.newest_checkpoint(saved.parent) == saved.with_name("older.ckpt")
    resumed(saved.with_name("older.ckpt"))


def test_no_flipped_bit_goes_unnoticed_where_it_matters(saved):
    content, load = saved.read_bytes(), AtomicCheckpointIO().load_checkpoint
    if "weights_only" in signature(TorchCheckpointIO.load_checkpoint).parameters:  # since Lightning 2.6
        load = partial(load, weights_only=True)
    expected = repr(load(saved))
    refused, step = 0, max(1, len(content) // 150)
    for place in range(0, len(content), step):
        saved.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        try:
            found = repr(load(saved))
        except ValueError as error:
            assert str(saved) in str(error), place  # noqa: PT017
            refused += 1
        else:
            assert found == expected, f"byte {place} is padding, or the file does not load"
    assert refused > 20


def test_files_written_without_checksums_load(saved):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.load(saved, weights_only=True), saved)
        resumed(saved)
        AtomicCheckpointIO().save_checkpoint({"x": torch.ones(300)}, saved)
    finally:
        torch.serialization.set_crc32_options(True)
    content = bytearray(saved.read_bytes())
    content[content.index(torch.ones(300).numpy().tobytes()) + 9] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        AtomicCheckpointIO().load_checkpoint(saved)


def test_a_fit_does_not_begin_with_weights_that_are_not_finite():
    module = fresh()
    module.net[2].bias.data[1] = math.inf
    with pytest.raises(ValueError, match=r"parameters of Classifier must be finite .* infinity in net\.2\.bias: no cl"):
        resumed(None, module=module)


def test_a_file_without_damage_fails_as_it_does(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(SimpleNamespace(x=1), path)
    with pytest.raises(pickle.UnpicklingError, match="SimpleNamespace"):
        read_whole(path, partial(torch.load, path, weights_only=True), "")


# ---- writing


@pytest.fixture
def no_room():
    """Files cannot grow beyond 10,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


MODEL = Snapshot(torch.ones(20_000), torch.ones(3, dtype=torch.uint8))


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, no_room):
    path = tmp_path / "a.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"x": torch.ones(3)}, path)
    with pytest.raises(OSError, match=rf"File too large; a file of this name is as it was before: make room.*{path}"):
        io.save_checkpoint({"x": torch.ones(20_000)}, path)
    with pytest.raises(OSError, match=r"File too large; no file of this name was made: make room .*round-000003\.pt"):
        ClientFiles(tmp_path / "models").keep(1, MODEL, 3)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["a.ckpt"]
    assert torch.equal(io.load_checkpoint(path)["x"], torch.ones(3))


def test_what_cannot_be_pickled_is_no_full_disk(tmp_path):
    with pytest.raises(Exception, match="pickle") as caught:
        AtomicCheckpointIO().save_checkpoint({"x": lambda: None}, tmp_path / "a.ckpt")
    assert not isinstance(caught.value, OSError)
    assert list(tmp_path.iterdir()) == []


def test_a_file_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch):
    """A rank has an unfinished file of its own, and takes the place of what a killed process has left."""
    seen, flush = [], os.fsync

    def noted(handle):
        seen.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), (tmp_path / "a.pt").exists()))
        flush(handle)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank, name in ((0, "a.pt.part"), (3, "a.pt.3.part")):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        (tmp_path / name).touch(0o644)
        write_whole(tmp_path / "a.pt", rank, private=True)
        assert seen == [(name, False), (tmp_path.name, True)]
        assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
        assert stat.S_IMODE((tmp_path / "a.pt").stat().st_mode) == 0o600
        (tmp_path / "a.pt").unlink()
        seen.clear()


@pytest.mark.parametrize("chosen", [True, False])
def test_whether_others_write_checksums_is_left_to_them(tmp_path, chosen):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(chosen)
    try:
        write_whole(tmp_path / "a.pt", torch.ones(3))
        assert torch.serialization.get_crc32_options() is chosen
    finally:
        torch.serialization.set_crc32_options(before)


# ---- what clients keep


def test_a_damaged_model_of_a_client_is_named(tmp_path):
    files = ClientFiles(tmp_path)
    files.keep(7, MODEL, 3)
    (path,) = tmp_path.rglob("*.pt")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"{path} is damaged, it is cut short: .* a checkpoint of before round 3"):
        files.get(7)


def test_a_damaged_state_of_a_client_is_named(tmp_path):
    store = ClientStateStore(7, tmp_path)
    store.save(3, {"x": torch.ones(100)})
    (path,) = tmp_path.rglob("*.pt")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=rf"{path} is damaged, it is cut short: .*counted=None to let client 7 begin"):
        store.restore(3)


@pytest.fixture
def open_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_what_clients_keep_is_for_its_owner_only(tmp_path, open_umask):
    ClientFiles(tmp_path / "new" / "models").keep(7, MODEL, 3)
    ClientStateStore(7, tmp_path / "kept").save(3, {"x": torch.ones(3)})
    AtomicCheckpointIO().save_checkpoint({"x": 1}, tmp_path / "checkpoints" / "a.ckpt")
    modes = {str(p.relative_to(tmp_path)): stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert modes == {
        "new": 0o700, "new/models": 0o700, "new/models/client-000007": 0o700,
        "new/models/client-000007/round-000003.pt": 0o600,
        "kept": 0o700, "kept/client-000007": 0o700, "kept/client-000007/round-000003.pt": 0o600,
        "checkpoints": 0o755, "checkpoints/a.ckpt": 0o644,
    }  # fmt: skip


def test_a_part_that_is_marked_as_a_folder_is_noticed(saved):
    """No checksum covers the mark, and torch would leave the tensor's memory as it found it."""
    content = bytearray(saved.read_bytes())
    name = next(i.filename for i in zipfile.ZipFile(saved).infolist() if i.filename.endswith("data/0"))
    entry = content.rindex(name.encode()) - 46
    content[entry + 38] |= 0x10
    saved.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{saved} is damaged, its part {name} is marked as a folder"):
        AtomicCheckpointIO().load_checkpoint(saved, weights_only=True)
