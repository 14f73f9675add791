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
    def plain_ratio(self) -> float:
        """Torch's median by the op's."""
        return self.timing.plain.median / self.timing.op.median

    @property
    def exact_ratio(self) -> float | None:
        """The same with float64 sums."""
        return None if self.timing.exact is None else self.timing.exact.median / self.timing.op.median

    @property
    def reads(self) -> float:
        """The op's median in units of reading the rows once."""
        return self.timing.op.median / self.timing.read.median

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


HEAD = "| op | problem | ms | x reading rows | torch, ms | by op | in float64, ms | by op |\n" + 8 * "|---" + "|"


def line(result: Result) -> str:
    """One line of the long table."""
    op, plain, exact = result.timing.op, result.timing.plain, result.timing.exact
    problem = f"{result.shape}, {result.m} rows of {result.dtype}, {result.threads} thread{'s' * (result.threads > 1)}"
    in_float64 = " | " if exact is None else f"{1e3 * exact.median:.3g} | {result.exact_ratio:.2f}"
    return (
        f"| {result.op} | {problem} | {1e3 * op.median:.3g} | {result.reads:.2f} "
        f"| {1e3 * plain.median:.3g} | {result.plain_ratio:.2f} | {in_float64} |"
    )


def _range(ratios: list[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{min(known):.2g} to {max(known):.2g}" if known else ""


def summary(results: Iterable[Result]) -> str:
    """How long torch takes by every op, and what was measured at the largest shape."""
    results = list(results)
    lines = ["| op | torch by op | in float64 | bfloat16 rows | in float64 |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(result.op for result in results):
        own = [result for result in results if result.op == name]
        halves = [[r for r in own if (r.dtype == "bfloat16") == small] for small in (False, True)]
        ranges = [_range([getattr(r, key) for r in half]) for half in halves for key in ("plain_ratio", "exact_ratio")]
        lines.append(f"| {' | '.join([name, *ranges])} |")
    largest = max(result.columns for result in results)
    lines += ["", "| largest shape, float32 | threads | x reading rows | bandwidth | peak |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.op}, m = {r.m} | {r.threads} | {r.reads:.2f} | {r.bandwidth_share:.0%} | {r.peak_share:.0%} |"
        for r in sorted(results, key=lambda r: (r.op, r.m, r.threads))
        if r.columns == largest and r.dtype == "float32"
    ]
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
    rows = [
        asdict(result) | {"plain_ratio": result.plain_ratio, "exact_ratio": result.exact_ratio} for result in results
    ]
    text = json.dumps({"environment": facts, "limits": rates, "results": rows}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
