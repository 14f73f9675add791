# SPDX-License-Identifier: Apache-2.0
"""Faults in executors."""

from mutations.change import In

CHANNELS, WORKERS = "tests/executors/test_worker_channels.py", "tests/executors/test_parallel_workers.py"

pool = In(
    "fl_lightning/executors/parallel/pool.py",
    f"{CHANNELS} tests/executors/test_parallel.py -k 'places or as_they_come'",
)
runner = In(
    "fl_lightning/executors/parallel/runner.py",
    f"{WORKERS} tests/executors/test_parallel.py -k 'frozen or dies or dropped or between_clients or that_change'",
)
worker = In(
    "fl_lightning/executors/parallel/worker.py",
    f"tests/executors/test_parallel_processes.py {WORKERS} -k 'processes or traces or dropped'",
)
process = In(
    "fl_lightning/executors/parallel/process.py",
    f"tests/executors/test_parallel_processes.py {WORKERS} -k 'processes or outlive or interrupted'",
)
messages = In("fl_lightning/executors/parallel/messages.py", f"{CHANNELS} tests/executors/test_aligned_rows.py")
executor = In(
    "fl_lightning/executors/parallel/executor.py",
    "tests/executors/test_aligned_rows.py tests/executors/test_parallel.py -k boundaries",
)
visits = In("fl_lightning/training/visits.py", f"tests/training/test_visits.py {WORKERS}")
present = In(
    "fl_lightning/training/visits.py",
    f"{WORKERS} tests/executors/test_parallel.py -k 'between_clients or that_change'",
)
FAILURES = "tests/executors/test_rank_failures.py"
ranked = In("fl_lightning/executors/ranks.py", f"{FAILURES} -k 'between and script'")
compared = In("fl_lightning/simulation/fit.py", f"{FAILURES} -k 'state and script'")
processes = In("fl_lightning/core/lightning/rank_processes.py", f"{FAILURES} -k 'hangs and script'")

MUTATIONS = [
    ranked(
        "clients that callbacks have changed go on",
        "if self._between is not None:\n            self._check",
        "if False:\n            self._check",
    ),
    compared("ranks do not compare the server's state", "type(rule).__name__: rule.state_dict(), ", ""),
    processes("a process that hangs is left", "            process.kill()\n", "            continue\n"),
    pool("the longest client always begins", "end(plain) <= 1.05 * end(longest)", "end(plain) < end(longest)"),
    pool("a full queue is not filled up", "        if self._waiting:\n            self._feed()\n", ""),
    pool("a part of a place goes into the queue", "self._waiting[:4096]", "self._waiting[:4095]"),
    runner("what one worker found frozen is forgotten", "self._frozen or message.frozen", "message.frozen"),
    present("another structure of the module is not noticed", "        found.add_structure(clients.module)\n", ""),
    present("data that workers lack are not noticed", "            found.add(name, value)\n", "            pass\n"),
    runner(
        "callbacks between clients are not looked for",
        "self._under_way and self._changes_between and self._is_stale()",
        "False",
    ),
    runner("clients are taken from the front again", "range(first, len(self._tasks))", "range(len(self._tasks))"),
    worker(
        "a worker whose module has changed goes on",
        "self._broken = bool(outcome.changed)",
        "self._broken = False",
        unseen="the parent ends it at that message, whatever it trains meanwhile",
    ),
    worker(
        "what is left at the end is not sent",
        "        self._send()\n        distrusted",
        "        distrusted",
    ),
    process("children of workers outlive them", "os.killpg(worker.pid, signal.SIGKILL)", "pass"),
    process("Ctrl-C reaches workers", "    os.setpgid(0, 0)\n", ""),
    process("workers use all threads", "    torch.set_num_threads(1)", "    pass"),
    messages(
        "memory formats are looked for in the wrong order",
        "key=tensor.stride, reverse=True",
        "key=tensor.stride",
        unseen="such tensors then travel torch's own way",
    ),
    messages("the sign bit of a view is lost", ".resolve_conj().resolve_neg()", ".resolve_conj()"),
    messages("tensors arrive at any address", "dtype=dtype).clone()", "dtype=dtype)"),
    messages("tensors that need gradients lose that", " or tensor.requires_grad:", ":"),
    executor("rows are not padded", "padded(n, like.dtype))", "n)"),
    visits(
        "warnings of workers are lost",
        "        for text, category, filename, line in outcome.warned:",
        "        for text, category, filename, line in ():",
    ),
    visits(
        "failed clients leave nothing behind",
        "        if outcome.traces is not None:\n",
        "        if outcome.traces is not None and outcome.error is None:\n",
    ),
    visits("a client is not undone", "clients.restore(failed=error is not None)", "pass"),
]
