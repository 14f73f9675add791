# SPDX-License-Identifier: Apache-2.0
"""Faults in values that are written with plain parts alone, and read again."""

from mutations.change import In

values = In(
    "fl_lightning/federation/plain_values.py",
    "tests/federation/test_module_state.py -k 'bits or lies or said or leaves_nothing'",
)
plain = In("fl_lightning/federation/plain_values.py", "tests/federation/test_plain_values.py")

MUTATIONS = [
    values("a client may hide methods", "return not callable(found) and", "return"),
    values("a client may hide parameters", "owner._parameters, ", ""),
    values("a client may hide hooks", "parts = FRAMEWORK, owner", "parts = owner"),
    values("later nodes are looked for", "not 0 <= place < len(self._made)", "False"),
    values("what was not written leaves nodes", "            del self.nodes[before[0] :]\n", ""),
    values(
        "an object that has two names is written twice", "        if id(value) not in self._at:\n", "        if True:\n"
    ),
    plain(
        "numbers of any length travel as they are",
        "type(value) is int and -(2**63) <= value < 2**63",
        "type(value) is int",
    ),
    plain(
        "2**63 travels as it is",
        "<= value < 2**63",
        "<= value <= 2**63",
    ),
    plain("strings of any length are written", "if type(value) is str and len(value) > CHARACTERS:", "if False:"),
    plain("what both sides have is written", "        if id(value) in self._known:\n", "        if False:\n"),
    plain(
        "an object that holds itself is written for ever",
        "            if id(value) in self._open:\n",
        "            if False:\n",
    ),
    plain("what failed once is open for good", "            self._open.clear()\n", ""),
    plain(
        "what was written is open for good",
        "            self._open.discard(id(value))\n",
        "",
        unseen="an object that was written is known by its place",
    ),
    plain("what failed counts", "            self.entries, self.nbytes = before[1:]\n", ""),
    plain("what failed has a place", "                self._at.pop(id(value), None)\n", "                pass\n"),
    plain(
        "what is too deep ends the visit",
        "except (StaysError, RecursionError) as error:",
        "except StaysError as error:",
    ),
    plain("there may be any number of entries", "if self.entries > STATE_ENTRIES or self.nbytes", "if self.nbytes"),
    plain(
        "there may be any number of bytes",
        "if self.entries > STATE_ENTRIES or self.nbytes > STATE_BYTES:",
        "if self.entries > STATE_ENTRIES:",
    ),
    plain(
        "exactly as many as may be are too many", "self.entries > STATE_ENTRIES or", "self.entries >= STATE_ENTRIES or"
    ),
    plain("bytes of arrays do not count", "        self._count(0, len(value))\n", ""),
    plain("bytes of tensors do not count", "        self._count(0, plain.nbytes)\n", ""),
    plain("arrays of any type are written", 'if value.dtype.kind not in "biufc" or', "if"),
    plain("numbers of NumPy come as arrays", 'name != "ndarray"]', "False]"),
    plain(
        "arrays are one number",
        "self.gathered += value.size if value.ndim else 0",
        "self.gathered += 1 if value.ndim else 0",
    ),
    plain("containers hold nothing", "            self.gathered += len(value)\n", "            pass\n"),
    plain("tensors of one number are gathered", "plain.numel() if plain.dim() else 0", "plain.numel()"),
    plain("a deque has no end", "value.maxlen]", "None]"),
    plain("a default is lost", 'getattr(value.default_factory, "__name__", None)', "None"),
    plain(
        "any default is written",
        "kind is defaultdict and value.default_factory in _FACTORIES.values():",
        "kind is defaultdict:",
    ),
    plain(
        "a class of the same name will do",
        "if self._classes.get(name) is kind and isinstance(value, tuple):",
        "if name in self._classes and isinstance(value, tuple):",
        unseen="nothing but named tuples comes here",
    ),
    plain(
        "an object of a class of the same name is written",
        "if self._classes.get(name) is kind and kinds_of",
        "if name in self._classes and kinds_of",
    ),
    plain("modules are written", " and not isinstance(value, nn.Module):\n            own", ":\n            own"),
    plain("what hides methods is written", "content.items() if is_own_name(value, key)}", "content.items()}"),
    plain("tensors of any dtype are written", "value.dtype not in DTYPES or value", "value"),
    plain("tensors of any class are written", " or type(value) is not Tensor:", ":"),
    plain("tensors without memory are written", " or value.is_meta or", " or"),
    plain("where a tensor was is forgotten on the way", " or hasattr(value, _AWAY)", ""),
    plain("sparse tensors come as they are not", '"sparse" if sparse else "tensor"', '"tensor"'),
    plain(
        "an object is made anew at every place",
        "        return self._made[place]\n",
        "        return copy(self._made[place])\n",
    ),
    plain("another word is a node", 'if kind != "node" or not 0', "if not 0"),
    plain("a key without a value is read", "dict(zip(values, values, strict=True))", "dict(zip(values, values))"),
    plain(
        "order is lost",
        "return _MAPPINGS[kind](self.pairs(parts[0]))",
        "return _MAPPINGS[kind](dict(reversed(self.pairs(parts[0]).items())))",
    ),
    plain("the message's tensors are the module's", "value.detach().clone().to(self", "value.detach().to(self"),
    plain("all tensors lie on the device", 'self._device if away else "cpu"', "self._device"),
    plain("all tensors lie on the CPU", 'self._device if away else "cpu"', '"cpu"'),
    plain("where a tensor was is forgotten", "            setattr(made, _AWAY, True)", "            pass"),
    plain("sparse tensors come dense", "reader._tensor(value, away).to_sparse()", "reader._tensor(value, away)"),
    plain("numbers of any length are read", "int(digits[:10_000], 16)", "int(digits, 16)"),
    plain("complex numbers are turned around", "complex(real, imaginary)", "complex(imaginary, real)"),
    plain("a byte array comes as bytes", "bytearray(value.numpy().tobytes())", "value.numpy().tobytes()"),
    plain("arrays of pairs are read", "_NUMBERS.fullmatch(dtype)", "_NUMBERS.match(dtype)"),
    plain("shapes are lost", ".reshape(shape).copy()", ".copy()"),
    plain("arrays cannot be written to", ".reshape(shape).copy()", ".reshape(shape)"),
    plain("an array of one number is a number", "made[()] if is_scalar else made", "made[()]"),
    plain("a tuple may have any length", " or len(items) != len(kind._fields):", ":"),
    plain("an object is made as a tuple", "if not issubclass(kind, tuple) or len", "if len"),
    plain("modules are made", "if issubclass(kind, nn.Module) or not all", "if not all"),
    plain("what hides methods is read", "or not all(is_own_name(made, key) for key in own):", "or False:"),
    plain(
        "names may be anything",
        "not isinstance(name, str) or not name.isidentifier() or",
        "not isinstance(name, str) or",
    ),
    plain("names need not be texts", "not isinstance(name, str) or not name", "not str(name)"),
    plain("the class may be bound", ' or name.startswith("__")', ""),
    plain("names of any length are bound", " or len(name) > 200:", ":"),
    plain("buffers may be bound", "owner._buffers, ", ""),
    plain("parts may be bound", ", owner._modules\n", "\n"),
    plain("properties may be hidden", 'and (not hasattr(found, "__get__") or type', "and (True or type"),
    plain("slots may not be bound", ' or type(found).__name__ == "member_descriptor")', ")"),
]
