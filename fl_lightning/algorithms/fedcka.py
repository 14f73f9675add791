# SPDX-License-Identifier: Apache-2.0
"""FedCKA: Compare Where It Matters, Layer-Wise Regularization to Improve Federated Learning on Heterogeneous Data.

Ha Min Son, Moon Hyun Kim, Tai-Myoung Chung. 2021. https://arxiv.org/abs/2112.00407. Experimental: the text of the paper
was not at hand; docs/methods/fedcka.md says what was taken from where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.moon import PreviousModels
from fl_lightning.algorithms.records import LocalWork
from fl_lightning.arguments import FILLED, Bounds, check_unused, checked
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Snapshot, standing_in
from fl_lightning.core.modules import submodules


class FedCKA(FedAvg):
    """The first layers are drawn to the global model's and away from those of the client's last one; experimental.

    Similarity is the linear centered kernel alignment of what layers put out on the batch.

    Args:
        mu: weight of the term; 0 is FedAvg.
        layers: names of the submodules to compare; ``None``: the first ``num_layers`` that own a matrix or a kernel.
        num_layers: how many, where ``layers`` does not name them.
        weighting: how the server weighs clients, see :class:`FedAvg`.
        directory: where the clients' last models lie, a directory for this fit alone; ``None``: in memory and in the
            checkpoint.

    Raises:
        ValueError: ``mu`` is negative, ``layers`` is empty, or ``num_layers`` is not positive.
    """

    @checked(mu=Bounds(0), layers=FILLED, num_layers=Bounds(1))
    def __init__(
        self,
        mu: float = 3.0,
        layers: Sequence[str] | None = None,
        num_layers: int = 2,
        weighting: Literal["samples", "uniform"] = "samples",
        directory: str | None = None,
    ) -> None:
        super().__init__(weighting)
        if layers is not None:
            check_unused("num_layers of FedCKA", num_layers, 2, "where layers names them")
        self.mu, self.num_layers, self.directory = mu, num_layers, directory
        self._client = ActivationSimilarity(mu, layers, num_layers, directory)

    def hyperparameters(self) -> dict[str, Any]:
        """``layers`` names submodules here, and the attribute of that name says what a layer of the parameters is."""
        return {**super().hyperparameters(), "layers": self.client_rule().hyperparameters()["layers"]}


class ActivationSimilarity(PreviousModels):
    """Adds ``mu / M sum_m -log(e^a_m / (e^a_m + e^b_m))`` over ``M`` layers.

    ``a_m`` is the similarity of layer ``m`` of the client's model to that of the received model, ``b_m`` to that of the
    client's last model.
    """

    def __init__(self, mu: float, layers: Sequence[str] | None, num_layers: int, directory: str | None) -> None:
        super().__init__(directory)
        self.mu, self.layers, self.num_layers = mu, layers, num_layers

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Finds the layers."""
        super().check_module(module, layout)
        self._compared(module)

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """The term; ``None`` in a client's first round, in which there is no last model."""
        if self.mu == 0 or self.previous is None:
            return None
        names = self._compared(work.module)
        mine = self._outputs(names, work, batch, batch_idx, None)
        with torch.no_grad():
            received = self._outputs(names, work, batch, batch_idx, self.received)
            previous = self._outputs(names, work, batch, batch_idx, self.previous)
        terms = [
            softplus(linear_cka(x, last) - linear_cka(x, new))
            for x, new, last in zip(mine, received, previous, strict=True)
        ]
        return self.mu * torch.stack(terms).mean()

    def _outputs(
        self, names: Sequence[str], work: LocalWork, batch: Any, batch_idx: int, model: Snapshot | None
    ) -> list[Tensor]:
        """``[B, d]`` what each compared layer puts out first in a pass of the training step, which ends after them."""
        if work.own_loss is None:
            raise ValueError("work.own_loss must be given: FedCKA looks at layers while the module computes its loss")
        outputs: dict[str, Any] = {}

        def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
                # A copy, because an activation that works in place may follow.
                outputs.setdefault(name, output.clone() if isinstance(output, Tensor) else output)
                if len(outputs) == len(set(names)):
                    raise _SeenAllError

            return hook

        with ExitStack() as stack:
            stack.enter_context(standing_in(work.module, work.parameters, work.layout, model, model is not None))
            for name in names:
                handle = work.module.get_submodule(name).register_forward_hook(note(name))
                stack.callback(handle.remove)
            with suppress(_SeenAllError):
                work.own_loss(batch, batch_idx)
        for name in names:
            if not isinstance(outputs.get(name), Tensor) or outputs[name].dim() < 2:
                found = "nothing" if name not in outputs else type(outputs[name]).__name__
                raise ValueError(f"layer {name!r} must put out one tensor [B, ...] for FedCKA, found {found}")
        return [outputs[name].flatten(1) for name in names]

    def _compared(self, module: nn.Module) -> list[str]:
        modules = dict(submodules(module))
        if self.layers is not None:
            unknown = [name for name in self.layers if name not in modules]
            if unknown:
                raise ValueError(f"layers of FedCKA must be submodules of {type(module).__name__}, found {unknown}")
            return list(self.layers)
        owners = [n for n, m in modules.items() if n and any(p.dim() > 1 for p in m.parameters(recurse=False))]
        if len(owners) < self.num_layers:
            raise ValueError(f"num_layers of FedCKA must be at most {len(owners)} here, found {self.num_layers}")
        return owners[: self.num_layers]


class _SeenAllError(Exception):
    """Ends a pass after the last layer that is compared."""


def linear_cka(x: Tensor, y: Tensor) -> Tensor:
    """``||Y'X||_F^2 / (||X'X||_F ||Y'Y||_F)`` of ``[B, p]`` and ``[B, q]`` with centred columns; 0 if one is constant.

    Source: Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network Representations Revisited, ICML 2019. Computed
    from the two ``[B, B]`` Gram matrices ``K`` and ``L``: ``<K, L> / (||K|| ||L||)``.
    """
    wide = [part.float() if part.dtype.itemsize < 4 else part for part in (x, y)]
    k, other = ((part - part.mean(0)) @ (part - part.mean(0)).T for part in wide)
    norms = torch.linalg.vector_norm(k) * torch.linalg.vector_norm(other)
    safe = torch.where(norms > 0, norms, torch.ones_like(norms))
    return torch.where(norms > 0, (k * other).sum() / safe, torch.zeros_like(norms))
