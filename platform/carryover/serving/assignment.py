"""Which arm answers a request. Pure: weights, a key and a number in, an arm out.

- Without a key, an arm is drawn: `uniform` is looked up in the cumulated weights, so over uniform
  draws an arm's share is exactly its weight.
- With a key, arms compete by weighted rendezvous hashing (Thaler and Ravishankar 1998, weights by
  Schindelhauer and Schomaker 2005): every arm gets a number from the hash of salt, arm and key, the
  exponential race log(u) / weight, and the largest wins. Over keys an arm's share is its weight;
  the same key always gets the same arm; an arm whose weight grows only gains keys, and an arm that
  is excluded loses its own keys, each to where it would have gone without that arm. Nothing else
  moves, and nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import log

from carryover.errors import ServingError

# 52 bits: the half that keeps the number above 0 would round to 1 with more.
_BITS = 52


class NoArm(ServingError):
    """No arm that may be chosen has weight."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm for a request, and by what rule.

    `reason` is "weighted" (drawn) or "sticky" (by key) here; the ingress adds "header", "model"
    and "fallback".
    """

    arm: str
    reason: str


def assign(
    weights: Mapping[str, float],
    *,
    key: str | None,
    salt: str,
    uniform: float,
    excluded: Collection[str] = (),
) -> Assignment:
    """Choose an arm.

    Args:
        weights: by arm, at least 0, of any sum; an arm of weight 0 is never chosen.
        key: what stays on one arm (a session, a user); None draws.
        salt: of the experiment, so that two experiments split the same keys independently. Neither
            a salt nor an arm's name may hold a NUL character.
        uniform: a number in [0, 1), used when there is no key.
        excluded: arms not to choose, for example those that are down.

    Raises:
        NoArm: no arm outside `excluded` has weight.
    """
    candidates = [
        (arm, weight) for arm, weight in weights.items() if weight > 0 and arm not in excluded
    ]
    if not candidates:
        raise NoArm(_why_none(weights, excluded))
    if len(candidates) == 1:
        return Assignment(candidates[0][0], "weighted" if key is None else "sticky")
    if key is None:
        return Assignment(_draw(candidates, uniform), "weighted")
    return Assignment(_race(candidates, key, salt), "sticky")


def _draw(candidates: list[tuple[str, float]], uniform: float) -> str:
    left = uniform * sum(weight for _, weight in candidates)
    for arm, weight in candidates:
        if left < weight:
            return arm
        left -= weight
    # Rounding may leave a sliver past the last weight.
    return candidates[-1][0]


def _race(candidates: list[tuple[str, float]], key: str, salt: str) -> str:
    data = key.encode("utf-8", "surrogatepass")
    best, winner = float("-inf"), candidates[0][0]
    for arm, weight in candidates:
        digest = blake2b(b"%b\0%b\0%b" % (salt.encode(), arm.encode(), data), digest_size=8)
        number = int.from_bytes(digest.digest(), "big") >> (64 - _BITS)
        score = log((number + 0.5) / (1 << _BITS)) / weight
        if score > best:
            best, winner = score, arm
    return winner


def _why_none(weights: Mapping[str, float], excluded: Collection[str]) -> str:
    down = sorted(arm for arm, weight in weights.items() if weight > 0 and arm in excluded)
    idle = sorted(arm for arm, weight in weights.items() if not weight > 0)
    parts = [f"unavailable: {', '.join(down)}"] if down else []
    parts += [f"at weight 0: {', '.join(idle)}"] if idle else []
    return f"no arm can take the request ({'; '.join(parts) or 'there are no arms'})"
