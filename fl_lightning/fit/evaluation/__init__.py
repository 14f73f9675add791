# SPDX-License-Identifier: Apache-2.0
"""Validation and test of one model on every client's data, with each client's own values.

The evaluation itself runs as it would without clients. ``client_evaluation`` keeps apart what each client adds, and
``one_client`` runs a client's batches once more where that does not tell its own values. Uses the rest of ``fit`` and
the rooms below it.
"""
