# SPDX-License-Identifier: Apache-2.0
"""Closes a round of a real federation with those of the answers that the method can work with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.core.errors import ClientError
from fl_lightning.core.records import RoundRecord
from fl_lightning.federation.client_messages import Fitting, LostClientsError
from fl_lightning.federation.door import said
from fl_lightning.federation.messages import ClientMessage
from fl_lightning.fit.server import Server
from fl_lightning.fit.uploads import Round


@dataclass(frozen=True)
class Closing:
    """Tries the method on all answers that fit, and leaves out whoever it fails for."""

    server: Server
    form: Fitting  # takes answers into rows
    rows: UpdateRows
    cohort: Sequence[int]  # clients of the round, by row
    num_samples: Callable[[Mapping[int, int]], int | None]  # of all clients, by what those of the round say now

    def closed(
        self, current: Round, answers: Mapping[int, object], why: Mapping[int, str], silent: Iterable[int]
    ) -> tuple[RoundRecord, dict[int, ClientMessage]]:
        """The record of the round, computed as if those who are left out had not been there, and the answers that fit.

        ``current`` says whom the round has left out so far, ``answers`` what came by client, ``why`` why nothing usable
        came of others, and ``silent`` from whom nothing came at all. Raises ClientError if too many rounds in a row
        have failed.
        """
        given, misfits = self.form.sorted_out({k: answers[k] for k in self.cohort if k in answers})
        why = {**why, **misfits}
        current.trained = len(answers.keys() | why.keys() - set(silent))
        for client in self.cohort:
            if client not in current.dropped and client not in given:
                self.server.failures.drop(current, client, why.get(client, "no answer"))
        return self._tried(current, given), given

    def _tried(self, current: Round, given: Mapping[int, ClientMessage]) -> RoundRecord:
        refused: tuple[type[Exception], ...] = ()
        while True:
            self._fill(current, given)
            before = dict(current.dropped)
            try:
                return self.server.close_round(current, refused)
            except ClientError:
                raise
            except LostClientsError as lost:
                current.dropped, blamed = before, lost.reasons
            except Exception:  # of a method, whose every reason may be what a client sent
                if refused:
                    raise
                current.dropped, blamed = before, self._blamed(current, given)
                if len(blamed) == len(current.uploads):  # it is not theirs
                    blamed = {}
            for client, reason in blamed.items():
                self.server.failures.drop(current, client, said(reason))
            if not blamed:
                refused = (Exception,)

    def _blamed(self, current: Round, given: Mapping[int, ClientMessage]) -> dict[int, str]:
        """The clients with whose answers alone the method fails, and how."""
        found: dict[int, str] = {}
        for client in [upload.client_id for upload in current.uploads]:
            alone = Round(current.index, asks=current.asks)
            self._fill(alone, {client: given[client]})
            words = self.server.trial(alone)
            if words is not None:
                found[client] = words
        return found

    def _fill(self, current: Round, given: Mapping[int, ClientMessage]) -> None:
        """Writes the answers of these clients into the rows of the round, but for those that are left out."""
        self.rows.begin_round()
        current.uploads.clear()
        for place, client in enumerate(self.cohort):
            if client in given and client not in current.dropped:
                current.uploads.append(self.form.upload(given[client], place, self.rows))
        sizes = {upload.client_id: upload.size for upload in current.uploads}
        self.server.cohorts.num_samples = self.num_samples(sizes)
