# SPDX-License-Identifier: Apache-2.0
"""Faults in rounds, checkpoints, and the data that clients get."""

from mutations.change import In

SIMULATION = "tests/fit"
POLICIES = f"{SIMULATION}/test_server.py {SIMULATION}/test_policies.py {SIMULATION}/test_min_clients.py"
RESUME = f"{SIMULATION}/test_resume.py tests/federation/test_client_schedules.py {SIMULATION}/test_min_clients.py"
FITS = f"tests/fit/test_repeated_fits.py {SIMULATION}/test_checkpoint.py {SIMULATION}/test_resume.py"

server = In("fl_lightning/fit/server.py", f"{POLICIES} -k 'not in_any_rule and not changes_nothing'")
SEVERAL = "tests/fit/evaluation/test_several_loaders.py"
evaluated = In("fl_lightning/fit/evaluation/client_evaluation.py", SEVERAL)
own_batches = In("fl_lightning/fit/loaders.py", SEVERAL)
one_client = In("fl_lightning/fit/evaluation/one_client.py", SEVERAL)
recorded = In("fl_lightning/fit/evaluation/one_client.py", SEVERAL)
divided = In("fl_lightning/data/division.py", SEVERAL)
cohorts = In("fl_lightning/fit/uploads.py", f"{SIMULATION}/test_server.py")
reports = In("fl_lightning/fit/server.py", f"{SIMULATION}/test_telemetry.py -k own_round")
uploads = In("fl_lightning/fit/uploads.py", f"{POLICIES} -k 'not in_any_rule and not changes_nothing'")
buffers = In("fl_lightning/fit/uploads.py", "tests/clients/test_buffers.py -k finite")
fit = In("fl_lightning/fit/fit.py", f"{RESUME} -k 'bit_for_bit or (variations_resume and not anywhere)'")
counted = In("fl_lightning/fit/fit.py", "tests/fit/test_scale.py -k peak")
kept = In("fl_lightning/fit/fit.py", "tests/clients/test_client_optimizers.py -k keep_in_a_fit")
settled = In("fl_lightning/lightning/loop_parts.py", "tests/lightning/test_results_patch.py")
round_of = In("fl_lightning/fit/fit.py", "tests/clients/test_parallel_workers.py -k without_data")
lifecycle = In(
    "fl_lightning/fit/fit_lifecycle.py",
    f"{FITS} -k 'repeated_fits or evaluated or inside_a_client or after_the_fit or interruption'",
)
progress = In(
    "fl_lightning/lightning/round_progress.py",
    f"{FITS} -k 'repeated_fits or still_ends or (variations_resume and not anywhere) or interruption'",
)
files = In("fl_lightning/lightning/checkpoint_io.py", f"{SIMULATION}/test_checkpoint.py -k newest")
state = In(
    "fl_lightning/fit/state_callback.py",
    f"{SIMULATION}/test_state_callback.py {SIMULATION}/test_other_fits.py -k 'state_callback or versions'",
)
checks = In("fl_lightning/lightning/fit_description.py", f"{SIMULATION}/test_other_fits.py -k 'remembered or kept'")
sampler = In("fl_lightning/data/cohort_samplers.py", "tests/data/test_cohort_samplers.py")
partition = In("fl_lightning/data/dirichlet_functions.py", "tests/data/test_partitions.py")
trainer = In(
    "fl_lightning/clients/local_training.py", "tests/clients/test_client_losses.py tests/clients/test_uploads.py"
)

groups = In("fl_lightning/clients/local_training.py", "tests/clients/test_accumulation.py")
skipped = In("fl_lightning/clients/local_training.py", "tests/fit/test_lightning_warnings.py -k nothing")
rare = In("fl_lightning/lightning/loop_parts.py", "tests/fit/test_lightning_warnings.py -k 'log_every or wait'")
grouped = In("fl_lightning/lightning/loop_parts.py", "tests/clients/test_accumulation.py")
scaled = In("fl_lightning/lightning/epoch_loop.py", "tests/clients/test_accumulation.py")
products = In("fl_lightning/fit/effective_conflicts.py", "tests/fit/test_effective_conflicts.py")
logged = In("fl_lightning/fit/server.py", "tests/fit/test_effective_conflicts.py -k log")

