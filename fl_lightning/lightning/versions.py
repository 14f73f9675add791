# SPDX-License-Identifier: Apache-2.0
"""What is installed here, and which implementation of each op runs: the facts that a bug report needs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import TextIO

import torch

from fl_lightning import ops
from fl_lightning.arguments import ANY, checked, shown
from fl_lightning.lightning.names import TREE, pl


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


__version__ = _installed("fl-lightning") or "0+source"


@dataclass(frozen=True)
class Versions:
    """What runs in this process."""

    fl_lightning: str  # "0+source" if it runs from a checkout that is not installed
    python: str
    platform: str  # operating system, its version and the processor
    torch: str
    cuda_build: str | None  # the CUDA (or ROCm) version that PyTorch was built for
    devices: tuple[str, ...]  # accelerators that PyTorch can use now, "cuda:0 NVIDIA H100" or "mps" for instance
    threads: int  # inside one operation on the CPU
    lightning_tree: str  # the copy of Lightning in use, "lightning.pytorch" or "pytorch_lightning"
    lightning: str
    torchmetrics: str | None
    torchvision: str | None
    ops: Mapping[str, ops.Backend]

    def __str__(self) -> str:
        rows = {
            "fl_lightning": self.fl_lightning,
            "python": self.python,
            "platform": self.platform,
            "torch": f"{self.torch} ({f'built for {self.cuda_build}' if self.cuda_build else 'CPU build'})",
            "accelerators": ", ".join(self.devices) or "none",
            "CPU threads": str(self.threads),
            "lightning": f"{self.lightning} ({self.lightning_tree})",
            "torchmetrics": self.torchmetrics or "not installed",
            "torchvision": self.torchvision or "not installed",
        }
        lines = [f"{name:<16}{value}" for name, value in rows.items()]
        alike: dict[tuple[str, str], list[str]] = {}
        for name, op in self.ops.items():
            alike.setdefault((op.implementation, op.reason or "the fastest"), []).append(name)
        lines += [f"\n{len(ops)} ops run as {how} ({why}):\n  {', '.join(ops)}" for (how, why), ops in alike.items()]
        return "\n".join(lines)


def versions() -> Versions:
    """Collects the versions without importing anything new; torchvision is looked up, not loaded."""
    return Versions(
        fl_lightning=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        torch=torch.__version__,
        cuda_build=_accelerator_build(),
        devices=_devices(),
        threads=torch.get_num_threads(),
        lightning_tree=TREE,
        lightning=str(vars(pl)["__version__"]),
        torchmetrics=_installed("torchmetrics"),
        torchvision=_installed("torchvision"),
        ops=ops.backend(),
    )


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide what a fit computes, and which kernels run."""
    kernels = next(iter(ops.backend().values())).implementation
    own = {"fl_lightning": __version__, "kernels": kernels}
    return {**own, "torch": str(torch.__version__), "lightning": str(vars(pl)["__version__"])}


@checked(file=ANY)
def show_versions(file: TextIO | None = None) -> None:
    """Prints versions, devices and the implementation of each op; paste it into bug reports.

    Args:
        file: where to write; standard output by default.
    """
    stream = sys.stdout if file is None else file
    if not hasattr(stream, "write"):
        raise TypeError(f"file of show_versions must be None or an open text file, found {shown(file)}")
    stream.write(f"{versions()}\n")


def _accelerator_build() -> str | None:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return None if torch.version.hip is None else f"ROCm {torch.version.hip}"


def _devices() -> tuple[str, ...]:
    cuda = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    return tuple(cuda + (["mps"] if torch.backends.mps.is_available() else []))
