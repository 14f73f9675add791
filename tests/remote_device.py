# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: tensors that say they are elsewhere, and a record of what is read back from them.

The numbers lie on the CPU. What CUDA refuses is refused: tensors of the CPU among those of the device, but for single
numbers where CUDA takes them, and for offsets and the like that this package's ops take there.
"""

from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")
aten = torch.ops.aten
# Results of these are numbers or sizes that only a device can tell.
_ASKING = {aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select}
# Operations that take a single number from the CPU, besides those that go element by element.
_TAKE_A_NUMBER = {aten.fill_, aten.masked_fill, aten.masked_fill_, aten.index_put, aten.index_put_, aten.copy_}
_TAKE_PLACES = {aten.index, aten.index_put, aten.index_put_}  # from the CPU, too, which they copy


class Remote(torch.Tensor):
    """A tensor elsewhere."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=ELSEWHERE
        )

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        self.held = other.held

    def tolist(self):
        return self.cpu().tolist()

    def __getitem__(self, places):
        return super().__getitem__(_as_tensors(places))

    def __setitem__(self, places, values):
        super().__setitem__(_as_tensors(places), values)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of RemoteDevice")


def _as_tensors(places):
    """Lists become tensors on the CPU: torch would make them on the device, where these have no numbers."""
    if isinstance(places, tuple):
        return tuple(map(_as_tensors, places))
    return torch.tensor(places) if isinstance(places, list) else places


class _Made(TorchFunctionMode):
    """Makes tensors of Python's numbers on the CPU and copies them elsewhere: torch itself would lose the numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device") if func in (torch.tensor, torch.as_tensor) else None
        if asked is None or torch.device(asked).type != ELSEWHERE.type or isinstance(args[0], Remote):
            return func(*args, **kwargs)
        del kwargs["device"]
        return func(*args, **kwargs).to(ELSEWHERE)


def _here(value):
    return value.held if isinstance(value, Remote) else value


class RemoteDevice(TorchDispatchMode):
    """Runs operations on remote tensors while it is entered.

    Attributes:
        reads: operations that brought numbers of the device to the CPU, in order.
        waits: operations that made the CPU wait for the device for another reason: copies to it that are not queued.
        calls: all operations on the device in order, and ``"synchronize"`` where the CPU waits for queued copies, which
            hold NaN before.
    """

    def __init__(self):
        super().__init__()
        self.reads, self.waits, self.calls = [], [], []
        self._made, self._under_way = _Made(), []
        self._streams = mock.patch.object(torch.accelerator, "current_stream", return_value=self)

    def __enter__(self):
        self._streams.start()
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._made.__exit__(*error)
        self._streams.stop()

    def record_event(self):
        """Of the device's only stream."""
        copies, self._under_way = self._under_way, []

        def synchronize():
            self.calls.append("synchronize")
            for to, arrived in copies:
                to.copy_(arrived)

        return SimpleNamespace(synchronize=synchronize)

    def put(self, tensor):
        """The tensor, elsewhere."""
        return Remote(tensor.clone())

    def put_module(self, module):
        """Moves the parameters and buffers of a module elsewhere; returns the module."""
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, torch.nn.Parameter(self.put(parameter.detach())))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, self.put(buffer))
        return module

    def get(self, tensor):
        """What a remote tensor holds, without a record."""
        return tensor.held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        packet, name = func.overloadpacket, str(func)
        number = torch.Tag.pointwise in func.tags or packet in _TAKE_A_NUMBER
        remote = [x for x in flat if isinstance(x, Remote)]
        plain = [x for x in flat if torch.is_tensor(x) and not isinstance(x, Remote) and (x.dim() > 0 or not number)]
        if packet in _TAKE_PLACES and remote:
            places = [x for x in plain if any(x is place for place in args[1])]
            plain = [x for x in plain if all(x is not place for place in places)]
            self.waits += [name for _ in places]
        asked = kwargs.get("device")
        if remote:
            self.calls.append(name)
        elsewhere = bool(remote) or (asked is not None and torch.device(asked).type == ELSEWHERE.type)
        if elsewhere and asked is not None:
            kwargs["device"] = torch.device("cpu")
        if remote and packet in _ASKING:
            self.reads.append(name)
            elsewhere = packet in (aten.nonzero, aten.masked_select)
        elif packet is aten._to_copy and remote:
            if asked is not None and torch.device(asked).type != ELSEWHERE.type:
                self.reads.append(name)
                elsewhere = False
        elif packet in (aten._to_copy, aten.copy_) and elsewhere:
            if packet is aten.copy_ and not isinstance(args[0], Remote):
                self.reads.append(name)
                elsewhere = False
            elif plain and not (kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])):
                self.waits.append(name)
        elif remote and plain and not name.startswith("fl_lightning."):  # those take them along as kernels' arguments
            raise RuntimeError(f"{name}: tensors here and elsewhere")
        known = {id(x.held): x for x in remote}
        result = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if remote and packet is aten._to_copy and not elsewhere and kwargs.get("non_blocking"):
            self._under_way.append((torch.full_like(result, torch.nan), result))
            return self._under_way[-1][0]

        def away(value):
            if not torch.is_tensor(value):
                return value
            return known[id(value)] if id(value) in known else Remote(value)

        return tree_map(away, result) if elsewhere else result
