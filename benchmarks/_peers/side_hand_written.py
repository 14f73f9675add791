# SPDX-License-Identifier: Apache-2.0
"""The hand-written loop."""

from torch.nn.utils import parameters_to_vector

from benchmarks._peers.baton import Baton, options
from benchmarks._rounds.shape import HandWritten


def main() -> None:
    """Runs the rounds."""
    given = options()
    loop = HandWritten(given.shape, *given.shape.data())
    baton = Baton(given.shape, parameters_to_vector(loop.weights))
    for _ in range(given.rounds):
        loop()
        baton.pass_on(parameters_to_vector(loop.weights), loop.steps)


if __name__ == "__main__":
    main()
