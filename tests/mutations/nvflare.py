# SPDX-License-Identifier: Apache-2.0
"""Faults in federations on NVFlare; ``.venv-nvflare/bin/python tests/mutate.py --only nvflare`` plants them."""

from mutations.change import In

flare = In(
    "fl_lightning/federation/nvflare.py",
    "tests/federation/test_nvflare.py -k 'raises_is_left or too_few or its_loss_again or before_the_first "
    "or to_the_others or is_refused or (another_kind and round) or controller_knows "
    "or (a_fit and (FedMDFG or MMPF)) or another_job'",
    needs="nvflare.client",
)

MUTATIONS = [
    flare("two sites may have one name", "if «len(set(sites)) != len(sites)→False»:"),
    flare("a server without a module is looked for", '        if «":" not in server→False»:\n'),
    flare("any object is a server", "    if «not isinstance(server, FederatedServer)→False»:\n"),
    flare("there may be more clients than sites", "    if «server.num_clients != num_clients→False»:\n"),
    flare("a job begins anew beside its checkpoint", "«        run.resume()\n→»"),
    flare("rounds are not saved", "«                run.save({})\n→»"),
    flare("a job trains one round more", "while server.round <«→=» self.rounds:"),
    flare("the server does not know how many rounds there are", "«        server.rounds = self.rounds\n→»"),
    flare("sites say which client they are", '{«**fields, "client_id": client→"client_id": client, **fields», "name"'),
    flare("sites say what they are called", '«, "name": self.sites[client]→»}'),
    flare(
        "sites that are refused take part",
        '                «self._refused[client] = f"it cannot take part: {words}"→pass»\n',
    ),
    flare("sites that are refused are registered", "            if «words is None→True»:\n"),
    flare(
        "silent sites may train",
        '{«client: f"it does not introduce itself: {words}" for client, words in missing.items()→»}',
    ),
    flare("exactly min_clients are too few", "len(server.registered) <«→=» server.min_clients:"),
    flare("too few sites begin", "if «len(server.registered) < server.min_clients→False»:"),
    flare("sites that are refused are sent models", "for client in clients« if client not in self._refused→»}\n"),
    flare(
        "sites that are refused have no reason",
        "«        missing |= {client: self._refused[client] for client in clients if client in self._refused}\n→»",
    ),
    flare("sites that are refused count as having trained", "partial(self._losses_at, server)«, self._refused→»)"),
    flare("an aborted round counts", "«        if self.is_aborted():\n            return None\n→»"),
    flare("nobody is asked for a loss again", "«partial(self._losses_at, server)→None», self._refused)"),
    flare(
        "losses are of the parameters of the round",
        '«{**vars(server.message(k)), "params": params}→vars(server.message(k))»',
    ),
    flare("who does not say a loss has no reason", "return {**«missing, **→»{client: fields"),
    flare("a message goes to all sites", "targets=«[self.sites[client]]→self.sites»"),
    flare("a message goes to the wrong site", "targets=[self.sites[client«→ - 1»]]"),
    flare("answers are those of the order of arrival", "answer = came.get(«self.sites→[*came, *self.sites]»[client])"),
    flare("nobody is waited for", "while «self.get_num_standing_tasks()→False» and not"),
    flare("what a site raises is an answer", "elif not isinstance(answer.params, dict)« or _ERROR in answer.params→»:"),
    flare("what a site raises ends its loop", "except «Exception→KeyboardInterrupt» as error:  # whatever"),
    flare("a site makes a client for every message", 'make(asked.meta["client_id"])« if client is None else client→»'),
    flare("a site is always the first client", 'make(«asked.meta["client_id"]→0») if client'),
    flare("a loss is not named", 'return {"«loss→value»": client.loss(message)}'),
    flare("tensors travel as they lie in memory", "value.detach()«.cpu().contiguous()→»"),
]
