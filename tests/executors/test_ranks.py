# SPDX-License-Identifier: Apache-2.0
"""Fits on several processes have the bits of one, and end everywhere if one of them fails."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_session
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from fl_lightning.core.fair_shares import fair_shares
from fl_lightning.core.lightning.ranks import metrics_apart
from fl_lightning.core.lightning.single_device import check_devices

SESSION = Path(rank_session.__file__)
SECONDS = 300
QUICK = ("FedLF", "SCAFFOLD with FedLF", "Ditto", "kept optimizers", "gathering", "failing client")

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]


def environment():
    path = [str(SESSION.parents[1]), str(SESSION.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def left_behind():
    """Processes that still run the session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if str(SESSION).encode() in command and f"RUN{os.getpid()}".encode() in command:
            found.append(path.parent.name)
    return found


def session(out, ranks, *words, torchrun=True, fails=False):
    """Runs the program on some ranks and returns what it printed; nothing of it may be left."""
    folder = Path(out) / f"RUN{os.getpid()}"
    folder.mkdir(exist_ok=True)
    command = [sys.executable]
    if ranks > 1 and torchrun:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
    command += [str(SESSION), str(folder), str(ranks), *words]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS, cwd=out)
    end = time.monotonic() + 30
    while left_behind() and time.monotonic() < end:
        time.sleep(0.2)
    assert left_behind() == []
    assert (result.returncode != 0) is fails, (result.stdout + result.stderr)[-6000:]
    return result.stdout + result.stderr


def results(out):
    files = sorted((Path(out) / f"RUN{os.getpid()}").glob("rank-*.json"))
    found = [json.loads(path.read_text()) for path in files]
    for path in files:
        path.unlink()
    return found


def saved(out):
    return sorted(path.name for path in (Path(out) / f"RUN{os.getpid()}").iterdir() if ".ckpt" in path.name)


def differences(one, other):
    """Names of what was logged or computed differently."""
    found = {}
    for case in one.keys() | other.keys():
        (weights, logged), (theirs, others) = one[case], other[case]
        names = [name for name in logged.keys() | others.keys() if logged.get(name) != others.get(name)]
        if names or weights != theirs:
            found[case] = sorted(names) or ["weights"]
    return found


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [(QUICK, 2), pytest.param(tuple(rank_session.FITS), 3, marks=pytest.mark.slow)],
    ids=["2 ranks", "all cases on 3 ranks"],
)
def test_several_processes_have_the_bits_of_one(tmp_path, cases, ranks):
    said = session(tmp_path, ranks, "fits", *cases)
    many = results(tmp_path)
    assert len(many) == ranks
    session(tmp_path, 1, "fits", *cases)
    (one,) = results(tmp_path)
    assert set(one) == set(cases)
    for rank in many:
        assert differences(one, rank) == {}
    steps = re.findall(r"STEP (\d) (\d)", said)
    later = {rank: steps.count((str(rank), "2")) for rank in range(ranks)}
    whole = steps.count(("0", "0"))  # with the sanity check; the first evaluation shows that the module can be divided
    assert sum(later.values()) < whole
    assert all(later.values()), "every rank evaluates some clients"


def test_a_script_starts_its_own_processes(tmp_path):
    said = session(tmp_path, 2, "fits", "FedAvg", torchrun=False)
    one, two = results(tmp_path)
    assert differences(one, two) == {}
    assert "2 processes on 1 machine" in said


