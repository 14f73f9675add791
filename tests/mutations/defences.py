# SPDX-License-Identifier: Apache-2.0
"""Faults in guards, attacks and differential privacy."""

from mutations.change import In

GUARDS = "tests/algorithms/guards"
CONTRACT = f"{GUARDS}/test_guard_contract.py"
ATTACKS = "tests/algorithms/attacks/test_attacks.py tests/algorithms/attacks/test_attacks_on_reports.py"

base = In("fl_lightning/algorithms/guards/base.py", f"{CONTRACT} {GUARDS}/test_robust_means.py {GUARDS}/test_krum.py")
guarding = In("fl_lightning/fit/guarding.py", f"{GUARDS}/test_guarded_fits.py")
norms = In("fl_lightning/algorithms/guards/norms.py", f"{GUARDS}/test_norm_clipping.py {CONTRACT} -k orm")
krum = In("fl_lightning/algorithms/guards/krum.py", f"{GUARDS}/test_krum.py")
coordinates = In("fl_lightning/algorithms/guards/coordinates.py", f"{GUARDS}/test_robust_means.py")
updates_matrix = In("fl_lightning/core/updates.py", f"{GUARDS}/test_nearly_equal_rows.py")
bulyan = In("fl_lightning/algorithms/guards/bulyan.py", f"{GUARDS}/test_krum.py {GUARDS}/test_robust_means.py")
median = In("fl_lightning/algorithms/guards/geometric_median.py", f"{GUARDS}/test_robust_means.py")
centred = In(
    "fl_lightning/algorithms/guards/centred_clipping.py",
    f"{GUARDS}/test_norm_clipping.py {CONTRACT} {GUARDS}/test_robust_means.py",
)
trust = In("fl_lightning/algorithms/guards/cosine_trust.py", f"{GUARDS}/test_robust_means.py")
colluding = In("fl_lightning/algorithms/attacks/colluding.py", ATTACKS)
labels = In("fl_lightning/algorithms/attacks/labels.py", ATTACKS)
reports = In("fl_lightning/algorithms/attacks/reports.py", ATTACKS)
updates = In("fl_lightning/algorithms/attacks/updates.py", ATTACKS)
privacy = In("fl_lightning/algorithms/differential_privacy.py", "tests/algorithms/test_differential_privacy.py")

MUTATIONS = [
    base("rows move the wrong part of the way", "(«self.center.to(row), row→row, self.center.to(row)», scale"),
    base("losses are those of the first clients", "cohort.losses[«places→: len(places)»]"),
    base("a share is rounded down", "«ceil(round(dishonest * m, 9))→int(dishonest * m)»"),
    guarding("reasons go to other clients", "leave_out(«places[place]→place», reason)"),
    guarding("norms of before stay known", "changed = «changed or verdict.changes_rows→False»"),
    guarding(
        "a guard counts on clients that one before leaves out", "«        most = max(map(guard.most_left, judged))\n→»"
    ),
    norms("short updates are stretched", "«torch.where(norms > bound, bound / norms, 1.0)→bound / norms»"),
    norms("the bound runs away from the quantile", "exp(«-→»self.rate"),
    norms("a round of zeros moves the bound", "« if len(above) > 0 else bound→»"),
    norms("updates of zeros set the bound", "norms«[norms > 0]→», self.bound"),
    krum("the place decides between equal scores", "«cohort.client_ids).argsort(→range(m)»)"),
    krum("a row is its own neighbour", "distances.clone()«.fill_diagonal_(torch.inf)→»"),
    krum("one neighbour more counts", "max(n - dishonest - «2→1», 1)"),
    krum("the nearest are left out", "order[«keep:→: m - keep»].tolist()"),
    krum("dishonest clients stay as well", "return m «- assumed(self.dishonest, m) →»if self.keep"),
    krum("cohorts that are too small are judged", "max(2 * assumed(self.dishonest, m) + «3→1»"),
    updates_matrix("distances are not squared", "torch.pdist(block)«.square()→»"),
    updates_matrix(
        "distances come from numbers of the rows' own width", "to«(device, torch.float64)→(device).float()»"
    ),
    coordinates("more than the middle counts as median", "(m - «1→3») // 2), m)"),
    coordinates("the least values are not moved", "return ordered[:, «b→0»], ordered"),
    bulyan("too many are chosen", "m - «2 * →»f))  # theta"),
    bulyan("all that are chosen count", ": m - «4→2» * f]"),
    bulyan("the median of an even number is the lower value", "ordered[:, «len(chosen)→(len(chosen) - 1)» // 2])["),
    median("distances lack half of what the rows' spread adds", "- c @ to_rows« / 2→»"),
    median("samples do not count", "beta = «alpha→1» / squares"),
    median("own rows do not undo the mean's weights", "Verdict(scale=c« / alpha→»"),
    centred("the next centre is the present one", "self.center = _combined(updates, «c→center», v)"),
    centred("cut rows are added up", "(scale[:, None] * (each - c)).«mean→sum»(0)"),
    centred("the rows' spread does not move the centre", "to_all[:m]« - c @ to_all / 2→»"),
    trust("updates against the server's are trusted", "0.0).«clamp(0, 1)→abs()»"),
    trust("updates keep their lengths", "trust / trust.sum()« * norms[own] / norms→»"),
    trust("own rows count those left out", "factors * «(m - len(left_out))→m»"),
    colluding("the lie goes the way of the updates", "block.mean(0) «-→+» z"),
    colluding("one client less makes a majority", "(n // 2 «+ 1 →»- m)"),
    colluding("liars know what they should not", 'if self.knows «=→!»= "own"'),
    colluding("the product stays positive", "= «-→»self.epsilon / len(honest)"),
    labels("flipped labels are one too high", "self.num_classes - «1 - →»labels"),
    labels("all other classes are mistaken", "y «=→!»= self.source, self.target, y"),
    labels("the replacing update keeps its length", "«update.mul_(self.factor)→pass»"),
    reports("the loss is told smaller", 'told["loss"] «*→/»='),
    updates("noise ignores its scale", "if self.match_norm else «self.std→1.0»"),
    updates("a random model is added to the global one", "update.copy_(«params - →-»model.to(params))"),
    privacy("noise is that of a sum", "self.clip« / len(cohort)→»"),
    privacy("updates are cut to length 1", "update *= «bound→1» / norm"),
    privacy("short updates are stretched", "if norm > «bound→0»:"),
    privacy("cut updates may be rounded up beyond the bound", "bound = self.clip« - rounding→»"),
    privacy("clients are added, not exchanged", "GaussianDpEvent(self.noise_multiplier« / 2→»)"),
    privacy("the last round is not counted", "self.rounds = cohort.round« + 1→»"),
    privacy("clients draw the same noise", '"client", work.round«, work.client_id→»)'),
    privacy("means by samples are let through", 'and «server.weighting == "uniform"→True»'),
]
