"""Arms with requests as the guard's tests need them."""

from dataclasses import replace

import numpy as np
from guard_simulation import RATE

from carryover.serving.observations import ArmStatistics, Observation, split_name

T0 = 1.8e9
EVEN = split_name({"baseline": 1, "carryover": 1})


def arm_pair(number, *, tpot=1.0, ttft=1.0, lift=1.0, failures=(0.02, 0.02), seed=0, **changes):
    """Two arms that share `number` requests, the treatment's times and acceptance scaled."""
    rng = np.random.default_rng(seed)
    arms = ArmStatistics("baseline"), ArmStatistics("carryover")
    for index in range(number):
        which = int(rng.random() < 0.5)
        name, rounds = arms[which].arm, int(rng.geometric(1 / 30))
        mean = 3.3 * (lift if which else 1.0)
        seen = Observation(
            T0 + index / RATE, name, name, "weighted", EVEN,
            "error" if rng.random() < failures[which] else "ok",
            ttft_s=float(rng.lognormal(-2, 0.6)) * (ttft if which else 1.0),
            tpot_s=float(rng.lognormal(-4, 0.25)) * (tpot if which else 1.0),
            e2e_s=float(rng.lognormal(0, 0.6)), output_tokens=100,
            rounds=rounds, accepted=int(rng.negative_binomial(rounds, 1 / (1 + mean))),
        )  # fmt: skip
        arms[which].add(replace(seen, **changes))
    return arms
