# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

from fl_lightning.data.visit_loader import VisitLoader


def test_it_is_the_same_loaders_as_long_as_a_visit():
    loaders = SimpleNamespace(batches=7, datasets="all")
    visit = VisitLoader(loaders, lambda given: given.batches)
    assert len(visit) == 7
    assert visit.loaders is loaders
    assert visit.datasets == "all"
