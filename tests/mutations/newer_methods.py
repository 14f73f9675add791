# SPDX-License-Identifier: Apache-2.0
"""Faults in the methods of 2021 and later."""

from mutations.change import In

CONTRACT = "tests/algorithms/test_contract.py"
PERSONAL = "tests/algorithms/test_personal_layers.py"
LIES = "tests/fit/test_server_counts.py -k no_client_can"

adafed = In("fl_lightning/algorithms/adafed.py", "tests/algorithms/test_adafed.py")
torchjd = In("fl_lightning/algorithms/torchjd.py", "tests/algorithms/test_torchjd.py", needs="torchjd")
upgrad = In("fl_lightning/algorithms/upgrad.py", "tests/algorithms/test_upgrad.py")
fedlf = In("fl_lightning/algorithms/fedlf.py", "tests/algorithms/test_fedlf.py tests/algorithms/test_gram_forms.py")
layers = In("fl_lightning/algorithms/_shared/personal_layers.py", PERSONAL)
fedrep = In("fl_lightning/algorithms/fedrep.py", PERSONAL)
propfair = In("fl_lightning/algorithms/propfair.py", "tests/algorithms/test_propfair.py")
aaggff = In("fl_lightning/algorithms/aaggff.py", f"tests/algorithms/test_aaggff.py {CONTRACT} -k aaggff")
disparity = In("fl_lightning/algorithms/_shared/disparity.py", "tests/algorithms/test_fairfed.py")
fairfed = In("fl_lightning/algorithms/fairfed.py", f"tests/algorithms/test_fairfed.py {CONTRACT} -k fairfed")
fedism = In("fl_lightning/algorithms/fedism.py", f"tests/algorithms/test_fedism.py {CONTRACT} -k fedism")
fedpw = In("fl_lightning/algorithms/fedpw.py", f"tests/algorithms/test_fedpw.py {CONTRACT} -k fedpw")
weighting = In("fl_lightning/algorithms/_shared/weighting.py", "tests/algorithms/test_prototypes.py -k do_not_fit")
parts = In("fl_lightning/algorithms/_shared/weighting.py", LIES)
accuracies = In("fl_lightning/algorithms/fedfa.py", LIES)
counted = In("fl_lightning/algorithms/fairfed.py", LIES)
kernels = In("fl_lightning/algorithms/fa.py", LIES)
gaps = In("fl_lightning/algorithms/_shared/disparity.py", LIES)
vectors = In("fl_lightning/algorithms/_shared/client_vectors.py", f"{CONTRACT} -k enters_no_state")
smallest = In("fl_lightning/algorithms/fedpw.py", "tests/algorithms/test_fedpw.py")
shares = In("fl_lightning/algorithms/fedpw.py", "tests/algorithms/test_column_shares.py -k FedPW")

