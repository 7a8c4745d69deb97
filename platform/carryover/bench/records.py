"""One row for each request of a bench: the record that every figure is computed from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from carryover.bench import statistics
from carryover.bench.client import Response


@dataclass(frozen=True)
class Condition:
    """What was asked of every arm alike, besides the prompts.

    Attributes:
        mode: `online` (through a server) or `offline` (the engine alone, one request at a time).
        temperature: of sampling.
        concurrency: requests in flight, closed loop; None with a rate.
        rate: requests per second, open loop with Poisson arrivals; None with a concurrency.
    """

    mode: str = "online"
    temperature: float = 0.0
    concurrency: int | None = 1
    rate: float | None = None

    @property
    def title(self) -> str:
        """Short and unique in a bench, such as `T=0 c=4`; offline the load is always the same."""
        if self.mode == "offline":
            return f"T={self.temperature:g}"
        load = f"c={self.concurrency}" if self.rate is None else f"rate={self.rate:g}/s"
        return f"T={self.temperature:g} {load}"

    @property
    def load(self) -> str:
        """The load in words."""
        if self.mode == "offline":
            return "batch 1"
        if self.rate is not None:
            return f"{self.rate:g} requests/s (Poisson)"
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Request:
    """One prompt on one arm.

    Attributes:
        arm: which arm answered.
        prompt_id: unique in the workload; the same on every arm.
        category: of the prompt: the set that it is counted in.
        source: of the prompt.
        block: in which block it was sent.
        wall_s: its share of the time in which its block was measured; NaN if it failed.
        response: what came back.
        condition: what was asked.
    """

    arm: str
    prompt_id: int
    category: str
    source: str
    block: int
    wall_s: float
    response: Response
    condition: Condition = Condition()

    @property
    def ok(self) -> bool:
        """Whether it got a whole response."""
        return self.response.error is None

    @property
    def tpot_s(self) -> float | None:
        """TPOT; None if it failed or has fewer than two tokens."""
        if not self.ok:
            return None
        answer = self.response
        return statistics.time_per_output_token(
            answer.ttft_s, answer.latency_s, answer.output_tokens
        )

    def to_row(self) -> dict[str, Any]:
        """Flat values, as in `REQUESTS`."""
        values = asdict(self)
        answer, condition = values.pop("response"), values.pop("condition")
        return {**condition, **values, "tpot_s": self.tpot_s, **answer}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Request:
        """The request that `to_row` gave."""
        values = dict(row)
        values.pop("tpot_s")
        condition = Condition(**{f.name: values.pop(f.name) for f in fields(Condition)})
        response = Response(**{f.name: values.pop(f.name) for f in fields(Response)})
        values["wall_s"] = nan if values["wall_s"] is None else values["wall_s"]
        return cls(**values, response=response, condition=condition)


REQUESTS = pa.schema(
    [
        pa.field("mode", pa.string(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        ("concurrency", pa.int32()),
        ("rate", pa.float64()),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("prompt_id", pa.int64(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("block", pa.int32(), nullable=False),
        ("wall_s", pa.float64()),
        ("started_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("latency_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("finish", pa.string()),
        ("text", pa.string()),
        ("num_drafts", pa.int32()),
        ("num_draft_tokens", pa.int32()),
        ("num_accepted_tokens", pa.int32()),
        ("accepted_histogram", pa.list_(pa.int32())),
        ("status", pa.int32()),
        ("error", pa.string()),
    ]
)


def write_requests(requests: Sequence[Request], path: Path) -> None:
    """Write one row per request, failed ones included, as Parquet, and as CSV beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([request.to_row() for request in requests], schema=REQUESTS)
    pq.write_table(table, path)
    # CSV has no lists
    texts = [json.dumps(histogram) for histogram in table["accepted_histogram"].to_pylist()]
    place = table.schema.get_field_index("accepted_histogram")
    flat = table.set_column(place, "accepted_histogram", pa.array(texts, pa.string()))
    pyarrow.csv.write_csv(flat, path.with_suffix(".csv"))


def read_requests(path: Path) -> list[Request]:
    """Read what `write_requests` wrote."""
    return [Request.from_row(row) for row in pq.read_table(path).to_pylist()]
