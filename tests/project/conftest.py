# SPDX-License-Identifier: Apache-2.0
import pytest
from distributions import build, copy_of_the_sources
from once import once


def build_without_kernels(folder):
    for hook in ("sdist", "wheel"):
        build(hook, copy_of_the_sources(folder / f"for_{hook}"), folder, FL_LIGHTNING_NO_EXT="1")


@pytest.fixture(scope="session")
def distributions(tmp_path_factory):
    """A folder with a wheel and a source distribution without kernels."""
    return once(tmp_path_factory, "distributions", build_without_kernels)


@pytest.fixture(scope="session")
def wheel(distributions):
    return next(distributions.glob("*.whl"))


@pytest.fixture(scope="session")
def sdist(distributions):
    return next(distributions.glob("*.tar.gz"))
