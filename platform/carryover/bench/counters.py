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
QUIET_S = 2.0
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


def read_settled(url: str, *, since: Counters, expected: Mapping[str, int]) -> Counters:
    """Read the counters once they hold all that was asked for: they are exported with a delay.

    Args:
        url: of the page.
        since: an earlier reading.
        expected: rounds by model id since then, as the responses told.

    Returns:
        The counters, after the expected rounds have arrived and nothing has changed for `QUIET_S`,
        or after `SETTLE_S`.
    """
    deadline = time.monotonic() + SETTLE_S
    last, quiet_since = read_counters(url), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        found = read_counters(url)
        if found != last:
            last, quiet_since = found, time.monotonic()
        deltas = counter_deltas(since, found)
        arrived = all(
            deltas.get(model, {}).get("num_drafts", 0.0) >= count
            for model, count in expected.items()
        )
        if arrived and time.monotonic() - quiet_since >= QUIET_S:
            break
    return last


class Window:
    """Counts what the engines did between two moments, after a warm-up.

    Args:
        url: of the page.

    Raises:
        httpx.HTTPError: the page cannot be read.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = read_counters(url)

    def begin(self, warmed: Mapping[str, int]) -> None:
        """Start counting.

        Args:
            warmed: rounds by model id since the window was made, which are not to be counted.
        """
        self._before = read_settled(self._url, since=self._before, expected=warmed)

    def end(self, expected: Mapping[str, int]) -> Counters:
        """What was counted since `begin`, by model id.

        Args:
            expected: rounds by model id, as the responses told.
        """
        after = read_settled(self._url, since=self._before, expected=expected)
        return counter_deltas(self._before, after)
