# SPDX-License-Identifier: Apache-2.0
"""Faults in what methods declare to keep, and in what follows from it."""

from mutations.change import In

declared = In("fl_lightning/core/storage/declared.py", "tests/core/test_kept.py")
follows = In("fl_lightning/core/storage/kept.py", "tests/core/test_kept.py")

MUTATIONS = [
    declared("values are of the class", "held = «vars(rule)→self.__dict__»"),
    declared("a dictionary can be replaced", "        «raise AttributeError→print»("),
    declared("a value is not taken back", "None« if happened else setattr(rule, self.name, before)→»"),
    declared("models in files count as memory", "«0 if in_files else →»min("),
    declared("the memory plan forgets the models of a round", "«(held + extent.cohort)→held»"),
    declared("the memory plan ignores the capacity", "«named(rule, self._capacity) or →»extent.clients"),
    declared("models that were kept elsewhere are taken", 'if «("files" in state) != here→False»:'),
    declared("a part counts as a model", "«(named(rule, self._size) or extent.model)→extent.model»"),
    declared("wide numbers count as narrow ones", "if «self._wide→False» else extent.dtype"),
    follows("a reset forgets nothing", "        «vars(rule).pop(name, None)→pass»\n"),
    follows("what a state lacks stays", "    «reset(rule)\n    →»vars(rule).update(loaded)\n"),
    follows("a copy takes the place of the rule", "other = «copy(rule)→rule»"),
    follows("everything is sent", "if «sent is None or entry.sent == sent→True»"),
    follows("a client is sent what the server keeps for all", '«if entry.sent == "owner"→»]\n    return'),
    follows("the round of what a client keeps is lost", "value), «when→0»)"),
    follows("names are not checked", "if «not given.keys() <= set(names)→False»:"),
    follows("base classes keep nothing", "«reversed(type(rule).__mro__)→[type(rule)]»"),
    declared(
        "values begin anew where they are read",
        "            «held[self.name] =→return» self.begun(rule)\n        return cast(T, held[self.name])",
    ),
    declared(
        "columns have no name", "self.columns = «tuple(entry.format(name) for entry in self.columns)→self.columns»"
    ),
    declared("every value has a number per column", '("{}",)« if columns else ()→», sent, wide'),
    declared("every client's value has a number per column", '("{}",)« if columns else ()→», sent\n'),
    declared("a type is the first value", "«None if isinstance(start, type) else →»start"),
    declared("where clients' values lie changes results", "self.placement = ()« if device is None else (device,)→»"),
    declared("where models lie changes results", "«tuple(name for name in (device, files) if name is not None)→()»"),
    declared("models in files lie in memory", "(directory := «named(rule, self._files)→None») is not None"),
    declared("there is a model of every client", ", named(rule, self._device)«, named(rule, self._capacity)→»)"),
    declared("clients' numbers have the parameters' size", "«(self._dtype or extent.dtype)→extent.dtype».itemsize"),
    declared("rows of a history are whole", '("{}«.rows→»",), RowHistory'),
    declared(
        "a history lies with the rows",
        "«named(rule, self._device)→"
        "None»)\n\n    def planned(self, rule: object, extent: Extent) -> int:\n        rows",
    ),
    declared("what changes inside begins anew after a restart", "«        value.load_state_dict(state)\n→»"),
    declared(
        "what changes inside is not taken back",
        "return «self.__get__(rule, type(rule)).tentatively()→lambda happened: None»",
    ),
    declared("anything is a first value", "    if «→False if True else »start not in (*_KINDS, tuple) if"),
    declared("NaN is a first value", "«(isinstance(value, float) and value == value)→isinstance(value, float)»"),
    declared("integers of any length are first values", "isinstance(value, int)« and abs(value) < 2**63→»"),
    declared("clients' values may be of any type", "    if «kind not in _KINDS→False»:\n"),
    follows("what a class does without is kept", "if «name in found or →»isinstance(entry, Declared)}"),
    follows("a state that is refused leaves nothing", "    «→reset(rule)\n    »_only(rule, states, list(entries))\n"),
    follows("one rule is taken back", "for rule in rules«→[:1]» for entry in declared(rule).values()]"),
    follows("every round counts", "            each(«happened→True»)\n"),
    follows(
        "columns that are sent are none",
        "for entry in declared(rule).values() «→if entry.sent is None »for column in entry.columns)",
    ),
    follows("all that is kept must be at clients", "return «any→all»(entry.at_client"),
    follows("who has nothing is sent something", "« if client_id in getattr(rule, name)→»}"),
    follows(
        "a client takes what it is not sent",
        '[«name for name, entry in declared(rule).items() if entry.sent == "all"→*declared(rule)»])\n',
    ),
    follows("what is sent to one is of the first client", "getattr(rule, name)[«client_id→0»] = restored"),
    follows("tensors that are sent are shared", "«restored(entries[name].kind, value)→value»"),
]
