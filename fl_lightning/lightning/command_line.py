# SPDX-License-Identifier: Apache-2.0
"""LightningCLI whose errors are short: what is wrong, where, and what it is called instead, without a page of usage."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NoReturn

from fl_lightning.arguments import nearest
from fl_lightning.lightning import names

_UNKNOWN = re.compile(r"Option '([^']+)' is not accepted")
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_KEY = re.compile(r'Parser key "([^"]+)"')


def short_cli() -> Any:
    """LightningCLI; a function, because the class exists only where the CLI extra is installed."""
    base: Any = names.LightningCLI
    saving: Any = names.lightning_module("cli").SaveConfigCallback

    class SavesBesideLogs(saving):  # type: ignore[misc]
        """Without a logger, runs share the working directory, where the file of a run before would stop the next."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if trainer.loggers:
                super().setup(trainer, pl_module, stage)

    class ShortCLI(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{"save_config_callback": SavesBesideLogs, **kwargs})

        def init_parser(self, **kwargs: Any) -> Any:
            parser = super().init_parser(**kwargs)
            parser.error = lambda message, ex=None: _refuse(getattr(ex, "subcommand_parser", None) or parser, message)
            return parser

    return ShortCLI


def _refuse(parser: Any, message: str) -> NoReturn:
    program = parser.prog.replace(" [options]", "")
    sys.stderr.write(f"error: {_unknown_option(message) or message}\n{program} --help lists the options.\n")
    raise SystemExit(2)


def _unknown_option(message: str) -> str | None:
    """One line about an option that a class does not have; ``None`` if something else is wrong.

    jsonargparse nests its errors by indentation, one level for each class on the way to the option.
    """
    lines = message.splitlines()
    place, found = next(((p, f) for p, line in enumerate(lines) if (f := _UNKNOWN.search(line))), (0, None))
    if found is None:
        return None
    around = list(_ancestors(lines, place))
    keys = [key[1] for line in reversed(around) if (key := _KEY.search(line))]
    owner = next((owner[1] for line in around if (owner := _OWNER.search(line))), None)
    if owner is None:
        return None
    options = _options(owner)
    hint = nearest(found[1], options) or (f": it has {', '.join(options)}" if options else "")
    return f"{'.init_args.'.join(keys)}: {owner} has no option {found[1]!r}{hint}"


def _ancestors(lines: list[str], place: int) -> Iterator[str]:
    """The lines that a line is nested in, from the inside out."""
    depth = _depth(lines[place])
    for line in reversed(lines[:place]):
        if _depth(line) < depth:
            depth = _depth(line)
            yield line


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _options(path: str) -> tuple[str, ...]:
    module, _, name = path.rpartition(".")
    try:
        found = inspect.signature(getattr(import_module(module), name)).parameters
    except (AttributeError, ImportError, TypeError, ValueError):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(option.name for option in found.values() if option.kind not in variadic)
