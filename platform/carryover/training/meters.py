"""What a training step measures: metrics over packs and workers, and time by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

_SUMMED_METRICS = ("anchors", "tokens")


class StepMeans:
    """Means of a step's metrics over packs and workers; `anchors` and `tokens` are sums.

    A pack may lack a block position (short responses), so each metric has a count of its own. All
    workers hold the same names, in the same order.

    Args:
        proposal_length: B.
    """

    def __init__(self, proposal_length: int) -> None:
        self._positions = range(1, proposal_length + 1)
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Take the metrics of one pack."""
        for name, value in metrics.items():
            prefix, is_position, _ = name.partition("/position_")
            names = [f"{prefix}/position_{k}" for k in self._positions] if is_position else [name]
            for known in names:
                self._sums.setdefault(known, 0.0)
                self._counts.setdefault(known, 0)
            self._sums[name] += float(value)
            self._counts[name] += 1

    def totals(self) -> torch.Tensor:
        """Sums and counts of this worker's packs, to be added up over workers."""
        names = sorted(self._sums)
        values = [self._sums[name] for name in names] + [self._counts[name] for name in names]
        return torch.tensor(values, dtype=torch.float64)

    def of(self, totals: torch.Tensor) -> dict[str, float]:
        """Metrics of the whole step from all workers' totals."""
        sums, counts = totals.chunk(2)
        return {
            name: float(total if name in _SUMMED_METRICS else total / count)
            for name, total, count in zip(sorted(self._sums), sums, counts, strict=True)
            if count
        }


class StageClock:
    """Wall-clock seconds of one step, in `stages_s` by stage.

    Args:
        device: whose work a stage waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self.stages_s: dict[str, float] = {}
        self._device = device
        self._started = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside the `with` block."""
        started = time.monotonic()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.stages_s[name] = self.stages_s.get(name, 0.0) + time.monotonic() - started

    def total_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started
