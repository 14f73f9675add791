# SPDX-License-Identifier: Apache-2.0
"""Faults in the methods."""

from mutations.change import In

PROTOTYPES = "tests/algorithms/test_prototypes.py"

ditto = In("fl_lightning/algorithms/ditto.py", "tests/algorithms/test_ditto.py")
moon = In("fl_lightning/algorithms/moon.py", "tests/algorithms/test_moon.py")
features = In(
    "fl_lightning/algorithms/features.py",
    f"tests/clients/test_client_hooks.py tests/algorithms/test_moon.py {PROTOTYPES}",
)
previous = In(
    "fl_lightning/algorithms/_shared/previous_models.py",
    "tests/algorithms/test_moon.py tests/algorithms/test_fedcka.py",
)
fedcka = In("fl_lightning/algorithms/fedcka.py", "tests/algorithms/test_fedcka.py")
fedproto = In("fl_lightning/algorithms/fedproto.py", PROTOTYPES)
fedproc = In("fl_lightning/algorithms/fedproc.py", PROTOTYPES)
prototypes = In("fl_lightning/algorithms/_shared/prototypes.py", PROTOTYPES)
fa = In("fl_lightning/algorithms/fa.py", "tests/algorithms/test_fa.py")
mmpf = In("fl_lightning/algorithms/mmpf.py", "tests/algorithms/test_mmpf.py")
fedlf = In("fl_lightning/algorithms/fedlf.py", "tests/algorithms/test_fedlf.py tests/algorithms/test_thresholds.py")
still = In("fl_lightning/algorithms/fedlf.py", "tests/algorithms/test_contract.py -k zero_rows")
blocks = In("fl_lightning/algorithms/fedlf.py", "tests/algorithms/test_layer_blocks.py")
descent = In(
    "fl_lightning/algorithms/_shared/common_descent.py",
    "tests/algorithms/test_common_descent.py tests/algorithms/test_thresholds.py",
)
joint = In(
    "fl_lightning/algorithms/_shared/rows.py", "tests/algorithms/test_fedlf.py tests/algorithms/test_fedlf_reads.py"
)
reference = In("fl_lightning/ops/_gram_problems.py", "tests/ops/test_common_descent_kernel.py -k reference")
fedmdfg = In(
    "fl_lightning/algorithms/fedmdfg.py", "tests/algorithms/test_fedmdfg.py tests/algorithms/test_thresholds.py"
)
fedfv = In("fl_lightning/algorithms/fedfv.py", "tests/algorithms/test_fedfv.py tests/algorithms/test_thresholds.py")
fcfl = In("fl_lightning/algorithms/fcfl.py", "tests/algorithms/test_thresholds.py -k budget")

