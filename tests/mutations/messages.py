# SPDX-License-Identifier: Apache-2.0
"""Faults in what server and clients of a federation let in, and in the clients."""

from mutations.change import In

COUNTS, DOOR = "tests/fit/test_server_counts.py", "tests/federation/test_door.py"
CLIENT, SERVER = "tests/federation/test_federated_client.py", "tests/federation/test_federated_server.py"
SCHEDULES = "tests/federation/test_client_schedules.py"

answers = In(
    "fl_lightning/federation/closing.py", f"{COUNTS} {DOOR} -k 'test_server_counts or no_loss or that_is_none'"
)
known = In(
    "fl_lightning/federation/registered_clients.py",
    f"{COUNTS} {DOOR} {CLIENT} -k 'test_server_counts or (introductions and not ends) or length_of_rounds or disagree'",
)
ranks = In("fl_lightning/federation/registered_clients.py", f"{SERVER} -k another_rank")
door = In(
    "fl_lightning/federation/door.py", f"{DOOR} -k 'evaluations or that_are_none or that_is_none or no_message_has'"
)
outliers = In("fl_lightning/federation/door.py", f"{COUNTS} {DOOR} -k 'test_server_counts or length_of_rounds'")
messages = In(
    "fl_lightning/federation/messages.py",
    f"{COUNTS} {CLIENT} {SCHEDULES} {DOOR} -k 'test_server_counts or of_no_round or no_sense or that_is_none "
    "or any_round or (bits_of_a_fit and method and SCAFFOLD and not Warm)'",
)
client = In(
    "fl_lightning/federation/federated_client.py",
    f"{CLIENT} {SERVER} {SCHEDULES} -k 'no_sense or (a_fit and MOON) or again or every_kind or ends_with "
    "or same_process or says_nothing or (forgotten and MOON and True) or alike or nothing_stays or losses_are "
    "or (no_difference and Adam) or (values_are and Ditto) or reads_the_clock'",
)
MUTATIONS = [
    ranks("nothing is said of adapters of another rank", '".«lora_→lora_A_»" in'),
    answers(
        "answers of other rounds are taken",
        "«(answer.client_id, answer.round) != (client, index)→answer.client_id != client»",
    ),
    answers(
        "answers of other clients are taken",
        "«(answer.client_id, answer.round) != (client, index)→answer.round != index»",
    ),
    answers("clients without data are taken", "        if answer.size < «1→0»:\n"),
    answers("answers without a loss are taken", '("loss",) * «needs.losses→0»'),
    answers("updates of other dtypes are converted", "if row.shape != theta.shape« or row.dtype != theta.dtype→»:"),
    answers("updates of other shapes are spread", "if row.«shape != theta.shape or row.→»dtype != theta.dtype:"),
    answers("one learning rate sets that of all", "            «odd |= _fast_ones(fitting)→pass»\n"),
    answers("learning rates are looked at that nobody reads", "if «self.needs.client_lr→True» or self"),
    outliers("learning rates of 0 refuse all others", "if number > most« > 0→»}"),
    answers("extras may be of any size", "«answer.extras→{}».items()}}"),
    answers("large numbers below zero pass", "«max(-float(low), float(high))→float(high)» > LARGEST"),
    answers("large numbers pass", "«max(-float(low), float(high))→-float(low)» > LARGEST"),
    answers("companions may be of any size", 'rows = {"update": answer.update, **{«→} and {»f'),
    answers("buffers of other dtypes are converted", "«value.dtype != known[name].dtype→False»]"),
    answers("complex extras are taken", "if «any(value.is_complex() for value in answer.extras.values())→False»:"),
    answers(
        "buffers are not compared with the module's",
        "except «(ValueError, KeyError)→KeyboardInterrupt» as error:",
    ),
    answers("odd answers are taken", "        odd = «_odd_ones(fitting)→{}»\n"),
    answers("the few decide what is odd", "most_common«(1)[0]→()[-1]»[0]"),
    answers("names of companions do not tell what is odd", "«            tuple(sorted(answer.companions)),\n→»"),
    answers("extras do not tell what is odd", "for name, value in «answer.extras→{}».items())"),
    answers("learning rates do not tell what is odd", "«            answer.client_lr is None,\n→»"),
    answers("an upload has the first row", "self.rows.row(«upload.index→0»).copy_("),
    answers("an update is added with the wrong sign", "copy_(«→-»answer.update)"),
    answers(
        "a client that does not say its loss is taken",
        '            «lost[client]→found.append(1.0)\n            _» = f"it was',
    ),
    answers(
        "losses are in the order of the answers",
        '        given = «said_so.get(client, "no answer")→list(said_so.values())[-1 - clients.index(client)]»\n',
    ),
    known("ids count from 1", "found.client_id >«=→» self.num_clients"),
    known("other settings are taken", '"layout", "clients"«, "settings"→»)'),
    known("other layouts are taken", '"«layout", "→»clients", "settings")'),
    known("other arguments are taken", '("method", «"arguments", →»'),
    known("other versions are taken", "        if «ours != theirs→False»:\n"),
    known("other frozen parameters are taken", "if «found.frozen != self._frozen→False»:"),
    known("refused clients are registered", "        if «words is not None→False»:\n            raise"),
    known("sizes of unknown clients are missing", "«if k in self._known else 0 →»for k"),
    known(
        "samples of those that are known count as all",
        "«        if len(self._known) < self.num_clients:\n            return None\n→»",
    ),
    known("samples are those of the introductions", "sum(«now.get(client, known.size)→known.size»"),
    known("clients without a step count in the mean visit", "known in self._known.items()« if known.steps > 0→»}"),
    known("the mean visit is rounded down", "«-(-sum(usual) // len(usual))→sum(usual) // len(usual)»"),
    known("one client sets the length of rounds", "odd«, _ = outliers(steps)→ = {}»"),
    outliers("whoever differs from the median is odd", "«OUTLIER * →»median"),
    known(
        "names are those of the first clients",
        "«self._known[k].name if k in self._known→"
        "list(self._known.values())[k].name if k < len(self._known)» else str(k)",
    ),
    known(
        "sizes of strangers are kept",
        "            if «client in self._known and self._known[client].size != answer.size→True»:\n",
    ),
    door("evaluations of other rounds are taken", "((client_id,), «index→record.round», stage)"),
    door("evaluations of other clients are taken", "(«(client_id,)→record.client_ids», index, stage)"),
    door("evaluations of other stages are taken", "((client_id,), index, «→record.»stage)"),
    door("any number of values is taken", "value.«shape != (1,) or value.→»is_complex()]"),
    door("complex values are taken", "value.shape != (1,)« or value.is_complex()→»]"),
    door("sizes below zero are taken", "    if «not SAMPLES.admits(size)→False»:\n"),
    door("names of metrics are not looked at", "        if «not NAME.admits(name)→False»:\n"),
    door("any name ends well", "0 < len(text) <= 200« and text.isprintable()→»)"),
    door("a federation's name is looked at from its beginning alone", "re.«fullmatch→match»(r"),
    door("a loss may be infinite", "«Bounds(LOSS.least, LOSS.most)→LOSS»"),
    door("numbers of any size pass", "SAMPLES = Bounds(0«, 10**12→»)"),
    door("letters that nobody sees are said", 'letter« if letter.isprintable() else "?"→»'),
    door("sentences of any length are said", "text if «len(text) <= SENTENCE→True» else"),
    door("what a mapping holds is not looked at", "entries = [«entry for pair in value.items() for entry in pair→»]"),
    door("what a list holds is not looked at", "            entries = «list(value)→[]»\n"),
    door("any depth is read", "if «depth > DEPTH or →»seen > ENTRIES:"),
    door("any number of entries is read", "if depth > DEPTH« or seen > ENTRIES→»:"),
    door("long strings are read", "if «len(value) > CHARACTERS→False»:"),
    door("objects of any class are read", "elif «not isinstance(value, (type(None), bool, int, float))→False»:"),
    door("sparse tensors are read", "«value.layout == torch.strided→True» and"),
    door(
        "tensors that take no memory are read",
        "«value.numel() * value.element_size() > value.untyped_storage().nbytes()→False»",
    ),
    door(
        "an object of another class is a message", "    if not «isinstance(found, kind)→hasattr(found, '__dict__')»:\n"
    ),
    messages("a round after the last is trained", "self.rounds <«=→» self.round:"),
    messages("this round may have counted already", "self.counted >«=→» self.round:"),
    messages("parameters of another shape are trained", "«self.params.shape != theta.shape or →»"),
    messages("parameters of another dtype are trained", "« or self.params.dtype != theta.dtype→»:"),
    messages("parameters that are not finite are trained", "if «not bool(all_finite(self.params))→False»:"),
    messages("a client is sent the state of another", "kept.for_one(rule, «client_id→0»)"),
    messages("buffers are not sent", "counted, «buffers or →»{}, steps_per_round"),
    messages("rounds and the steps of one are exchanged", "«steps_per_round, rounds→rounds, steps_per_round», module"),
    messages("answers of any round are read", "«round=ROUND, →»size=SAMPLES, loss=LOSS"),
    client(
        "a client shares its rule with the server",
        "client=«deepcopy(paired_client_rule(algorithm, client, full_gradients))→"
        "paired_client_rule(algorithm, client, full_gradients)»",
    ),
    client("a client beyond the last is made", "num_clients is None or client_id >«=→» num_clients"),
    client("num_clients is given twice", "            if «num_clients is not None→False»:\n"),
    client("the trainer may say how many epochs", "if «name in self._trainer→False»:"),
    client("what was kept is not asked for", 'if self._keeps and work != "«loss→train»" else None'),
    client("what stays at the client is not kept", "            «self._kept.put(message.round, visit.kept)→pass»\n"),
    client("what stays at the client is that of the next round", "self._kept.put(message.round«→ + 1», visit.kept)"),
    client("kept optimizers are no state", "«self._options.keeps_optimizer or →»kept"),
    client(
        "clients without state write",
        "self._keeps = «self._options.keeps_optimizer or kept.at_clients(self._options.client_rule)→True»",
    ),
    client("an evaluation runs without the personal model", 'if self._keeps and work «!= "loss"→== "train"» else None'),
    client("a client says the size of the first", "place = data.train_dataloader(), 0« if own else self.client_id→»"),
    client("validation data are tested", 'evaluate = trainer.«validate if work == "val" else trainer.→»test'),
    client("several devices are taken", "if trainer.«num_devices > 1 or trainer.num_nodes→num_nodes» > 1:"),
    client("a loss is one of training", 'self._visit«(message, "loss").loss→(message, "train").sent.train_loss»'),
    client("the fit is as long as one round", "rounds = message.«rounds or message.round→round» + 1"),
    client("data of one client are in reverse order", "return [torch.arange(len(labels))«→.flip(0)»]"),
    client(
        "evaluation data are in reverse order",
        "return «self.divide(samples, seed)→[part.flip(0) for part in self.divide(samples, seed)]»",
    ),
]
