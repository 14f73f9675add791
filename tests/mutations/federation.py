# SPDX-License-Identifier: Apache-2.0
"""Faults in the server of a federation whose clients are elsewhere: who counts, and what a restart remembers."""

from mutations.change import In

COUNTS, DOOR = "tests/fit/test_server_counts.py", "tests/federation/test_door.py"

server = In(
    "fl_lightning/federation/federated_server.py",
    f"{COUNTS} tests/federation/test_federated_server.py "
    "-k 'test_server_counts or guards or nobody_asked or say_where or fit_are'",
)
saved = In(
    "fl_lightning/fit/server.py",
    f"{COUNTS} tests/federation/test_federated_server.py -k 'test_server_counts or guards'",
)
again = In("fl_lightning/fit/server.py", "tests/federation/test_federated_server.py -k goes_on")
model = In(
    "fl_lightning/federation/served_model.py",
    f"{COUNTS} tests/federation/test_federated_server.py -k 'test_server_counts or guards or goes_on'",
)
served = In(
    "fl_lightning/federation/served_model.py",
    f"{COUNTS} tests/federation/test_federated_server.py tests/federation/test_module_state.py -m 'not slow' "
    "-k 'made_of or refuses or asked_for or test_server_counts or clients_numbers or lists_and_metrics or may_miss'",
)
counting = In(
    "fl_lightning/federation/registered_clients.py", f"{COUNTS} tests/federation/test_door.py -k test_server_counts"
)
closing = In(
    "fl_lightning/federation/closing.py",
    f"{COUNTS} {DOOR} -k 'test_server_counts or breaks_the_method or broken or no_loss'",
)

