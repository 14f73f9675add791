# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture
def no_process_is_left():
    import worker_processes  # not earlier: the package comes after what tests/conftest.py copies

    worker_processes.others = worker_processes.children()
    yield
    assert worker_processes.worker_ids() == []
