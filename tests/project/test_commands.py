# SPDX-License-Identifier: Apache-2.0
"""The commands of the documentation work as they stand there, in a fresh checkout, as far as no network is needed."""

import argparse
import ast
import re
import runpy
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.comparison import command
from fl_lightning.comparison.command import rule_from
from fl_lightning.federation.flower_template import write_app

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "fl_lightning" / "federation" / "flower_app" / "README.md.txt"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.py")),
    TEMPLATE,
]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
EXTRAS = set(
    re.findall(
        r"^(\w+) = \[", PROJECT.split("[project.optional-dependencies]\n")[1].split("\n[")[0], flags=re.MULTILINE
    )
)
WHEELS = ("fl_lightning-1.0-cp310-abi3-manylinux_2_28_x86_64.whl", "fl_lightning-1.0-py3-none-any.whl")
BROUGHT_BY = {"flwr": "flower", "flower-superlink": "flower", "flower-supernode": "flower"}
"""Programs that come with an extra."""
SYSTEM = {"openssl", "ssh-keygen", "printf", "export"}
READERS_OWN = {"train.py"}
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:make|pip|python|git|flwr|flower-|\.venv/)\b")


def tracked():
    """The files of a fresh checkout, and their folders; all files where this is no checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = [ROOT / name for name in listed] or list(ROOT.rglob("*"))
    return {*files, *(folder for file in files for folder in file.parents)}


FILES = tracked()


def fenced(path):
    """The page's fenced blocks, and in scripts the indented commands of the docstring, as (language, text)."""
    text = path.read_text(encoding="utf-8")
    found = []
    if path.suffix == ".py":
        doc = ast.get_docstring(ast.parse(text)) or ""
        found = [("sh", line.strip()) for line in doc.splitlines() if line.startswith("    ")]
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    return found + re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)


def commands(block):
    """The commands of a block as lists of words, without comments and without assignments before them."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((place for place, word in enumerate(words) if word in ("&&", ";")), len(words))
            head, words = words[:end], words[end + 1 :]
            while re.match(r"[A-Z_]+=", head[0]):
                head = head[1:]
            yield head[: head.index(">")] if ">" in head else head


class Parsed(Exception):  # noqa: N818
    """A program has understood its arguments."""


class Reader:
    """Someone who types the commands of one page, one after the other.

    Args:
        folder: a new folder, for what commands write.
        start: where the reader is.
        monkeypatch: of pytest.
    """

    def __init__(self, folder, start, monkeypatch):
        self.home, self.start, self.patch = folder, start, monkeypatch
        self.here = start
        self.clones = {}
        self.installed = set()
        self.made = set()

    def types(self, words):
        """Carries a command out, or reads it as its program would."""
        program = Path(words[0]).name
        known = {"make": self.make, "pip": self.pip, "python": self.python, "cd": self.cd, "git": self.git}
        if program in known:
            known[program](words[1:])
        elif words[0].startswith("benchmarks/"):
            text = self.file(words[0]).read_text(encoding="utf-8")
            assert [word for word in words[1:] if word.strip("-") not in text] == []
        else:
            assert program in SYSTEM | self.installed or BROUGHT_BY.get(program) in self.installed, words

    def file(self, name):
        """A file or a folder that a fresh checkout has."""
        path = (self.here / name).resolve()
        assert path in FILES or self.home in path.parents, f"{name} is not there"
        assert path.exists()
        return path

    def cd(self, words):
        (name,) = words
        self.here = self.clones.get(name) or self.file(name)

    def git(self, words):
        (page,) = re.findall(r'^Homepage = "(.*)"', PROJECT, flags=re.MULTILINE)
        assert words == ["clone", page]
        self.clones[Path(page).name] = ROOT

    def make(self, words):
        done = subprocess.run(["make", "-n", *words], cwd=self.here, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.made |= set(words)

    def pip(self, words):
        assert words[0] == "install"
        rest = iter(words[1:])
        for word in rest:
            if word == "-r":
                self.file(next(rest))
            elif word.startswith("."):
                assert self.here in (ROOT, self.start), f"{word} is the checkout in its own folder only"
                assert re.fullmatch(r"\.(\[\w+(,\w+)*\])?", word)
                assert set(re.findall(r"\w+", word)) <= EXTRAS
                self.installed |= set(re.findall(r"\w+", word))
            elif word.startswith("dist/"):
                assert "dist" in self.made
                assert any(fnmatch(wheel, Path(word).name) for wheel in WHEELS), word
            elif not word.startswith("-"):
                assert not word.startswith("fl-lightning"), "there is no release"
                self.installed.add(re.match(r"[\w-]+", word)[0])

    def python(self, words):
        if words[:2] == ["-m", "fl_lightning"]:
            self.package(words[2:])
        elif words[:2] == ["-m", "pytest"]:
            for word in words[2:]:
                if "/" in word:
                    self.file(word)
        elif words[0] == "-m":
            path = ROOT / words[1].replace(".", "/")
            path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            self.patch.delitem(sys.modules, f"{words[1]}.__main__", raising=False)  # imported by another test
            self.reads_arguments(self.file(path), words[2:], lambda: runpy.run_module(words[1], run_name="__main__"))
        elif words[0] not in READERS_OWN:
            path = self.file(words[0])
            self.patch.syspath_prepend(str(path.parent))
            self.reads_arguments(path, words[1:], lambda: runpy.run_path(str(path), run_name="__main__"))

    def package(self, words):
        """A command of the package itself."""
        name, *options = words
        if name == "compare":
            parsed, rest = command._parser().parse_known_args(options)
            assert rest == []
            assert [rule_from(text) for text in parsed.methods]
        else:
            assert name == "flower-app"
            self.patch.chdir(self.home)
            assert main(words) == 0
            self.here = self.home / options[0]

    def reads_arguments(self, path, words, run):
        """Lets a program read its arguments, and no more; one that reads none must be given none."""
        if "parse_args" not in path.read_text(encoding="utf-8"):
            assert words == []
            return
        read = argparse.ArgumentParser.parse_args

        def parse(parser, args=None, namespace=None):
            read(parser, args, namespace)
            raise Parsed

        before = set(sys.modules)
        with self.patch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", parse)
            patch.setattr(sys, "argv", [str(path), *words])
            with pytest.raises((Parsed, ImportError)) as stop:
                run()
        for name in set(sys.modules) - before:  # several examples have a module of their own called task
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == path.parent:
                del sys.modules[name]
        if stop.type is not Parsed:  # a package that the page has installed before, and this environment lacks
            missing = stop.value.name or ""
            assert missing.split(".")[0] in self.installed | {"fl_lightning"}, stop.value


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands(path, tmp_path, monkeypatch):
    blocks = fenced(path)
    hidden = [line for language, text in blocks for line in text.splitlines() if not language and COMMAND.match(line)]
    assert hidden == [], "a block of commands is marked sh"
    reader = Reader(tmp_path, ROOT, monkeypatch)
    if path == TEMPLATE:
        write_app(tmp_path / "app")
        reader = Reader(tmp_path, tmp_path / "app", monkeypatch)
    for language, text in blocks:
        if language in ("sh", "bash", "console"):
            for words in commands(text):
                reader.types(words)
    pipes = re.findall(r"`pip install\s+([^`]+)`", path.read_text(encoding="utf-8"))
    assert [text for text in pipes if "fl-lightning[" in text] == [], "there is no release"