MUTATIONS = [
    products("both factors' updates act on the old factor", "a[:1]« - a[1:]→»"),
    products("what A does is left out", "«b[:1].expand_as(b[1:])→0 * b[1:]»"),
    products("the product is scaled once", "pair.scaling«**2→»"),
    products("the scaling of another adapter counts", '«given.get(rest.partition(".")[0], 1.0)→max(given.values())»'),
    products("what is no factor does not count", "«products += →»updates.dots"),
    products("factors of embeddings are no pairs", "«(?:embedding_)?→»"),
    products("pairs with a frozen factor A are left out", "«first in layout.names or →»"),
    products("pairs with a frozen factor B are left out", "« or second in layout.names→»"),
    products("shapes that do not multiply are pairs", "« and shape[:1] == (prod(shapes[second][1:]),)→»"),
    products("columns of the share before are read again", "«max(begin, first)→first», max("),
    products("a client whose update does nothing conflicts", "products <«→=» 0"),
    logged("conflicts are counted against the step's opposite", "count(cohort, «→-»step)"),
    groups("gradients are forgotten by the place in the visit", "opens or «place→done % work.window» == 0"),
    skipped("batches of manual optimization count as skipped", "loss is None« and self._automatic→»"),
    rare("values that are logged over a round are named, too", "« and not meta.on_epoch→»"),
    groups("a pass ends without a step", "«ends_pass→is_last» or place"),
    grouped("gradients are never forgotten", "«self._skip_backward→True» or not"),
    scaled("the training loss is divided by the window", "loss.detach()« * window→»"),
    sampler("7 of 100 clients are 8", "«round(clients_per_round * num_clients, 9)→clients_per_round * num_clients»"),
    partition("samples of a class stay in order", "owner[«rng.permutation(index)→index»]"),
    partition("who holds just the equal part gets more", "sizes * num_clients >«=→» n"),
    partition(
        "the donor gives of its rarest class", "«max(stocks[donor], key=len)→min(filter(None, stocks[donor]), key=len)»"
    ),
    partition("the classes of a client follow equal shares", "alpha * «left / n→(left > 0) / len(left)»"),
    partition("clients are filled in order", "«rng.permutation(index)→index» for index"),
    trainer(
        "the mean loss of a device ignores sizes",
        "«(wide * torch.tensor(sizes, dtype=wide.dtype, device=wide.device)).sum() / sum(sizes)→wide.mean()»",
        unseen="losses are on a device only where there is one, and what decides runs on the processor",
    ),
    server("exactly min_clients are too few", "<«→=» self._options.min_clients:"),
    reports("the report of the last round stays", "«        self._algorithm.report = trusted(StepReport)()\n→»"),
    cohorts(
        "losses of some clients count as those of all",
        "if «len(losses) == len(uploads)→losses» else None",
        unseen="all clients of a round measure their loss, or none does",
    ),
    cohorts(
        "learning rates of some clients count as those of all",
        "if «len(rates) == len(uploads)→rates» else None",
        unseen="the clients of a round all have a learning rate, or none has: their optimizers are of one kind",
    ),
    uploads("norms of the first clients in place of the kept", "self.norms[«places→: len(places)»]"),
    uploads(
        "training losses of the first clients in place of the kept",
        "«[self.train_losses[k] for k in places]→self.train_losses[: len(places)]»",
    ),
    uploads(
        "losses at the global model are not checked",
        "elif «upload.loss is not None and not isfinite(upload.loss)→False»:",
    ),
    buffers("buffers are not checked", "elif «not buffers[place]→False»:"),
    uploads("companions are not checked", "elif «not all(map(isfinite, companions.values()))→False»:"),
    uploads("shapes may differ between clients", "if «any(shape != shapes[0] for shape in shapes)→False»:"),
    fit(
        "client optimizers begin anew after a resume",
        '«self.clients.runner.optimizers.load_state_dict(states["client_optimizers"])→pass»',
    ),
    fit("schedules begin anew after a resume", '«self.clients.schedules.load_state_dict(states["schedules"])→pass»'),
    counted("clients' sizes are added one by one", "«int(loaders.sizes.sum())→sum(loaders.sizes)»"),
    round_of("clients without data are planned for", "t.«num_samples > 0 and t.→»client_id not in"),
    kept("optimizer states of clients never count", "«        runner.optimizers.commit(record.client_ids)\n→»"),
    settled(
        "logged tensors stay on the device of the first", "torch.device(args[0]) «== self.value.device→is not None»"
    ),
    settled("logged tensors are searched for at every call", "«entry.__class__ = _SettledResult→pass»"),
    lifecycle(
        "a new fit goes on from the last one's state", "self._carried« if self._trainer.current_epoch > 0 else None→»"
    ),
    lifecycle("the parameters to evaluate are trained on", "            «theta.copy_(trained)→pass»\n"),
    lifecycle(
        "other weights given since are overwritten",
        "«_same(self._fit.evaluation_params(trained.to(theta)), theta)→True»",
    ),
    lifecycle(
        "trained parameters of a finished fit are lost",
        "«self._trained if self._finished or self._fit.evaluates_params else →»theta",
    ),
    lifecycle("an interrupted fit is finished", "if not self._finished« and not interrupted→»:"),
    lifecycle(
        "buffers of a client in training are saved",
        "«{name: buffers.get(name, value) for name, value in state.items()}→dict(state)»",
    ),
    progress(
        "a step of an interrupted validation is lost",
        "        «    self._loop._batches_that_stepped += 1\n        →»self._finish_counters()",
    ),
    progress("the epoch's end is counted as a step later", "«        loop._batches_that_stepped -= 1\n→»"),
    progress(
        "a round run again is counted twice",
        '«        self._loop._batches_that_stepped = start["batches_that_stepped"]\n→»',
    ),
    progress(
        "max_steps ends a round that is left open",
        "«self._held_max_steps, self._loop.max_steps = self._loop.max_steps, -1→pass»",
    ),
    progress("plateau schedulers miss an epoch", "update_plateau_schedulers=«True→False»"),
    files("the oldest checkpoint is the newest", "sorted(dated«, reverse=True→»)"),
    state("older versions are read", 'state_dict["version"] «!=→>» VERSION'),
    state("the sanity check counts as validation", "«and not trainer.sanity_checking→»"),
    state("a state once loaded is loaded again", "self._progress«, self.loaded = progress, None→ = progress»"),
    checks("memory of other data is taken", "«refused and memories and strict→False»"),
    checks("zeros are no memory", "«state.numel() > 0→bool(state.any())»"),
    evaluated("samples of other loaders do not count", ".size «+→»= batch"),
    evaluated("clients stand in the order of loaders", "«dict(sorted(self._clients.items()))→self._clients»"),
    own_batches("all loaders are the first", "told = «place→0» if"),
    one_client("transfer hooks are told the first loader", "(trainer, batch«, loader or 0→»)"),
    one_client("batches of the last loader are all there are", "«own.number for own in loaders→loaders[-1].number»]"),
    recorded("names that say it are not left alone", '«kwargs.get("add_dataloader_idx", True)→True»'),
    divided("loaders are divided by one draw", "«*([place] if place else [])→»"),
    divided("the second loader's division stays", "name«.split()[0]→» not in gone"),
]
