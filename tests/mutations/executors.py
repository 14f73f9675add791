# SPDX-License-Identifier: Apache-2.0
"""Faults in executors."""

from mutations.change import In

CHANNELS, WORKERS = "tests/clients/test_worker_channels.py", "tests/clients/test_parallel_workers.py"

pool = In("fl_lightning/clients/workers/process.py", f"{CHANNELS} tests/clients/test_parallel.py -k 'places'")
runner = In(
    "fl_lightning/clients/workers/runner.py",
    f"{WORKERS} tests/clients/test_parallel.py -k 'frozen or dies or dropped or that_change'",
)
worker = In(
    "fl_lightning/clients/workers/worker.py",
    f"tests/clients/test_parallel_processes.py {WORKERS} -k 'processes or traces or dropped'",
)
process = In(
    "fl_lightning/clients/workers/process.py",
    f"tests/clients/test_parallel_processes.py {WORKERS} -k 'processes or outlive or interrupted'",
)
packed = In("fl_lightning/core/processes.py", "tests/core/test_tensor_bytes.py tests/clients/test_worker_channels.py")
executor = In(
    "fl_lightning/clients/workers/runner.py",
    "tests/clients/test_aligned_rows.py tests/clients/test_parallel.py -k boundaries",
)
visits = In("fl_lightning/clients/visits.py", f"tests/clients/test_visits.py {WORKERS}")
VISITS = "tests/clients/test_module_visits.py"
module_visits = In("fl_lightning/clients/module_visits.py", VISITS)
kept = In("fl_lightning/lightning/module/kept_objects.py", VISITS)
contents = In("fl_lightning/lightning/module/contents.py", VISITS)
state = In("fl_lightning/lightning/module/object_state.py", f"{VISITS} -k hooks")
banks = In("fl_lightning/clients/memory_banks.py", "tests/clients/test_memory_banks.py")
FAILURES = "tests/clients/test_rank_failures.py"
ranked = In("fl_lightning/clients/ranks/ranked_runner.py", f"{FAILURES} -k 'between and script'")
compared = In("fl_lightning/fit/fit.py", f"{FAILURES} -k 'state and script'")
processes = In("fl_lightning/lightning/rank_processes.py", f"{FAILURES} -k does_not_end")

MUTATIONS = [
    ranked(
        "clients that callbacks have changed go on", "if «self._between is not None→False»:\n            self._check"
    ),
    compared("ranks do not compare the server's state", "«type(rule).__name__: kept.state(rule), →»"),
    processes("a process that hangs is left", "            «process.kill()→continue»\n"),
    pool("a full queue is not filled up", "«        if self._waiting:\n            self._feed()\n→»"),
    pool("a part of a place goes into the queue", "self._waiting[:«4096→4095»]"),
    runner("what one worker found frozen is forgotten", "«self._flaw or →»message.flaw"),
    worker("what is left at the end is not sent", "        «self._send()\n        →»process"),
    module_visits("metrics are not emptied", "            «before.metric.reset()→pass»\n"),
    module_visits("metrics are not put back", "            «before.put_back()→pass»\n"),
    module_visits("attributes are not put back", "            «kept.put(kept.content)→pass»\n"),
    module_visits("what callbacks change is not seen", "        if «not self._pinned→False»:\n"),
    module_visits("any client's attributes are taken", "        if «is_chosen→True»:\n"),
    module_visits("views stay views", "return plain«.detach().clone()→»"),
    module_visits("new lists are of one client", "        «new.setdefault(key, type(items)()).extend(items)→pass»"),
    state("hooks that a visit adds stay", "            «hooks.clear()→pass»\n"),
    state("hooks that a visit takes away are gone", "hooks.update(«content.get(name, {})→{}»)"),
    state("changed hooks are not seen", "return not («self.changed_names→»() if self.content"),
    kept("a full deque has not grown", "range(«len(before) + 1 if full else →»1)"),
    kept("what is new is not taken away", "[«n for n in now if n not in content→»]"),
    kept("slots are not looked at", "return {**«slots, **→»"),
    kept("dictionaries have no attributes", "        return (Items,« *names→»)"),
    kept("keys do not count", "«all(map(is_, now, then)) and →»"),
    contents("tensors of other shapes do not come back", "        «tensor.data = content.clone()→pass»"),
    banks("columns are not looked at", "{0«, old.dim() - 1→»}"),
    banks("a bank is one wherever its pointer is", "«all→any»(within for row"),
    banks("no pointer goes several times around", '"«perhaps→no»" if'),
    banks("every counter is a pointer", "% length «=→>»= 0 for"),
    banks("one client's word is enough", 'if «"no" not→"yes"» in given'),
    process("children of workers outlive them", "«os.killpg(worker.pid, signal.SIGKILL)→pass»"),
    process("Ctrl-C reaches workers", "«    os.setpgid(0, 0)\n→»"),
    process("workers use all threads", "    «torch.set_num_threads(1)→pass»"),
    packed("memory formats are looked for in the wrong order", "key=values.stride«, reverse=True→»"),
    packed("the sign bit of a view is lost", ".resolve_conj()«.resolve_neg()→»"),
    packed("tensors arrive at any address", "dtype=dtype)«.clone()→»"),
    packed("tensors that need gradients lose that", "values«.requires_grad_(requires_grad)→»"),
    executor("rows are not padded", "«padded(n, like.dtype)→n»)"),
    visits("warnings of workers are lost", "        for text, category, filename, line in «outcome.warned→()»:"),
    visits("failed clients log nothing", "        for call in «outcome.logged→()»:\n"),
    visits("nobody hears of a wish to stop", "« or outcome.stops→»"),
    visits("a client is not undone", "«clients.restore(failed=error is not None)→pass»"),
]
