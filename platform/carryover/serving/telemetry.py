"""What an ingress replica tells: Prometheus metrics, and observations for the controller.

A request only appends to a buffer; everything else happens in the heartbeat, for all requests
since the last one together. Metrics carry Ray Serve's labels as well (application, deployment,
replica): a replica that restarts begins a series of its own at 0, so that `increase()` and
`rate()` summed over replicas are right, whatever restarts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from ray.serve import metrics

from carryover.serving.observations import Observation

# About a minute of 300 requests/s without a controller, and a few MB.
BUFFER = 20_000
_LABELS = ("experiment", "arm")
_REQUEST_LABELS = (*_LABELS, "reason", "outcome", "shadow")
_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip


class Telemetry:
    """Buffers observations and counts them.

    Attributes:
        dropped: observations that did not fit the buffer, ever.
    """

    def __init__(self, *, buffer: int = BUFFER) -> None:
        self.dropped = 0
        self._kept: deque[Observation] = deque()
        self._uncounted: list[tuple[str, Observation]] = []
        self._buffer = buffer
        self._requests = metrics.Counter(
            "carryover_requests", "Requests by arm, reason of the choice and outcome.",
            tag_keys=_REQUEST_LABELS,
        )  # fmt: skip
        self._refused = metrics.Counter(
            "carryover_refused_requests", "Requests refused before an arm was chosen.",
            tag_keys=("experiment", "status"),
        )  # fmt: skip
        self._tokens = _counter("carryover_output_tokens", "Tokens that the arm wrote.")
        self._rounds = _counter("carryover_rounds", "Speculative rounds.")
        self._accepted = _counter("carryover_accepted_tokens", "Proposals accepted.")
        self._proposed = _counter("carryover_proposed_tokens", "Proposals made.")
        self._ttft = _histogram("carryover_ttft_seconds", "To the first token.", _SECONDS)
        self._tpot = _histogram("carryover_tpot_seconds", "Per further token.", _TOKEN_SECONDS)
        self._e2e = _histogram("carryover_request_seconds", "To the end of the answer.", _SECONDS)
        self._weight = _gauge("carryover_traffic_weight", "Fraction of requests in force.")
        self._in_flight = _gauge("carryover_in_flight_requests", "Requests on the arm.")
        self._down = _gauge("carryover_arm_down", "1 while the arm gets no requests.")
        self._lost = metrics.Counter(
            "carryover_dropped_observations", "Observations lost while the controller was away."
        )
        self._refusals: Counter[tuple[str, int]] = Counter()

    def add(self, observation: Observation, *, experiment: str) -> None:
        """Count a finished request."""
        self._uncounted.append((experiment, observation))
        if len(self._kept) >= self._buffer:
            self._kept.popleft()
            self.dropped += 1
        self._kept.append(observation)

    def refuse(self, status: int, *, experiment: str) -> None:
        """Count a request that never got an arm."""
        self._refusals[experiment, status] += 1

    def take(self, most: int = 2_000) -> list[Observation]:
        """Take observations out of the buffer, the oldest first."""
        kept = self._kept
        return [kept.popleft() for _ in range(min(most, len(kept)))]

    def lose(self, count: int) -> None:
        """Count observations that were taken and could not be delivered."""
        self.dropped += count

    def publish(
        self,
        *,
        experiment: str,
        weights: Mapping[str, float],
        in_flight: Mapping[str, int],
        down: Mapping[str, str],
    ) -> None:
        """Bring Prometheus metrics up to date."""
        counts: Counter[tuple[str, ...]] = Counter()
        sums: dict[tuple[str, str], list[int]] = {}
        for name, seen in self._uncounted:
            counts[name, seen.arm, seen.reason, seen.outcome, str(seen.shadow).lower()] += 1
            if seen.shadow or seen.outcome != "ok":
                continue
            key = (name, seen.arm)
            total = sums.setdefault(key, [0, 0, 0, 0])
            total[0] += seen.output_tokens
            total[1] += seen.rounds
            total[2] += seen.accepted
            total[3] += seen.proposed
            tags = dict(zip(_LABELS, key, strict=True))
            for histogram, value in (
                (self._ttft, seen.ttft_s), (self._tpot, seen.tpot_s), (self._e2e, seen.e2e_s),
            ):  # fmt: skip
                if value is not None:
                    histogram.observe(value, tags)
        self._uncounted.clear()
        for key, count in counts.items():
            self._requests.inc(count, dict(zip(_REQUEST_LABELS, key, strict=True)))
        for key, values in sums.items():
            tags = dict(zip(_LABELS, key, strict=True))
            counters = (self._tokens, self._rounds, self._accepted, self._proposed)
            for counter, value in zip(counters, values, strict=True):
                if value:
                    counter.inc(value, tags)
        for (name, status), count in self._refusals.items():
            self._refused.inc(count, {"experiment": name, "status": str(status)})
        self._refusals.clear()
        for arm, weight in weights.items():
            tags = {"experiment": experiment, "arm": arm}
            self._weight.set(weight, tags)
            self._in_flight.set(in_flight.get(arm, 0), tags)
            self._down.set(float(arm in down), tags)
        if self.dropped > self._published_drops:
            self._lost.inc(self.dropped - self._published_drops)
            self._published_drops = self.dropped

    _published_drops = 0


def _counter(name: str, text: str) -> metrics.Counter:
    return metrics.Counter(name, text, tag_keys=_LABELS)


def _gauge(name: str, text: str) -> metrics.Gauge:
    return metrics.Gauge(name, text, tag_keys=_LABELS)


def _histogram(name: str, text: str, boundaries: tuple[float, ...]) -> metrics.Histogram:
    return metrics.Histogram(name, text, boundaries=list(boundaries), tag_keys=_LABELS)
