# SPDX-License-Identifier: Apache-2.0
"""Server optimizers: Adaptive Federated Optimization.

Sashank J. Reddi, Zachary Charles, Manzil Zaheer, Zachary Garrett, Keith Rush, Jakub Konecny, Sanjiv Kumar,
H. Brendan McMahan. ICLR 2021. https://arxiv.org/abs/2003.00295

Ordinary torch optimizers whose gradient is the server's step, for ``FederatedStrategy(server_optimizer=...)``. FedAvgM
needs none of them: it is ``functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.arguments import Bounds, checked, shown


class _Adaptive(Optimizer):
    """Algorithm 2 with ``-Delta_t`` for the gradient; subclasses say how the second moment moves.

    Unlike ``torch.optim.Adam`` there is no correction of the moments' start, which is ``tau^2`` for the second, and
    ``tau`` is large enough to matter.
    """

    @checked(lr=Bounds(above=0), betas=Bounds(0, below=1), tau=Bounds(above=0))
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
    ) -> None:
        name = type(self).__name__
        if hasattr(params, "ndim"):  # one parameter, whose rows are none
            raise TypeError(
                f"params of {name} must be an iterable of parameters or their groups, found {shown(params)}"
            )
        given: list[Any] = list(params)
        for entry in given:
            if not isinstance(entry, (Tensor, dict, tuple)):  # tuples hold names as well
                raise TypeError(f"params of {name} must hold parameters or their groups, found {shown(entry)}")
        if not given:
            raise ValueError(f"params of {name} must hold one parameter or more, found {given}")
        super().__init__(given, {"lr": lr, "betas": betas, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step along the gradients.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2), tau = group["lr"], group["betas"], group["tau"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["v"] = torch.full_like(p, tau**2, memory_format=torch.preserve_format)
                m, v = state["m"], state["v"]
                m.lerp_(p.grad, 1 - beta1)
                self._move(v, p.grad.square(), beta2)
                p.addcdiv_(m, v.sqrt().add_(tau), value=-lr)
        return loss

    @abstractmethod
    def _move(self, v: Tensor, square: Tensor, beta: float) -> None:
        """Moves the second moment ``v`` in place; ``square`` is the squared gradient."""


class FedAdam(_Adaptive):
    """``v <- beta_2 v + (1 - beta_2) Delta^2`` (Algorithm 2, FedAdam).

    Args:
        params: parameters or parameter groups.
        lr: server learning rate ``eta``.
        betas: decay of the first and the second moment.
        tau: degree of adaptivity, added to the root of the second moment.

    Raises:
        ValueError: an argument is out of range.
    """

    def _move(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.lerp_(square, 1 - beta)


class FedYogi(_Adaptive):
    """``v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)`` (Algorithm 2, FedYogi).

    Args:
        params: parameters or parameter groups.
        lr: server learning rate ``eta``.
        betas: decay of the first moment, and pace of the second.
        tau: degree of adaptivity, added to the root of the second moment.

    Raises:
        ValueError: an argument is out of range.
    """

    def _move(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.addcmul_(square, (v - square).sign_(), value=beta - 1)


class FedAdagrad(_Adaptive):
    """``v <- v + Delta^2`` (Algorithm 2, FedAdagrad); the paper's experiments have ``beta_1 = 0``, the default here.

    Args:
        params: parameters or parameter groups.
        lr: server learning rate ``eta``.
        beta: decay of the first moment.
        tau: degree of adaptivity, added to the root of the second moment.

    Raises:
        ValueError: an argument is out of range.
    """

    @checked(lr=Bounds(above=0), beta=Bounds(0, below=1), tau=Bounds(above=0))
    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float, beta: float = 0.0, tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, (beta, 0.0), tau)

    def _move(self, v: Tensor, square: Tensor, beta: float) -> None:
        v.add_(square)
