# SPDX-License-Identifier: Apache-2.0
"""A SuperLink and SuperNodes in processes of their own, on loopback, for one test; nothing is left running."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from process_families import Family, free_port, kill, until

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(sys.executable).parent


def listens(port: int) -> bool:
    """Whether something answers at a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs, with a folder of their own."""
    return {
        **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "NO_COLOR": "1",
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


class Network:
    """The processes of one federation.

    Args:
        folder: of this test; logs, Flower's home and its database lie there.
        family: to which all processes belong, and which ends them.

    Attributes:
        gate: a folder that the app of the tests knows, see ``network_app/task.py``.
    """

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder, self._family = folder, family
        self.port, self.gate = free_port(), folder / "gate"
        self.gate.mkdir()
        home = folder / "flower"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.env = {**environment(home), **family.env}
        self._started = 0

    # ---- processes

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        self._started += 1
        log = self.folder / f"{self._started}-{name}.log"
        return self._family.start([PROGRAMS / program, *arguments], self.env, log, self.folder)

    def superlink(self) -> subprocess.Popen[bytes]:
        """Starts the SuperLink, or starts it again with what its database has."""
        process = self._start(
            "superlink", "flower-superlink", "--insecure", "--port", str(self.port),
            "--database", str(self.folder / "link.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        until(lambda: listens(self.port) or process.poll() is not None, 60, "SuperLink starts", self.logs)
        assert process.poll() is None, self.logs()
        return process

    def supernode(self, name: str, **config: str | int) -> subprocess.Popen[bytes]:
        """Starts a SuperNode, whose node-config has underscores for hyphens."""
        words = [f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items()]
        return self._start(
            name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
            "--port", str(free_port()), "--node-config", " ".join(words),
        )  # fmt: skip

    def command(self, *arguments: str, seconds: float = 120) -> str:
        """What ``flwr`` prints."""
        done = subprocess.run(
            [PROGRAMS / "flwr", *arguments], env=self.env, cwd=self.folder, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def run(self, app: Path, **config: str | int) -> int:
        """Submits an app; returns the run's id."""
        words = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        changed = ["--run-config", words] if config else []
        return int(json.loads(self.command("run", str(app), "test", *changed, "--format", "json"))["run-id"])

    def status(self, run: int) -> str:
        """``running``, ``finished:completed`` and so on."""
        (found,) = json.loads(self.command("ls", "test", "--run-id", str(run), "--format", "json"))["runs"]
        return found["status"]

    def said(self, run: int) -> str:
        """What the server app of a run has printed."""
        return self.command("log", str(run), "test", "--show")

    def finish(self, run: int, seconds: float = 420) -> str:
        """Waits for the end of a run; returns how it ended."""
        until(lambda: self.status(run).startswith("finished"), seconds, f"run {run} ends", self.logs)
        return self.status(run)

    # ---- ends

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL for a process and for what it started, as when its machine loses power."""
        for member in self._family.descendants(process.pid):
            kill(member)
        process.wait(30)

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"---- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.log")))
