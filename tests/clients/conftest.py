# SPDX-License-Identifier: Apache-2.0
import pytest
import worker_processes


@pytest.fixture
def no_process_is_left():
    worker_processes.others = worker_processes.children()
    yield
    assert worker_processes.worker_ids() == []
