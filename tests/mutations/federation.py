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
closing = In(
    "fl_lightning/federation/closing.py",
    f"{COUNTS} {DOOR} -k 'test_server_counts or breaks_the_method or broken or no_loss'",
)

MUTATIONS = [
    server("the sampler's seed is that of the fit", 'derive_seed(options.seed, "sampler")', "options.seed"),
    server(
        "who drops out is asked to train",
        "for client in self._cohort if client not in self._drop_outs)",
        "for client in self._cohort)",
    ),
    server(
        "nobody hears which visit counted",
        "self._binding.theta, self.counted.get(client_id),",
        "self._binding.theta, None,",
    ),
    server(
        "clients hear the last round in place of that which counted",
        "self._binding.theta, self.counted.get(client_id),",
        "self._binding.theta, self.round - 1 if self.counted else None,",
    ),
    server(
        "evaluations do not hear which visit counted",
        "self.counted.get(client_id), self._bank.global_values(), module=",
        "None, self._bank.global_values(), module=",
    ),
    server(
        "evaluations are of the parameters in training",
        "self.round, self.evaluated_params, kept",
        "self.round, self._binding.theta, kept",
    ),
    server(
        "an evaluation is of the round before",
        "return ServerMessage(\n            self.round,",
        "return ServerMessage(\n            max(self.round - 1, 0),",
    ),
    server(
        "a round may be closed that nobody has opened",
        "        if self._cohort is None:\n            raise",
        "        if False:\n            raise",
    ),
    server("answers of others are taken", "        if others:\n", "        if False:\n"),
    server("silent clients count as having trained", "why.keys() - set(silent))", "why.keys())"),
    server(
        "who answered something unusable does not count as having trained",
        "came = len(answers.keys() | why.keys() - set(silent))",
        "came = len(given)",
    ),
    server(
        "who is missing does not count as having trained",
        "came = len(answers.keys() | why.keys() - set(silent))",
        "came = len(answers)",
    ),
    server(
        "all clients of a round count as having trained",
        "came = len(answers.keys() | why.keys() - set(silent))",
        "came = len(self._cohort)",
    ),
    server(
        "reasons of the transport are lost",
        "{client: said(words) for client, words in (missing or {}).items()} | misfits",
        "dict(misfits)",
    ),
    server("reasons are taken as they are", "{client: said(words) for client", "{client: words for client"),
    server("odd answers have no reason", "(missing or {}).items()} | misfits", "(missing or {}).items()}"),
    server(
        "who drops out is dropped twice",
        "if client not in self._drop_outs and client not in given:",
        "if client not in given:",
    ),
    server("who drops out is not in the record", 'dropped=dict.fromkeys(self._drop_outs, "dropped out")', "dropped={}"),
    server(
        "everybody who was asked counts",
        "counted = {client: given[client] for client in record.client_ids}",
        "counted = dict(given)",
    ),
    server(
        "who counted before is forgotten",
        "self.counted |= dict.fromkeys(counted, self.round)",
        "self.counted = dict.fromkeys(counted, self.round)",
    ),
    server(
        "a visit counts as one of the next round",
        "dict.fromkeys(counted, self.round)",
        "dict.fromkeys(counted, self.round + 1)",
    ),
    server(
        "sizes are those of the introduction",
        "        self._introductions.resize({client: answer.size for client, answer in counted.items()})\n",
        "",
    ),
    server(
        "sizes of those that do not count are taken",
        "answer.size for client, answer in counted.items()})",
        "getattr(answer, 'size', 0) for client, answer in answers.items()})",
    ),
    server("local steps are those of the round", "self._local_steps += sum(", "self._local_steps = sum("),
    server(
        "local steps of everybody count",
        "sum(answer.steps for answer in counted.values())",
        "sum(answer.steps for answer in answers.values())",
    ),
    server(
        "learning rates of everybody are averaged",
        "for answer in counted.values() if answer.client_lr",
        "for answer in answers.values() if answer.client_lr",
    ),
    server(
        "the learning rate is that of one client", "mean_rate(known) if known else None", "known[0] if known else None"
    ),
    server(
        "an answer may come twice",
        "        self._cohort = None\n        self.round += 1\n",
        "        self.round += 1\n",
        unseen="an answer of an earlier round is refused by its number",
    ),
    server(
        "a record without local steps",
        "replace(record, local_steps=self._local_steps, training_seconds=trained)",
        "replace(record, training_seconds=trained)",
    ),
    server(
        "other versions of a state are read",
        'if state.get("version") != VERSION:',
        'if state.get("version") < VERSION:',
    ),
    server(
        "parameters are those to evaluate after a restart", '        self._binding.theta.copy_(state["params"])\n', ""
    ),
    server(
        "buffers are lost in a restart",
        '        self._bank.put(state["buffers"])\n',
        "",
        unseen="the module's state holds them, too",
    ),
    server(
        "the module's state is lost in a restart",
        '        self.module.load_state_dict(state["state_dict"])\n',
        "",
        unseen="parameters and buffers are restored once more, and frozen parameters must agree",
    ),
    saved(
        "the method's state is lost in a restart",
        '(("algorithm", self._algorithm), ("client_rule", self._rule))',
        '(("client_rule", self._rule),)',
    ),
    again(
        "the client rule's state is lost in a restart",
        '(("algorithm", self._algorithm), ("client_rule", self._rule))',
        '(("algorithm", self._algorithm),)',
    ),
    saved("guards begin anew", '        self._guards.load_state_dict(states.get("guards", {}), columns)\n', ""),
    saved(
        "the server optimizer begins anew",
        '            self.optimizer.load_state_dict(states["server_optimizer"])\n',
        "            pass\n",
    ),
    saved("failed rounds are forgotten", 'states.get("failed_rounds", 0)', "0"),
    saved("skipped rounds are forgotten", 'states.get("skipped_rounds", 0)', "0"),
    server("visits that counted are forgotten", 'state["round"], dict(state["counted"])', 'state["round"], {}'),
    server("the length of a round is forgotten", '        self._steps_per_round = state["steps_per_round"]\n', ""),
    server("local steps are forgotten", '        self._local_steps = state["local_steps"]\n', ""),
    server("introductions are forgotten", '        self._introductions.load_state_dict(state["clients"])\n', ""),
    server(
        "names are forgotten", "        self._server.names = self.client_names\n\n    def module", "\n    def module"
    ),
    server(
        "a state shares memory with the parameters",
        '"params": self._binding.theta.clone()',
        '"params": self._binding.theta',
    ),
    server(
        "a state holds the parameters in training for evaluation",
        "self._binding.showing(self.evaluated_params.contiguous())",
        "self._binding.showing(self._binding.theta)",
    ),
    server(
        "the finished module has the parameters in training",
        "            self._binding.theta.copy_(final)\n",
        "            pass\n",
    ),
    server("the method begins with the state of another fit", "        self._server.reset()\n", ""),
    server(
        "a rule that does not say where its state lives is taken",
        "        if obstacle is not None:\n",
        "        if False:\n",
    ),
    closing(
        "who lost is not blamed",
        "current.dropped, blamed = before, lost.reasons",
        "current.dropped, blamed = before, {}",
    ),
    closing(
        "the method's error is raised",
        "            except Exception:  # of",
        "            except KeyboardInterrupt:  # of",
    ),
    closing(
        "everybody is blamed for a broken method",
        "                if len(blamed) == len(current.uploads):  # it is not theirs\n",
        "                if False:\n",
    ),
    closing(
        "clients are blamed with the others' answers at hand",
        "self._fill(alone, [client])",
        "self._fill(alone, [*self.given])",
    ),
    closing(
        "who is blamed is not named",
        "                self.server.drop(current, client, said(reason))\n",
        "                current.dropped[client] = 'left out'\n",
    ),
    closing("who is left out is filled in again", " and client not in current.dropped:", ":"),
    closing("uploads of the trial before stay", "        current.uploads.clear()\n", ""),
    closing(
        "rows of the trial before stay",
        "        self.rows.begin_round()\n",
        "",
        unseen="every row that is read was written before",
    ),
    closing(
        "rows are in the order of the answers",
        "self.form.upload(self.given[client], place, self.rows)",
        "self.form.upload(self.given[client], len(current.uploads), self.rows)",
        unseen="no result depends on where a row lies",
    ),
    closing(
        "samples of all are those of the trial before",
        "        self.server.cohorts.num_samples = self",
        "        self",
    ),
    closing(
        "too many failed rounds in a row are a client's fault",
        "            except ClientError:\n                raise\n",
        "",
    ),
]
