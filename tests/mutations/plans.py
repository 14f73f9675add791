# SPDX-License-Identifier: Apache-2.0
"""Faults in planned steps."""

from mutations.change import In

STEPS, PROGRAMS = "tests/training/test_planned_steps.py", "tests/training/test_planned_programs.py"
PLANNED = "fl_lightning/training/planned"

program = In(f"{PLANNED}/program.py", PROGRAMS)
traces = In(f"{PLANNED}/trace.py", PROGRAMS)
plan = In(f"{PLANNED}/plan.py", f"{STEPS} -k 'same_bits or losses or methods'")
calls = In(f"{PLANNED}/planned_calls.py", f"{STEPS} -k 'wrong or same_bits or hooks or read or end_of_a_round'")
capture = In(f"{PLANNED}/capture.py", f"{STEPS} -k 'cannot_repeat'")
gradients = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'hold_on'")

MUTATIONS = [
    program("memory is used again while something reads it", "if last < place), None)", "if last <= place + 9), None)"),
    program(
        "what the function returns is written over",
        "for node in (self._outputs if fresh_gradients else returned)}",
        "for node in (self._outputs if fresh_gradients else ())}",
    ),
    program(
        "gradients that have to be fresh stay where they are",
        "self._outputs if fresh_gradients else returned",
        "returned",
    ),
    program(
        "operations that generate their variant are used",
        "torch.Tag.generated not in variant.tags",
        "True",
    ),
    traces("views without a schema are taken for new memory", "            self.sources[n] = ", "            _ = "),
    plan("what a compared run has changed stays", "            tensor.copy_(before)", "            pass"),
    calls(
        "the end of a round compares nothing",
        "for plan, batch, index in last.values() if self._wrong is None else ():",
        "for plan, batch, index in ():",
    ),
    calls("the first results are not compared", "        if not plan.verified:", "        if False:"),
    calls("what is logged gets lost", "        self._log.replay()\n", ""),
    calls("hooks are not looked for", "            self._hooked = found", "            self._hooked = None"),
    capture("changes outside the step are accepted", "if _root(what.source) != records:", "if False:"),
    capture("Python's random numbers are accepted", "    if drawn:", "    if False:"),
    gradients("gradients are never fresh", "fresh = hooks.keeps_gradients or not optimizer.lets_go", "fresh = False"),
]
