# SPDX-License-Identifier: Apache-2.0
"""Faults in what nodes of Flower and their server say to each other; see :mod:`mutations.flower`."""

from mutations.change import In

ROOM, TESTS = "fl_lightning/federation/flower", "tests/federation/flower"
FAULTS, PIECES, RECORDS = (f"{TESTS}/test_{name}.py" for name in ("faults", "pieces", "records"))

mailbox = In(
    f"{ROOM}/nodes.py", f"{PIECES} {FAULTS} -k 'test_pieces or late_and or silent_rounds'", needs="flwr.serverapp"
)
members = In(
    f"{ROOM}/nodes.py",
    f"{PIECES} {FAULTS} -k 'test_pieces or comes_back or is_not_there or waited_for_once or keys_bind'",
    needs="flwr.serverapp",
)
packing = In(f"{ROOM}/messages.py", RECORDS, needs="flwr.serverapp")
protocol = In(f"{ROOM}/messages.py", RECORDS, needs="flwr.serverapp")

MUTATIONS = [
    mailbox("errors of the client app are silence", "silent=«not own→True»)"),
    mailbox("errors of the SuperLink are the client's", "silent=«not own→False»)"),
    mailbox("a message that was not taken is waited for", "            if «not ids or not ids[0]→False»:\n"),
    mailbox("a message that was not taken is an answer", 'did not take its message"«, silent=True→»)'),
    mailbox("no reply is an answer", 'no reply within {timeout:g} s"«, silent=True→»)'),
    mailbox(
        "a reply counts twice",
        "self._waiting.«pop(message.metadata.reply_to_message_id, None)→get(message.metadata.reply_to_message_id)»",
    ),
    mailbox(
        "replies that nobody waits for raise",
        "            if« node is None:\n                self._stray(message)\n            elif→»",
    ),
    mailbox("strays are not counted", "«        self.strays += 1\n→»"),
    mailbox("late replies count in the next round", "«        self._waiting.clear()\n→»"),
    mailbox("who has not replied is not named", "        for node in «self.forget→»():\n"),
    mailbox("a round waits for ever", "left is not None and left <= «0→-10»"),
    mailbox("nobody is waited for", "if «not self._waiting→True» or (left is not None"),
    mailbox("messages have no end", "kind, «ttl=ttl, →»group_id=group)"),
    members("nodes that have gone are asked", "            if «node not in online→False»:\n"),
    members(
        "a node is refused for ever",
        "«self.refused = {node: why for node, why in self.refused.items() if node in online}→pass»",
    ),
    members(
        "rivals that have gone take part",
        "«self._rivals = {node: found for node, found in self._rivals.items() if node in online}→pass»",
    ),
    members(
        "the second node of a client takes its place",
        "        if «found.client_id in self.nodes→False»:\n            # A",
    ),
    members(
        "who waits for another node to go never takes part",
        "            if «found.client_id not in self.nodes→False»:\n",
    ),
    members("who waits is asked again", "{*self.nodes.values(), *self.refused,« *self._rivals,→»"),
    members("who was refused is asked again", "{*self.nodes.values(), *self.«refused, *self.→»_rivals,"),
    members("who has not answered is never asked again", "*«(self._asked.keys() - overdue)→self._asked.keys()»})"),
    members("everybody is asked all the time", "«, *(self._asked.keys() - overdue)→»})"),
    members(
        "who is slow is waited for",
        "return bool(«(self._asked.keys() & online) - self._slow→self._asked.keys() & online»)",
    ),
    members("nobody is waited for", "return «bool((self._asked.keys() & online) - self._slow)→False»"),
    members("who could not be reached is refused", "« and not reply.silent→»:"),
    members("refusals of the server do not count", "if flaw is not None« or refusal is not None→»:"),
    members("flaws of keys do not count", "if «flaw is not None or →»refusal is not None:"),
    members("a client without a key takes part", "if «self.keys is not None and not key→False»:"),
    members("any key will do", "«self.keys.get(client, key) != key→False»:"),
    members("keys are not remembered", "            «self.keys[found.client_id] = key→pass»\n"),
    members("the key is that of the first node", "if «found.node_id == node→True»)"),
    members("exactly min_clients are too few", "if len(self.nodes) <«→=» fewest:"),
    members("a round begins with too few", "(«len(found) >= fewest and →»not waiting)"),
    members("a round waits for everybody", "«(len(found) >= fewest and not waiting)→False»"),
    packing("tensors whose names have dots take each other's place", '            «where += "\'"→break»\n'),
    packing("a tuple comes as a list", 'entries« if kind == "list" else tuple(entries)→»'),
    packing("keys that are numbers come as strings", "return {kind: [[«key→str(key)», _written"),
    packing(
        "an ordered dict comes as a dict",
        '«type(value).__name__ if type(value).__name__ in _KINDS→"dict" if True» else',
    ),
    packing("any class is written by its value", "if «type(value) in _PLAIN→isinstance(value, _PLAIN)»:"),
    packing("any key is written", "if «all(type(key) in _PLAIN for key in value)→True»:"),
    packing("other forms are read", "if written «== _FORMAT→>= 0»:"),
    packing("shapes are lost", "flat.clone()«.view(shape)→»"),
    packing(
        "columns are written as rows",
        "tensor.detach().cpu()«.contiguous()→»",
        unseen="reshape copies what is not contiguous",
    ),
    packing("tensors share the message's memory", "bytearray«(data)→(data[:1]) * 0 or bytearray(data[::-1])»"),
    packing("fewer bytes than the shape says are read", "len(data) «!=→>» prod(shape) * dtype.itemsize"),
    packing("arrays of other forms are read", "«array.stype != _RAW or→»"),
    packing("fields stay beside the message", "values«.pop(entry.name)→[entry.name]» for entry"),
    packing("what is beside a message is lost", "«{**own, **besides}→own».items()"),
    protocol("evaluations of another stage are taken", '            if «found.get("stage") == stage→True»:\n'),
    protocol(
        "evaluations are of no client in particular",
        'return evaluation(found, «client_id→found["client_ids"][0]», index, stage)',
    ),
    protocol("stale evaluations are taken", 'return evaluation(found, client_id, «index→found["round"]», stage)'),
    protocol("a stage may be evaluated twice", "if «len(set(self.stages)) < len(self.stages)→False»:"),
    protocol("an order may hold anything", "@«checked()\n@→»dataclass(frozen=True)\nclass Order"),
    protocol("an answer may hold anything", "@«checked()\n@→»dataclass(frozen=True)\nclass Answer"),
    protocol("any name is one of a federation", "@checked(num_clients=CLIENTS«, federation=FEDERATION→»)"),
    protocol("any number of clients will do", "@checked(«num_clients=CLIENTS, →»federation=FEDERATION)"),
    protocol("what was trained is lost", "None« if trained is None else vars(trained)→»"),
    protocol("one evaluation is sent", "[vars(record) for record in evaluations«→[:1]»]"),
]