MUTATIONS = [
    ditto("the pull is away from the global model", "(«v - work.params→work.params - v»)"),
    ditto("lambda is left out", "«.mul_(self.lam)→»"),
    ditto("every step draws the same random numbers", '"personal", «→0 * »self._'),
    ditto(
        "statistics of BatchNorm stay those of the first step",
        "buffers = «packed_buffers(work.module, work.params.device)→model.buffers»",
    ),
    ditto("the first personal model is the global one itself", "Snapshot(work.params«.clone()→»,"),
    ditto("a stored model changes before its client counts", "held.params.to(work.params«, copy=True→»)"),
    moon("drawn to the last model", "(«far - near→near - far»)"),
    moon("multiplied by the temperature", "«/→*» self.temperature"),
    moon("the received model on both sides", "features_of(self.«previous→received»,"),
    features("other models run in training mode", "evaluate=«True→False»"),
    features("features of another batch are taken", "self._output« if batch is self._batch else None→»"),
    previous("a new client takes the last one's model", "self.previous = «None→self.previous» if model"),
    previous("the received model is remembered", "«work.row→self.received.params».to(device)"),
    previous(
        "statistics of the received model are remembered",
        "«packed_buffers(work.module, device)→self.received.buffers.to(device)»))",
    ),
    fedcka("drawn to the last model", "linear_cka«(x, last) - linear_cka(x, new)→(x, new) - linear_cka(x, last)»"),
    fedcka("summed over layers", "torch.stack(terms).«mean→sum»()"),
    fedcka("columns are not centred", "«(part - part.mean(0)) @ (part - part.mean(0))→part @ part».T"),
    fedcka(
        "outputs are taken after what works in place", "output«.clone() if isinstance(output, Tensor) else output→»"
    ),
    fedcka("the last layers in place of the first", "owners[«: self.num_layers→-self.num_layers :»]"),
    fedcka("layers without a matrix count", "p.dim() > «1→0» for p"),
    fedcka("hooks stay on the module", "stack.callback(«handle.remove→lambda: None»)"),
    fedcka("the own outputs come from evaluation mode", "model, «model is not None→True»)"),
    fedproto("drawn to zero where there is no prototype", "classes« * known→»"),
    fedproto("summed over the features", "offsets.square().«→sum(1).»mean()"),
    fedproc("the weight falls to zero a round late", "1.0 - «when→(when - 1)» / "),
    fedproc("the weight goes on falling below zero", "max(«0→-1».0, 1.0 - when"),
    fedproc("classes without a prototype compete", '«.masked_fill(~known, float("-inf"))→»'),
    fedproc("the own loss always counts in full", "1.0« - self.contrast_weight(work.round)→»"),
    fedproc("prototypes are not normalized", "«normalize(prototypes, dim=1)→prototypes»"),
    fedproc("the contrast is not weighed", "-«weight * →»(classes"),
    prototypes("every pass is counted", "if batch_idx «==→<» 0:"),
    prototypes("the last batch alone is counted", "«self._collected[0] + sums, self._collected[1] +→sums,» counts"),
    prototypes("the mean is over all clients", "«held.sum(0).clamp(min=1)[:, None]→len(held)»"),
    prototypes("a class nobody holds loses its prototype", "«torch.where(fresh[:, None], means, before)→means»"),
    prototypes("a class nobody holds is no longer known", "«self.known.to(fresh.device) | →»fresh"),
    prototypes(
        "a client keeps the prototypes of its last round", "self.«_received = self._collected→_collected» = None"
    ),
    prototypes(
        "too large classes show in the last batch alone", "«torch.maximum(self._collected[2], largest)→largest»"
    ),
    prototypes("the first class too many passes", "int(largest) >«=→» self.num_classes"),
    fa("sigma is not squared", "self._width«**2→»"),
    fa("negative covariance is not penalized", "covariance«.abs()→» - self.tau"),
    fa("the group is not centred in the penalty", "«(member - share)→member» * scores"),
    fa("the group is centred the wrong way in the program", "member_scores «-→+» share * scores"),
    fa("negative covariance is not bounded", "torch.cat([covariances, «-→»covariances, among])"),
    fa("the share is that of the other group", "self.share = share = «→1 - »members / total"),
    fa("rounds that leave out constraints are not counted", "«self.relaxed += len(rows) == len(among)→pass»"),
    fa("rounds without any weights are not counted", "«        self.relaxed += 1\n→»"),
    fa("the last batch alone is summed", "self._sums «+→»= rows @"),
    fa("samples of the last batch alone are counted", "self._counts «+→»= torch"),
    fa("bases without samples take part", "near = mass > «NO_KERNEL * mass.max()→-1»"),
    mmpf("mu moves a round late", "self.inner «==→>» self.inner_rounds"),
    mmpf("K is set to k_min", "«min(self.k, self.k_min)→self.k_min»"),
    mmpf(
        "failures are counted on after a success",
        "self.k«, self.failures = min(self.k, self.k_min), 0→ = min(self.k, self.k_min)»",
    ),
    mmpf("clients at the kept loss are not behind", "(losses >«=→» "),
    mmpf("the step of mu does not shrink", "self.alpha «/ self.k →»* shares"),
    mmpf("participants take the weight of the absent", "«mass * mu→mu»)"),
    mmpf("patience is one longer", "self.failures >«=→» self.patience"),
    mmpf("the last model stays in the end", "None if better« and not self._finished()→»"),
    mmpf("the kept model changes with the global one", "cohort.params«.clone()→»"),
    mmpf("one mu is tried only once", "self.«inner, self.iteration = 0, self.iteration +→iteration +=» 1"),
    reference("the mean length is over all rows", "/ «live[:, :online].sum(1, keepdim=True).clamp_min(1)→online»"),
    reference(
        "a fair row of zeros is stretched",
        "«torch.where(size > zero_direction * weights.norm() * mean, fair * mean / size, 0.0)→fair * mean / size»",
    ),
    reference("the mean square is the sum", "squares.sum(1)« / live.sum(1).clamp_min(1)→»"),
    reference("remembered rows must fall, too", "(«(slopes > noise)[:, :online] | ~live→slopes > noise»).all(1)"),
    fedlf("remembered rows stay in the hull", "«gram = gram[:, : m + history, : m + history]→unused = 0»"),
    fedlf("remembered rows are in units of the update", "«scale[:, len(cohort) :] *= cohort.client_lr or 1.0→pass»"),
    blocks("the fair row needs no column", "block.size - m« - self.fair→»"),
    blocks("a joined block is as large as its first layer", "size=one.size« + two.size→»"),
    blocks("there is no last resort", "«solve(block, last=True)→block»"),
    descent("equal losses are not scaled by their number", " «/ math.sqrt(m) →»* abs(total)"),
    fedlf("a direction in one layer is enough", "bool(seen.solved.«all→any»())"),
    still("a round in which nobody moved is remembered", "elif «not bool(coeff.any())→False»"),
    joint("what a device says is mixed up", "squares, «solved, fair→fair, solved» = each"),
    joint("the step is as long as its direction", "«target / size→1.0» if"),
    fedmdfg("slopes are those of rows as they came", "[:m] «* rescale →»/ eta"),
    fedmdfg("negative losses are dropped with those of zero", "losses «!=→>» 0"),
    fedfv("of equal losses the later come first", "«losses→len(losses) - 1 - losses.flip(0)».argsort(stable=True)"),
    fcfl("a disparity at its budget is not tight", "(excess[known] >«=→» 0)"),
]
