# SPDX-License-Identifier: Apache-2.0
import pytest
from worker_processes import children


@pytest.fixture
def no_process_is_left():
    before = children()
    yield
    assert children() == before
