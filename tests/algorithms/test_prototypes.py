# SPDX-License-Identifier: Apache-2.0
"""FedProc and FedProto."""

import copy

import pytest
import torch
import torch.nn.functional as F
from client_rounds import CLASSES, Net, Rounds, assign, by_rule, client_data, descend, flat, lost, mean_of, partial
from method_fits import fit_method, trained
from support import Classifier, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms import FedAvg, Federation, FedProc, FedProto
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

LR, LAM, ROUNDS = 0.2, 0.8, 5


def proto_term(features, y, protos, when):
    """As the authors' code: targets are the features themselves where there is no prototype."""
    targets = features.clone()
    for row, label in enumerate(y.tolist()):
        targets[row] = protos.get(label, features[row])
    return 1.0, LAM * F.mse_loss(features, targets)


def proc_term(features, y, protos, when):
    a = max(0, 1 - when / (ROUNDS - 1)) if protos else 0.0
    total = torch.zeros(()).double()
    for f, label in zip(features, y.tolist(), strict=True):
        if label in protos and a > 0:
            scores = {c: torch.exp(F.cosine_similarity(f, p, dim=0) / 0.5) for c, p in protos.items()}
            total = total - torch.log(scores[label] / sum(scores.values()))
    return 1 - a, a * total / len(y)


def federate(data, term, epochs=2):
    """Prototypes in dictionaries of lists, as published code has them."""
    module, protos, path = Net(), {}, []
    for t in range(6):
        models, sent = {}, {}
        for i in partial(t):
            local, held = copy.deepcopy(module), {}
            for epoch in range(epochs):
                for batch in data[i]:
                    features, y = local.federated_features(batch)
                    weight, extra = term(features, y, protos, t)
                    loss = weight * F.cross_entropy(local.head(features), y) + extra
                    if epoch == epochs - 1:
                        for f, label in zip(features.detach(), y.tolist(), strict=True):
                            held.setdefault(label, []).append(f)
                    descend(local, loss, LR)
            models[i] = local
            sent[i] = {label: torch.stack(values).mean(0) for label, values in held.items()}
        arrived = [i for i in partial(t) if i not in lost(t)]
        for label in range(CLASSES):
            means = [sent[i][label] for i in arrived if label in sent[i]]
            if means:
                protos[label] = torch.stack(means).mean(0)
        assign(module, mean_of({i: models[i] for i in arrived}, data))
        path.append(flat(module))
    return torch.stack(path), protos


MAKE = {
    "FedProto": (lambda: FedProto(LAM, num_classes=CLASSES), proto_term),
    "FedProc": (lambda: FedProc(ROUNDS, 0.5, num_classes=CLASSES), proc_term),
}
each = pytest.mark.parametrize("name", MAKE)


def some_classes(client):
    return [[0, 1], [1], [0, 2], [3]][client]


@each
def test_equals_the_loop_with_dictionaries(name):
    """Clients without some classes, a class that nobody has at first, a drop-out, late joiners, two local epochs."""
    make, term = MAKE[name]
    data = client_data(labels=some_classes, seed=6)
    path, run = by_rule(make, data, lr=LR, epochs=2)
    client, (expected, protos) = run.client, federate(data, term)
    torch.testing.assert_close(path, expected, rtol=0, atol=1e-9)
    assert client.known.tolist() == [True] * CLASSES
    torch.testing.assert_close(client.prototypes, torch.stack([protos[c] for c in range(CLASSES)]), rtol=0, atol=1e-10)
    plain = Rounds(FedAvg(), FedAvg().client_rule(), data, lr=LR, epochs=2)
    for t in range(6):
        plain.round(partial(t), lost(t))
    assert not torch.allclose(plain.params, path[-1], atol=1e-3)


@each
def test_samples_without_a_class_count_nowhere(name):
    """Negative labels; the module's own loss takes care of them itself."""
    method = MAKE[name][0]()
    run = Rounds(method, method.client_rule(), client_data(clients=2), lr=LR)
    run.round([0, 1])
    run.module.federated_features = lambda batch: (run.module.encoder(batch[0]), torch.full_like(batch[1], -1))
    run.when = 0 if name == "FedProto" else 1
    report = run.train(0)[1]
    assert not report.extras["prototype_counts"].any()
    assert not report.extras["prototypes"].any()


