# SPDX-License-Identifier: Apache-2.0
"""What is built, shipped and promised to users before any code runs."""

import os
import re
import tarfile
import zipfile
from contextlib import suppress
from email.parser import Parser
from functools import cache
from pathlib import Path

import pytest
from distributions import FILES
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
IGNORED = re.compile(
    r"(^|/)(\.(?!ci/|gitignore)[^/]*|__pycache__|[^/]*\.egg-info|build|dist|demo|logs|lightning_logs)/"
)
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
CODE = re.compile("^```.*?^```|`[^`\n]*`", flags=re.DOTALL | re.MULTILINE)
SOURCES = sorted(
    path for folder in ("fl_lightning", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


@pytest.fixture
def shipped(wheel):
    with zipfile.ZipFile(wheel) as archive:
        yield archive


@pytest.fixture
def metadata(shipped):
    (name,) = (name for name in shipped.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(shipped.read(name).decode())


def test_the_wheel_holds_every_module_the_marker_and_nothing_else(shipped, wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    package = {path.relative_to(ROOT).as_posix() for path in SOURCES if path.is_relative_to(ROOT / "fl_lightning")}
    modules = {name for name in shipped.namelist() if ".dist-info/" not in name}
    page = {f"fl_lightning/report/page.{kind}" for kind in ("css", "html", "js")}
    assert modules == package | page | {"fl_lightning/py.typed", "fl_lightning/_built.txt"}
    assert shipped.read("fl_lightning/_built.txt") == b"pure torch: FL_LIGHTNING_NO_EXT=1\n"


def test_the_wheel_carries_the_apache_licence(shipped, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    (name,) = (name for name in shipped.namelist() if name.endswith("licenses/LICENSE"))
    text = shipped.read(name).decode()
    assert text == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_malicious_lightning_releases_are_excluded(metadata):
    required = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist"))}
    lightning = required["lightning"].specifier
    assert not {"2.5.2", "2.6.2", "2.6.3"} & set(
        lightning.filter(["2.5.2", "2.5.3", "2.6.1", "2.6.2", "2.6.3", "2.6.4"])
    )
    assert {"2.5.3", "2.6.1", "2.6.4"} == set(lightning.filter(["2.5.3", "2.6.1", "2.6.4"]))


def test_the_core_needs_three_packages_and_the_rest_are_extras(metadata):
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    core = {r.name for r in required if r.marker is None}
    assert core == {"torch", "lightning", "torchmetrics"}
    assert {"benchmarks", "cli", "demo", "test", "lint"} <= set(metadata.get_all("Provides-Extra"))


def test_nothing_under_the_gpl_is_required(metadata):
    names = {Requirement(text).name.lower() for text in metadata.get_all("Requires-Dist")}
    assert not names & {"cvxopt", "quadprog", "qpsolvers"}


def test_supported_pythons_are_declared_alike(metadata):
    declared = {c.rpartition(" ")[2] for c in metadata.get_all("Classifier") if re.search(r"Python :: 3\.\d+$", c)}
    assert declared == {"3.10", "3.11", "3.12", "3.13"}
    assert all(SpecifierSet(metadata["Requires-Python"]).contains(f"{version}.0") for version in declared)
    assert not SpecifierSet(metadata["Requires-Python"]).contains("3.9.18")


def test_the_source_distribution_is_complete(sdist):
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    scripts = {path.relative_to(ROOT).as_posix() for path in SOURCES}
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    more = {".ci/run", "fl_lightning/py.typed"}
    assert sorted((pages | scripts | kernels | set(FILES) | more) - inside) == []
    assert [name for name in inside if name.endswith((".so", ".pyc", "_built.txt"))] == []


def test_the_published_text_has_no_relative_links(metadata):
    text, version = metadata.get_payload(), metadata["Version"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert all(target.startswith(("https://", "#")) for target in targets)
    home = "fl-lightning/fl-lightning"
    assert f"FedLF](https://raw.githubusercontent.com/{home}/v{version}/docs/demo.png)" in text
    assert f"[Data](https://github.com/{home}/blob/v{version}/docs/data.md)" in text
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", page)) > 20


def test_all_sources_name_their_licence():
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in SOURCES}
    # An __init__.py without code may be empty.
    without = [name for name, text in texts.items() if text and not text.startswith(LICENCE)]
    assert without == []


@cache
def texts():
    """Of all files but pictures, by name."""
    found = {}
    for folder, folders, files in os.walk(ROOT):
        inside = Path(folder).relative_to(ROOT)
        folders[:] = sorted(name for name in folders if not IGNORED.search(f"{(inside / name).as_posix()}/"))
        for name in sorted(files):
            with suppress(UnicodeDecodeError):
                found[(inside / name).as_posix()] = Path(folder, name).read_text(encoding="utf-8")
    return found


def lines_with(pattern):
    suspects = {name: text for name, text in texts().items() if pattern.search(text)}
    return [f"{name}: {line}" for name, text in suspects.items() for line in text.splitlines() if pattern.search(line)]


def test_no_file_mentions_paths_of_a_machine():
    assert lines_with(re.compile(r"(?<![\w./~-])/(work|root|home|Users|opt|mnt|srv|data)/\w")) == []


def test_no_file_is_left_unfinished():
    assert lines_with(re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")))) == []


def test_links_between_pages_lead_somewhere():
    links = [
        (page, target)
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"))
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", CODE.sub("", page.read_text(encoding="utf-8")))
        if "://" not in target
    ]
    assert links
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []


def test_the_version_is_the_same_everywhere():
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1].strip("\"'") == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)
    assert latest[1] == version
    assert ("date-released" in citation) == (latest[2] != "unreleased")
