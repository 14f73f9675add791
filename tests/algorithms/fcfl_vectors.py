# SPDX-License-Identifier: Apache-2.0
"""FCFL on vectors in numpy: no Gram matrix, every linear program by trying all of its vertices."""

from itertools import combinations

import numpy as np


def best_vertex(objective, at_most, bounds, weights=None):
    """Maximises over ``x >= 0``, ``weights . x = 1``, ``at_most x <= bounds``; ``None`` if nothing is feasible."""
    k = len(objective)
    weights = np.ones(k) if weights is None else weights
    walls = np.vstack([at_most.reshape(-1, k), -np.eye(k)])
    limits = np.concatenate([bounds, np.zeros(k)])
    scale = np.abs(walls).max(1)
    scale[scale == 0] = 1
    walls, limits = walls / scale[:, None], limits / scale
    best, value = None, -np.inf
    for chosen in combinations(range(len(walls)), k - 1):
        system = np.vstack([weights, walls[list(chosen)]])
        if abs(np.linalg.det(system)) < 1e-13:
            continue
        x = np.linalg.solve(system, np.concatenate([[1.0], limits[list(chosen)]]))
        if (walls @ x <= limits + 1e-11).all() and objective @ x > value:
            best, value = x, objective @ x
    return best


def soft(values, delta):
    powers = np.exp((values - values.max()) / delta)
    return powers / powers.sum()


class VectorFCFL:
    """The same arguments, switches and defaults as the rule."""

    def __init__(
        self,
        budget=0.1,
        stage1_rounds=800,
        smooth_feasibility=False,
        joint_sharpening=False,
        hull_of_clients=False,
        bounds_when_tight=False,
        joint_threshold=1e-3,
        delta=0.5,
        beta=0.01,
    ):
        self.budget, self.stage1_rounds, self.joint_threshold, self.beta = budget, stage1_rounds, joint_threshold, beta
        self.smooth_feasibility, self.joint_sharpening = smooth_feasibility, joint_sharpening
        self.hull_of_clients, self.bounds_when_tight = hull_of_clients, bounds_when_tight
        self.delta_loss = self.delta_gap = delta
        self.rounds = 0

    def step(self, losses, gaps, u, v, ids, lr):
        """``u`` and ``v``: rows of losses and disparities, learning rate times gradient."""
        if self.budget is None:
            gaps = np.full(len(losses), np.nan)
        budget = np.array([self.budget[i] for i in ids]) if isinstance(self.budget, tuple) else (self.budget or 0.0)
        excess, known = (gaps - budget)[~np.isnan(gaps)], ~np.isnan(gaps)
        v = v[known]
        down_loss = soft(losses, self.delta_loss) @ u
        down_gap = soft(excess, self.delta_gap) @ v if len(v) else np.zeros_like(down_loss)
        self.rounds += 1
        if self.rounds > self.stage1_rounds:
            return self._pareto(excess, u, v, down_gap)
        d = self._min_max(excess, down_loss, down_gap)
        flat_loss = 0.1 * np.linalg.norm(down_loss) / lr <= self.delta_loss
        flat_gap = len(v) > 0 and 0.1 * np.linalg.norm(down_gap) / lr <= self.delta_gap
        if self.joint_sharpening:
            flat_loss = flat_gap = d @ d / lr**2 <= self.joint_threshold
        self.delta_loss *= self.beta if flat_loss and self.delta_loss > 1e-4 else 1
        self.delta_gap *= self.beta if flat_gap and self.delta_gap > 1e-4 else 1
        return d

    def _min_max(self, excess, down_loss, down_gap):
        if len(excess) == 0:
            return down_loss
        shift = excess.max()
        smooth = shift + self.delta_gap * np.log(np.exp((excess - shift) / self.delta_gap).sum())
        corners = np.stack([down_loss, down_gap])
        if (smooth if self.smooth_feasibility else excess.max()) <= 0:
            x = best_vertex(corners @ down_loss, np.zeros((0, 2)), np.zeros(0))
        else:
            x = best_vertex(corners @ down_gap, -(corners @ down_loss)[None], np.zeros(1))
        return x @ corners

    def _pareto(self, excess, u, v, down_gap):
        bound = len(v) > 0 and (not self.bounds_when_tight or (excess >= 0).any())
        limits = np.vstack([u, down_gap]) if bound else u
        products = np.abs(limits @ limits.T)
        limits = np.where(products.max(1, keepdims=True) < 1e-150 * products.max(), 0.0, limits)
        corners = np.vstack([u, v]) if self.hull_of_clients else limits
        x = best_vertex(corners @ u.mean(0), -(limits @ corners.T), np.zeros(len(limits)))
        return x @ corners
