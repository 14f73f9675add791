# SPDX-License-Identifier: Apache-2.0
"""What a reader of results from a device needs to judge them.

python -m benchmarks._gpu.facts [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess

import lightning
import torch

import fl_lightning
from fl_lightning import ops


def printed(*command: str) -> str:
    """The last line that a command prints; ``"unknown"`` where there is no such command, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[-1]


def facts(device: torch.device) -> dict[str, str]:
    """Device, driver, versions, date."""
    name, driver = platform.processor() or platform.machine(), "none"
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        capability = f"compute capability {card.major}.{card.minor}"
        memory = f"{card.total_memory / 2**30:.0f} GiB, {card.L2_cache_size / 2**20:.0f} MiB of L2"
        name = f"{card.name}, {memory}, {capability}"
        driver = printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    used = ops.backend()["layer_gram"]
    return {
        "device": name,
        "driver": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "lightning": lightning.__version__,
        "fl_lightning": f"{fl_lightning.__version__}, commit {printed('git', 'rev-parse', '--short', 'HEAD')}",
        "kernels": f"{used.implementation} {used.reason}".strip(),
        "nvcc": printed("nvcc", "--version"),
        "python": f"{platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option that all stages have."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program only")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    device = torch.device(parser.parse_args().device)
    print("\n".join(f"- {name}: {value}" for name, value in facts(device).items()))


if __name__ == "__main__":
    main()
