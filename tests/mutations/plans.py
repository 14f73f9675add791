# SPDX-License-Identifier: Apache-2.0
"""Faults in planned steps."""

from mutations.change import In

STEPS, PROGRAMS = "tests/clients/test_planned_steps.py", "tests/clients/test_planned_programs.py"
GUARDS, WRONG = "tests/clients/test_planned_guards.py", "tests/clients/test_wrong_plans.py"
VARIANTS = "tests/clients/test_planned_variants.py"
PLANNED = "fl_lightning/clients/planned"

clipping = In("fl_lightning/clients/local_training.py", "tests/clients/test_optimization.py -k clipping")
program = In(f"{PLANNED}/plan.py", PROGRAMS)
plan = In(f"{PLANNED}/plan.py", f"{VARIANTS} {WRONG} -k 'dropout or mean or foreign or number or end'")
firsts = In(f"{PLANNED}/plan.py", f"{WRONG} -k start")
steps = In(f"{PLANNED}/planned_gradients.py", f"{GUARDS} {WRONG} -k 'end or start or hooks or every_round'")
logs = In(f"{PLANNED}/planned_gradients.py", f"{VARIANTS} -k 'logged'")
notes = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'logged'")
forks = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'makes_workers'")
leaks = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'nothing_is_left'")
gradients = In(f"{PLANNED}/planned_gradients.py", f"{STEPS} -k 'hold_on'")

MUTATIONS = [
    program("what the function returns is written over", "set«(map(_memory, returned))→[int]()»"),
    program("gradients that share memory are left so", "«shared[_memory(g)] == 1 and →»"),
    program("gradients that no run writes are left so", "« and _memory(g) in self._made→»"),
    program("gradients keep the layout of a view", "« and g.is_contiguous()→»"),
    program("masks are repeated", "«index.dtype is not torch.int64→False»"),
    program("tensors that move are repeated", "«torch.Tag.inplace_view in op.tags→False»"),
    program("a number is the same tensor in every run", "if «func is _ATEN.lift_fresh.default→False»"),
    program("a recording draws random numbers", "«torch.random.fork_rng(devices=()), →»"),
    program("a recording trains", ".copy_(t.detach()) for t in inputs«→[:0]»]"),
    plan("what a comparison has changed stays", "        «_put_back(inputs, before, state)\n        →»if not same:"),
    plan("the random generator goes on in a comparison", "    «torch.set_rng_state(state)→pass»"),
    plan("numbers become tensors", '«"pass_arg_as_tensor", True→"no_such_part", False»)'),
    plan("other tensors are trained", "and «id(value) not in own→False»"),
    steps("the end of a round compares nothing", "for plan in «self.used→()»:"),
    firsts("the first results are not compared", "«        self.compare()\n→»"),
    steps("hooks are not looked for", "(reason := «_reason_against(self._eager, self._parameters)→None»)"),
    steps("eight values end planning", "«found.steps // _WORTH→0»"),
    logs("what is logged gets lost", "            «log.to(name, value, *args, **kwargs)→pass»\n        return"),
    logs("what a refused step logs gets lost", "            «log.notes = False→pass»\n"),
    notes("what is logged is written over", "value.detach()«.clone()→»"),
    forks(
        "the first backward pass comes after TorchDynamo",
        "«        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]\n→»",
    ),
    leaks("TorchDynamo keeps plans", "kept: Any = «ref(self.plans[-1])→lambda plan=self.plans[-1]: plan»"),
    gradients(
        "who keeps gradients gets others in their memory",
        "«eager.hooks.keeps_gradients or not eager.optimizer.lets_go→False»",
    ),
    clipping("gradients are never clipped", "            «self._calls.module.clip_gradients(optimizer.wrapped)→pass»"),
]
