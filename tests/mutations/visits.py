# SPDX-License-Identifier: Apache-2.0
"""Faults in what a client elsewhere does for one message."""

from mutations.change import In

FOLDER = "tests/federation"
CLIENT, SERVER, SCHEDULES, STATE, VISIT = (
    f"{FOLDER}/test_{name}.py"
    for name in ("federated_client", "federated_server", "client_schedules", "module_state", "client_visit")
)
QUICK = (
    "-m 'not slow' -k 'client_visit or (no_difference and (Adam or global or manual or path)) "
    "or (bits_of_a_fit and (MOON or SCAFFOLD or Epochs or Glue)) or (forgotten and MOON and True) or Ditto or no_sense "
    "or sense_are or by_hand or cannot_know or with_all or begins_at or ends_with or losses_are or alike or evaluated "
    "or privacy_does or lists_and or says_nothing or failed_visit or stays_at or reads_the_clock or of_one_client "
    "or steps_itself or named_once'"
)

visit = In("fl_lightning/federation/client_visit.py", f"{VISIT} {CLIENT} {SCHEDULES} {SERVER} {STATE} {QUICK}")
messages = In("fl_lightning/federation/messages.py", f"{VISIT} {CLIENT} {SCHEDULES} {SERVER} {STATE} {QUICK}")

