# SPDX-License-Identifier: Apache-2.0
"""Faults in what is kept across rounds."""

from mutations.change import In

rows = In("fl_lightning/core/storage/row_history.py", "tests/core/test_row_history.py")
cache = In("fl_lightning/core/storage/row_history.py", "tests/core/test_row_history.py")
by_client = In("fl_lightning/core/storage/per_client.py", "tests/core/test_per_client.py")
PRIVATE = "tests/fit/test_damaged_files.py -k '{} or owner_only'"
kept = In("fl_lightning/core/storage/files.py", f"tests/core/test_kept_states.py {PRIVATE.format('kept_states')}")
models = In(
    "fl_lightning/core/storage/per_client.py", f"tests/core/test_client_models.py {PRIVATE.format('client_models')}"
)
files = In("fl_lightning/core/storage/files.py", "tests/fit/test_damaged_files.py")

MUTATIONS = [
    models("states without news push older ones out", "«self._referred[-1] != state→True»"),
    models("one state more is referred to", "self._referred[-_CHECKPOINTS«→ - 1 »:]"),
    models(
        "newest files are deleted",
        "«        kept |= {(client, when) for client, (when, _) in self._newest.items()}\n→»",
    ),
    models("files nobody refers to stay", "            «self._remove({(client_id, before[0])})→pass»\n"),
    models("buffers are not in the digest", "for part in (model.params,« model.buffers→»):"),
    models("a restored state is not referred to", "if «self._newest→False» else []"),
    models("a file that is gone is not missed", "if «not self._path(client, when).exists()→False»:"),
    rows("the round itself is forgotten", "e.round >«=→» before"),
    rows("a round before since counts", "e.round >«=→» since"),
    rows("larger ids come first", "(-self._entries[i].round, «→-»i)"),
    rows("one row more than the capacity", "[self.capacity - len(arriving) «→+ 1 »:]"),
    rows("products of replaced rows stay", "«        self._products.clear(slots)\n→»"),
    rows("scales of one side alone", "«torch.outer(scales, scales)→scales[None, :]»"),
    rows("scales are lost in combinations", "coeff[:, m:]« * scales→»"),
    rows("rows that leave stay in the products", "gone = set(leaving)«.difference(clients)→»"),
    rows("storage grows beyond the capacity", "slots« if self.capacity is None else min(slots, self.capacity)→»"),
    rows("old rows are lost when storage grows", "            «rows[:held] = self._rows→pass»\n"),
    cache("grown products are no longer known", "result._known[:held, :held] = self.gram, «self._known→False»"),
    cache(
        "products of one side stay known",
        "self._known[slots] = «self._known[:, slots] = →»False",
        unseen="a pair is known only if both of its halves are",
    ),
    cache("products of one side stay", "«.index_fill_(2, there, torch.nan)→»"),
    cache("cross products on one side", "«        self.gram[:, beside[:, None], there] = products.mT\n→»"),
    cache(
        "known products are computed again",
        "«torch.where(held.isnan(), computed, held)→computed»",
        unseen="products that were computed twice are the same bits",
    ),
    kept("states that did not count stay", "if «when !=→counted is not None and when <» counted:"),
    kept(
        "the state of a visit that did not count is given",
        "return self._held[«counted→max(self._held)»]",
        unseen="all others are deleted by then",
    ),
    kept("a client without a visit that counted goes on", "«        if counted is None:\n            return None\n→»"),
    kept("files of killed processes stay", "«unfinished.unlink(missing_ok=True)→pass»"),
    kept("a state that is gone is begun anew", "        if «counted not in self._rounds()→False»:\n"),
    kept("states in memory stay", "            «del self._held[when]→pass»\n"),
    kept("states in files stay", "«self._path(when).unlink(missing_ok=True)→pass»"),
    kept("a folder is shared by all clients", "client_file(self._folder, «self._client_id→0», when)"),
    kept("everybody may read what a client keeps", "state«, private=True→»)"),
    kept("rounds beyond the ninth are not found", 'int(path.stem«.partition("-")[2]→[-1]»)'),
    models("a damaged model is taken", "if «_digest(model) != digest→False»:"),
    models(
        "a client gets the file of its first round",
        "path = «self._path(client_id, when)→min(self._path(client_id, when).parent.iterdir())»\n        load",
    ),
    models("everybody may read a client's model", "content«, private=True→»)"),
    models("digests are not restored", "(when, «digest→0») for client, when, digest in"),
    rows("a row's round is not restored", "_Entry(slot, «when→0», scale)"),
    rows("scales are not restored", "_Entry(slot, when, «scale→1.0»)"),
    rows("products are not restored", 'GramCache(«state["gram"]→(state["gram"] * torch.nan)».to'),
    rows(
        "what is remembered is not forgotten",
        "        self._entries: dict[int, _Entry] = «{}→getattr(self, '_entries', {})»\n",
    ),
    cache("products of grown storage are lost", "result.gram[:, :«held, :held→0, :0»], result._known"),
    cache("all products are known", "«bool(self._known[slots[:, None], slots].all())→True»"),
    cache("one known product is enough", "slots].«all→any»())"),
    cache("computed products are not known", "«        self._known[slots[:, None], slots] = True\n→»"),
    cache(
        "cross products are not known",
        "«        self._known[slots[:, None], others] = self._known[others[:, None], slots] = True\n→»",
    ),
    cache(
        "products that were never computed are known",
        "torch.«zeros→ones»(slots, slots, dtype=torch.bool)",
        unseen="whoever takes a slot forgets its products first",
    ),
    cache(
        "a loaded state knows everything",
        "«~gram.isnan().any(0).cpu()→gram.isnan().any(0).cpu().logical_or(torch.tensor(True))» if",
    ),
    cache("known products stay where rows are replaced", "«self._known[slots] = self._known[:, slots] = False→pass»"),
    files("rounds of a client are in one file", "round-{when«→ // 10»:06d}.pt"),
    files("checksums are not written", "set_crc32_options(«True→False»)"),
    files(
        "the user's choice about checksums is lost",
        "            «torch.serialization.set_crc32_options(checksums)→pass»\n",
    ),
    files(
        "a file has its name while it is written",
        "«partial→path.write_bytes(b''); partial».replace(path)",
        unseen="only a crash between two lines would show it",
    ),
    files("an unfinished file stays", "        «partial.unlink(missing_ok=True)→pass»\n\n\ndef _own"),
    files("rights of an unfinished file stay", "    «partial.unlink(missing_ok=True)→pass»  # of a process"),
    files("a private file is for everybody", "«0o600→0o666» if private"),
    files("a private folder is for everybody", "«0o700→0o777» if private"),
    files("folders are made from the inside", "«reversed(missing)→missing»"),
    files("a file is not flushed", "«            os.fsync(file.fileno())\n→»"),
    files("the new name is not flushed", "«        _flush_names(path.parent)\n→»"),
    files("an error does not say which file", "advice«, str(path)→») from error"),
    files(
        "an error of torch covers up that of the disk", "error« if isinstance(error, OSError) else error.__context__→»"
    ),
    files("ranks write into one unfinished file", 'return «f".{rank}" if rank else →»""'),
    files("damage is not looked for", "flaw = «_damage(path)→None»"),
    files("an empty file is well", '        return «"it is empty"→None»\n'),
    files("a file that is cut short is well", '        return «"it is cut short"→None»\n'),
    files("wrong first bytes are well", '«"its first bytes are wrong" if ends_well else →»None'),
    files("a part marked as a folder is well", "            if «folders→False»:\n"),
    files("files without checksums are damaged", "if «not any(entry.CRC for entry in entries)→False»:"),
    files("wrong checksums are well", "return None if «broken is None→True» else"),
    files(
        "a file that is none of torch's is damaged by name alone",
        '            raise « # nothing is wrong with the file→ValueError("damaged") from error»',
    ),
    by_client("who wrote again leaves as early", "«            self._held.pop(client_id, None)\n→»"),
    by_client("one client more than the capacity", ") >«=→» self._capacity"),
    by_client("newest leave first", "self._held[next(«iter→reversed»(self._held))]"),
    by_client("tensors stay where they come from", "if «self._device is not None→False» and"),
    by_client("a client that has a number starts again", "«self._held.get(client, first)→first»"),
    by_client("a client without a number counts as zero", "get(client, «first→0.0»)"),
    by_client("asking sets a number", "self._held.«get→setdefault»(client, first)"),
    by_client("starts of other clients", "zip(clients, starts«→[::-1]»,"),
    by_client("numbers have 32 bits", "pairs]«, dtype=torch.float64→»)"),
    by_client("a round changes what it is taken back to", "before = «dict(self._held)→self._held»"),
    by_client("a state that is loaded is added", "        «self._held = {}\n        →»for"),
    by_client("parameters and buffers are exchanged", 'Tensor, value["«params→buffers»"]'),
    by_client("the checkpoint's tensor is kept", "value.detach()«.clone()→»"),
    by_client("numbers come back as they are", "return «kind(value)→value»"),
    by_client("a round is taken back either way", "            if «not happened→True»:\n"),
]
