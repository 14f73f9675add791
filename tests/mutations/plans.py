# SPDX-License-Identifier: Apache-2.0
"""Faults in planned steps."""

from mutations.change import In

STEPS, PROGRAMS = "tests/training/test_planned_steps.py", "tests/training/test_planned_programs.py"
GUARDS, WRONG = "tests/training/test_planned_guards.py", "tests/training/test_wrong_plans.py"
STEADY = "tests/training/test_steady_visits.py"
PLANNED = "fl_lightning/training/planned"

clipping = In("fl_lightning/training/module_calls.py", "tests/training/test_optimization.py -k clipping")
program = In(f"{PLANNED}/program.py", PROGRAMS)
traces = In(f"{PLANNED}/trace.py", PROGRAMS)
plan = In(f"{PLANNED}/plan.py", f"{STEPS} -k 'same_bits or losses or methods'")
calls = In(f"{PLANNED}/planned_calls.py", f"{STEPS} {GUARDS} {WRONG} -k 'wrong or same_bits or hooks or read or end'")
capture = In(f"{PLANNED}/capture.py", f"{GUARDS} -k 'cannot_repeat'")
moves = In(f"{PLANNED}/program.py", f"{GUARDS} -k 'cannot_repeat'")
moved = In(f"{PLANNED}/plan.py", f"{GUARDS} -k 'replaced'")
notes = In(f"{PLANNED}/step_log.py", f"{STEPS} -k 'logged'")
forks = In(f"{PLANNED}/capture.py", f"{STEPS} -k 'makes_workers'")
passes = In(f"{PLANNED}/planned_calls.py", f"{STEADY} {GUARDS}")
visits = In("fl_lightning/training/local_steps.py", STEADY)
hooks = In("fl_lightning/training/client_hooks.py", STEADY)
batches = In("fl_lightning/training/client_batches.py", STEADY)
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
    plan("what a compared run has changed stays", "            tensor.detach().copy_(before)", "            pass"),
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
    capture("functions that remember are accepted", "    if remembers is not None:", "    if False:"),
    moves("memory that is replaced is not looked for", "name__ in _MOVING:", "name__ in ():"),
    moved(
        "what is compared is the memory of before",
        "[inputs[place] for place in self._compared]  #",
        "[inputs[place].detach() for place in self._compared]  #",
    ),
    notes("what is logged is written over", "value.detach().clone()", "value.detach()"),
    program("what others still read is written over", "self._last_use[source] > place or ", ""),
    program("a view of what is written over is read", " or shared != [source]", ""),
    program("gradients that share memory are left so", " and len(sharing) == 1 and ", " and "),
    program("gradients that no run writes are left so", " and self._is_anew(self._trace.base(node))", ""),
    program("parts of one result count as one", "place = node.args[1]", "place = None"),
    clipping("gradients are never clipped", "            self.module.clip_gradients(optimizer)", "            pass"),
    forks("the first backward pass is in a trace", "    begin_autograd()\n", ""),
    passes("one look at the guards is enough", "if self._once.get(shape) is not plan:", "if False:"),
    passes(
        "guards of the visit before count", "        self._direct.clear()\n        self._once", "        self._once"
    ),
    visits(
        "the last batch is like all others",
        "            self._gradients.end_steady()\n",
        "            pass\n",
    ),
    visits("schedules within visits are forgotten", " and not self._loop.clock.scheduled", ""),
    visits("transfer hooks are forgotten", " and not self._calls.hooked", ""),
    visits("hooks of optimizers are forgotten", " and self._optimizer.lets_go", ""),
    visits("the client rule's code is forgotten", "steady and self._hooks.steady", "steady"),
    hooks("rules before batches are forgotten", "not self._begins and not", "not"),
    hooks("rules after gradients are forgotten", " and not self.keeps_gradients", ""),
    batches("data that asks other code is forgotten", "self.loaders.in_memory and", ""),
    batches("attacks are forgotten", " and self._options.attack_of(client) is None", ""),
    gradients("gradients are never fresh", "fresh = hooks.keeps_gradients or not optimizer.lets_go", "fresh = False"),
]
