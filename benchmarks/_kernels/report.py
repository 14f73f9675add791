# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown and JSON."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import fl_lightning
from benchmarks._kernels.timing import Timing
from fl_lightning import ops

_FLAGS = ("fma", "f16c", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "asimd")


@dataclass(frozen=True)
class Result:
    """One op on one problem with one number of threads.

    Attributes:
        peak: the processor's float32 operations per second with these threads.
    """

    op: str
    shape: str
    columns: int
    layers: int
    m: int
    dtype: str
    threads: int
    implementation: str
    bytes: int
    flops: int
    row_bytes: int
    peak: float
    timing: Timing

    @property
    def speed_up(self) -> float:
        """Reference's median by the op's."""
        return self.timing.reference.median / self.timing.op.median

    @property
    def reads(self) -> float:
        """The op's median in units of reading the rows once."""
        return self.timing.op.median / self.timing.read.median

    @property
    def loop_ratio(self) -> float | None:
        """Median of the loop written by hand by the op's; ``None`` where there is no such loop."""
        loop = self.timing.loop
        return None if loop is None else loop.median / self.timing.op.median

    @property
    def bandwidth_share(self) -> float:
        """Rate at which the counted bytes pass, by the rate of reading."""
        return self.bytes / self.row_bytes / self.reads

    @property
    def peak_share(self) -> float:
        """Rate of the counted operations, by the peak."""
        return self.flops / self.timing.op.median / self.peak


def environment(device: torch.device, seed: int, threads: list[int], how: str) -> dict[str, object]:
    """Versions, processor, settings and date."""
    cpu: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    found: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "fl_lightning": fl_lightning.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": f"{ops.backend()['layer_gram'].implementation} {ops.backend()['layer_gram'].reason}".strip(),
        "processor": cpu.get("model name", platform.machine()),
        "processors": torch.get_num_threads() if not cpu else _processors(),
        "flags": " ".join(flag for flag in _FLAGS if flag in flags),
        "threads": ", ".join(map(str, threads)),
        "seed": seed,
        "limits": how,
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def _processors() -> int:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8").count("processor\t")


HEAD = (
    "| op | shape | m | rows | threads | time, ms | quartiles | MB | GFLOP | x reading rows | bandwidth | peak "
    "| reference, ms | speed-up | loop, ms | loop by op |\n" + 16 * "|---" + "|"
)


def line(result: Result) -> str:
    """One line of the long table."""
    op, reference, loop = result.timing.op, result.timing.reference, result.timing.loop
    compared = " |  |" if loop is None else f" {1e3 * loop.median:.3g} ({loop.count}) | {result.loop_ratio:.2f} |"
    share = f"{result.peak_share:.0%}" if result.flops else ""
    return (
        f"| {result.op} | {result.shape} | {result.m} | {result.dtype} | {result.threads} | {1e3 * op.median:.3g} "
        f"| {1e3 * op.low:.3g} to {1e3 * op.high:.3g} ({op.count}) | {result.bytes / 1e6:.4g} | "
        f"{result.flops / 1e9:.3g} | {result.reads:.2f} | {result.bandwidth_share:.0%} | {share} | "
        f"{1e3 * reference.median:.3g} ({reference.count}) | {result.speed_up:.1f} |{compared}"
    )


def summary(results: Iterable[Result]) -> str:
    """The least speed-up of every op, and what was measured at the largest shape."""
    results = list(results)
    lines = ["| op | least speed-up over the reference | where |", "|---|---|---|"]
    for name in dict.fromkeys(result.op for result in results):
        worst = min((r for r in results if r.op == name), key=lambda r: r.speed_up)
        place = f"{worst.shape}, m = {worst.m}, {worst.dtype}, threads: {worst.threads}"
        lines.append(f"| {name} | {worst.speed_up:.1f} | {place} |")
    largest = max(result.columns for result in results)
    lines += ["", "| largest shape, float32 | threads | x reading rows | bandwidth | peak |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.op}, m = {r.m} | {r.threads} | {r.reads:.2f} | {r.bandwidth_share:.0%} | {r.peak_share:.0%} |"
        for r in sorted(results, key=lambda r: (r.op, r.m, r.threads))
        if r.columns == largest and r.dtype == "float32"
    ]
    looped = [result for result in results if result.timing.loop is not None]
    if looped:
        lines += ["", "| one torch.mm per layer, by the op | threads | times as long |", "|---|---|---|"]
        lines += [f"| {r.op}, {r.shape}, m = {r.m} | {r.threads} | {r.loop_ratio:.2f} |" for r in looped]
    return "\n".join(lines)


def markdown(facts: dict[str, object], rates: list[dict[str, float]], results: list[Result]) -> str:
    """The whole report."""
    lines = [f"# Kernels on {facts.get('gpu', facts['processor'])}", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [
        f"- {rate['threads']:.0f} thread(s): reads {rate['bandwidth'] / 1e9:.1f} GB/s (largest matrix), "
        f"peak {rate['peak'] / 1e9:.0f} GFLOP/s"
        for rate in rates
    ]
    return "\n".join([*lines, "", summary(results), "", HEAD, *map(line, results), ""])


def write(
    folder: Path, name: str, facts: dict[str, object], rates: list[dict[str, float]], results: list[Result]
) -> None:
    """Writes ``name.md`` and ``name.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown(facts, rates, results), encoding="utf-8")
    rows = [asdict(result) | {"speed_up": result.speed_up, "loop_ratio": result.loop_ratio} for result in results]
    text = json.dumps({"environment": facts, "limits": rates, "results": rows}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
