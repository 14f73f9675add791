# SPDX-License-Identifier: Apache-2.0
"""Faults in what several processes say to each other, and in what they begin with alike."""

from mutations.change import In

EXCHANGE = "tests/clients/test_rank_exchange.py"
RANKED = "tests/clients/test_ranks.py"

ranks = In("fl_lightning/lightning/ranks.py", EXCHANGE)
shared = In("fl_lightning/lightning/shared_by_ranks.py", f"{EXCHANGE} {RANKED} -k 'alike or silent or as_they_were'")

MUTATIONS = [
    ranks("all processes have the first device", "devices[«self.local_rank→0»]"),
    ranks("another number of processes is taken", "if «dist.get_world_size() != self.size→False»:"),
    ranks("every fit makes its own notes", "        if «self._store is None→True»:\n"),
    ranks(
        "who left once has left for good",
        "            self._store = self._shared_store()\n«        self.has_left = False\n→»",
    ),
    ranks("every rank keeps its own notes", "        if «self.rank == 0→True»:\n            store = TCP"),
    ranks(
        "notes that cannot be reached are an error without a name",
        "        «with self._answered()→if True»:\n            return TCPStore",
    ),
    ranks("nobody waits for others", "            «self.gather(None)→pass»\n"),
    ranks("who has left waits", "if self._store is not None« and not self.has_left→»:"),
    ranks("who has left asks", "«        if self.has_left:\n            return value\n→»"),
    ranks("the first rank says all", "dist.broadcast_object_list(box, «source→0»,"),
    ranks("every rank hears itself alone", "return [unpack(«part→packed», self.device) for part in found]"),
    ranks("ranks are heard in the other order", "unpack(part, self.device) for part in found«→[::-1]»]"),
    ranks(
        "who has left takes part in columns", '        if «self.has_left→False»:\n            raise RankError(f"rank'
    ),
    ranks("parts are as long as the first", "longest, rest = «max(sizes)→sizes[0]», part.shape[1:]"),
    ranks("short parts are not filled up", "        if «len(part) < longest→False»:\n"),
    ranks(
        "parts travel as they lie in memory",
        "padded = part«.contiguous()→»\n",
        unseen="gloo takes them so, and NCCL is for GPUs",
    ),
    ranks("tensors of one exchange have one number", "number * _TENSORS - 1)« + 1→»"),
    ranks("exchanges at one time have one number", "«number→0» * _TENSORS - 1) + 1"),
    ranks("notes that are not there are waited for", "« if self._store.check(keys) else None→»"),
    ranks("one note is enough", "if «self._store.check(keys)→any(self._store.check([key]) for key in keys)» else None"),
    ranks(
        "ranks say that they have come once they have been heard",
        '                «self._store.set(f"rank {self.rank}", str(self._exchanges))\n            yield→'
        'pass\n            yield\n        self._store.set(f"rank {self.rank}", str(self._exchanges))»\n',
    ),
    ranks("who has ended is slow", "if waited < 0.«9→0» * self._timeout"),
    ranks(
        "who waits is late, too",
        "for rank in late« if rank != self.rank→»]",
        unseen="a rank notes that it has come before it waits",
    ),
    ranks("the last rank is never late", "range(self.size «→- 1 »if self._store"),
    ranks("an error while one looks who is late is the error", "with suppress(«RuntimeError→KeyError»):  # the first"),
    ranks(
        "nobody leaves",
        '            end_at_exit(getattr(self.launcher, "procs", []))\n«        self.has_left = True\n→»',
    ),
    ranks("requests are those of this rank", "signals.follow(«self.gather(signals.requests)→[signals.requests]»,"),
    ranks(
        "places are begun though the process is to end",
        "if «self.signals is not None and self.signals.urgent→False»:\n                return",
    ),
    ranks("places are divided once", "        self._divisions += «1→0»  # counted"),
    ranks("who leaves begins what it has taken", "if «leaving or →»turn >= len(places):"),
    ranks(
        "who is urged to leave does not know it", "leaving = «self.signals is not None and self.signals.urgent→False»"
    ),
    ranks("one tensor that has arrived is enough", "return «all→any»(work.is_completed()"),
    ranks("nobody waits for tensors", "                «work.wait()→pass»\n"),
    shared("every rank draws its own numbers in Python", "«    random.setstate(python)\n→»"),
    shared("every rank draws its own numbers in PyTorch", "«    torch.set_rng_state(generator)\n→»"),
    shared("buffers are every rank's own", "[*module.named_parameters()«, *module.named_buffers()→»]"),
    shared("other shapes are taken", "(name, «tuple(tensor.shape)→tensor.dim()», str(tensor.dtype))"),
    shared("modules are not compared", "if «tensors != found[0]→False»:"),
    shared("more tensors than the first rank has have no words", "«zip_longest→zip»(found[0], tensors)"),
    shared("what does not lie in one piece stays a rank's own", "                «tensor.data.copy_(whole)→pass»\n"),
    shared("metrics join what others hold", "        «metric.distributed_available_fn = _alone→pass»\n"),
    shared("metrics stay apart", "            «metric.distributed_available_fn = available→pass»\n"),
    shared("other advice is not heard", 'message=r"«It is recommended to use `self.log\\(.*sync_dist=True→»")'),
    shared("advice is never heard again", "            «warnings.filters.remove(own)→pass»"),
    shared("whoever resets the filters ends the fit", "with suppress(«ValueError→KeyError»):"),
]
