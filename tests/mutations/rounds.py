# SPDX-License-Identifier: Apache-2.0
"""Faults in rounds, checkpoints, and the data that clients get."""

from mutations.change import In

POLICIES = "tests/simulation/test_policies.py tests/simulation/test_server.py tests/simulation/test_round.py"
RESUME = "tests/simulation/test_checkpoint.py tests/simulation/test_resume.py tests/simulation/test_client_schedules.py"

server = In("fl_lightning/simulation/server.py", POLICIES + " tests/simulation/test_min_clients.py")
uploads = In("fl_lightning/simulation/uploads.py", POLICIES)
fit = In("fl_lightning/simulation/fit.py", RESUME + " tests/simulation/test_min_clients.py")
lifecycle = In(
    "fl_lightning/simulation/fit_lifecycle.py",
    f"{RESUME} tests/strategy/test_repeated_fits.py tests/simulation/test_other_fits.py "
    "tests/algorithms/test_fair_training.py tests/algorithms/test_mmpf.py",
)
progress = In("fl_lightning/core/lightning/round_progress.py", "tests/core/test_round_progress.py " + RESUME)
files = In(
    "fl_lightning/core/lightning/checkpoint_io.py", "tests/simulation/test_checkpoint.py tests/simulation/test_kill.py"
)
state = In("fl_lightning/simulation/state_callback.py", "tests/simulation/test_state_callback.py " + RESUME)
checks = In("fl_lightning/simulation/resume_checks.py", "tests/core/test_fit_description.py " + RESUME)
sampler = In("fl_lightning/data/cohort_samplers.py", "tests/data/test_cohort_samplers.py")
partition = In("fl_lightning/data/partition_functions.py", "tests/data/test_partitions.py")
trainer = In(
    "fl_lightning/training/local_trainer.py", "tests/training/test_client_losses.py tests/training/test_uploads.py"
)

MUTATIONS = [
    server("exactly min_clients are too few", "< self._min_clients:", "<= self._min_clients:"),
    server("the report of the last round stays", "        self._algorithm.report = StepReport()\n", ""),
    server(
        "losses of some clients count as those of all",
        "if len(losses) == len(uploads) else None",
        "if losses else None",
    ),
    server(
        "learning rates of some clients count as those of all",
        "if len(rates) == len(uploads) else None",
        "if rates else None",
    ),
    server(
        "the training loss ignores sizes",
        "sum(loss * size for loss, size in trained) / sum(size for _, size in trained)",
        "sum(loss for loss, _ in trained) / len(trained)",
    ),
    uploads("norms of the first clients in place of the kept", "norms[kept]", "norms[: len(kept)]"),
    uploads(
        "training losses of the first clients in place of the kept", "[losses[k] for k in kept]", "losses[: len(kept)]"
    ),
    uploads(
        "losses at the global model are not checked",
        "elif upload.loss is not None and not isfinite(upload.loss):",
        "elif False:",
    ),
    uploads("buffers are not checked", "elif not buffers[place]:", "elif False:"),
    uploads(
        "companions are not checked",
        "elif not all(bool(rows.norm(row).isfinite()) for row in companions.values()):",
        "elif False:",
    ),
    uploads("shapes may differ between clients", "if any(shape != shapes[0] for shape in shapes):", "if False:"),
    fit(
        "skipped rounds are counted anew after a resume",
        'server.skipped_rounds = states.get("skipped_rounds", 0)',
        "server.skipped_rounds = 0",
    ),
    fit(
        "the server optimizer begins anew after a resume",
        'server.optimizer.load_state_dict(states["server_optimizer"])',
        "pass",
    ),
    fit(
        "client optimizers begin anew after a resume",
        'self.clients.runner.optimizers.load_state_dict(states["client_optimizers"])',
        "pass",
    ),
    fit("schedules begin anew after a resume", 'self.clients.schedules.load_state_dict(states["schedules"])', "pass"),
    fit("clients without data are planned for", "t.num_samples > 0 and t.client_id not in", "t.client_id not in"),
    fit("optimizer states of clients never count", "        runner.optimizers.commit(record.client_ids)\n", ""),
    lifecycle(
        "a new fit goes on from the last one's state",
        "        elif self._trainer.current_epoch == 0:\n",
        "        elif False:\n",
    ),
    lifecycle("the parameters to evaluate are trained on", "            theta.copy_(trained)\n", "            pass\n"),
    lifecycle(
        "other weights given since are overwritten",
        "_same(self._algorithm.evaluation_params(trained.to(theta)), theta)",
        "True",
    ),
    lifecycle(
        "trained parameters of a finished fit are lost",
        "self._trained if self._finished or self._shown() is theta else theta",
        "theta",
    ),
    lifecycle("an interrupted fit is finished", "if not self._finished and not interrupted:", "if not self._finished:"),
    lifecycle(
        "buffers of a client in training are saved",
        "{name: buffers.get(name, value) for name, value in state.items()}",
        "dict(state)",
    ),
    progress(
        "a step of an interrupted validation is lost",
        "            self._loop._batches_that_stepped += 1\n        self._finish_counters()",
        "        self._finish_counters()",
    ),
    progress("the epoch's end is counted as a step later", "        loop._batches_that_stepped -= 1\n", ""),
    progress(
        "a round run again is counted twice",
        '        self._loop._batches_that_stepped = start["batches_that_stepped"]\n',
        "",
    ),
    progress(
        "max_steps ends a round that is left open",
        "self._held_max_steps, self._loop.max_steps = self._loop.max_steps, -1",
        "pass",
    ),
    progress("plateau schedulers miss an epoch", "update_plateau_schedulers=True", "update_plateau_schedulers=False"),
    files("the oldest checkpoint is the newest", "sorted(dated, reverse=True)", "sorted(dated)"),
    state("older versions are read", 'state_dict["version"] != VERSION', 'state_dict["version"] > VERSION'),
    state("the sanity check counts as validation", "and not trainer.sanity_checking", ""),
    state(
        "a state once loaded is loaded again",
        "self._progress, self.loaded = progress, None",
        "self._progress = progress",
    ),
    checks("memory of other data is taken", "refused and memories and strict", "False"),
    checks("zeros are no memory", "state.numel() > 0", "bool(state.any())"),
    sampler("7 of 100 clients are 8", "round(clients_per_round * num_clients, 9)", "clients_per_round * num_clients"),
    partition("samples of a class stay in order", "owner[rng.permutation(index)]", "owner[index]"),
    partition("who holds just the equal part gets more", "sizes * num_clients >= n", "sizes * num_clients > n"),
    partition(
        "the donor gives of its rarest class",
        "max(stocks[donor], key=len)",
        "min(filter(None, stocks[donor]), key=len)",
    ),
    trainer(
        "the mean loss of a device ignores sizes",
        "(wide * torch.tensor(sizes, dtype=wide.dtype, device=wide.device)).sum() / sum(sizes)",
        "wide.mean()",
    ),
]
