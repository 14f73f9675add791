# SPDX-License-Identifier: Apache-2.0
"""A federation on NVFlare, with the extra ``nvflare``: the server's controller, and the loop of its clients.

NVFlare carries the messages: connections, certificates, sites and jobs are its own. What a round does is the library's,
so the weights have the bits of ``Trainer(strategy=FederatedStrategy(...)).fit``.

Roth et al.: NVIDIA FLARE: Federated Learning from Simulation to Real-World, 2022, https://arxiv.org/abs/2210.13291.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.arguments import FILLED, Bounds, checked
from fl_lightning.core.errors import how_to_install
from fl_lightning.core.records import RoundRecord
from fl_lightning.federation.federated_client import FederatedClient
from fl_lightning.federation.federated_server import FederatedServer
from fl_lightning.federation.message_checks import printable
from fl_lightning.federation.server_run import ServerRun
from fl_lightning.lightning.names import rank_zero_warn

try:
    import nvflare.client as flare
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.workflows.model_controller import ModelController
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs
except ImportError as error:
    raise ImportError(f"fl_lightning.federation.nvflare needs NVFlare: {how_to_install('nvflare')}") from error

_INTRODUCE, _TRAIN, _LOSS = "introduce", "train", "loss"
_ERROR = "error"
_POLL = 0.1  # seconds


class FederatedController(ModelController):  # type: ignore[misc, unused-ignore]
    """Runs a :class:`fl_lightning.FederatedServer` as the workflow of an NVFlare job.

    First every site introduces itself. A site with another method, model, setting or version does not take part, and
    the log says why. If fewer than the strategy's ``min_clients`` are left, the job ends with that. In the rounds, a
    site that raises an error, does not answer in time or is gone is left out, and so is one whose answer is none. Every
    round ends with a checkpoint.

    Args:
        server: where the job's code makes the server: ``"task:server"`` is the function ``server`` of ``task.py``. It
            takes no arguments and returns a :class:`fl_lightning.FederatedServer`.
        sites: names of the sites. A site's place in the list is its client id.
        rounds: of the whole federation.
        timeout: seconds that a round waits for its clients; 0: until they have answered or NVFlare gives them up.
        folder: of ``last.ckpt``, which Lightning's ``load_from_checkpoint`` and a later job read. Another job with the
            same folder goes on from there, bit for bit. ``""``: the run folder of the job.

    Raises:
        ValueError: ``sites`` has a name twice, or ``server`` has no colon.
    """

    @checked(server=FILLED, sites=FILLED, rounds=Bounds(1), timeout=Bounds(0))
    def __init__(self, server: str, sites: list[str], rounds: int, timeout: int = 0, folder: str = "") -> None:
        super().__init__(persistor_id="", ignore_result_error=True)
        if len(set(sites)) != len(sites):
            raise ValueError(f"sites must be distinct names, found {sites}")
        if ":" not in server:
            raise ValueError(f"server must be a module and a function in it, 'task:server', found {server!r}")
        # NVFlare writes into a job the arguments that it finds under their own names.
        self.server, self.sites, self.rounds, self.timeout, self.folder = server, sites, rounds, timeout, folder
        self._refused: dict[int, str] = {}

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        """NVFlare calls this when the controller becomes part of a job.

        Args:
            job: the job.
            ctx: where in the job.
            kwargs: none.
        """
        # Without it the job would carry a copy of this file, which hides the installed package.
        job.set_app_packages([*job.job.app_packages, "fl_lightning"])
        super().add_to_fed_job(job, ctx, **kwargs)

    def run(self) -> None:
        """The workflow.

        Raises:
            ClientError: too many rounds in a row have failed.
            ValueError: the server is of another number of clients, too few sites can take part, or the checkpoint in
                the folder is of another federation.
        """
        fobs.register(TensorDecomposer)
        server = _made(self.server, len(self.sites))
        server.rounds = self.rounds
        run = ServerRun(server, Path(self.folder or self.get_run_dir()))
        run.resume()
        self._introduce(server)
        with run.running():
            while server.round < self.rounds and (record := self._round(server)) is not None:
                run.closed(record)
                run.save({})

    def _introduce(self, server: FederatedServer) -> None:
        found, missing = self._ask(_INTRODUCE, {client: {} for client in range(len(self.sites))})
        self._refused = {client: f"it does not introduce itself: {words}" for client, words in missing.items()}
        for client, fields in found.items():
            introduction = {**fields, "client_id": client, "name": self.sites[client]}
            words = server.refusal(introduction)
            if words is None:
                server.register(introduction)
            else:
                self._refused[client] = f"it cannot take part: {words}"
        words = "; ".join(f"site {self.sites[client]}: {why}" for client, why in self._refused.items())
        fewest = server.options.min_clients
        if len(server.registered) < fewest and not self.is_aborted():
            raise ValueError(f"min_clients={fewest} sites must take part: {words}")
        if words:
            rank_zero_warn(f"{words}; the others go on")

    def _round(self, server: FederatedServer) -> RoundRecord | None:
        """One round; ``None`` if the job was aborted in the middle of it."""
        cohort = server.open_round()
        absent = {client: why for client, why in self._refused.items() if client in cohort}
        answers, missing = self._ask(
            _TRAIN, {client: vars(server.message(client)) for client in cohort if client not in absent}
        )
        if self.is_aborted():
            return None
        return server.close_round(answers, missing | absent, partial(self._losses_at, server), absent)

    def _losses_at(self, server: FederatedServer, params: Tensor, clients: Sequence[int]) -> dict[int, Any]:
        found, missing = self._ask(_LOSS, {k: {**vars(server.message(k)), "params": params} for k in clients})
        return {**missing, **{client: fields.get(_LOSS) for client, fields in found.items()}}

    def _ask(
        self, task: str, messages: Mapping[int, Mapping[str, Any]]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """Sends one message to each client and waits; returns what came by client, and why others sent nothing."""
        came: dict[str, FLModel] = {}
        for client, message in messages.items():
            self.send_model(
                task_name=task,
                data=FLModel(params={"message": _plain(message)}, meta={"client_id": client}),
                targets=[self.sites[client]],
                timeout=self.timeout,
                callback=lambda answer: came.setdefault(answer.meta["client_name"], answer),
            )
        while self.get_num_standing_tasks() and not self.is_aborted():
            time.sleep(_POLL)
        answers, missing = {}, {}
        for client in messages:
            answer = came.get(self.sites[client])
            if answer is None:
                missing[client] = f"no answer within {self.timeout} s" if self.timeout else "no answer"
            elif not isinstance(answer.params, dict) or _ERROR in answer.params:
                missing[client] = printable((answer.params or {}).get(_ERROR, "its answer is empty"))
            else:
                answers[client] = answer.params
        return answers, missing


@checked()
def run_client(make: Callable[[int], FederatedClient]) -> None:
    """The whole training script of a site: answers what the controller asks, until the job ends.

    What training raises goes to the server as the reason why this client is left out of the round; the loop goes on.

    Args:
        make: makes the client with this id, when the first message has come.
    """
    flare.init()
    client: FederatedClient | None = None
    while flare.is_running():
        asked = flare.receive()
        if asked is None:
            return
        try:
            client = make(asked.meta["client_id"]) if client is None else client
            answer = _answer(client, flare.get_task_name(), asked.params["message"])
        except Exception as error:  # whatever a user's module or data raise
            answer = {_ERROR: printable(f"{type(error).__name__}: {error}")}
        flare.send(FLModel(params=_plain(answer)))


def _answer(client: FederatedClient, task: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    if task == _INTRODUCE:
        return vars(client.introduction())
    return vars(client.train(message)) if task == _TRAIN else {_LOSS: client.loss(message)}


def _made(path: str, num_clients: int) -> FederatedServer:
    module, _, name = path.partition(":")
    server = getattr(importlib.import_module(module), name)()
    if not isinstance(server, FederatedServer):
        raise ValueError(f"{path} must return a FederatedServer, found {type(server).__name__}")
    if server.num_clients != num_clients:
        raise ValueError(f"sites must be as many as num_clients of {path}, {server.num_clients}, found {num_clients}")
    return server


def _plain(value: Any) -> Any:
    """A message as NVFlare writes it: dicts, lists, numbers, strings, and contiguous tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
