# SPDX-License-Identifier: Apache-2.0
"""Faults in federations on Flower; ``.venv-flower/bin/python tests/mutate.py --only flower`` plants them."""

from mutations.change import In

ROOM, TESTS = "fl_lightning/federation/flower", "tests/federation/flower"
FAULTS, PIECES, ORDERS = (f"{TESTS}/test_{name}.py" for name in ("faults", "pieces", "orders"))

app = In(
    f"{ROOM}/client_app.py",
    f"{PIECES} {ORDERS} {TESTS}/test_parity.py -k 'test_pieces or data_of_all or (a_fit and AFL) or kept or double'",
    needs="flwr.serverapp",
)
strategy = In(
    f"{ROOM}/strategy.py",
    f"{ORDERS} {FAULTS} {TESTS}/test_resume.py {TESTS}/test_parity.py -k 'test_orders or is_not_there or starts_once "
    "or is_over or (not_interrupted and (Ditto or AFL)) or keys_bind or whom_was_asked or (a_fit and AFL)'",
    needs="flwr.serverapp",
)

MUTATIONS = [
    app("a name is looked for from its beginning alone", "str(value)«→[:1]».isdecimal()"),
    app("the simulation's number counts before the user's", '("«client-id", "partition→partition-id", "client»-id")'),
    app("clients of the data of all say how many there are", "«None if shared else →»origin.num_clients"),
    app("federations share a folder", "«/ origin.federation→», **options"),
    app(
        "all messages get one rule",
        "return «deepcopy(given)→given» if",
        unseen="a client copies the half that has state",
    ),
    app("unknown options are taken", "    if «unknown→False»:\n"),
    app("options that the app sets are taken", '« or name in ("folder", "num_clients", "client_id")→»]'),
    app(
        "other parameters are not evaluated",
        "message« if order.evaluated is None else replace(message, params=order.evaluated)→»",
    ),
    app(
        "the parameters to evaluate are trained",
        "            sent = client().train(«→chosen if order.stages else »message)\n",
    ),
    app("everybody trains", "        if «order.trains→True»:\n"),
    app("one stage is evaluated", "for stage in order.stages«→[:1]»:"),
    app("what a client raises ends its process", "except «Exception→KeyError» as error:  # the server"),
    strategy("an object starts twice", "        if «server.rounds is not None→False»:\n"),
    strategy("a restart is another federation", '«run.resume()→(run.resume() and None)» or {"federation"'),
    strategy("keys are forgotten in a restart", '«dict(extra["keys"])→{}» if self._bind else None'),
    strategy("keys count unasked", 'dict(extra["keys"])« if self._bind else None→»'),
    strategy("keys are not saved", '"keys": «keys or →»{}})'),
    strategy(
        "a federation gets a new name with every round", 'run.save({"federation": «extra["federation"]→token_hex(8)»,'
    ),
    strategy("evaluations are a round late", "index > 0 and «index→(index - 1)» % self._every == 0"),
    strategy("the model of before the first round is evaluated", "due = index« > 0 and index→»"),
    strategy("nobody's data are evaluated in spite of all", '« and self._evaluation != "none"→»'),
    strategy("clients that do not train are never evaluated", 'if «stages and self._evaluation == "all"→False»:'),
    strategy("clients that do not train are always evaluated", 'if stages« and self._evaluation == "all"→»:'),
    strategy(
        "who is evaluated trains",
        "partial(self._order, client, stages, trains=«False→True») for client in sorted(others)",
    ),
    strategy(
        "clients that are not connected count as having trained",
        "«        silent |= {client for client in cohort if client not in nodes}\n→»",
    ),
    strategy(
        "clients that are not connected are not named",
        '«        missing |= {client: "it is not connected" for client in cohort if client not in nodes}\n→»',
    ),
    strategy(
        "answers of those that were to evaluate count", "for client, answer in answers.items()« if client in nodes→»}"
    ),
    strategy(
        "the failure of a client that was to evaluate counts",
        "«{k: why for k, why in missing.items() if k in cohort}→missing», asks, silent",
    ),
    strategy("silence counts as having trained", "if k in cohort}, asks«, silent→»)"),
    strategy("methods cannot ask again", "«self._losses_at if server.needs.requery else →»None"),
    strategy(
        "the parameters in training are evaluated",
        "«server.evaluated_params if trains and stages and not server.evaluates_params else →»None",
    ),
    strategy("silent clients have spoken", "for client, reply in replies.items() if «reply.silent→False»}"),
    strategy(
        "replies are in the order of arrival",
        "sorted(clients.items(), key=lambda item: «→-»item[1])",
        unseen="the server orders answers by itself",
    ),
    strategy(
        "losses are of the parameters of the round",
        "«altered(self.server.message(client), params=params)→self.server.message(client)»",
    ),
    strategy(
        "who has gone is asked for a loss",
        "        «    if client in self._members.nodes\n        →»}\n        found",
        unseen="who is connected is looked up when a round begins, and who is asked has answered since",
    ),
    strategy(
        "the round evaluates with the failure of others",
        "lost = {«client: why for client, why in missing.items() if client in self._members.nodes→»}",
    ),
    strategy(
        "a misfit ends the evaluation", "                «lost[client] = str(flaw)\n                continue→raise»\n"
    ),
    strategy("an evaluation of nobody replaces the last one", "«self.last_evaluation if record is None else →»record"),
    strategy("the end is not evaluated", "            «self._evaluate_at_the_end()→pass»\n"),
    strategy("test data are always read", '["test"]« if self._test else []→»'),
    strategy(
        "the end is an evaluation of the round before",
        "self._take_evaluations(answers, missing, stage, self.server.round«→ - 1»)",
    ),
    strategy("what the server must read is understated", "«max→min»(rule.reads, half.reads, key=list(_SEEN).index)"),
    strategy(
        "what the server must read is in the order of letters",
        "«max(rule.reads, half.reads, key=list(_SEEN).index)→min(rule.reads, half.reads)»",
    ),
]
