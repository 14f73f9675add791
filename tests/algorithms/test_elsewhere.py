# SPDX-License-Identifier: Apache-2.0
"""Methods on a device: what they make themselves lies beside what they are given, and results are those of the CPU."""

from unittest import mock

import pytest
import torch
from algorithm_cohorts import elsewhere, make_cohort, random_rows, sampled_rounds
from client_rounds import CLASSES, INPUTS, Net, Rounds, client_data
from guards.test_guard_contract import GUARDS, rounds
from remote_device import Remote, RemoteDevice
from test_contract import RULES

from fl_lightning import algorithms as fl
from fl_lightning import attacks
from fl_lightning.algorithms.base import overrides
from fl_lightning.algorithms.differential_privacy import DifferentialPrivacy
from fl_lightning.core.layout import ParamLayout

EVERYBODY = tuple(range(4))
CLIENTS = {
    name: rule
    for name, rule in RULES.items()
    # Halves that change nothing are all alike; these need other arguments here.
    if overrides(rule().client_rule()) and name not in ("FA", "FedRep", "FedProc", "FedProto")
} | {
    "FedAvg": fl.FedAvg,
    "FA": lambda: fl.FA(2 * torch.eye(INPUTS), sigma=4.0),
    "FedRep": lambda: fl.FedRep(head_epochs=1),
    "FedProto": lambda: fl.FedProto(num_classes=CLASSES),
    "FedProc": lambda: fl.FedProc(num_classes=CLASSES, rounds=3),
    "FCFL-eo": lambda: fl.FCFL(notion="eo"),
    "FairReg-eo": lambda: fl.FairReg(notion="eo"),
    "FairFed-dp": lambda: fl.FairFed(notion="dp"),
    "FedHEAL-few": lambda: fl.FedHEAL(tau=0.9),
}
LOOKS = dict.fromkeys(("FedAvg", "FedMDFG", "FedFV", "FedMGDAPlus"), 1) | {"QFedAvg": 2}  # at the device, per step
LOOKS |= dict.fromkeys((name for name in RULES if name.startswith("FedLF")), 1)
PRIVATE = {
    "central": lambda: DifferentialPrivacy(0.1, 1.0, seed=3, uncovered="allow"),
    "local": lambda: DifferentialPrivacy(0.1, 1.0, "local", seed=3, uncovered="allow"),
}
ATTACKS = {
    "noise": attacks.RandomUpdates(EVERYBODY),
    "noise as long": attacks.RandomUpdates(EVERYBODY, match_norm=True),
    "models": attacks.RandomModels(EVERYBODY),
    "enlarged": attacks.ScaledUpdates(EVERYBODY),
    "zero": attacks.ZeroUpdates(EVERYBODY),
    "targeted": attacks.TargetedScaling(EVERYBODY, 0, 1),
}
PLOTS = {
    "ALIE": attacks.ALIE((0, 2)),
    "ALIE that knows": attacks.ALIE((0, 2), knows="honest"),
    "products": attacks.InnerProductManipulation((0, 2)),
}
RELABELLED = {"flip": attacks.LabelFlip(EVERYBODY, 3), "targeted": attacks.TargetedScaling(EVERYBODY, 0, 1)}


SERVERS = RULES | {"FedLF-on-cpu": lambda: fl.FedLF(history_device="cpu")}


@pytest.mark.parametrize("name", SERVERS)
def test_server_rules(name):
    here, there, device = SERVERS[name](), SERVERS[name](), RemoteDevice()
    for cohort in sampled_rounds(4, 7, 4, seed=1):
        want = here.aggregate(cohort)
        with device:
            step = there.aggregate(elsewhere(device, cohort))
        torch.testing.assert_close(device.get(step), want)
        assert there.report.flagged == here.report.flagged
        if name in LOOKS:
            assert (len(device.reads), device.waits) == (LOOKS[name], [])
            device.reads.clear()


