# SPDX-License-Identifier: Apache-2.0
"""The example with four sites of pictures, on pictures that the test makes."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("PIL")
pytest.importorskip("torchvision")

from flwr.app import Context, RecordDict
from in_process import InProcess
from PIL import Image

EXAMPLE = Path(__file__).parents[3] / "examples" / "office_caltech"
PER_CLASS = {"amazon": 5, "caltech10": 4, "dslr": 2, "webcam": 3}


@pytest.fixture
def example(monkeypatch):
    """Imports a file of the example."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    names = [path.stem for path in EXAMPLE.glob("*.py")]
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def pictures(tmp_path):
    """A folder as the data set has it, with noise in the pictures."""
    generator = torch.Generator().manual_seed(0)
    for site, count in PER_CLASS.items():
        for label in range(10):
            folder = tmp_path / "pictures" / site / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 256, (40, 50, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{number}.jpg")
    return tmp_path / "pictures"


def test_the_app_gives_the_bits_of_the_simulation(example, pictures, tmp_path):
    task, app = example("task"), example("client_app").app
    trainer = example("simulate").main(pictures, rounds=2)
    assert trainer.strategy.last_evaluation.client_names == task.SITES
    configs = {
        100 + place: {"client-id": place, "data-path": str(pictures / site)} for place, site in enumerate(task.SITES)
    }
    grid = InProcess(dict.fromkeys(configs, app), configs)
    context = Context(7, 1, {}, RecordDict(), {"rounds": 2, "folder": str(tmp_path / "run")})
    example("server_app").main(grid, context)
    found = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(found[name], value) for name, value in trainer.lightning_module.state_dict().items())
    assert (tmp_path / "run" / "report.html").exists()
