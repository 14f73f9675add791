# SPDX-License-Identifier: Apache-2.0
"""The documentation site: its pages, its API reference, its notebooks, and the code on its pages."""

import ast
import builtins
import contextlib
import importlib
import re
import runpy
import subprocess
import sys
import warnings
import zlib
from importlib.util import find_spec
from pathlib import Path

import public_api
import pytest

import fl_lightning as fl

ROOT, PACKAGE = Path(__file__).parents[2], Path(fl.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
NOTEBOOKS = ROOT / "examples" / "notebooks"


@pytest.fixture
def site(monkeypatch):
    """The script that assembles the site."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_site"))
    return importlib.import_module("build_site")


def public_names():
    """Classes and functions of the committed list, by the names that it documents them under."""
    starts = [re.match(r"([\w.]+)(?:: class of |\()", line) for line in public_api.recorded()]
    names = {found[1] for found in starts if found}
    return {name for name in names if name.rpartition(".")[0] not in names}  # a class's methods go with it


def test_what_the_reference_leaves_to_contributors_is_there():
    for part in runpy.run_path(str(ROOT / "docs" / "_site" / "conf.py"))["contributors_parts"]:
        assert find_spec(f"fl_lightning.{part}") is not None, part


def test_the_reference_has_every_public_name(site):
    text = site.api_pages()
    documented = {
        f"{Path(place).stem}.{name}"
        for place, page in text.items()
        for name in re.findall(r"^\.\. auto(?:class|function):: (\w+)$", page, flags=re.MULTILINE)
    }
    assert documented == public_names()
    assert len(documented) > 100
    assert all(f"[`{Path(place).stem}`]" in text["api/index.md"] for place in text if not place.endswith("index.md"))


def test_every_page_is_in_a_table_of_contents(site):
    known = site.pages()
    index = site.site_text("docs/index.md", known)
    listed = {name for _, names in site.sections(index) for name in names}
    tops = {place for place in known.values() if "/" not in place} - {"index.md"}
    assert listed == tops | {"methods/index.md", *site.notebooks().values()}


def parses(text):
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_on_pages_parses(page):
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    # A block may be the inside of a class, or of a dict.
    wrong = [block for block in blocks if not any(map(parses, (block, f"if True:\n{block}", f"{{\n{block}}}")))]
    assert wrong == []


@pytest.mark.parametrize("page", ["distributed", "groups", "nvflare", "privacy", "trackers"])
def test_code_on_pages_brings_its_names(page):
    blocks = BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    text = "".join(block.partition("\n    ")[0] if not parses(block) else block for block in blocks)
    nodes = list(ast.walk(ast.parse(text)))
    made = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    made |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)} | vars(builtins).keys()
    names = [node for node in nodes if isinstance(node, ast.Name)]
    made |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    assert {node.id for node in names} - made == set()


def there_is(name):
    """Whether the package has what ``fl.name`` or ``fl_lightning.name`` says."""
    found, place = fl, PACKAGE
    for part in name.split("."):
        place /= part
        if not hasattr(found, part):
            if not place.is_dir() and not place.with_suffix(".py").is_file():
                return False
            with contextlib.suppress(ImportError):  # of an optional package
                importlib.import_module(".".join(["fl_lightning", *place.relative_to(PACKAGE).parts]))
        found = getattr(found, part, found)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_and_files_on_pages_exist(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w./])(?:fl|fl_lightning)\.(\w+(?:\.\w+)*)", text))
    files = set(re.findall(r"(?<![\w./])((?:fl_lightning|tests|benchmarks|csrc|release)/[\w./-]*\w)", text))
    lost = {name for name in names if not there_is(name)} | {name for name in files if not (ROOT / name).exists()}
    made_there = {"CONTRIBUTING.md": "adaptive_?clip", "kernels.md": r"gpu\.md"}
    assert {name for name in lost if not re.search(made_there.get(page.name, "^$"), name, re.IGNORECASE)} == set()


@pytest.mark.filterwarnings("ignore")
def test_the_first_ten_minutes_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, second, third = BLOCK.findall((ROOT / "docs" / "get_started.md").read_text(encoding="utf-8"))
    assert "MyDataModule" in third
    names = {}
    for block in (first, second):
        shorter, count = re.subn("max_epochs=30", "max_epochs=2", block)
        assert count == 1
        exec(shorter, names)
    printed = capsys.readouterr().out
    assert "worst 10 %" in printed
    assert re.search(r"^FedAvg \{'mean'.*\nFedLF \{'mean'", printed, flags=re.MULTILINE)
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.fixture
def notebook(monkeypatch):
    """Runs a notebook's script with so many rounds; returns its names."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")

    def run(name, rounds, folder):
        script = (NOTEBOOKS / name).read_text("utf-8")
        text, count = re.subn(r"\b(rounds|ROUNDS)( ?= ?)30\b", rf"\1\g<2>{rounds}", script)
        assert count
        (folder / name).write_text(text, encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return runpy.run_path(str(folder / name))

    return run


def test_the_notebook_of_digits_runs(notebook, tmp_path, capsys):
    names = notebook("fair_digits.py", 8, tmp_path)
    assert float(names["plain"].callback_metrics["val_acc"]) > 0.9
    assert len(names["fair"].client_ids) == 20
    assert re.search(r"FedLF +mean 0\.\d+ +worst_10", capsys.readouterr().out)


def test_the_notebook_of_sites_runs(notebook, tmp_path, capsys):
    names = notebook("four_sites.py", 2, tmp_path)
    assert names["fair"].client_names == ("Aberdeen", "Bergen", "Cork", "Delft")
    assert set(names["fair"].values) == {"val_acc", "val_parity_gap", "val_acc_gap"}
    assert "Cork" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.process
def test_the_site_builds_without_a_warning_and_has_every_public_name():
    for package in ("sphinx", "furo", "myst_nb", "sphinx_design", "jupytext"):
        pytest.importorskip(package, reason="pip install '.[docs]'")
    done = subprocess.run([sys.executable, ROOT / "docs" / "_site" / "build_site.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = ROOT / "build" / "site" / "html"
    inventory = zlib.decompress((built / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()
    found = set(re.findall(r"^([\w.]+) py:(?:class|function|exception) ", inventory, flags=re.MULTILINE))
    assert public_names() - found == set()
    page = (built / "notebooks" / "four_sites.html").read_text(encoding="utf-8")
    assert "Aberdeen" in page
    assert "<img" in page
