# SPDX-License-Identifier: Apache-2.0
"""Runs a program on several ranks, within a time limit, and makes sure that no process of it is left."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import copies
import rank_session
from process_families import free_port

SESSION = Path(rank_session.__file__)
SECONDS = 300
TORCHRUN = ("-m", "torch.distributed.run")


def folder_of(out):
    """The folder of a test's runs; its name marks the processes of this test run."""
    folder = Path(out) / f"RUN{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return folder


def environment(**more):
    path = [str(SESSION.parents[1]), str(SESSION.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    own = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    return {**kept, **own, **more}


def left_behind(out):
    """Processes that still run a program of this test."""
    return [path.name for path in Path("/proc").glob("[0-9]*") if _runs(path, folder_of(out))]


def _runs(process, folder):
    try:
        if (folder / "copy" / process.name).exists():  # an ended one that nobody has waited for is none any more
            return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return str(folder).encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


class Copied(copies.Copied):
    """A script on a copy of this process, which :func:`left_behind` knows by a file with its number."""

    def begins(self):
        (marks := Path(sys.argv[1], "copy")).mkdir(exist_ok=True)
        (marks / str(os.getpid())).touch()


class FirstCopied(Copied):
    """The same, but what it starts begins from nothing."""

    also_what_it_starts = False


def command(out, ranks, *words, program=SESSION, torchrun=True, options=()):
    """The command line that runs a program on some ranks."""
    found = [sys.executable]
    if ranks > 1 and torchrun:
        found += [*TORCHRUN, "--nproc_per_node", str(ranks), "--master_port", str(free_port()), *options]
    return [*found, str(program), str(folder_of(out)), str(ranks), *words]


def finished(out, process, fails=False):
    """Waits for a program and returns what it printed; nothing of it may be left."""
    try:
        said, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        raise AssertionError(f"it runs for more than {SECONDS} s: {said[-6000:]}") from None
    end = time.monotonic() + 30
    while left_behind(out) and time.monotonic() < end:
        time.sleep(0.2)
    assert left_behind(out) == [], said[-6000:]
    assert (process.returncode != 0) is fails, said[-6000:]
    return said


def started(out, line, kind=subprocess.Popen, **more):
    return kind(line, env=environment(**more), cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def session(out, ranks, *words, program=SESSION, fails=False, kind=subprocess.Popen, **options):
    """Runs the program on some ranks, a single one in this process, and returns what it printed."""
    if ranks > 1:
        return finished(out, started(out, command(out, ranks, *words, program=program, **options), kind), fails)
    with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which pytest makes errors; in a process of its own they are printed
        importlib.import_module(program.stem).main(str(folder_of(out)), "1", *words)
    return said.getvalue()


def forked(out, ranks, *words, program=SESSION, fails=False):
    """The same on copies of this process, which has imported everything; returns what they printed.

    They find each other as processes of torchrun do.
    """
    if ranks == 1:
        return session(out, ranks, *words, program=program)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "forked"}
    shared["MASTER_PORT"] = str(free_port())
    line, children = command(out, ranks, *words, program=program, torchrun=False), []
    files = [folder_of(out) / f"said-{rank}" for rank in range(ranks)]
    for rank, file in enumerate(files):
        with file.open("wb") as output:
            own = {**environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(Copied(line, env=own, cwd=out, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, end - time.monotonic()))
    late = [child for child in children if child.poll() is None]
    for child in late:
        child.kill()
        child.wait()
    said = "".join(file.read_text() for file in files)
    assert late == [], said[-6000:]
    assert any(child.returncode for child in children) is fails, said[-6000:]
    return said


def results(out):
    """What the ranks have written, in their order; the next run begins without."""
    files = sorted(folder_of(out).glob("rank-*.json"))
    found = [json.loads(path.read_text()) for path in files]
    for path in files:
        path.unlink()
    return found


def differences(one, other):
    """Names of what was logged or computed differently."""
    found = {}
    for case in one.keys() | other.keys():
        (weights, logged), (theirs, others) = one[case], other[case]
        names = [name for name in logged.keys() | others.keys() if logged.get(name) != others.get(name)]
        if names or weights != theirs:
            found[case] = sorted(names) or ["weights"]
    return found
