"""vLLM's own speculative counters, read before and after a bench from a metrics page.

The page may be vLLM's (`vllm:spec_decode_...`) or Ray's (`ray_vllm_spec_decode_...`), on which the
counters of an arm's replicas are added up. They are an independent count of what the responses say.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

POLL_S = 0.5
SETTLE_S = 15.0
_COUNTER = re.compile(r"^(?:ray_)?vllm[:_](spec_decode_\w+?)_total$")

Counters = dict[str, dict[str, float]]


def read_counters(url: str) -> Counters:
    """Read the counters: by model id, then by name without vLLM's prefix, per position included.

    Args:
        url: of the page.

    Raises:
        httpx.HTTPError: the page cannot be read.
    """
    answer = httpx.get(url, timeout=10.0)
    answer.raise_for_status()
    return parse_counters(answer.text)


def parse_counters(page: str) -> Counters:
    """Parse a metrics page; see `read_counters`."""
    found: Counters = defaultdict(lambda: defaultdict(float))
    # The page of a node holds a megabyte of other metrics.
    lines = (line for line in page.splitlines() if "spec_decode_" in line)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            match = _COUNTER.match(sample.name)
            if match is None or "model_name" not in sample.labels:
                continue
            name = match.group(1).removeprefix("spec_decode_")
            if "position" in sample.labels:
                name += f".{sample.labels['position']}"
            found[sample.labels["model_name"]][name] += sample.value
    return {model: dict(values) for model, values in found.items()}


def counter_deltas(before: Counters, after: Counters) -> Counters:
    """What was counted between two readings, per model."""
    return {
        model: {
            name: value - before.get(model, {}).get(name, 0.0) for name, value in values.items()
        }
        for model, values in after.items()
    }


def settled_deltas(url: str, before: Counters, *, expected: Mapping[str, int]) -> Counters:
    """Read the deltas once they hold all that was measured: counters are exported with a delay.

    Args:
        url: of the page.
        before: read before the bench.
        expected: rounds by model id that the responses told of.

    Returns:
        The deltas after all rounds have arrived, or after `SETTLE_S`.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        deltas = counter_deltas(before, read_counters(url))
        arrived = all(
            deltas.get(model, {}).get("num_drafts", 0.0) >= count
            for model, count in expected.items()
        )
        if arrived or time.monotonic() > deadline:
            return deltas
        time.sleep(POLL_S)
