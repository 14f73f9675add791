# SPDX-License-Identifier: Apache-2.0
"""What is installed here, and which implementation of each op runs: the facts that a bug report needs."""

from __future__ import annotations

import platform
import sys
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


def versions() -> dict[str, str]:
    """What is installed, by name, and what PyTorch can use now; nothing new is imported for it."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    cuda = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    accelerators = cuda + ["mps"] * torch.backends.mps.is_available()
    return {
        "fl_lightning": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": f"{torch.__version__} ({f'built for {build}' if build else 'CPU build'})",
        "accelerators": ", ".join(accelerators) or "none",
        "CPU threads": str(torch.get_num_threads()),  # inside one operation
        "lightning": f"{vars(pl)['__version__']} ({TREE})",
        **{name: _installed(name) or "not installed" for name in ("torchmetrics", "torchvision")},
    }


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
    lines = [f"{name:<16}{value}" for name, value in versions().items()]
    alike: dict[tuple[str, str], list[str]] = {}
    for name, op in ops.backend().items():
        alike.setdefault((op.implementation, op.reason or "the fastest"), []).append(name)
    lines += [f"\n{len(some)} ops run as {how} ({why}):\n  {', '.join(some)}" for (how, why), some in alike.items()]
    stream.write("\n".join(lines) + "\n")
