# SPDX-License-Identifier: Apache-2.0
import copy
import math

import pytest
import torch
from client_rounds import Net, Rounds, assign, client_data, descend, flat, mean_of

from fl_lightning.algorithms import PropFair

M, EPS, LR = 1.5, 0.3, 0.1


def slope(loss, huber):
    """Of the surrogate, from the authors' code, differentiated by hand."""
    if M - loss < EPS:
        return 1 / EPS if huber else 1 / M
    return 1 / (M - loss)


@pytest.mark.parametrize("huber", [False, True])
def test_equals_gradients_scaled_by_hand(huber):
    data = client_data(seed=3)
    data[0] = data[0][:1]
    server = PropFair(M, EPS, huber)
    run, module, beyond = Rounds(server, server.client_rule(), data, lr=LR, epochs=2), Net(), 0
    for _ in range(6):
        run.round(list(data))
        ends = {}
        for client, batches in data.items():
            net = copy.deepcopy(module)
            for batch in batches * 2:
                loss = net.loss(batch)
                size = float(loss.detach())
                beyond += M - size < EPS
                descend(net, loss, LR * slope(size, huber))
            ends[client] = net
        assign(module, mean_of(ends, data))
    assert 0 < beyond < 6 * 2 * 10  # both pieces of the surrogate
    torch.testing.assert_close(run.params, flat(module), rtol=0, atol=1e-9)


@pytest.mark.parametrize("huber", [False, True])
@pytest.mark.parametrize("loss", [0.0, 0.7, M - EPS - 1e-9, M - EPS + 1e-9, M, 40.0])
def test_slopes_on_both_sides_of_the_bound(loss, huber):
    x = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
    value = PropFair(M, EPS, huber).client_rule().shape_loss(None, x)
    value.backward()
    assert float(x.grad) == pytest.approx(slope(loss, huber), rel=1e-6)
    if loss < M - EPS:
        assert float(value.detach()) == pytest.approx(-math.log(1 - loss / M))
