# SPDX-License-Identifier: Apache-2.0
"""What the simulation assumes of machines and models: every number with where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


def _rate(default: float, unit: str, source: str) -> Any:
    return field(default=default, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Rates:
    """Of a cluster of equal machines with some GPUs each.

    Attributes:
        gpus_per_machine: GPUs that share the machine's network card.
        gpu_memory: of one GPU.
        memory_rate: at which a GPU reads its memory.
        products_rate: float32 inner products of long rows.
        nvlink: what one GPU sends to others of its machine.
        network: what one machine sends to others; as much arrives at the same time.
        latency: of one exchange.
        visit: per client beside its steps.
        solve_100: FedLF's small problem of one layer with 100 clients, on the CPU.
        solve_1000: the same with 1,000.
        bytes_per_number: of updates on their way and in memory.
        weights_kept: vectors as long as the model in a GPU beside the updates.
        working_memory: activations, batches, libraries.
    """

    gpus_per_machine: float = _rate(8, "", "assumed")
    gpu_memory: float = _rate(80e9, "B", "H100 SXM, data sheet")
    memory_rate: float = _rate(2.7e12, "B/s", "assumed: 80 % of an H100's 3.35e12, data sheet")
    products_rate: float = _rate(6e13, "FLOP/s", "on paper: benchmarks/README.md, 100 rows of ResNet-18 in 1.76 ms")
    nvlink: float = _rate(2e11, "B/s", "assumed: 44 % of the 4.5e11 of an H100's data sheet")
    network: float = _rate(4.5e10, "B/s", "assumed: one card of 400 Gb/s, 90 % of it")
    latency: float = _rate(5e-5, "s", "assumed")
    visit: float = _rate(5e-4, "s", "measured: benchmarks/README.md, 3.7 to 5.8 ms per 10 clients, one CPU core")
    solve_100: float = _rate(5e-4, "s", "measured: --measure, one CPU core; GPUs assumed alike")
    solve_1000: float = _rate(0.14, "s", "the same")
    bytes_per_number: float = _rate(4, "B", "float32")
    weights_kept: float = _rate(4, "", "counted: global and local parameters, gradient, step")
    working_memory: float = _rate(8e9, "B", "assumed")

    def changed(self, values: Mapping[str, float]) -> Rates:
        """Other rates.

        Raises:
            ValueError: there is no rate of a name, or a value is not above 0.
        """
        known = [rate.name for rate in fields(self)]
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"names of rates must be among {known}, found {name!r}")
            if not value > 0:
                raise ValueError(f"{name} must be above 0, found {value}")
        return replace(self, **values)


@dataclass(frozen=True)
class Workload:
    """A model and the clients that train it.

    Attributes:
        name: short name.
        parameters: ``n``.
        layers: of the method.
        samples: of a client, mean.
        batch: samples per step.
        work: floating-point operations per sample, forward and backward.
        rate: floating-point operations per second of a GPU that trains it.
        source: where work and rate are from.
    """

    name: str
    parameters: int
    layers: int
    samples: float
    batch: int
    work: float
    rate: float
    source: str


WORKLOADS = (
    Workload(
        "ResNet-18", 11_689_512, 62, 600, 50, 1.09e10, 1e14,
        "3 x 2 x 1.82e9 multiply-adds per image of 224 x 224 (torchvision); rate assumed, 10 % of an H100's peak in "
        "bfloat16",
    ),
    Workload(
        "ViT-B", 86_567_656, 152, 600, 50, 1.06e11, 2e14,
        "3 x 2 x 17.6e9 multiply-adds per image of 224 x 224 (torchvision); rate assumed, 20 % of the peak",
    ),
    Workload(
        "language model of 1e9", 1_000_000_000, 200, 100, 4, 6 * 1e9 * 512, 4e14,
        "6 n per token, samples of 512 tokens; layers and rate assumed, 40 % of the peak",
    ),
)  # fmt: skip
