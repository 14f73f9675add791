# SPDX-License-Identifier: Apache-2.0
"""Fits of whole methods in a Trainer, and what must hold for all of them."""

from support import Classifier, fit, fresh, weights


def fit_method(method, rounds=3, module=None, **options):
    """The trained module and its strategy; BatchNorm, momentum, four of six clients per round."""
    module = fresh(Classifier, norm=True, momentum=0.5) if module is None else module
    return fit(module, rounds, algorithm=method, **{"clients_per_round": 4, "seed": 2, **options})[:2]


def trained(method, **options):
    """All weights and buffers after a fit without validation."""
    return weights(fit_method(method, **{"limit_val_batches": 0, **options})[0])
