# SPDX-License-Identifier: Apache-2.0
"""Faults in how what a module keeps travels between a server and its clients."""

from mutations.change import In

STATE = "tests/federation/test_module_state.py"

changes = In(
    "fl_lightning/federation/module_changes.py",
    "tests/federation/test_module_state.py -k 'lists_and_metrics or gets_its or lies or evaluated or grows'",
)
saved = In("fl_lightning/federation/served_model.py", changes.tests)
counts = In("fl_lightning/federation/module_changes.py", "tests/federation/test_module_state.py -k named_once")
home = In(
    "fl_lightning/federation/served_model.py", f"{STATE} -m 'not slow' -k 'not ends_a_federation and not privacy'"
)
kept = In(
    "fl_lightning/federation/module_changes.py", f"{STATE} -m 'not slow' -k 'not ends_a_federation and not privacy'"
)

MUTATIONS = [
    changes(
        "a client does not take what rounds have left",
        "            «kept.apply(change)→pass»\n        self._visit.begin()\n",
    ),
    changes("a client's module keeps what a visit left", "        «self._outer.put_back()→pass»\n"),
    changes("what hooks make is not sent", "            if «key in now→False»:\n"),
    changes("what metrics gather is not sent", "        if «share.updates→False»:\n"),
    saved("metrics are not saved", "found = «state.metrics.values() if metrics else →»()"),
    changes("states of metrics may have any shape", "«value.shape == default.shape and →»"),
    changes("changes are not tried", "                «kept.apply(change)→pass»\n            finally"),
    changes("the first that is too large stays", "    «tasks.sort(key=lambda task: sum(map(_weight, task[1])))→pass»"),
    counts(
        "what training gathers is sent without a word",
        "«            gathered[attribute] += 0 if count is None else count + writer.gathered - before\n→»",
    ),
    counts("what was said is said again", 'if «f"{name}: {words}" not in self._said→True»'),
    saved("what is too large grows on", "«            self._forget(name)\n→»"),
    kept("the visit is not looked at", "«        self._visit.begin()\n→»"),
    kept("what a message cannot hold stays without a word", "self._stays, self._gathered = «alone | →»stays, gathered"),
    kept("why something stays is lost", "self._stays, self._gathered = alone« | stays→», gathered"),
    kept(
        "metrics that cannot be joined stay without a word",
        '«        alone |= dict.fromkeys(left.ran_on, "a metric whose states cannot be joined")\n→»',
    ),
    kept("who changes nothing else says nothing", "            «self._stays = alone\n            →»return {}\n"),
    kept(
        "what the server has made is not known",
        '                «attributes |= {f"{owner}.{key}" if owner else key for key in parts[0][::2]}→pass»\n',
    ),
    home(
        "metrics that cannot be joined are saved",
        "for metric in found« if joins_clients(metric)→»)",
        unseen="who reads them leaves them out",
    ),
    home("what rounds have not changed is sent, too", "[(kept, kept.change()) for kept in state.«changed()→kept»]"),
    home("metrics that are too large grow on", "            «self._first.state.metrics[name].reset()→pass»\n"),
    home("everything begins anew where one is too large", "            if «name in kept.changed_names()→True»:\n"),
    home("a server says all that it is told to say", "if name not in self._said« and len(self._said) < _SAID→»:"),
    home("a server says everything again", "if «name not in self._said and →»len(self._said) < _SAID:"),
    home("answers are read as of the first round", "if self._now is None« or self._now.state is not state→»:"),
    home("what the server lacks is not named", "        for name in «sorted(lacking)→()»:\n"),
    home("what was there before a restart stays", "«        self._first.state.put_back()\n→»"),
    home("metrics are added to what is there", "            «metric.reset()\n            →»share"),
    home("what metrics have gathered is lost in a restart", "            «share.add_to(metric)→pass»\n"),
    home("changes are lost in a restart", "            «kept.apply(change)→pass»\n        for metric"),
    kept("objects of one name are one", "«            count[kept.name] += 1\n→»"),
    kept("parameters are not known", '«("parameter", part._parameters), →»'),
    kept("buffers are not known", ',« ("buffer", part._buffers)→»)'),
    kept(
        "modules are not known",
        '«            self.known[f"module {name}"] = part\n→»',
        unseen="modules are among the objects that may change, too",
    ),
    kept("classes of what is inside are not known", "«(*self.known.values(), *content)→self.known.values()»"),
    kept("classes beside the module's are not known", "«        self.classes |= _classes_beside(type(module))\n→»"),
    kept("what goes away is not said", "            «gone += change[1]→pass»\n"),
    kept("what is added takes the place of all", 'if «isinstance(change, Added)→False» else ("whole", [change])'),
    kept("names that nobody may bind are sent", "            if «is_own_name(holder, key)→True»:\n"),
    kept("metrics alone are not sent", "if changes «or metrics →»else {}"),
    kept("what the reader lacks ends it", "            if «kept is None→False»:\n                lacking.add"),
    kept("what was tried stays", "                «kept.put(kept.content)→pass»\n"),
    kept("errors of other values are raised", "except «Exception→ValueError» as error:  # of values"),
    kept(
        "what a hook has made is the server's",
        "return «attributes is None or not place or attribute in attributes→True»",
    ),
    kept("nobody looks which names are bound", "if «not is_own_name(kept.value, name)→False»]"),
    kept("content of another type is taken", "if «type(content) is not type(kept.content)→False»:"),
    kept("tensors of other dtypes are taken", "if content.«dtype != kept.content.dtype or content.→»layout"),
    kept("metrics may have other states", "if« states.keys() != metric._defaults.keys() or→»"),
    kept("no updates are some", "not 0 <«→=» updates <= _UPDATES"),
    kept(
        "a list may hold anything",
        "if type(value) is not list« or not all(isinstance(item, Tensor) for item in value)→»:",
        unseen="nothing else that a message holds can be put on a device",
    ),
    kept("states may have any dtype", "and value.shape == default.shape« and value.dtype == default.dtype→»:"),
]
