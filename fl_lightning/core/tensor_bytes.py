# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes, for processes that exchange many small tensors.

A file of ``torch.save`` has an entry of more than a kilobyte for each tensor, and reading it takes some ten times as
long as reading these bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def pack(value: object, places: Mapping[int, int] | None = None) -> bytes:
    """The bytes of an object. What a process has on a GPU comes to the GPU of the process that unpacks it.

    Args:
        value: the object.
        places: by their ids, objects that the other process has, too, and their places among these.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    packer.places = places or {}
    packer.dump(value)
    return buffer.getvalue()


def unpack(packed: bytes, device: torch.device, known: Sequence[Any] = ()) -> Any:
    """The object.

    Args:
        packed: by :func:`pack`; bytes of a stranger can run any code.
        device: for tensors that were not on the CPU.
        known: what takes the places of the objects that both processes have.
    """
    unpacker = _Unpacker(io.BytesIO(packed))
    unpacker.device, unpacker.known = device, known
    return unpacker.load()


class _Packer(pickle.Pickler):
    places: Mapping[int, int]

    def persistent_id(self, obj: Any) -> int | None:
        """Tells what is known in both processes."""
        return self.places.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """Plain tensors travel as their bytes, sparse ones as files of torch; all else as pickle has it."""
        if isinstance(obj, Tensor) and obj.layout is not torch.strided:
            file = io.BytesIO()  # pickle's own way leaves them in a list of torch's that its next load goes through
            torch.save(obj, file)
            return _loaded, (file.getvalue(),)
        if type(obj) not in (Tensor, nn.Parameter) or obj.is_quantized:
            return NotImplemented
        values = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
        content = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = isinstance(obj, nn.Parameter), obj.requires_grad, obj.device.type == "cpu"
        return _tensor, (content, obj.dtype, tuple(obj.shape), *kind)


class _Unpacker(pickle.Unpickler):
    device: torch.device
    known: Sequence[Any]

    def persistent_load(self, pid: Any) -> Any:
        """What is known in both processes."""
        return self.known[pid]

    def find_class(self, module: str, name: str) -> Any:
        """Tells tensors where to go."""
        found: Callable[..., Any] = super().find_class(module, name)
        return partial(found, self.device) if found is _tensor else found


def _loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def _tensor(
    device: torch.device,
    content: bytes,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    is_parameter: bool,
    requires_grad: bool,
    on_cpu: bool,
) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    values = flat.reshape(shape)
    values = values if on_cpu else values.to(device)
    return nn.Parameter(values, requires_grad) if is_parameter else values.requires_grad_(requires_grad)
