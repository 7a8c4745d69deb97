"""The application of test_serving_front.py, as Ray Serve's own tools build it."""

from faulty_engine import FaultyServer
from ray import serve

from carryover.bench.ingress import card
from carryover.serving.application import bind_front
from carryover.serving.config import ServeConfig


def build(args: ServeConfig):
    """Our front before arms without a model."""
    names = [arm.name for arm in args.arms]
    arms = {
        name: serve.deployment(
            FaultyServer, name=f"FaultyServer:{name}", max_ongoing_requests=10_000,
            health_check_period_s=1, ray_actor_options={"num_cpus": 0.1},
        ).bind(name)
        for name in names
    }  # fmt: skip
    return bind_front(
        args, arms=arms, cards={name: card(name) for name in names},
        described={name: {} for name in names},
    )  # fmt: skip
