# SPDX-License-Identifier: Apache-2.0
"""What shows only in a process that has computed nothing yet. Its start takes longer than all of it: there is one."""

import os
import subprocess
import sys
from pathlib import Path

from once import once

PARTS = {
    "plans": "import test_planned_steps as here; here.plan_in_workers()",  # first: nothing has gone backward yet
    "alignment": "from test_aligned_rows import check_places as check; "
    "check('sequential', '32-true'); check('parallel', '32-true')",
}
PROGRAM = """
import traceback
for name, part in {parts}.items():
    with open(name, "w") as file:
        try:
            exec(part)
        except BaseException:
            traceback.print_exc(file=file)
"""


def run(folder):
    """Runs all parts and leaves a file for each, which is empty if all is well."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(parts=PARTS)]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def trouble(factory, part):
    """What went wrong in a part."""
    return (once(factory, "fresh-process", run) / part).read_text()
