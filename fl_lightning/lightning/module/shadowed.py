# SPDX-License-Identifier: Apache-2.0
"""Other values in front of attributes of an object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def shadowed(owner: object, **values: Any) -> Iterator[None]:
    """Puts other values in front of attributes and methods of an object, and takes them away in the end."""
    attributes = vars(owner)  # nn.Module's own way of setting one would register submodules and tensors
    hidden = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(hidden)
