# SPDX-License-Identifier: Apache-2.0
"""Commands of the documentation name what is there: files, targets, extras, options and methods."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fl_lightning.comparison import command
from fl_lightning.comparison.command import rule_from

ROOT = Path(__file__).parents[2]
FOLDERS = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(FOLDERS)]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
OPTIONAL = PROJECT.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
EXTRAS = set(re.findall(r"^(\w+) = \[", OPTIONAL, flags=re.MULTILINE))
READERS_OWN = {"train.py"}


def commands(path):
    """The commands of a page as lists of words, without assignments before them; in scripts those of the docstring."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(?:sh|bash|console)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    if path.suffix == ".py":
        doc = ast.get_docstring(ast.parse(text)) or ""
        blocks = [line.strip() for line in doc.splitlines() if line.startswith("    ")]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((place for place, word in enumerate(words) if word in ("&&", ";")), len(words))
            head, words = words[:end], words[end + 1 :]
            while head and re.match(r"[A-Z_]+=", head[0]):
                head = head[1:]
            if head:
                yield head[: head.index(">")] if ">" in head else head


def check_options(file, words):
    """A program of this project has the options that it is given."""
    assert file.is_file(), file
    folder = file.parent if file.name == "__main__.py" else file
    text = "".join(path.read_text(encoding="utf-8") for path in (folder.rglob("*.py") if folder.is_dir() else [file]))
    assert [w for w in words if w.startswith("--") and f'"{w.partition("=")[0]}"' not in text] == []


def check_python(here, words):
    if words[:2] == ["-m", "pytest"]:
        assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []
    elif words[:3] == ["-m", "fl_lightning", "compare"]:
        parsed, rest = command._parser().parse_known_args(words[3:])
        assert rest == []
        assert [rule_from(text) for text in parsed.methods]
    elif words[0] == "-m" and words[1] != "fl_lightning":
        path = ROOT / words[1].replace(".", "/")
        check_options(path / "__main__.py" if path.is_dir() else path.with_suffix(".py"), words[2:])
    elif words[0] not in {"-m", *READERS_OWN}:
        check_options(here / words[0], words[1:])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands(path):
    here = ROOT
    for words in commands(path):
        program = Path(words[0]).name
        if program == "cd" and (ROOT / words[1]).is_dir():
            here = ROOT / words[1]
        elif program == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=here, capture_output=True, check=True)
        elif program == "pip":
            extras = [extra for word in words[1:] for extra in re.findall(r"^\.\[([\w,]+)\]", word)]
            assert set(",".join(extras).split(",")) - {""} <= EXTRAS, words
            assert not any(word.startswith("fl-lightning") for word in words), "there is no release"
        elif program == "python":
            check_python(here, words[1:])
