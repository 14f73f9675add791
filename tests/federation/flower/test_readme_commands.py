# SPDX-License-Identifier: Apache-2.0
"""The commands in the README of the example with an app for Flower, as a user types them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from process_families import family, free_port, until

pytest.importorskip("flwr")

from network import environment, listens

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1200)]


class Shell:
    """Runs lines of the README, each in the app's folder, with ports of this test and a home of its own.

    Args:
        folder: of the test.
        processes: to which all that is started belongs.
    """

    def __init__(self, folder, processes):
        self.app, self.folder, self.processes = folder / "fair-sites", folder, processes
        self.port, self.started = free_port(), 0
        self.env = {**environment(folder / ".flwr"), **processes.env, "HOME": str(folder)}

    def adapted(self, line):
        """A command with free ports, at addresses of this machine."""
        for address in ("server.example.org", "0.0.0.0"):
            line = line.replace(address, "127.0.0.1")
        line = line.replace(":8000", f":{self.port}")
        line = re.sub(r"--port \d+", lambda _: f"--port {free_port()}", line)
        words = shlex.split(line)
        return [*words, "--port", str(self.port)] if words[0] == "flower-superlink" else words

    def begin(self, line):
        """Starts a command that goes on."""
        self.started += 1
        words = self.adapted(line)
        self.processes.start(words, self.env, self.folder / f"{self.started}-{words[0]}.log", self.app)

    def do(self, line, seconds=120):
        """Runs a command to its end; returns what it prints."""
        done = subprocess.run(
            self.adapted(line), env=self.env, cwd=self.app, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self):
        """The ends of all logs."""
        return "\n".join(f"---- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def shell(tmp_path):
    with family() as processes:
        yield Shell(tmp_path, processes)
    assert processes.members() == []


def section(text, title):
    """The lines of all code blocks of a section, continuation lines joined."""
    (body,) = re.findall(rf"^## {title}.*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```\w*\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def commands(lines, *programs):
    """Those that begin with one of these programs."""
    return [line for line in lines if line.split(" ")[0] in programs]


def digest(text):
    """The last digest of weights that was printed."""
    found = re.findall(r"digest of the weights: (\w+)", text)
    assert found, text
    return found[-1]


@pytest.fixture
def readme(shell):
    """Copies the app; returns its README."""
    example = Path(__file__).parents[3] / "examples" / "flower_app"
    shutil.copytree(example, shell.app, ignore=shutil.ignore_patterns("__pycache__"))
    return (shell.app / "README.md").read_text()


def connection(shell, lines):
    """Writes Flower's file of connections as the README has it; returns its path."""
    path = shell.folder / ".flwr" / "config.toml"
    path.parent.mkdir()
    written = "\n".join(line for line in lines if " = " in line or line.startswith("["))
    path.write_text(written.replace(":8000", f":{shell.port}"))
    return path


def test_the_commands_for_one_machine_give_the_weights_of_the_simulation(shell, readme):
    lines = section(readme, "Deploy on one machine")
    connection(shell, lines)
    (link,), nodes, (run,) = (commands(lines, name) for name in ("flower-superlink", "flower-supernode", "flwr"))
    assert len(nodes) == 4
    shell.begin(link)
    until(lambda: listens(shell.port), 60, "SuperLink starts", shell.logs)
    for node in nodes:
        shell.begin(node)
    said = shell.do(f"{run} --run-config 'rounds=1'", 900)
    assert digest(said) == digest(shell.do("python simulate.py --rounds 1", 300)), said


def test_the_commands_for_several_machines_work_with_tls_and_registered_keys(shell, readme):
    (run,) = commands(section(readme, "Deploy on one machine"), "flwr")
    config = connection(shell, section(readme, "Deploy on one machine"))
    config.write_text(config.read_text().replace("insecure = true", f'root-certificates = "{shell.app}/ca.crt"'))
    lines = section(readme, "Deploy on several machines")
    for line in commands(lines, "openssl", "printf"):
        subprocess.run(line, shell=True, cwd=shell.app, check=True, capture_output=True, timeout=120)
    (link,), (node,), (key,), (register,) = (
        commands(lines, name) for name in ("flower-superlink", "flower-supernode", "ssh-keygen", "flwr")
    )
    shell.begin(link)
    until(lambda: listens(shell.port), 60, "SuperLink starts", shell.logs)
    for site in range(4):
        for line in (key, register):
            shell.do(line.replace("site0", f"site{site}"))
        mine = node.replace("site0", f"site{site}").replace("client-id=0", f"client-id={site}")
        shell.begin(f"{mine} --port {free_port()}")
    said = shell.do(f"{run} --run-config 'rounds=1'", 900)
    assert digest(said) == digest(shell.do("python simulate.py --rounds 1", 300)), said
