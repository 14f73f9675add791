# SPDX-License-Identifier: Apache-2.0
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A process that has used a GPU cannot be copied, as tests of worker processes do. So the suite sees a GPU only where
# it is asked to: benchmarks/gpu.sh runs the tests that need one.
if os.environ.get("FL_LIGHTNING_TEST_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import functools
import gc
import importlib.metadata
import logging
from contextlib import ExitStack
from pathlib import Path

import pytest
from copies import interpreters

# Every Trainer asks for plug-ins, and reads what all installed packages say of themselves. Lightning comes later.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
INTERPRETERS = {}
SPARE: list[Path] = []  # the working directory of the last test that left nothing in it

# `make quick` runs the tests of these rooms, all but those marked fit, process or slow.
QUICK = {"algorithms", "core", "data", "lightning", "metrics", "ops"}


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Nothing that is there once all tests are known goes away: the collector of garbage need not look at it again."""
    gc.disable()
    if hasattr(session.config, "workerinput") or session.config.getoption("dist", "no") == "no":
        copy_before_imports(session.config)
    found = yield
    gc.freeze()
    gc.enable()
    return found


def copy_before_imports(config):
    """Only processes that run tests import torch: the one that divides them among workers need not."""
    copied = ExitStack()
    config.add_cleanup(copied.close)
    import torchmetrics  # noqa: F401

    INTERPRETERS["interpreter"] = copied.enter_context(interpreters())
    import lightning.pytorch  # noqa: F401

    INTERPRETERS["interpreter_with_lightning"] = copied.enter_context(interpreters())


@pytest.fixture(autouse=True, scope="session")
def set_torch():
    import torch

    # Some warnings of torch come once in a process: an error in whichever test is the first. They come every time here.
    torch.set_warn_always(True)
    # The first backward pass of a process decides whether autograd starts threads, which copies of the process cannot
    # have. It does for tensors without memory, as opcheck and torch.compile make them, so it is one on the processor.
    torch.ones((), requires_grad=True).backward()
    return torch


@pytest.fixture(autouse=True)
def one_thread(set_torch):
    """Two threads on a loaded two-core machine run several times slower than one."""
    set_torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_directory(request, monkeypatch):
    """Lightning writes logs and checkpoints into the working directory, which is empty and most often stays so."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
        yield
        return
    folder = SPARE.pop() if SPARE else request.getfixturevalue("tmp_path_factory").mktemp("directory")
    monkeypatch.chdir(folder)
    yield
    if not any(folder.iterdir()):
        SPARE.append(folder)


@pytest.fixture(scope="session")
def interpreter():
    """Runs code in an interpreter that knows neither Lightning nor this package, only torch and torchmetrics."""
    return INTERPRETERS["interpreter"]


@pytest.fixture(scope="session")
def interpreter_with_lightning():
    """Runs code in an interpreter that has Lightning and not this package."""
    return INTERPRETERS["interpreter_with_lightning"]


@pytest.fixture(autouse=True)
def log_level():
    """Programs of the benchmarks silence Lightning, one in a fixture of its file; a test may wait for messages."""
    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel(logging.INFO)  # Lightning's own choice
    logger.propagate = True  # Lightning keeps messages to itself where it is imported before pytest listens


@pytest.fixture(autouse=True)
def no_trainer_in_quick_tests(request, monkeypatch):
    """A test that runs a Trainer says so, or `make quick` grows slow without notice."""
    room = request.node.path.relative_to(Path(__file__).parent).parts[0]
    if room in QUICK and not any(map(request.node.get_closest_marker, ("fit", "process", "slow"))):
        from lightning import Trainer

        def refuse(*_, **__):
            pytest.fail("mark this test with pytest.mark.fit")

        for name in ("fit", "validate", "test", "predict"):
            monkeypatch.setattr(Trainer, name, refuse)
