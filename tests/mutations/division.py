# SPDX-License-Identifier: Apache-2.0
"""Faults in how the processes of a fit divide its work, and in what they compare."""

from mutations.change import In

fits = In("fl_lightning/fit/on_ranks.py", "tests/fit/test_on_ranks.py")
evaluations = In(
    "fl_lightning/fit/evaluation/between_evaluations.py", "tests/fit/evaluation/test_divided_evaluations.py"
)

MUTATIONS = [
    fits("whole rows are divided", "    if «whole_rows_reason(options) is not None→False»:\n        return Ranked"),
    fits("columns are never divided", "    if «whole_rows_reason(options) is not None→True»:\n        return Ranked"),
    fits("every rank has the first share", "Columns.cut(total, ranks.size), «ranks.rank→0»,"),
    fits("columns are divided among all machines", "Columns.cut(total, ranks.«size→num_nodes»)"),
    fits("steps of divided columns are not compared", "ranks.gather_parts«, agreement.note→»)"),
    fits("steps of whole rows are not compared", "Columns((0, total)«, note=agreement.note→»)"),
    fits("state in columns stays where it is", "    if «not kept.columns(rule)→True»:\n"),
    fits("the server's rule visits clients", "ColumnState(rule, «deepcopy(rule)→rule»,"),
    fits("the server's rule is a copy", "ColumnState(«rule, deepcopy(rule)→deepcopy(rule), rule»,"),
    fits(
        "limits of a trainer do not count",
        "found = «{name: getattr(trainer, name) for name in _LIMITS}→dict[str, Any]()»",
    ),
    fits("callbacks are in the order of their ranks", '"callbacks": «sorted(callbacks)→callbacks[::-1]»'),
    fits("options of optimizers do not count", "repr(«groups→len(groups)»)}"),
    fits("parameters are options", 'if «name != "params"→True»}'),
    fits("executors with processes are taken", "if «not isinstance(executor, Sequential)→False»:"),
    fits(
        "settings of the trainer are not compared",
        "«{**description.settings, **trainer_settings(trainer)}→dict(description.settings)»",
    ),
    fits(
        "settings of the strategy are not compared",
        "«{**description.settings, **trainer_settings(trainer)}→trainer_settings(trainer)»",
    ),
    fits("threads are not compared", "«{**description.versions, **here}→dict(description.versions)»)"),
    fits("versions are not compared", "«{**description.versions, **here}→here»)"),
    fits("ranks are counted from 0 behind the first", "enumerate(others«, 1→»)"),
    fits("fits are not compared", "        if «found→False»:\n            raise"),
    fits("nobody says that data need a seed", "_SEED * «('data' in found)→False»"),
    fits("everything needs a seed", "_SEED * «('data' in found)→True»"),
    fits("evaluation data are not compared", "        if «other != found[0]→False»:\n"),
    fits("everything is named", "if «other.get(name) != found[0].get(name)→True»)"),
    fits(
        "more processes than clients are faster",
        "«per_round * sum(sizes) / (len(sizes) * largest)→ranks.size») if largest",
    ),
    fits("every process is as fast as all", "«min→max»(ranks.size, per_round * sum"),
    fits("clients without data divide by 0", "« if largest else 1.0→»\n"),
    fits("two processes are slower than one", "at most {«max(bound, 1.0)→bound»:.1f}"),
    fits("a share is the shortest", "«max→min»(end - begin for begin, end in rows.columns.spans)"),
    fits("a process trains all clients", "trained = «ceil(per_round / ranks.size)→per_round»"),
    fits("a process trains fewer than it may", "trained = «ceil(per_round / ranks.size)→per_round // ranks.size»"),
    fits("guards need no columns", "options.client_rule«, *options.guards→»)"),
    fits("client rules need no columns", "(options.algorithm, «options.client_rule, →»*options.guards)"),
    fits("server rules need no columns", "(options.«algorithm, options.→»client_rule, *options.guards)"),
    fits("what clients keep needs whole rows", "if kept.«columns(rule) and kept.→»at_clients(rule):"),
    fits("state in columns needs whole rows", "if kept.columns(rule)« and kept.at_clients(rule)→»:"),
    fits("columns and what clients keep go together", "if «kept.columns(rule) and kept.at_clients(rule)→False»:"),
    fits("the last coefficients alone are compared", "(«31 * self._noted + →»checksum(numbers))"),
    fits("the order of coefficients makes no difference", "«31 * →»self._noted + checksum"),
    fits(
        "notes grow without end",
        "«(31 * self._noted + checksum(numbers)) % 2**64→31 * self._noted + checksum(numbers)»",
    ),
    fits("coefficients of the round before still count", "        «self._noted = 0\n        →»rank,"),
    fits("times are compared", "for entry in fields(record)« if entry.name not in _TIMES→»}"),
    fits("records are not compared", '«**checksums(account, "record"), →»'),
    fits("coefficients are not compared", '«, "the coefficients of the step": self._noted→»}'),
    fits("what the fit holds is not compared", "sums = {**«sums, **→»checksums"),
    fits("every rank has its own times", "altered(record, **found[«0→-1»][1])"),
    fits("rounds may differ", "        if «names→False»:\n            raise RankError"),
    fits("starts may differ", '    if «names→False»:\n        raise ValueError(\n            f"all ranks must begin'),
    fits("what the first rank lacks is not compared", "for name in «{**first, **other}→first» if"),
    fits(
        "the last rank alone is compared", "        if names«→ and rank == len(found) - 1»:\n            return rank, "
    ),
    fits("everything that differs is named", "names«[:_NAMED]→»"),
    evaluations(
        "a process is always alone", "return «self._ranks is not None and self._loader.share is not None→False»"
    ),
    evaluations(
        "one process divides with nobody", "return self.«_ranks is not None and self._loader→_loader».share is not None"
    ),
    evaluations("divided steps are watched", "if self._ranks is None« or self.is_divided→»:"),
    evaluations("steps of one process are watched", "if self.«_ranks is None or self.→»is_divided:"),
    evaluations("nobody watches", "if «self._ranks is None or self.is_divided→True»:"),
    evaluations("what cannot be joined is", "        if «reason is not None→False»:\n            raise RankError"),
    evaluations("errors travel as they are", "                «part.row.error = portable(part.row.error)→pass»\n"),
    evaluations(
        "clients are in the order of ranks",
        "dict(«sorted(pair for some in self._ranks.gather(own) for pair in some.items())→"
        "pair for some in self._ranks.gather(own) for pair in some.items()»)",
    ),
    evaluations("the clients of others are lost", "for some in «self._ranks.gather(own)→[own]» for pair"),
    evaluations("a step that is not the only one is divided", "if «parts is None or →»num_loaders(self._trainer) > 1:"),
    evaluations("several loaders are divided", "if parts is None« or num_loaders(self._trainer) > 1→»:"),
    evaluations("what passes from client to client is divided", "if parts.«passed_on or parts.→»grown:"),
    evaluations("lists that grow are divided", "if parts.passed_on« or parts.grown→»:"),
    evaluations("what modules remember is divided", "if «self._notices.memory.names or →»parts"),
    evaluations("metrics with a past are divided", "« or parts.adds_to_older_metrics→»:"),
    evaluations("loggers that steps write to do not count", "        if «self._touches_loggers→False»:\n"),
    evaluations("values of batches are divided", "        if «values.logs_steps→False»:\n"),
    evaluations("callbacks that look at batches do not count", 'return None if «callback is None→True» else f"is'),
    evaluations(
        "fewer clients than ranks are divided",
        "« or loader.num_evaluated < ranks.size→»:\n            return\n        if any",
    ),
    evaluations(
        "as many clients as ranks are too few",
        "loader.num_evaluated <«→=» ranks.size:\n            return\n        if any",
    ),
    evaluations("what is divided is divided once more", "if ranks is None or« loader.share is not None or→»"),
    evaluations(
        "an obstacle elsewhere does not count",
        "if any(reasons := «ranks.gather(self._obstacle(parts, values))→[self._obstacle(parts, values)]»):",
    ),
    evaluations("all must have an obstacle", "if «any→all»(reasons :="),
    evaluations("the obstacle is that of the first rank", "«next(filter(None, reasons))→reasons[0]»"),
    evaluations(
        "nobody remembers that clients can be divided",
        "«        self._notices.divisible[self._stage] = ref(self._module)\n→»",
    ),
    evaluations(
        "every rank has the first share",
        "fair_shares(loader.counts, ranks.size)[«ranks.rank→0»]\n\n    def divide_again",
    ),
    evaluations(
        "what is divided again has the first share", "fair_shares(loader.counts, ranks.size)[«ranks.rank→0»]\n\n\nclass"
    ),
    evaluations("another module is divided", "« or shown() is not self._module→»"),
    evaluations(
        "few clients are divided again", "« or loader.num_evaluated < ranks.size→»:\n            return\n        if num"
    ),
    evaluations("several loaders are divided again", "if «num_loaders(self._trainer) == 1 and →»batch"),
    evaluations(
        "callbacks that came later do not count", "== 1« and batch_callback(self._trainer, self._stage) is None→»:"
    ),
    evaluations(
        "one stage shows it for all",
        "«self._notices.divisible.get(self._stage)→next(iter(self._notices.divisible.values()), None)»",
    ),
    evaluations("one step forgets the one before", "self._touches_loggers «|→»= watched.touched"),
    evaluations("loggers stay watched", "            «self._trainer.loggers = loggers→pass»\n"),
    evaluations(
        "a logger that is taken by its place is not seen",
        "        «self.touched = True\n        →»return super().__getitem__",
    ),
    evaluations(
        "loggers that are walked over are not seen", "        «self.touched = True\n        →»return super().__iter__"
    ),
    evaluations("callbacks of another stage count", '«{"val": "validation", "test": "test"}[stage]→"validation"»'),
    evaluations("batches that begin do not count", '«f"on_{word}_batch_start", →»'),
    evaluations("batches that end do not count", '«, f"on_{word}_batch_end"→»)'),
    evaluations("averaged weights do not count", "« or averaging(callbacks)→»"),
]
