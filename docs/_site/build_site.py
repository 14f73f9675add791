# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site from the Markdown pages, the docstrings and the notebooks' scripts.

python docs/_site/build_site.py                        # build/site/html
python docs/_site/build_site.py --builder linkcheck    # asks the addresses of other sites

The pages stay as a code host shows them. This script copies them into ``build/site/source``, turns links to files that
are no pages into links to the repository, and makes the tables of contents from the lists of ``docs/index.md``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from api_pages import api_pages

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "site"
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the site that lie outside of docs, and their places on it."""
REPOSITORY = "https://github.com/fl-lightning/fl-lightning"
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SECTION = re.compile(r"^\*\*([^*\n]+)\*\*\n\n((?:- .*\n(?:  .*\n)*)+)", flags=re.MULTILINE)
LISTED = re.compile(r"^- \[[^\]]*\]\(([^)#\s]+\.(?:md|ipynb))\)", flags=re.MULTILINE)
REFERENCE = "- [API reference](api/index.md): every public name, from the docstrings.\n"


def pages() -> dict[str, str]:
    """The site's path of each page, by its path in the repository."""
    inside = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return {name: name.removeprefix("docs/").replace("README.md", "index.md") for name in sorted(inside)} | OUTSIDE


def notebooks() -> dict[str, str]:
    """The site's path of each notebook, by its script's path in the repository."""
    scripts = sorted((ROOT / "examples" / "notebooks").glob("*.py"))
    return {path.relative_to(ROOT).as_posix(): f"notebooks/{path.stem}.ipynb" for path in scripts}


def site_text(name: str, known: dict[str, str]) -> str:
    """A page with links for the site.

    Args:
        name: its path in the repository.
        known: the pages.
    """
    here, targets = Path(known[name]).parent, known | notebooks()

    def moved(link: re.Match[str]) -> str:
        target, mark, anchor = link[1].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = Path(os.path.normpath((ROOT / name).parent / target))
        inside = path.relative_to(ROOT).as_posix()
        if inside in targets:
            return f"]({os.path.relpath(targets[inside], here)}{mark}{anchor})"
        if path.suffix in (".png", ".svg"):
            copied = OUT / "source" / "pictures" / path.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            return f"]({os.path.relpath(Path('pictures') / path.name, here)})"
        if inside.startswith("build/") or not path.exists():
            raise SystemExit(f"{name} links to {target}, which does not exist")
        return f"]({REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{inside}{mark}{anchor})"

    text = (ROOT / name).read_text(encoding="utf-8")
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(moved, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(moved, text[end:])])


def sections(index: str) -> Iterator[tuple[str, list[str]]]:
    """The captions of the index and the site's pages below each."""
    for caption, entries in SECTION.findall(index):
        yield caption, list(dict.fromkeys(LISTED.findall(entries)))


def toctree(entries: Iterable[str]) -> str:
    """A hidden table of contents, which the sidebar shows."""
    return "\n".join(["\n```{toctree}", ":hidden:", "", *entries, "```"]) + "\n"


def index_page(text: str) -> str:
    """The first page: its lists as cards, and the first page of each as an entry of the sidebar.

    Args:
        text: ``docs/index.md`` with links for the site.
    """
    found = list(SECTION.finditer(text))
    lists = {section[1]: section[2] for section in found}
    lists |= {"API reference": REFERENCE, "Contributing": lists.pop("Contributing")}
    cards = "".join(f":::{{grid-item-card}} {caption}\n{entries}:::\n\n" for caption, entries in lists.items())
    grid = f"::::{{grid}} 1 1 2 2\n:gutter: 3\n\n{cards}::::\n"
    contents = toctree(f"{caption} <{LISTED.findall(entries)[0]}>" for caption, entries in lists.items())
    return text[: found[0].start()] + grid + text[found[-1].end() :] + contents


def assemble() -> None:
    """Writes everything that Sphinx reads; files that are the same keep their times."""
    known, source = pages(), OUT / "source"
    written = {known[name]: site_text(name, known) for name in known}
    folders = sorted({name for name in written if name.endswith("/index.md")})
    for name in folders:
        below = sorted(other for other in written if Path(other).parent == Path(name).parent and other != name)
        written[name] += toctree(Path(other).name for other in below)
    for _, (first, *others) in sections(written["index.md"]):
        written[first] += toctree(others)
    written["index.md"] = index_page(written["index.md"])
    written |= api_pages()
    written |= {place: notebook(ROOT / script) for script, place in notebooks().items()}
    for name, text in written.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in source.rglob("*"):
        if path.is_file() and path.suffix in (".md", ".ipynb") and path.relative_to(source).as_posix() not in written:
            path.unlink()


def notebook(script: Path) -> str:
    """A script with ``# %%`` cells as a notebook without outputs."""
    import jupytext

    made = jupytext.read(script, fmt="py:percent")
    licence = made.cells.pop(0)
    assert "SPDX" in licence.source, f"{script} must begin with a cell of its licence"
    made.cells[0].source += f"\n\n*This page is a notebook: {{nb-download}}`{script.stem}.ipynb`.*"
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
    return str(jupytext.writes(made, fmt="ipynb"))


def main() -> int:
    """Assembles the sources and runs Sphinx; any warning is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--builder", choices=("html", "linkcheck"), default="html")
    builder = parser.parse_args().builder
    assemble()
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "auto", "-b", builder]
    places = ["-c", Path(__file__).parent, "-d", OUT / "doctrees", OUT / "source", OUT / builder]
    failed = subprocess.run([*command, *map(str, places)], check=False).returncode
    if not failed:
        print(OUT / builder / ("index.html" if builder == "html" else "output.txt"))
    return failed


if __name__ == "__main__":
    sys.exit(main())
