# SPDX-License-Identifier: Apache-2.0
"""The hooks of pre-commit and `make check` run the same programs on the same files."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
RECIPE = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
(LOCAL,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
HOOKS = {hook["id"]: hook for hook in LOCAL["hooks"]}


def test_the_hooks_run_what_make_check_runs():
    programs = set(re.findall(r"\$\(BIN\)/([\w-]+(?: format)?)", RECIPE))
    assert programs == {re.match(r"\.venv/bin/([\w-]+(?: format)?)", hook["entry"])[1] for hook in HOOKS.values()}
    assert LOCAL["repo"] == "local"
    assert {hook["language"] for hook in HOOKS.values()} == {"system"}


def test_scripts_are_checked_wherever_they_lie():
    (named,) = re.findall(r"shellcheck (.*)", RECIPE)
    first_line = re.compile(r"#!.*\b(ba)?sh\b")
    folders = (".ci", "benchmarks", "examples", "csrc", "tests")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in ("", ".sh"))
    scripts = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.is_file() and first_line.match(path.read_text(encoding="utf-8").partition("\n")[0])
    }
    assert scripts == set(named.split())
    assert all(re.search(HOOKS["shellcheck"]["files"], script) for script in scripts)
