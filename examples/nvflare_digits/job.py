# SPDX-License-Identifier: Apache-2.0
"""A federation of three sites on NVFlare: its simulator runs the job, and a Trainer gives the same weights.

    pip install '.[nvflare,demo]'
    python examples/nvflare_digits/job.py

``--export`` writes the job alone, as ``nvflare job submit`` takes it, for sites on machines of their own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner

import fl_lightning as fl
from fl_lightning.federation.nvflare import FederatedController

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # digits.py, the project that is federated

from task import ROUNDS, SITES, simulated  # noqa: E402


def job(folder: Path) -> FedJob:
    """The controller for the server, the training script for the sites, and the code that both import."""
    made = FedJob("digits", min_clients=len(SITES))
    made.to_server(FederatedController("task:server", SITES, ROUNDS, timeout=300, folder=str(folder / "run")))
    made.to_clients(ScriptRunner(str(HERE / "client.py"), server_expected_format=ExchangeFormat.PYTORCH))
    for file in (HERE / "task.py", HERE.parent / "digits.py"):
        made.to_server(str(file))
        made.to_clients(str(file))
    return made


def main() -> bool:
    """Runs or exports the job; returns whether the weights are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("nvflare_run"), help="where everything is written")
    parser.add_argument("--export", action="store_true", help="write the job, do not run it")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.export:
        job(folder).export_job(str(folder))
        print(f"the job is in {folder / 'digits'}")
        return True
    job(folder).simulator_run(str(folder / "workspace"), clients=list(SITES))
    run = torch.load(folder / "run" / "last.ckpt", weights_only=True)
    most = max(float((run["state_dict"][name] - value).abs().max()) for name, value in simulated().items())
    there, here = run["server"]["fit"]["versions"]["kernels"], fl.ops.backend()["layer_gram"].implementation
    other = f"the weights differ by up to {most:.1e}: the job ran the kernels {there!r}, the Trainer {here!r}"
    print(other if most else "the weights are equal, bit for bit")
    return not most


if __name__ == "__main__":
    sys.exit(not main())
