# SPDX-License-Identifier: Apache-2.0
"""Faults in what is kept across rounds."""

from mutations.change import In

models = In("fl_lightning/core/storage/model_files.py", "tests/core/test_client_models.py")
tensors = In("fl_lightning/core/storage/tensors.py", "tests/core/test_row_history.py -k tensors")
rows = In("fl_lightning/core/storage/row_history.py", "tests/core/test_row_history.py")
cache = In("fl_lightning/core/storage/gram_cache.py", "tests/core/test_row_history.py")
own = In("fl_lightning/core/storage/own_models.py", "tests/core/test_client_models.py tests/algorithms/test_ditto.py")
numbers = In("fl_lightning/core/storage/numbers.py", "tests/core/test_client_numbers.py")
kept = In("fl_lightning/core/storage/kept_states.py", "tests/core/test_kept_states.py")

MUTATIONS = [
    own("the memory plan forgets the models of a round", "0) + cohort_size) * each", "0)) * each"),
    own("a restored copy takes the place of the models at hand", "OwnModels(self.method, self._directory)", "self"),
    own("models that were kept elsewhere are taken", 'if ("files" in state) != here:', "if False:"),
    numbers("a client that has a number starts again", "self._numbers.get(client, first)", "first"),
    numbers("a state is the numbers themselves", "return dict(self._numbers)", "return self._numbers"),
    models("states without news push older ones out", "self._referred[-1] != state", "True"),
    models(
        "one state more is referred to",
        "self._referred[-self.keep_checkpoints :]",
        "self._referred[-self.keep_checkpoints - 1 :]",
    ),
    models(
        "newest files are deleted",
        "        kept |= {(client, when) for client, (when, _) in self._newest.items()}\n",
        "",
    ),
    models("files nobody refers to stay", "            self._remove({(client_id, before[0])})\n", "            pass\n"),
    models(
        "buffers are not in the digest", "for part in (model.params, model.buffers):", "for part in (model.params,):"
    ),
    models("a restored state is not referred to", "if self._newest else []", "if False else []"),
    models("a file that is gone is not missed", "if not self._path(client, when).exists():", "if False:"),
    tensors("who wrote again leaves as early", "        self._tensors.pop(client_id, None)\n        if", "        if"),
    tensors(
        "one client more than the capacity", "len(self._tensors) >= self.capacity", "len(self._tensors) > self.capacity"
    ),
    tensors("who added leaves early", "        self._tensors[client_id] = self._tensors.pop(client_id)\n", ""),
    tensors("the caller's tensor is kept", "value.device, copy=True)", "value.device)"),
    tensors("the checkpoint's tensor is kept", "t.device, copy=True)", "t.device)"),
    rows("the round itself is forgotten", "e.round >= before", "e.round > before"),
    rows("a round before since counts", "e.round >= since", "e.round > since"),
    rows("larger ids come first", "(-self._entries[i].round, i)", "(-self._entries[i].round, -i)"),
    rows(
        "one row more than the capacity", "[self.capacity - len(arriving) :]", "[self.capacity - len(arriving) + 1 :]"
    ),
    rows("products of replaced rows stay", "        self._products.clear(slots)\n", ""),
    rows("scales of one side alone", "torch.outer(scales, scales)", "scales[None, :]"),
    rows("scales are lost in combinations", "coeff[:, m:] * scales", "coeff[:, m:]"),
    rows("rows that leave stay in the products", "gone = set(leaving).difference(clients)", "gone = set(leaving)"),
    rows("storage grows beyond the capacity", "slots if self.capacity is None else min(slots, self.capacity)", "slots"),
    rows("old rows are lost when storage grows", "            rows[:held] = self._rows\n", "            pass\n"),
    cache(
        "grown products are no longer known",
        "result._known[:held, :held] = self.gram, self._known",
        "result._known[:held, :held] = self.gram, False",
    ),
    cache(
        "products of one side stay known",
        "self._known[slots] = self._known[:, slots] = False",
        "self._known[slots] = False",
        unseen="a pair is known only if both of its halves are",
    ),
    cache("products of one side stay", ".index_fill_(2, there, torch.nan)", ""),
    cache("cross products on one side", "        self.gram[:, beside[:, None], there] = products.mT\n", ""),
    cache(
        "known products are computed again",
        "torch.where(held.isnan(), computed, held)",
        "computed",
        unseen="products that were computed twice are the same bits",
    ),
    kept("states that did not count stay", "if when != counted:", "if counted is not None and when < counted:"),
]