MUTATIONS = [
    saved("the sampler's seed is that of the fit", '«derive_seed(self._options.seed, "sampler")→self._options.seed»'),
    server(
        "who drops out is asked to train", "map(int, selection.client_ids)« if client not in selection.drop_outs→»)"
    ),
    server("nobody hears which visit counted", "«self.counted.get(client)→None», self"),
    server(
        "clients hear the last round in place of that which counted",
        "self.«counted.get(client)→round - 1 if self.counted else None», self",
    ),
    server(
        "evaluations are of the parameters in training", "self._told(client_id, self.«evaluated_params→_model.params»)"
    ),
    server("an evaluation is of the round before", "self.client_rule, «self.round→0»,"),
    server(
        "a round may be closed that nobody has opened", "        if «self._selection is None→False»:\n            raise"
    ),
    server("answers of others are taken", "        if «others→False»:\n"),
    closing("silent clients count as having trained", "why.keys()« - set(silent)→»)"),
    closing(
        "who answered something unusable does not count as having trained",
        "current.trained = len(«answers.keys() | why.keys() - set(silent)→given»)",
    ),
    closing(
        "who is missing does not count as having trained",
        "current.trained = len(answers«.keys() | why.keys() - set(silent)→»)",
    ),
    closing(
        "all clients of a round count as having trained",
        "current.trained = len(«answers.keys() | why.keys() - set(silent)→self.cohort»)",
    ),
    closing("reasons of the transport are lost", "why = «{**why, **misfits}→dict(misfits)»"),
    server("reasons are taken as they are", "{client: «said(words)→words» for client"),
    closing("odd answers have no reason", "why = «{**why, **misfits}→dict(why)»"),
    closing("who drops out is dropped twice", "if client not in «current.dropped and client not in →»given:"),
    server(
        "who drops out is not in the record", 'dropped=«dict.fromkeys(self._selection.drop_outs, "dropped out")→{}»'
    ),
    server("everybody who was asked counts", "for client in «record.client_ids→given»], self"),
    counting("who counted before is forgotten", "            self.counted«[client] = index→ = {client: index}»\n"),
    counting("a visit counts as one of the next round", "self.counted[client] = index«→ + 1»\n"),
    counting(
        "sizes are those of the introduction", "«altered(self._known[client], size=answer.size)→self._known[client]»"
    ),
    counting("local steps are those of the round", "self._local_steps «+→»= answer.steps"),
    counting("the learning rate is that of one client", "«trusted(mean_rate)(rates)→rates[0]» if rates else None"),
    server(
        "an answer may come twice",
        "        self.«_selection = None\n        self.→»round += 1\n",
        unseen="an answer of an earlier round is refused by its number",
    ),
    server(
        "a record without local steps", "altered(record, «local_steps=self._local_steps, →»training_seconds=trained)"
    ),
    server("other versions of a state are read", 'if state.get("version") «!=→<» VERSION:'),
    model("parameters are those to evaluate after a restart", '«        self.params.copy_(state["params"])\n→»'),
    model(
        "buffers are lost in a restart",
        '«        self.buffers.put(state["buffers"])\n→»',
        unseen="the module's state holds them, too",
    ),
    model(
        "the module's state is lost in a restart",
        '«        self.module.load_state_dict(state["state_dict"])\n→»',
        unseen="parameters and buffers are restored once more, and frozen parameters must agree",
    ),
    served("a module that makes its parts late has none", "«        module.configure_model()\n→»"),
    served("all numbers have 32 bits", "dtype=«_DTYPES[precision]→None»)"),
    served("all parameters are trained", "trained_names(self.module, «configured_optimizers(self.module)→[]»)"),
    served(
        "a module that the method cannot use is taken",
        "«        options.client_rule.check_module(self.module, self.binding.layout)\n→»",
    ),
    served("buffers are always averaged", 'BufferBank(self.module, «options.buffers→"mean"», trained)'),
    served(
        "frozen parameters are none",
        "frozen_digest(self.module, «trained→[n for n, _ in self.module.named_parameters()]»)",
    ),
    served("what visits leave is not joined", "«        merge_left(self.home.visits, uploads, counted)\n→»"),
    served(
        "what visits leave is not sent on",
        "«        self.plain = self.home.plain()\n→»",
        unseen="a server looks what there is when it opens a round",
    ),
    served("metrics are lost in a restart", "self.home.plain(«metrics=True→»)"),
    served("what visits have left is lost in a restart", '«        self.home.load(state["module"])\n→»'),
    served(
        "what was loaded is not sent on",
        "«        self.plain = self.home.plain()\n→»\n    def release",
        unseen="a server looks what there is when it opens a round",
    ),
    served("buffers are added to those of before", "«        self.buffers.remember()\n→»"),
    served("the finished module shares memory", "«        self.binding.release()\n→»"),
    saved(
        "the method's state is lost in a restart",
        '(«("algorithm", self._algorithm), ("client_rule", self._rule)→("client_rule", self._rule),»)',
    ),
    again(
        "the client rule's state is lost in a restart",
        '(("algorithm", self._algorithm),« ("client_rule", self._rule)→»)',
    ),
    saved("guards begin anew", '«        self.guards.load_state_dict(states.get("guards", {}), columns)\n→»'),
    saved(
        "the server optimizer begins anew",
        '            «self.optimizer.load_state_dict(states["server_optimizer"])→pass»\n',
    ),
    saved("failed rounds are forgotten", '«states.get("failed_rounds", 0)→0»'),
    saved("skipped rounds are forgotten", '«states.get("skipped_rounds", 0)→0»'),
    counting("visits that counted are forgotten", '«dict(state["counted"])→{}», state'),
    server("the length of a round is forgotten", 'state["round"], «state["steps_per_round"]→None»'),
    counting("local steps are forgotten", 'dict(state["counted"]), «state["local_steps"]→0»'),
    server("introductions are forgotten", "«        self._load_clients(state)\n→»"),
    server("names are forgotten", "time.perf_counter(), self.«client_names→_server.failures.names»\n"),
    model("a state shares memory with the parameters", '"params": self.params«.clone()→»'),
    model(
        "a state holds the parameters in training for evaluation",
        "self.binding.showing(self.«evaluated.contiguous()→params»)",
    ),
    model(
        "the finished module has the parameters in training", "            «self.params.copy_(self.evaluated)→pass»\n"
    ),
    server("the method begins with the state of another fit", "«        self._server.reset()\n→»"),
    server("a rule that does not say where its state lives is taken", "        if «obstacle is not None→False»:\n"),
    closing("who lost is not blamed", "current.dropped, blamed = before, «lost.reasons→{}»"),
    closing("the method's error is raised", "            except «Exception→KeyboardInterrupt»:  # of"),
    closing(
        "everybody is blamed for a broken method",
        "                if «len(blamed) == len(current.uploads):  # it is not theirs→False:»\n",
    ),
    closing(
        "clients are blamed with the others' answers at hand", "self._fill(alone, «{client: given[client]}→given»)"
    ),
    closing(
        "who is blamed is not named",
        "                «self.server.failures.drop(current, client, said(reason))→"
        "current.dropped[client] = 'left out'»\n",
    ),
    closing("who is left out is filled in again", "« and client not in current.dropped→»:"),
    closing("uploads of the trial before stay", "«        current.uploads.clear()\n→»"),
    closing(
        "rows of the trial before stay",
        "«        self.rows.begin_round()\n→»",
        unseen="every row that is read was written before",
    ),
    closing(
        "rows are in the order of the answers",
        "«self.cohort.index(client)→len(self._uploads)», client",
        unseen="no result depends on where a row lies",
    ),
    closing("samples of all are those of the trial before", "        self«.server.cohorts.num_samples = self→»"),
    closing(
        "too many failed rounds in a row are a client's fault",
        "«            except ClientError:\n                raise\n→»",
    ),
]
