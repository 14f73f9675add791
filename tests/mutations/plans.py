# SPDX-License-Identifier: Apache-2.0
"""Faults in planned steps."""

from mutations.change import In

STEPS, PROGRAMS = "tests/clients/test_planned_steps.py", "tests/clients/test_planned_programs.py"
GUARDS, WRONG = "tests/clients/test_planned_guards.py", "tests/clients/test_wrong_plans.py"
VARIANTS = "tests/clients/test_planned_variants.py"
PLANNED = "fl_lightning/clients/planned"

clipping = In("fl_lightning/clients/module_calls.py", "tests/clients/test_optimization.py -k clipping")
program = In(f"{PLANNED}/program.py", PROGRAMS)
recording = In(f"{PLANNED}/recording.py", PROGRAMS)
plan = In(f"{PLANNED}/plan.py", f"{VARIANTS} {WRONG} -k 'dropout or mean or foreign or number or end'")
steps = In(f"{PLANNED}/planned_gradients.py", f"{GUARDS} {WRONG} -k 'end or start or hooks or every_round'")
logs = In(f"{PLANNED}/planned_gradients.py", f"{VARIANTS} -k 'logged'")
notes = In(f"{PLANNED}/step_log.py", f"{STEPS} -k 'logged'")
forks = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'makes_workers'")
leaks = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'nothing_is_left'")
gradients = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'hold_on'")

MUTATIONS = [
    program(
        "what the function returns is written over",
        "fresh = [*recording.returned, *(gradients if fresh_gradients else ())]",
        "fresh = gradients if fresh_gradients else []",
    ),
    program("gradients that have to be fresh stay", "*(gradients if fresh_gradients else ())]", "]"),
    program("gradients that share memory are left so", "shared[memory] == 1 and ", ""),
    program("gradients that no run writes are left so", " and memory in self._made", ""),
    program("gradients keep the layout of a view", " and gradient.is_contiguous()", ""),
    program("masks are repeated", "index.dtype is not torch.int64", "False"),
    program("tensors that move are repeated", "torch.Tag.inplace_view in op.tags", "False"),
    recording("a number is the same tensor in every run", "if func is torch.ops.aten.lift_fresh.default", "if False"),
    recording("a recording draws random numbers", "torch.random.fork_rng(devices=()), ", ""),
    recording("a recording trains", ".copy_(t.detach()) for t in inputs]", ".copy_(t.detach()) for t in inputs[:0]]"),
    plan("what a comparison has changed stays", "        if not keep:", "        if False:"),
    plan("the random generator goes on in a comparison", "    torch.set_rng_state(state)", "    pass"),
    plan("numbers become tensors", '"pass_arg_as_tensor", True)', '"no_such_part", False)'),
    plan("other tensors are trained", "and id(value) not in own", "and False"),
    steps("the end of a round compares nothing", "if last is not None and self.reason is None:", "if False:"),
    steps(
        "the first results are not compared",
        "            if plan.wrong is not None:\n                self.give_up(plan.wrong)\n            elif",
        "            if",
    ),
    steps("hooks are not looked for", "_hook_of(self._module, self._parameters)", "None"),
    steps("eight values end planning", "guarded.steps // _WORTH", "0"),
    logs("what is logged gets lost", "        log.replay()\n", ""),
    notes("what is logged is written over", "value.detach().clone()", "value.detach()"),
    forks("the first backward pass comes after TorchDynamo", "        begin_autograd()\n", ""),
    leaks("TorchDynamo keeps plans", "kept: Any = ref(plan)", "kept: Any = lambda: plan"),
    gradients("gradients are never fresh", "hooks.keeps_gradients or not optimizer.lets_go", "False"),
    clipping("gradients are never clipped", "            self.module.clip_gradients(optimizer)", "            pass"),
]