@pytest.mark.parametrize("equalise", [True, False])
def test_fedlf_looks_again_where_a_layer_has_no_direction(equalise):
    """The device has the step before the CPU waits, and a second one only where the CPU has solved the layers."""
    flagged = merged = usual = 0
    for sizes, m, losses in (((2, 1, 12, 1, 3), 4, None), ((2, 30, 20), 3, None), ((20, 0, 30), 3, [1.0] * 3)):
        layout, device = ParamLayout.from_sizes(sizes), RemoteDevice()
        here, there = (fl.FedLF(reading="library" if equalise else "paper") for _ in range(2))
        for cohort in sampled_rounds(8, 6, m, 3, n=sum(sizes), layout=layout):
            cohort = cohort if losses is None else make_cohort(cohort.updates.rows, losses, layout=layout)
            want = here.aggregate(cohort)
            with device:
                step = there.aggregate(elsewhere(device, cohort))
            torch.testing.assert_close(device.get(step), want, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(there.report.weights, here.report.weights, rtol=1e-9, atol=1e-12)
            assert (there.report.flagged, there.report.scalars) == (here.report.flagged, here.report.scalars)
            again = here.report.flagged or here.report.scalars["merged_layers"] > 0
            assert (len(device.reads) > 1, device.waits) == (again, [])
            queued = device.calls.index("synchronize") - 1
            assert "combine" in device.calls[queued]
            assert device.calls[queued + 1 :].count(device.calls[queued]) == again
            flagged, merged = flagged + here.report.flagged, merged + (here.report.scalars["merged_layers"] > 0)
            usual += not again
            device.calls.clear(), device.reads.clear()
    assert min(flagged, merged, usual) > 0


def trained(client, device=None):
    """Parameters after two rounds of a client half under the plain mean."""
    data, module = client_data(batches=1), Net()
    if device is not None:
        module = device.put_module(module)
        data = {i: [tuple(device.put(part) for part in batch) for batch in own] for i, own in data.items()}
    rounds = Rounds(fl.FedAvg("uniform"), client, data, module, momentum=0.5, epochs=2)
    for ids in ((0, 1, 2), (1, 3)):
        rounds.round(ids)
    return rounds.params


@pytest.mark.filterwarnings("ignore:client . has samples")
@pytest.mark.parametrize("name", [*CLIENTS, *PRIVATE])
def test_client_halves(name):
    device, make = RemoteDevice(), PRIVATE.get(name) or (lambda: CLIENTS[name]().client_rule())
    with mock.patch.object(DifferentialPrivacy, "epsilon", return_value=0.0):
        want = trained(make())
        with device:
            found = trained(make(), device)
    torch.testing.assert_close(device.get(found), want)


@pytest.mark.parametrize("name", GUARDS)
def test_guards(name):
    here, there, device = GUARDS[name](), GUARDS[name](), RemoteDevice()
    for cohort in rounds():
        want = here.guarded(cohort)
        with device:
            found = there.guarded(elsewhere(device, cohort))
        assert found.client_ids == want.client_ids
        torch.testing.assert_close(device.get(found.updates.rows), want.updates.rows)


@pytest.mark.parametrize("name", ATTACKS)
def test_updates_of_dishonest_clients(name):
    update, params = random_rows(2, 5, torch.float32)
    device, changed = RemoteDevice(), update.clone()
    remote = device.put(update)
    ATTACKS[name].replace(changed, params, 7)
    with device:
        ATTACKS[name].replace(remote, device.put(params), 7)
    assert not torch.equal(changed, update)
    torch.testing.assert_close(device.get(remote), changed)


@pytest.mark.parametrize("name", PLOTS)
def test_dishonest_clients_who_know_of_each_other(name):
    cohort, device = make_cohort(random_rows(4, 6)), RemoteDevice()
    with device:
        remote = elsewhere(device, cohort)
        assert PLOTS[name].conspire(remote.updates, [0, 2])
    before = cohort.updates.rows.clone()
    assert PLOTS[name].conspire(cohort.updates, [0, 2])
    assert not torch.equal(cohort.updates.rows, before)
    torch.testing.assert_close(device.get(remote.updates.rows), cohort.updates.rows)


@pytest.mark.parametrize("name", RELABELLED)
def test_wrong_labels(name):
    labels, device = torch.tensor([0, 1, 2, 0]), RemoteDevice()
    _, want = RELABELLED[name].change_batch((torch.zeros(4), labels))
    with device:
        _, found = RELABELLED[name].change_batch((device.put(torch.zeros(4)), device.put(labels)))
    assert isinstance(found, Remote)
    assert torch.equal(device.get(found), want)
