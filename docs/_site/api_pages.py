# SPDX-License-Identifier: Apache-2.0
"""The pages of the API reference: one for each public module, with every public name."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "project"))
import public_api

TITLES = {
    "fl_lightning": "Strategy, data and messages",
    "fl_lightning.algorithms": "Methods",
    "fl_lightning.attacks": "Attacks",
    "fl_lightning.callbacks": "Callbacks",
    "fl_lightning.data": "Data",
    "fl_lightning.executors": "Executors",
    "fl_lightning.guards": "Defences",
    "fl_lightning.federation.nvflare": "NVFlare",
    "fl_lightning.algorithms.torchjd": "TorchJD",
    "fl_lightning.metrics": "Metrics",
    "fl_lightning.metrics.functional": "Functional metrics",
    "fl_lightning.ops": "Ops",
    "fl_lightning.optim": "Server optimizers",
    "fl_lightning.solvers": "Solvers",
}
"""Headings; a module that is new and not listed is called by its own name."""


def documented() -> dict[str, list[str]]:
    """The public names of each public module; a name that two modules have belongs to the first."""
    seen: set[int] = set()
    found: dict[str, list[str]] = {}
    for name, value in public_api.public_objects().items():
        module, _, short = name.rpartition(".")
        if callable(value) and id(value) not in seen:
            seen.add(id(value))
            found.setdefault(module, []).append(short)
    return found


def api_pages() -> dict[str, str]:
    """The text of each page, by its place on the site."""
    modules = dict(sorted(documented().items()))
    written = {f"api/{module}.md": _module_page(module, names) for module, names in modules.items()}
    lines = [f"- [`{module}`]({module}.md): {_title(module)}" for module in modules]
    contents = "\n".join(["```{toctree}", ":hidden:", "", *modules, "```"])
    title = "# API reference\n\nEvery public name, from the docstrings. `import fl_lightning as fl` is assumed."
    return {"api/index.md": f"{title}\n\n" + "\n".join(lines) + f"\n\n{contents}\n", **written}


def _title(module: str) -> str:
    return TITLES.get(module, module)


def _module_page(module: str, names: list[str]) -> str:
    owner = pkgutil.resolve_name(module)
    values = {name: getattr(owner, name) for name in names}
    told = [text for text in (inspect.getdoc(owner) or "").split("\n\n") if not text.startswith("Uses ")]
    parts = [f".. py:module:: {module}", "", *"\n\n".join(told).splitlines(), ""]
    parts += [f"* :obj:`{name}`: {_summary(value)}" for name, value in values.items()]
    for name, value in values.items():
        parts += ["", *_directive(name, value)]
    return "\n".join([f"# {_title(module)}", "", "```{eval-rst}", *parts, "```", ""])


def _summary(value: Any) -> str:
    """The first line of a docstring, which is a sentence."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _directive(name: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        shown = [base for base in value.__bases__ if not base.__name__.startswith("_") and base is not object]
        return [f".. autoclass:: {name}", "   :members:", *(["   :show-inheritance:"] if shown else [])]
    return [f".. autofunction:: {name}"]
