# SPDX-License-Identifier: Apache-2.0
"""Faults in what several processes share: columns, rows that travel, clients that are divided among ranks."""

from mutations.change import In

SHARES = "tests/algorithms/test_column_shares.py"
ROWS = "tests/clients/test_column_rows.py"
RANKS = "tests/clients/test_ranks.py"

columns = In(
    "fl_lightning/core/updates.py",
    f"tests/core/test_column_parts.py {SHARES} -k '(same_bits and (FedLF-needed or FedHEAL or FedMDFG)) "
    "or where_slices or travel or any_number'",
)
rows = In("fl_lightning/clients/ranks/column_rows.py", ROWS)
state = In("fl_lightning/clients/ranks/column_rows.py", "tests/clients/test_column_state.py")
files = In("fl_lightning/core/storage/kept.py", "tests/core/test_column_parts.py")
ranked = In("fl_lightning/clients/ranks/ranked_runner.py", f"{RANKS} -k 'bits_of_one and 2'")
together = In("fl_lightning/clients/ranks/ranked_runner.py", "tests/clients/test_ranked_runner.py")
asked = In(
    "fl_lightning/clients/ranks/ranked_runner.py", "tests/clients/test_rank_failures.py -k 'terminated_in_a_round'"
)

MUTATIONS = [
    columns("the last slice, which is short, is left out", "«-(-total // width)→total // width»"),
    columns("shares are cut within slices", "share «// shares * width→* width // shares»"),
    columns("the last share is longer than the vector", "* width, «→2 * »total) for share"),
    columns("a share has one column more", "return self.span[1] - self.span[0]«→ + 1»\n"),
    columns("a part is one of rows", "values[«..., →»slice(*self.span)]"),
    columns(
        "all shares are as long as this one",
        "«[end - begin for begin, end in self.spans]→[self.numel] * len(self.spans)»",
    ),
    columns("a segment that began before is left out", "«bisect_right(starts, a) - 1→bisect_left(starts, a)»"),
    columns("a segment that begins at the end is sent, too", "«bisect_left→bisect_right»(starts, b)"),
    columns("segments are those of the whole share", "_within(starts, «a, b→begin, end»))[at]"),
    columns("sums are those of the first segments", "whole[«at→: len(segments)»] = segments"),
    columns("an empty share sends sums", "_within(starts, begin, begin))«[:0]→»"),
    columns("where segments begin is counted from the front", "min(max(start, begin), end)« - begin→»"),
    columns("an integer is that of this share", "[1] * len(self.spans)))«.sum()→[self.share]»)"),
    rows("rows of the round before still count", "«        super().begin_round()\n→»"),
    rows("two clients get the same memory", "self._free«.pop()→[-1]» if"),
    rows("rows that have travelled are not used again", "            «self._free.append(self._whole.pop(index))→pass»"),
    rows("a client's companions go in an order of its own", "self.update(index), «sorted→list»(companions)"),
    rows("places of companions are in another order", "for name in «sorted(names)→names»)]"),
    rows("companions travel in another order", "companions[name] for name in «sorted(names)→names»)]"),
    rows("norms of companions are those of the update", "self._whole_norm(«companions[name]→update») for"),
    rows(
        "the norm is that of the columns that are here",
        "named, checksums)«→ if False else SentRows(index, float(self.values[index].norm()), named, checksums)»",
    ),
    rows("norms are in the order of the rows", "self._known[index].norm for index in «indices→sorted(indices)»]"),
    rows("notes of earlier rounds stay", "            «self._ranks.forget(self._key(wave, self._ranks.rank))→pass»\n"),
    rows("rows are given up while they travel", "« and self._pending[self._over].is_over()→»:"),
    rows("nobody waits for rows", "            «pending.wait()→pass»\n"),
    rows("waves in which some ranks have nobody do not begin", "self._begun < «max→min»(map(len, sent), default=0)"),
    rows("one part of a row may be wrong", "if «any→all»((found - sent) % 2**64"),
    rows("checksums that wrap around are wrong", "(found - sent) «% 2**64 →»for"),
    rows("checksums are not looked at", "if «→False and »any((found - sent) % 2**64"),
    rows("ranks without columns wait for rows", "for place in places« if end > begin→»]"),
    rows("rows go to ranks without columns", "for rank, (a, b) in others« if b > a→»]"),
    rows("a rank's own columns are the first", "place.copy_(vector[«begin:end→: end - begin»])"),
    rows("rows go to the own rank, too", "enumerate(self._spans)« if rank != me→»]"),
    rows("rows that have arrived do not count", "            «self._rows.arrived(client)→pass»\n"),
    state("broadcasts are a share", "return self.«columns.joined(self._placed(value))→_placed(value)»"),
    state("state goes to whoever does not train the client", "if owner «=→!»= self.ranks.rank:"),
    state("the own columns are missing", ".«copy_(parts[name])→zero_()»"),
    state("ranks without columns are waited for", "in self._others()« if b > a→»]"),
    state("ranks without columns send", "«elif self.columns.numel→else»:"),
    state("the rank waits for itself", "enumerate(self.columns.spans)« if rank != self.ranks.rank→»]"),
    state("training does not wait for state", "self.ranks.transfer(sends, receives)«.wait()→»"),
    state("visits begin without their state", "«        visiting.begin_fit(federation)\n→»"),
    state(
        "visits begin before their state",
        "        «for client, values in mine.items():\n            kept.take_own(visiting, client, values)\n"
        "        visiting.begin_fit(federation)→"
        "visiting.begin_fit(federation)\n        for client, values in mine.items():\n"
        "            kept.take_own(visiting, client, values)»\n",
    ),
    state("everything lies in columns", "return «name in kept.columns(self.server)→True»"),
    state("nothing lies in columns", "return «name in kept.columns(self.server)→False»"),
    state("columns travel from wherever they lie", ".to(self.federation.device)«.contiguous()→»"),
    files("rows are joined along the wrong dimension", "torch.stack«(joined).view→(joined, 1).reshape»(shape)"),
    files("the state of one process is marked", "if «len(columns.spans) == 1→False»:\n"),
    files("every process gets what lies in columns", "if «first and →»joined"),
    files("nested names are not looked for", 'head, «_, rest = name.partition(".")→rest = name, ""»'),
    files(
        "a state of the whole is not divided", "«columns.part(value) if value.shape[-1] == columns.total else →»value"
    ),
    files(
        "every process has the whole",
        "row.cpu()« if first else row[:0]→»",
        unseen="only the first gives it back: it takes memory",
    ),
    files("the second process has the whole", "self.columns.share == «0→1», *"),
    files("no rows have another type", "torch.empty(0, self.columns.total«, dtype=rows.dtype→»)"),
    files("a checkpoint is marked where nothing lies in columns", "_changed(state, names or «()→list(state)», lambda"),
    files("columns of an earlier fit stay marked", "            return value«.values→»\n"),
    files("what is missing is looked for", "        if «head in result→True»:\n"),
    files(
        "the given state changes", "    result« = dict(state)→: dict[str, Any] = state  # type: ignore[assignment]»\n"
    ),
    files("lists hold nothing", "    if «isinstance(value, list | tuple)→False»:\n"),
    files(
        "a tuple comes back as a list",
        "return «type(value)(_every(entry, change, kinds) for entry in value)→"
        "[_every(entry, change, kinds) for entry in value]»",
    ),
    files("everything lies in columns", "    return «bool(found)→True»\n"),
    files("nothing lies in columns", "    return «bool(found)→False»\n"),
    files("parts are written", "whole: dict[str, Any] = «_every(state, ColumnPart.whole, (ColumnPart,))→dict(state)»"),
    ranked(
        "clients come back in another order",
        "self._outcomes.pop(«self._turn→min(self._outcomes, key=lambda place: -place)»)",
    ),
    ranked(
        "ranks that hold all columns are sent a share",
        "«[total] * self.ranks.size if len(spans) == 1 else spans→"
        "spans * self.ranks.size if len(spans) == 1 else spans[::-1]»",
    ),
    together("clients without a step are left out", "[costs[place] «+ 1 →»for place in left]"),
    ranked(
        "companions travel twice",
        "companions=«{}→upload.report.companions»",
    ),
    ranked(
        "a client's rows are not sent",
        "        sent = «self._exchange.send(upload.index, upload.report.companions)→None»\n",
    ),
    together(
        "state goes to another rank than the client",
        "{client: «owners[place]→(owners[place] + 1) % ranks.size» for place, client in",
    ),
    together(
        "losses come back in another order", "[«losses[place] for place in range(len(clients))→*losses.values()»]"
    ),
    together(
        "ranks measure the losses of the first clients", "«[clients[place] for place in share]→clients[: len(share)]»"
    ),
    together("an error of another rank is lost", "«            if wrong is not None:\n                raise wrong\n→»"),
    asked(
        "requests to stop are not followed between clients", "«ranks.follow_requests(between_clients=bool(left))→pass»"
    ),
    asked("all clients are trained once more", "[«place for place in left if place not in self._outcomes→»]"),
]