@pytest.mark.slow
def test_two_machines(tmp_path):
    """Two agents of torchrun with one process each, as on two machines."""
    folder, port = tmp_path / f"RUN{os.getpid()}", free_port()
    folder.mkdir()
    agents = []
    for node in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node)]
        command += ["--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port)]
        agents.append(subprocess.Popen([*command, str(SESSION), str(folder), "2", "nodes"], env=environment()))
    assert [agent.wait(SECONDS) for agent in agents] == [0, 0]
    one, two = results(tmp_path)
    session(tmp_path, 1, "fits", "FedLF")
    assert differences(one, two) == differences(one, results(tmp_path)[0]) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_another_number_of_processes_goes_on_from_a_checkpoint(tmp_path, before, after):
    case = "SCAFFOLD with FedLF"
    session(tmp_path, before, "save", case)
    names = [name.partition(".columns-")[0] for name in saved(tmp_path)]
    copies = ["after-2.ckpt", "round-1.ckpt", "same.ckpt"]
    assert names == (sorted(copies * 2) if before > 1 else copies), "folders of older checkpoints are gone"
    session(tmp_path, after, "resume", case)
    resumed = results(tmp_path)
    _, *whole = rank_session.trained(case, 1, rounds=4)
    assert all(differences({case: json.loads(json.dumps(whole))}, rank) == {} for rank in resumed)


def test_one_rank_stops_all(tmp_path):
    session(tmp_path, 2, "stop")
    assert [rank["round"] for rank in results(tmp_path)] == [2, 2]


def test_the_same_trainer_goes_on_with_more_rounds(tmp_path):
    session(tmp_path, 2, "again")
    many = results(tmp_path)
    session(tmp_path, 1, "again")
    (one,) = results(tmp_path)
    assert one["round"] == 3
    assert many == [one, one]


FAILURES = {
    "data": r"ValueError: all ranks must run the same fit, found that rank 1 differs from rank 0 in .*other samples",
    "weights": r"RankError: after round 2, rank 1 must have the global parameters of rank 0, found others",
    "coefficients": r"RankError: after round 2, rank 1 must have the coefficients of rank 0, found others",
    "counts": r"RankError: training client \d changes attribute 'steps', which the other ranks would not see",
    "raise": r"OSError: the disk is full",
    "kill": r"RankError: rank 0 of 2 waits for another process of this fit, which has ended|Signal 9 \(SIGKILL\)",
    "rows": r"RankError: rank \d finds that row \d of the round must be what its client has sent, and that other bits",
}


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["script", "torchrun"])
@pytest.mark.parametrize(
    "what", [pytest.param(name, marks=[] if name in ("weights", "kill") else pytest.mark.slow) for name in FAILURES]
)
def test_all_processes_end_with_one_that_fails(tmp_path, what, torchrun):
    said = session(tmp_path, 2, what, torchrun=torchrun, fails=True)
    assert re.search(FAILURES[what], said), said[-4000:]


def test_shares_are_fair():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ranks = int(torch.randint(1, 9, (), generator=generator))
        costs = torch.randint(0, 50, (30,), generator=generator).tolist()
        shares = fair_shares(costs, ranks)
        assert sorted(client for share in shares for client in share) == [c for c, cost in enumerate(costs) if cost]
        loads = [sum(costs[client] for client in share) for share in shares]
        bound = max(sum(costs) / ranks, max(costs))
        assert max(loads) <= bound * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # Graham 1969


def test_metrics_come_back_as_they_were():
    module = rank_session.Gathering(**rank_session.OPTIONS)
    before = [metric.distributed_available_fn for metric in (module.acc, module.both["a"])]
    with metrics_apart(module):
        assert not module.acc.distributed_available_fn()
        assert not module.both["a"].distributed_available_fn()
    assert [metric.distributed_available_fn for metric in (module.acc, module.both["a"])] == before


def test_what_cannot_run_on_several_processes_is_refused(monkeypatch):
    cpu, mps = torch.device("cpu"), torch.device("mps", 0)
    check_devices([cpu] * 3, 3, LightningEnvironment())
    with pytest.raises(ValueError, match=r"MPS has one device, found .* 2 processes"):
        check_devices([mps], 2, LightningEnvironment())
    with pytest.raises(ValueError, match="runs on CPU, CUDA or MPS, found xla"):
        check_devices([torch.device("xla", 0)], 1, LightningEnvironment())
    monkeypatch.setattr(TorchElasticEnvironment, "world_size", lambda self: 4)
    with pytest.raises(ValueError, match=r"torchrun has started 4 processes, and Trainer\(devices=1, num_nodes=1\)"):
        check_devices([cpu], 1, TorchElasticEnvironment())
