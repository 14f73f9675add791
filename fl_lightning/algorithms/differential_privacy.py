# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of clients: updates are cut to a bound, and noise hides which of them were there.

H. Brendan McMahan, Daniel Ramage, Kunal Talwar, Li Zhang: Learning Differentially Private Recurrent Language Models.
ICLR 2018. https://arxiv.org/abs/1710.06963

Robin C. Geyer, Tassilo Klein, Moin Nabi: Differentially Private Federated Learning: A Client Level Perspective. 2017.
https://arxiv.org/abs/1712.07557
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.errors import ModuleError, how_to_install
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.modules import buffers_of, followers_of, named_model_buffers
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.storage.declared import server_state

_DELTA = 1.1  # without a delta: 1 / N to this power, so that it is below one client's share


class DifferentialPrivacy(ClientRule):
    """Each client cuts its update to the length ``clip``; noise is added to the mean of a round, or by each client.

    The promise is about clients: exchange all data of one client for other data, and what is published changes no more
    than ``(epsilon, delta)`` allows. Such an exchange moves a sum of updates by at most ``2 clip``. After each round,
    ``fed/epsilon`` says what has been spent, with the accountant of the package ``dp-accounting`` (extra ``privacy``).

    ``where="central"``: the server, which is trusted, adds normal noise with standard deviation
    ``noise_multiplier * clip / m`` to the mean of ``m`` updates. The promise covers the models of all rounds. It needs
    ``FedAvg("uniform")``, whose weights do not depend on anybody's data, and no guard. A server optimizer keeps it.

    ``where="local"``: each client adds noise with standard deviation ``noise_multiplier * clip`` to its own update. The
    promise covers all that the server sees of updates, so any method and any guard may follow: they only process what
    is public already.

    Some methods read more than updates: losses, accuracies, features or groups. These are not covered, and neither is
    what else a visit changes in the module: BatchNorm statistics, counts, other parameters that follow trained ones.
    Both are refused unless ``uncovered="allow"``. Numbers of samples, training losses that are logged, and evaluation
    are never covered.

    The spent epsilon counts every round as one in which every client took part, whether it counted or not. With
    ``amplified=True`` it counts on the secrecy of who was drawn (``"central"``, uniform draws without replacement). The
    strategy's ``seed`` decides who is drawn, so it must be secret, too: ``seed=secrets.randbits(63)``.

    Whether a client fails, which may depend on its data, is not covered, and neither are attacks on how noise was
    rounded to the parameters' precision.

    Args:
        clip: the longest update.
        noise_multiplier: standard deviation of the noise over ``clip``.
        where: who adds the noise.
        delta: of the promise; ``None``: ``N ** -1.1`` for ``N`` registered clients, which must be more than one.
        amplified: count on the secrecy of the sample. Needs ``UniformSampler()``.
        uncovered: whether to refuse what the promise does not cover.
        seed: makes the noise repeatable, for research, and breaks the promise. ``None``: secret noise.

    Raises:
        ValueError: an argument is out of range, or ``amplified`` is asked for without ``where="central"``.
    """

    reads = "sums"

    rounds = server_state(0)  # up to the last one that counted

    @checked(clip=Bounds(above=0), noise_multiplier=Bounds(above=0), delta=Bounds(above=0, below=1))
    def __init__(
        self,
        clip: float,
        noise_multiplier: float,
        where: Literal["central", "local"] = "central",
        delta: float | None = None,
        amplified: bool = False,
        uncovered: Literal["refuse", "allow"] = "refuse",
        seed: int | None = None,
    ) -> None:
        if amplified and where != "central":
            raise ValueError(f"amplified=True needs where='central', found {where!r}: the server knows who was drawn")
        self.clip, self.noise_multiplier, self.where, self.delta = clip, noise_multiplier, where, delta
        self.amplified, self.uncovered, self.seed = amplified, uncovered, seed
        self.withholds = "DifferentialPrivacy does not cover it" if uncovered == "refuse" else None
        self._federation: Federation | None = None
        self._beside: dict[str, Tensor] = {}

    def refusal(self, server: ServerRule) -> str | None:
        """Names what the promise would not cover."""
        if self.where == "central" and not (type(server) is FedAvg and server.weighting == "uniform"):
            name = f"{type(server).__name__}({server.weighting!r})" if type(server) is FedAvg else type(server).__name__
            return (
                "adds noise for a mean whose weights nobody's data decide: use FedAvg('uniform') in place of "
                f"{name}, or where='local'"
            )
        needs = server.needs
        read = {"losses": needs.losses or needs.requery, "accuracies": needs.accuracies, "features": needs.features}
        read["groups"] = needs.groups
        named = " and ".join(name for name, is_read in read.items() if is_read)
        if named and self.uncovered == "refuse":
            return (
                f"does not cover the {named} that {type(server).__name__} reads: use a method that reads updates "
                "alone, or say uncovered='allow'"
            )
        return None

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Refuses running statistics, which clients send without noise."""
        moving = [name for name, buffer in module.named_buffers() if buffer.is_floating_point()]
        if moving and self.uncovered == "refuse":
            raise ValueError(
                f"DifferentialPrivacy does not cover the buffers of {type(module).__name__}, found {moving[0]!r}: use "
                "layers without running statistics (GroupNorm), or say uncovered='allow' with buffers='global'"
            )

    def begin_fit(self, federation: Federation) -> None:
        """Takes the number of clients.

        Raises:
            ValueError: there is a single one, and no ``delta``.
        """
        self._delta_among(federation.num_clients)
        self._federation = federation

    def begin_client(self, work: LocalWork) -> None:
        """Remembers what a client would send without noise if its training changed it."""
        if self.uncovered == "refuse":
            self._beside = {name: value.detach().clone() for name, value in _sent_beside(work).items()}

    @torch.no_grad()
    def end_client(self, work: LocalWork) -> ClientReport:
        """Moves the client's parameters to where the cut update, with noise if it is local, leads.

        Raises:
            ModuleError: local training has changed more than parameters.
            ValueError: ``clip`` is below what rounding changes.
        """
        self._check_beside(work)
        update = (work.params - work.row).double()
        # Parameters are rounded, and the server takes the difference again: that may make the update longer by so much.
        rounding = 2 * torch.finfo(work.params.dtype).eps * float(work.params.double().norm())
        bound = self.clip - rounding
        if bound <= 0:
            raise ValueError(
                f"clip of DifferentialPrivacy must be above the rounding error of the parameters, {rounding:.2g}, "
                f"found {self.clip}"
            )
        norm = float(update.norm())
        if norm > bound:
            update *= bound / norm
        if self.where == "local":
            update += self._noise(len(update), self.clip, update, "client", work.round, work.client_id)
        elif norm <= bound:
            return ClientReport()
        trained = (work.params.double() - update).to(work.params)
        for parameter, values in zip(work.parameters, work.layout.views(trained), strict=True):
            parameter.copy_(values)
        return ClientReport()

    def _check_beside(self, work: LocalWork) -> None:
        before, self._beside = self._beside, {}
        now = _sent_beside(work) if before else {}
        changed = [name for name, value in before.items() if name in now and not torch.equal(value, now[name])]
        if changed:
            kind = type(work.module).__name__
            raise ModuleError(
                f"DifferentialPrivacy does not cover what local training changes in {kind} beside trained parameters, "
                f"found changes in {', '.join(map(repr, changed[:5]))}: leave these alone in "
                "training, or say uncovered='allow' with buffers='global', which sends none of them"
            )

    def adjust_step(self, cohort: Cohort, step: Tensor) -> Tensor:
        """Adds central noise to the mean."""
        if self.where == "local":
            return step
        columns, scale = cohort.updates.columns, self.clip / len(cohort)
        if self.seed is None:  # every shard of the columns has a secret of its own
            return step + self._noise(len(step), scale, step)
        return step + columns.part(self._noise(columns.total, scale, step, "server", cohort.round))

    def _noise(self, n: int, scale: float, like: Tensor, *parts: int | str) -> Tensor:
        """``[n]`` normal numbers with standard deviation ``noise_multiplier * scale``, drawn on the CPU."""
        if self.seed is None:
            noise = _secret_noise(n)
        else:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "privacy", *parts))
            noise = torch.randn(n, generator=generator, dtype=torch.float64)
        return noise.mul_(self.noise_multiplier * scale).to(like)

    def commit(self, cohort: Cohort) -> None:
        """Counts the rounds up to this one, and what has been spent."""
        self.rounds = cohort.round + 1
        self.scalars = {"epsilon": self.epsilon(self.rounds)}

    @checked(rounds=Bounds(0), num_clients=Bounds(1), cohort_size=Bounds(1))
    def epsilon(self, rounds: int, num_clients: int | None = None, cohort_size: int | None = None) -> float:
        """What so many rounds spend, by Renyi differential privacy; none spend nothing.

        With amplification it is the smaller of two bounds, with and without the secrecy of the sample: where there is
        little noise, the accountant's bound with secrecy is the larger one.

        Args:
            rounds: how many.
            num_clients: registered clients; ``None``: those of the fit.
            cohort_size: clients drawn per round, for amplification; ``None``: those of the fit.

        Raises:
            ImportError: ``dp-accounting`` is not installed.
            ValueError: outside of a fit, a number that it takes is missing; an argument is out of range; or ``delta``
                is, with a single client.
        """
        dp_accounting, rdp = accounting()
        fit = self._federation
        clients = num_clients or (fit.num_clients if fit else None)
        drawn = cohort_size or (fit.cohort_size if fit else None)
        if (self.delta is None and clients is None) or (self.amplified and (clients is None or drawn is None)):
            raise ValueError("num_clients, and cohort_size with amplified=True, must be given outside of a fit")
        delta = self._delta_among(clients or 1)

        def spent(event: Any) -> float:
            accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
            accountant.compose(event, rounds)
            return float(accountant.get_epsilon(delta))

        if rounds == 0:
            return 0.0
        # Exchanging a client moves the sum by 2 clip, and the noise is noise_multiplier * clip.
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier / 2)
        if self.amplified and clients is not None and drawn is not None and drawn < clients:
            return min(spent(event), spent(dp_accounting.SampledWithoutReplacementDpEvent(clients, drawn, event)))
        return spent(event)

    def _delta_among(self, clients: int) -> float:
        if self.delta is None and clients == 1:
            raise ValueError(
                "delta of DifferentialPrivacy must be given for a single client, found None: without it delta is 1, "
                "and nothing is promised"
            )
        return float(clients) ** -_DELTA if self.delta is None else self.delta


def _sent_beside(work: LocalWork) -> dict[str, Tensor]:
    """What a client sends if its training has changed it, beside trained parameters."""
    aside = (*followers_of(work.module, work.layout.names), *buffers_of(work.module)[1])
    return {tensor.name: tensor.value for tensor in aside} | dict(named_model_buffers(work.module))


def _secret_noise(n: int) -> Tensor:
    """``[n]`` standard normal numbers, float64, each from 52 random bits of the operating system.

    Not from torch's generator: it keeps 32 bits of its seed, and so many can be tried until the noise is found.
    """
    bits = np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64) >> np.uint64(12)
    noise: Tensor = torch.special.ndtri(torch.from_numpy((bits + 0.5) / 2.0**52))
    return noise


def accounting() -> tuple[Any, Any]:
    """The accountant's package, and its module of Renyi differential privacy; raises ImportError without them."""
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError as error:
        raise ImportError(f"DifferentialPrivacy needs dp-accounting: {how_to_install('privacy')}") from error
    return dp_accounting, rdp
