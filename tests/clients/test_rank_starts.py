# SPDX-License-Identifier: Apache-2.0
"""All ways to start several processes: LightningCLI, ``python -m``, torchrun, and SLURM's ``srun``."""

import sys

import pytest
import rank_runs
import rank_session
from process_families import free_port
from rank_runs import SESSION, TORCHRUN, finished, folder_of, results, started

CLI = SESSION.with_name("rank_cli.py")
CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {folder}
  strategy:
    class_path: fl_lightning.FederatedStrategy
    init_args:
      algorithm:
        class_path: fl_lightning.algorithms.FedLF
      clients_per_round: 5
"""
TRIES = ["--nproc_per_node", "2", "--master_port"]
STARTS = {
    "script": lambda: [sys.executable, str(CLI)],
    "module": lambda: [sys.executable, "-m", "rank_cli"],
    "torchrun": lambda: [sys.executable, *TORCHRUN, *TRIES, str(free_port()), str(CLI)],
}

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


def test_a_command_line_with_yaml(tmp_path):
    config = folder_of(tmp_path) / "fit.yaml"
    config.write_text(CONFIG.format(folder=folder_of(tmp_path)))
    path = f"{SESSION.parent}:{rank_runs.environment()['PYTHONPATH']}"
    many = {}
    for name, start in STARTS.items():
        finished(tmp_path, started(tmp_path, [*start(), "fit", "--config", str(config)], PYTHONPATH=path))
        many[name] = results(tmp_path)
    line = [sys.executable, str(CLI), "fit", "--config", str(config), "--trainer.devices", "1"]
    finished(tmp_path, started(tmp_path, line, PYTHONPATH=path))
    (one,) = results(tmp_path)
    assert one["ranks"] is None
    assert many == dict.fromkeys(STARTS, [{"ranks": 2, "weights": one["weights"]}] * 2)


def slurm(rank, **more):
    """What ``srun --nodes 1 --ntasks-per-node 2`` sets for a task."""
    tasks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODELIST": "127.0.0.1"}
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    return {**tasks, **own, "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "fit", **more}


def test_tasks_of_slurm(tmp_path):
    """One of them gets the signal that the job's time is up: all save, and the job is put into the queue once."""
    queue = tmp_path / "scontrol"
    queue.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/queued\n')
    queue.chmod(0o755)
    program = SESSION.with_name("rank_trouble.py")
    more = {"MASTER_PORT": str(free_port()), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    line = [sys.executable, str(program), str(folder_of(tmp_path)), "2", "requeue"]
    tasks = [started(tmp_path, line, **slurm(rank, **more)) for rank in range(2)]
    for task in tasks:
        finished(tmp_path, task)
    case, many = "SCAFFOLD with FedLF", results(tmp_path)
    assert (tmp_path / "queued").read_text() == "requeue 4711\n"
    _, resumed, _ = rank_session.trained(case, 1, rounds=3, resume=tmp_path / "hpc_ckpt_1.ckpt")
    _, weights, _ = rank_session.trained(case, 1, rounds=3)
    assert [*(rank[case][0] for rank in many), resumed] == [weights] * 3