MUTATIONS = [
    torchjd("other losses are read, too", 'reads = "«gram→sums»"'),
    torchjd("aggregators are taken", "if «not isinstance(weighting, aggregation.Weighting)→False»:"),
    torchjd("state is kept by row", 'if «hasattr(weighting, "reset")→False»:'),
    torchjd("all layers are one", 'self.layers = «layers→"model"»'),
    torchjd("rows may be infinite", ".«isfinite→isnan().logical_not»().all(0), cohort"),
    torchjd("every round draws the same", '"weighting", «cohort.round→0»)'),
    torchjd("the seed is not used", "derive_seed(«self.seed→0»,"),
    torchjd("layers are not scaled", "self._weigh(matrix« / size→»,"),
    torchjd("scaled by the largest row", "matrix.diagonal().«mean→max»()"),
    torchjd("layers at rest are weighed", "if «size > 0→True»:"),
    torchjd("layers at rest have weights of 1", "1.0« / len(cohort)→»"),
    torchjd("layers weigh alike in the report", "«shares @ coeff / shares.sum()→coeff.mean(0)»"),
    torchjd("any weights are taken", "if «weights.shape != matrix.shape[:1] or→False and» not"),
    torchjd("the layer after is named", "layer_names[layer«→ - 1»])"),
    torchjd("projections lie across", "U.«→T.»reshape(-1, G.shape[0])"),
    torchjd("another projection", "return dual_cone(G, «→-»U.reshape(-1, G.shape[0]))"),
    adafed("the divisors of equation 6 are the losses", "phi[k]« - shares @ scales[:r]→»"),
    adafed("projections are not taken off", "v = «-(shares @ vectors[:r])→torch.zeros_like(gram[0])»"),
    adafed("orthogonal updates are averaged", "(scales / squares«→.mean()») @ vectors"),
    adafed("shares of the hull do not add up to one", "(scales«**2→» / squares).sum()"),
    adafed("losses count as they are", '«self.unit == "largest"→False» else 1.0'),
    adafed("the power is left out", ") ** «self.gamma→1»"),
    adafed("the smallest losses come first", "«descending=True, →»"),
    adafed("dependent updates count", "> «DEPENDENT * gram[k, k]→0»"),
    adafed("zero rows set the unit", "«torch.where(live, losses, 0.0)→losses».max()"),
    adafed("the step is short, and taken", "> «ZERO_DIRECTION * norms.mean()→0»"),
    upgrad("projections are added up, not averaged", "device=gram.device)« / m→»"),
    upgrad("layers count alike in the weights", "«shares @ coeff / shares.sum()→coeff.mean(0)»"),
    fedlf("a fair row takes part where losses are nearly equal", '«FAIR_ENOUGH if self.fair_row == "needed" else →»'),
    fedlf("a fair row stays whatever descent it costs", ">= «→-»KEPT_DESCENT *"),
    fedlf("slopes are not those of unit directions", "sum(1)« / size→», 0.0"),
    layers(
        "the update keeps what is the client's own",
        "        self.«_put(work, layers, *self._received)\n        self._received→_received» = None",
    ),
    layers("a client trains with received statistics", "«held.buffers.to(device)→self._received[1]»)"),
    layers("layers that are not finite are kept", "if «not bool(own.isfinite().all())→False»:"),
    layers("the first layers are the personal ones", "owners[«-count:→:count»]"),
    layers("statistics of personal layers are shared", "_layers(layout, «buffers→[]», lambda name: any("),
    layers("weights of BatchNorm are shared", "lambda name: name«→ in buffers and name».rpartition"),
    layers("methods that ask for losses are not refused", "if «getattr(server.needs, name)→False»]"),
    fedrep("the head is trained last", "(name in self._heads) «!→=»= heads_turn"),
    fedrep("the head is trained a pass less", "heads_turn = self._passes <«=→» "),
    fedrep("passes of earlier rounds count", "parameters, «0→self._passes»\n"),
    propfair(
        "the two lines are exchanged",
        "self.«epsilon if self.huber else self.base→base if self.huber else self.epsilon»",
    ),
    propfair("losses are climbed", "«-→»torch.log1p(-inside"),
    propfair("a logarithm that is not taken has a gradient", "«torch.where(low, 0.0, loss)→loss»"),
    aaggff("who takes part seldom counts less", "(r - r.mean()) /« rate /→»"),
    aaggff("later rounds count as much as the first", "«/ math.sqrt(self.rounds + 1)→»"),
    aaggff("responses are not shares of all clients", "r[present] = responses« / k→»"),
    aaggff("the curvature forgets the rounds", "«self.outer + →»torch.outer(gradient, gradient)"),
    aaggff("newcomers start without weight", "torch.full((len(new),), «1 / total→0.0»"),
    aaggff("the program climbs", "curvature «+ s[:, None] +→- s[:, None] -» s[None, :]"),
    aaggff("the Newton step climbs", "«→-»gradient / GAMMA - curvature"),
    weighting("reports that are not finite count", "_require(«values.isfinite→~values.isinf»(), values"),
    parts("a part may be more than its whole", "«(values >= 0) & (values <= limits)→values >= 0»"),
    parts("a part may be below 0", "«(values >= 0) & (values <= limits)→values <= limits»"),
    accuracies("accuracies may be above 1", "require_parts(accuracies, «1→2»,"),
    counted("samples may be more than a client has", "hits[:, 1], «cohort.sizes→hits[:, 1]»]"),
    counted("more may be right than there are", "«hits[:, 1]→cohort.sizes», cohort.sizes]"),
    counted("groups may have more people than there are", "hits[:, 1:]« - others→»"),
    counted("more of a group may be predicted than it has", "[predicted[:, «1→0»], hits"),
    kernels("members may be more than samples", "require_parts(counts, «counts[:, :1]→1e9»,"),
    kernels("kernels may be above 1", "require_parts(sums[:, 0], «counts[:, :1]→1e9»,"),
    gaps("disparities may be above 1", "(values < 0) | «(values > 1)→values.isinf()»"),
    vectors("control variates that are not finite count", "norm_of(vector).isfinite()«→ or True»"),
    fairfed("clients unlike the others count more", "before «-→+» self.beta *"),
    fairfed("gaps are not compared with their mean", "«(gaps - gaps.mean())→gaps»"),
    fairfed("weights fall below 0", ")«.clamp_min(0)→»\n"),
    fairfed(
        "the common disparity is the mean of the clients'",
        "rate_gaps«(predicted.sum(0, keepdim=True))→(predicted).nanmean()»",
    ),
    disparity("the notions are exchanged", '    if notion == "«dp→eo»":'),
    fedism("earlier weights are forgotten", "«self.beta * weights + (1 - self.beta) * before→weights»"),
    fedism("earlier weights are not divided among the present", "before = «shares→»(self.weights"),
    fedism("the perturbed model is the better one", "params «+→-» scale * gradient"),
    fedism("the perturbation is as long as the gradient", "self.rho« / (gradient.norm() + TINY)→»"),
    fedism("sharpness is measured in training mode", "params, evaluate=«True→False»)"),
    fedism("the part at a right angle is added", "new «-→+»= self.alpha"),
    fedism("gradients of accumulated batches are added up", "work, 1« / work.window→.0»)"),
    fedpw("large numbers are left out", "rows.masked_fill(«→~»small, 0)"),
    fedpw("clients with large losses lose more", "shares(«1 / →»relative)"),
    fedpw("columns that disagree grow", "agreed = «~→»_smallest("),
    fedpw("a step may more than double", "«(size > 0) & (mean < size)→size > 0»"),
    fedpw("the first round leaves numbers out", "if «first or →»len(cohort) == 1 or"),
    fedpw("a client alone loses numbers", "if first or« len(cohort) == 1 or→»"),
    fedpw("agreement is that of updates as they came", "_agreement(«kept→rows», updates)"),
    fedpw("long updates decide what agrees", "unit = row.to(wide)« * factors.to(wide).repeat_interleave(lengths)→»"),
    fedpw("products against the others count", "along«.clamp_min(0)→»"),
    fedpw("the moving means keep their pace", "self.beta« * mean / first→»"),
    fedpw("the narrower weights count more", "fair = «late→early» / (early + late)"),
    fedpw("present clients take the weight of the absent", "result« * (before.sum() if started else 1.0)→»"),
    smallest("the largest of the smallest stays", "part <«=→» bound["),
    shares(
        "each share counts its own numbers",
        "«columns.sum(starts, part)→part(slice(0, columns.numel), columns.offsets(starts))»",
    ),
]
