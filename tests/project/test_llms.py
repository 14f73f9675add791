# SPDX-License-Identifier: Apache-2.0
"""docs/llms.txt, from which a reader who knows only Lightning federates a project, names what there is."""

import ast
import inspect
import re
from functools import reduce
from pathlib import Path

import pytest

import fl_lightning as fl

TEXT = (Path(__file__).parents[2] / "docs" / "llms.txt").read_text(encoding="utf-8")
INDENTED = re.compile(r"(?:^    \S.*\n(?:(?:    .*)?\n)*)", re.MULTILINE)
BLOCKS = [re.sub("^    ", "", block, flags=re.MULTILINE) for block in INDENTED.findall(TEXT)]
CALLS = [
    node
    for block in BLOCKS
    if not block.startswith("git ")
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("fl.")
]


def named(path):
    return reduce(getattr, path.split(".")[1:], fl)


@pytest.mark.parametrize("path", sorted({*re.findall(r"\bfl(?:\.\w+)+", TEXT)}))
def test_every_name_is_there(path):
    assert named(path) is not None


def test_calls_have_arguments_that_there_are():
    assert len(CALLS) > 8
    for call in CALLS:
        known = inspect.signature(named(ast.unparse(call.func))).parameters
        assert {word.arg for word in call.keywords} <= known.keys(), ast.unparse(call)


def test_methods_and_options_in_prose_are_there():
    methods = {*re.findall(r"`([A-Z]\w+)\(", TEXT)} - {"Trainer"}
    assert len(methods) > 12
    assert [name for name in methods if not (hasattr(fl.algorithms, name) or hasattr(fl.data, name))] == []
    options = inspect.signature(fl.FederatedStrategy).parameters
    assert {"client_optimizer_state", "on_client_error", "executor", "guard", "client", "partition"} <= options.keys()
