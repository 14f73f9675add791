# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of examples/projects, each project in an environment of its own with the versions it is pinned to.

An environment sees the packages of the Python that runs this file, so only what a project needs beyond them is
installed, and torch, torchvision and Lightning keep their versions.

Usage: python tests/project/run_projects.py [NAME ...] [-- arguments of pytest]
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import time
import venv
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from project_facts import PROJECTS

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "examples" / "projects" / "requirements"
FOLDER = ROOT / "build" / "projects"
KEPT = ("torch", "torchvision", "lightning", "pytorch-lightning")


def pins(name: str) -> list[str]:
    """What stands in the project's file."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def installed(name: str) -> Path:
    """The interpreter of the project's environment, which is made anew if its pins or the packages below changed."""
    folder, packages = FOLDER / name, site.getsitepackages()[0]
    kept = "".join(f"{package}=={version(package)}\n" for package in KEPT)
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([sys.version, packages, kept, *pins(name)])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(folder, clear=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "below.pth").write_text(f"import site; site.addsitedir({packages!r})\n", encoding="utf-8")
    (folder / "kept.txt").write_text(kept, encoding="utf-8")
    if pins(name):
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--progress-bar", "off"]
        subprocess.run([*pip, "-c", str(folder / "kept.txt"), "-r", str(REQUIREMENTS / f"{name}.txt")], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def run(name: str, arguments: list[str]) -> tuple[int, int, str]:
    """How many cases passed and failed, and the learning rates; a skipped case has failed: its package is not found."""
    report = FOLDER / f"{name}.xml"
    report.unlink(missing_ok=True)
    try:
        python = installed(name)
    except subprocess.CalledProcessError as error:
        print(f"{name}: pip ended with {error.returncode}")
        return 0, 1, ""
    cases = ["tests/project/test_projects.py", "-k", f"[{name}]", f"--junitxml={report}", "-q", "--show-capture=no"]
    # torch must not be imported before this is set: models of this size run slower on several threads.
    settings = {"OMP_NUM_THREADS": "1", "FL_LIGHTNING_TREE": PROJECTS[name].tree}
    done = subprocess.run([python, "-m", "pytest", *cases, *arguments], cwd=ROOT, env={**os.environ, **settings})
    if not report.exists():
        return 0, 1, ""
    root = ElementTree.parse(report).getroot()
    (suite,) = root.iter("testsuite")
    total, skipped, failures, errors = (int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors"))
    failed = skipped + failures + errors
    rates = "".join(found.get("value", "") for found in root.iter("property") if found.get("name") == "rates")
    return total - failed, max(failed, int(done.returncode != 0)), rates


def main(arguments: list[str]) -> int:
    """Runs the named projects, or all, and prints what came of it."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, rest = arguments[:split], arguments[split + 1 :]
    known = sorted(file.stem for file in REQUIREMENTS.glob("*.txt"))
    if unknown := sorted(set(names) - set(known)):
        print(f"PROJECTS must name projects of {REQUIREMENTS.relative_to(ROOT)}, found {', '.join(unknown)}")
        return 2
    rows, schedules = [], ""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        print(f"\n{name}: {', '.join(pins(name)) or 'nothing to install'}", flush=True)
        start = time.monotonic()
        passed, failed, rates = run(name, rest)
        rows.append((name, ", ".join(pins(name)) or "-", passed, failed, round(time.monotonic() - start)))
        schedules += f"{name:20}{rates}\n" if rates else ""
    if schedules:
        print(
            "\nlearning rates, the same with many clients as without a federation: first step, last step of the first"
        )
        print(f"epoch, last step, end\n{schedules}", end="")
    print(f"\nwith {', '.join(f'{package}=={version(package)}' for package in KEPT)}")
    wide = max(len(versions) for _, versions, *_ in rows) + 2
    print(f"{'project':20}{'versions':{wide}}{'passed':>8}{'failed':>8}{'seconds':>9}")
    for name, versions, passed, failed, seconds in rows:
        print(f"{name:20}{versions:{wide}}{passed:8}{failed:8}{seconds:9}")
    return int(any(failed for *_, failed, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