@each
def test_a_class_too_many_in_the_first_batch_is_named(name):
    method, data = {"FedProto": FedProto, "FedProc": FedProc}[name](num_classes=3), client_data(clients=1)
    for place, (_, y) in enumerate(data[0]):
        y.clamp_(max=2 if place else 3)
    data[0][0][1][0] = 3
    with pytest.raises(ValueError, match="class indices must be below num_classes=3, found 3"):
        Rounds(method, method.client_rule(), data).round([0])


def test_contrast_gives_way_to_the_own_loss():
    client = FedProc(rounds=5).client_rule()
    assert client.contrast_weight(0) == 0  # no prototypes yet
    client.prototypes = torch.zeros(10, 3)
    assert [client.contrast_weight(t) for t in range(1, 8)] == [0.75, 0.5, 0.25, 0, 0, 0, 0]


@each
def test_states_and_reports_that_do_not_fit(name):
    run = Rounds((method := MAKE[name][0]()), method.client_rule(), client_data(), lr=LR)
    cohort, _ = run.round([0, 1])
    other = FedProto().client_rule()
    other.prototypes, other.known = run.client.prototypes, run.client.known
    with pytest.raises(ValueError, match="num_classes must be that of the checkpoint, 4, found 10"):
        other.begin_fit(Federation(4, run.layout, torch.device("cpu"), torch.float64))
    with pytest.raises(ValueError, match=r"extras must hold 'prototypes' \[m, 4, any\] for .*, found \[\]"):
        run.client.commit(fl.Cohort(**{**vars(cohort), "extras": {}}))
    for extra, number, words in (
        ("prototypes", torch.nan, "be finite"),
        ("prototype_counts", -1.0, "lie between 0 and"),
    ):
        odd = cohort.extras[extra].clone()
        odd[1].view(-1)[-1] = number
        with pytest.raises(ValueError, match=f"extras\\['{extra}'\\] must {words}.* from client 1"):
            run.client.commit(fl.Cohort(**{**vars(cohort), "extras": {**cohort.extras, extra: odd}}))
    run.client.prototypes = torch.zeros(CLASSES, 99)
    with pytest.raises(ValueError, match="features must keep their width, 99 in earlier rounds, found 6"):
        run.train(0)
    rule_state.reset(run.client)
    run.data[0][0][0][0, 0] = float("inf")
    with pytest.raises(ValueError, match="features must be finite, found NaN or infinity at client 0"):
        run.train(0)


# ---- in a trainer

FITS = {"FedProto": lambda: FedProto(2.0, num_classes=4), "FedProc": lambda: FedProc(num_classes=4)}


class Unlabelled(Classifier):
    def federated_features(self, batch):
        return super().federated_features(batch)[0]


@each
@pytest.mark.fit
def test_modules_without_labels(name):
    words = r"Unlabelled.federated_features must return a pair \(features \[B, d\], class indices \[B\]\)"
    with pytest.raises(fl.ClientError, match=words):
        fit_method(FITS[name](), module=fresh(Unlabelled))


@each
@pytest.mark.fit
def test_half_precision(name):
    module, strategy = fit_method(FITS[name](), precision="bf16-mixed")
    assert weights(module).isfinite().all()
    assert strategy.client_rule.prototypes.isfinite().all()


@pytest.mark.fit
def test_fedproc_takes_the_rounds_of_the_fit():
    default = trained(FedProc(num_classes=4), rounds=3)
    assert torch.equal(default, trained(FedProc(3, num_classes=4), rounds=3))
    with pytest.warns(UserWarning, match=r"rounds of FedProc is 100 in a fit of 3: .* weighs 0\.02\. "):
        other = trained(FedProc(100, num_classes=4), rounds=3)
    assert not torch.equal(default, other)


def test_fedproc_at_a_client_hears_the_rounds_from_the_server():
    server, client = (FedProc(num_classes=3).client_rule() for _ in range(2))
    with pytest.raises(ValueError, match="rounds of FedProc must be given where the number of rounds is not known"):
        client.contrast_share(1)
    server.begin_fit(Federation(3, ParamLayout.from_sizes([4]), torch.device("cpu"), torch.float32, rounds=11))
    rule_state.load_broadcast(client, rule_state.broadcast(server))
    client.begin_fit(Federation(3, ParamLayout.from_sizes([4]), torch.device("cpu"), torch.float32))
    assert client.contrast_share(4) == pytest.approx(0.6)
