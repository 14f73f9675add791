# SPDX-License-Identifier: Apache-2.0
"""Workflows call what exists, test what is promised, and may do no more than they need."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
JOBS = [(flow, name, job) for flow, content in FLOWS.items() for name, job in content["jobs"].items()]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def commands(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def combinations(job):
    return job.get("strategy", {}).get("matrix", {}).get("include", [])


def test_there_are_workflows_for_tests_wheels_and_docs():
    assert {"tests", "wheels", "docs"} <= set(FLOWS)
    for content in FLOWS.values():
        assert set(content) >= {"name", True, "permissions", "jobs"}  # YAML 1.1 reads the key "on" as true


@pytest.mark.parametrize(("flow", "name", "job"), JOBS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_job_runs_commands_that_exist(flow, name, job):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {combination["target"] for combination in combinations(job) if "target" in combination}
    for command in commands(job):
        assert subprocess.run(["bash", "-n"], input=re.sub(r"\$\{\{.*?\}\}", "x", command), text=True).returncode == 0
        assert "${{" not in command, "a value from outside must come through env, or it can hold commands"
        targets |= set(re.findall(r"\bmake ([\w-]+)", command))
        assert all((ROOT / script).is_file() for script in re.findall(r"python (\w\S*\.py)", command))
    assert all(re.search(f"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert all(re.search(r"@(v\d+|release/v1|[0-9a-f]{40})$", step["uses"]) for step in job["steps"] if "uses" in step)
    needs = job.get("needs", [])
    assert {needs} if isinstance(needs, str) else set(needs) <= set(FLOWS[flow]["jobs"])


def test_every_supported_python_and_the_oldest_dependencies_are_tested():
    matrix = combinations(FLOWS["tests"]["jobs"]["tests"])
    promised = set(re.findall(r"Python :: (3\.\d+)", PROJECT))
    assert {each["python"] for each in matrix if each["target"] == "test"} == promised
    assert [each["python"] for each in matrix if each["target"] == "test-oldest"] == ["3.10"]
    tried = set(FLOWS["wheels"]["jobs"]["try"]["strategy"]["matrix"]["python"])
    assert tried == {"3.10", "3.13"} <= promised


def test_only_jobs_that_publish_may_do_more_than_read():
    assert all(content["permissions"] == {"contents": "read"} for content in FLOWS.values())
    assert {(flow, name) for flow, name, job in JOBS if "permissions" in job} == {
        ("docs", "publish"),
        ("wheels", "publish"),
    }


def test_nothing_is_uploaded_that_was_not_tried():
    publish = FLOWS["wheels"]["jobs"]["publish"]
    assert publish["needs"] == "try"
    assert set(FLOWS["wheels"]["jobs"]["try"]["needs"]) == {"sources", "kernels"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert "github.ref_type == 'tag'" in publish["if"]
    assert not commands(publish)


def test_the_version_is_the_same_everywhere():
    version = re.search(r'^version = "(.*)"$', PROJECT, re.MULTILINE)[1]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert citation["cff-version"] == "1.2.0"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)
    assert latest[1] == version
    assert ("date-released" in citation) == (latest[2] != "unreleased")


def test_wheels_are_built_and_tried_with_the_oldest_torch_that_runs_kernels():
    oldest = re.search(r"^TORCH = \((\d+), (\d+)\)$", (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE).groups()
    named = f"'torch=={'.'.join(oldest)}.*'"
    assert named in re.search(r"^before-build = (.*)$", PROJECT, re.MULTILINE)[1]
    assert named.replace("'", '"') in (ROOT / "release/clean_environments.py").read_text(encoding="utf-8")


def test_the_oldest_versions_that_users_may_have_stay_promised():
    required = dict(re.findall(r'^  "([a-z]+)(>=[^"]*)",$', PROJECT, re.MULTILINE))
    for name, oldest in (("torch", "2.6.0"), ("lightning", "2.5.0"), ("torchmetrics", "1.4.0")):
        assert SpecifierSet(required[name]).contains(oldest)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_what_github_takes(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "labels", "body"} == set(form)
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "checkboxes", "dropdown", "markdown")
        assert field["attributes"]["label"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