MUTATIONS = [
    visit("a visit begins at the first round", "        self._loop.progress.begin_at(«self._message.round→0»)\n"),
    visit(
        "an evaluation knows no trained parameters",
        'trainer.optimizers« if self._work in ("train", "loss") else configured_optimizers(module)→»',
    ),
    visit("data of the last visit stay", "«        self._loop.forget_data()\n→»"),
    visit(
        "a client's own data are those of client 0",
        "                «dataloader = dataloader.numbered_from(client)→pass»\n",
    ),
    visit(
        "an evaluation is of the module's own parameters",
        "«        self._take_message(self._binding, buffers, self._num_clients or len(dataloader))\n→»",
    ),
    visit("an evaluation is without what rounds have left", "        «self._module.take()\n        →»limit"),
    visit("a test ends where a validation does", 'self.limits[«f"limit_{self._work}_batches"→"limit_val_batches"»]'),
    visit(
        "a validation ends where training does", 'self.limits[«f"limit_{self._work}_batches"→"limit_train_batches"»]'
    ),
    visit("the evaluator goes on", "«        self._evaluator.stop()\n→»"),
    visit("parameters stay bound", "            «self._binding.release()→pass»\n"),
    visit("the trainer's limits are not given back", "«        self.give_limits_back(self._trainer)\n→»"),
    visit(
        "the client rule adds nothing to the loss",
        "return «self.side.runner.hooks.training_step(super().training_step, *args, **kwargs)→"
        "super().training_step(*args, **kwargs)»",
    ),
    visit(
        "the client rule corrects no gradients",
        "«        closure = self.side.runner.hooks.corrected(closure, self.precision_plugin)\n→»",
    ),
    visit("parameters are not compared", "«        message.check_params(theta)\n→»"),
    visit("the module's own parameters are trained", "«        theta.copy_(message.params)\n→»"),
    visit("the module's own buffers are trained", "            «buffers.put(message.buffers)→pass»\n"),
    visit(
        "what the method sends is not taken",
        "            «kept.take(rule, message.broadcast)\n"
        "            kept.take_own(rule, client, message.client_state)→pass»\n",
    ),
    visit("what the client kept is not taken", 'if «self._before is not None and self._before["rule"]→False»:'),
    visit("the rule does not know how many rounds there are", "theta.dtype«, rounds=message.rounds→»))"),
    visit("full gradients count as visits of many steps", "batches.plan(«options.needs.full_gradients→False»)"),
    visit("optimizers begin anew", 'if «self._before is not None and self._before["optimizers"]→False»:'),
    visit(
        "schedulers that step within visits step alone",
        "«        check_visit_schedulers(trainer, self._knows_clock, message.round * side.schedules.steps)\n→»",
    ),
    visit("schedules are those of the first round", "«            loop.pass_rounds(message.round)\n→»"),
    visit("schedules pass a round too many", "loop.pass_rounds(message.round«→ + 1»)"),
    visit("a round does not begin for schedules", "«            side.schedules.begin_round()\n→»"),
    visit("the clock is that of the client's own data", "        clock.plan = «plan or →»own\n"),
    visit("who knows all data does not know the clock", "clock, «→not has_all and »plan is not None\n"),
    visit("nobody asks for rounds", 'lacking += «["rounds"] if self._message.rounds is None else []→[]»'),
    visit("nobody asks for the steps of a round", '[]« if self._knows_clock else ["steps_per_round"]→»'),
    visit("a client without data trains", "        if «size == 0→False»:\n"),
    visit("a loss is measured after training", 'trains = «self._work == "train"→True»'),
    visit(
        "a client draws what it drew in the first round",
        "ClientTask(client, 0, «index→0», size, loaders.num_batches(client))",
    ),
    visit(
        "schedulers may be stepped by hand",
        "«        refuse_steps_by_hand(self._trainer, self._upload.pace.by_hand)\n→»",
    ),
    visit(
        "schedules do not hear of the visit",
        "«        self.side.schedules.arrived(self._client_id, self._upload.pace)\n→»",
    ),
    visit("the visit counts for no schedule", "«        side.schedules.count(counted)\n→»"),
    visit("what the visit left is not merged", "«        merge_left(side.runner.visits, uploads, counted)\n→»"),
    visit("a loss is one of the first round", "side.losses_at(«self._message.round→0»,"),
    visit("schedules stay at the beginning of the round", "        «self.side.schedules.close_round()→pass»\n"),
    visit("one message trains all rounds", "        «self._trainer.should_stop = True→pass»"),
    visit("an answer is one of the next round", "answer_of(upload, index«→ + 1»,"),
    visit("buffers of before the visit are sent", "side.buffers.«values_in(upload.buffers)→global_values()»"),
    visit(
        "a client that keeps nothing new forgets what it had",
        "if «not upload.report.kept and self._before is not None→False»:",
    ),
    visit("optimizers are not kept", '"optimizers": «self.side.runner.optimizers.take_aside(self._client_id)→{}»}'),
    visit("what privacy withholds is sent", "self._module.left(«self._options.client_rule.withholds→»)"),
    visit(
        "what the visit left is not sent",
        "answer_of(upload, index, update, buffers, «left→{}»)",
    ),
    visit("training begins without what rounds have left", "«        self._fit.take_module()\n→»"),
    messages("losses are lost", "upload.size, «upload.loss→None»,\n"),
    messages(
        "the training loss is that of the round's begin",
        "«None if upload.train_loss is None else float(upload.train_loss)→upload.loss»",
    ),
    messages("learning rates are lost", "«upload.client_lr→None»,\n"),
    messages("companions are lost", "«_on_cpu(upload.report.companions)→{}»"),
    messages("extras are lost", "«_on_cpu(upload.report.extras)→{}»"),
    messages("steps are lost", "«upload.pace.steps→0»,\n"),
    messages("votes on memory banks are lost", "«dict(upload.buffers.votes)→{}»,"),
    messages("what rounds have left is not sent", "rounds, «module or →»{})"),
    messages("what is sent to all is lost", '«kept.state(rule, "all")→{}», kept'),
    visit(
        "what a client cannot take has no words",
        "except «(AttributeError, IndexError, KeyError, TypeError, RuntimeError)→KeyError» as error:",
    ),
    visit(
        "what the server sends to one is not taken",
        "«            kept.take_own(rule, client, message.client_state)\n→»",
    ),
    visit("what the server sends to all is not taken", "«            kept.take(rule, message.broadcast)\n→»"),
    visit("another length of rounds is taken", "if «has_all and given not in (None, own.steps)→False»:"),
    visit("who has all data asks for the length of rounds", "return «own if has_all else →»None"),
    visit("full gradients take the steps of the message's visit", "    if «full_gradients→False»:\n"),
    visit("accumulation is forgotten", "batches = given« * own.window→»"),
    visit("an epoch is as long as a visit", "«-(-batches // local_epochs)→batches»"),
    visit("epochs are rounded down", "«-(-batches // local_epochs)→batches // local_epochs»"),
]
