# SPDX-License-Identifier: Apache-2.0
"""What a check raises."""

DECLARE = "declare all that it keeps with server_state, per_client or at_clients"
SEEDED = "draw random numbers from torch.Generator().manual_seed(seed)"


def require(holds: bool, problem: str) -> None:
    """Raises AssertionError with what is wrong and what to write instead; ``python -O`` leaves out ``assert``."""
    if not holds:
        raise AssertionError(problem)
