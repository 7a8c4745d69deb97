"""The Ray Serve application of a configuration.

One deployment of vLLM per arm, the ingress in front of them, and one controller that owns the
split between them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.serve import Application
from ray.serve.llm import build_llm_deployment

from carryover.serving import controller_deployment
from carryover.serving.arms import llm_config, size_kv_cache
from carryover.serving.config import (
    Arm,
    ServeConfig,
    check_drafters,
    check_target,
    engine_differences,
    engine_setting,
)
from carryover.serving.ingress import ArmIngress
from carryover.serving.settings import FrontSettings
from carryover.serving.web import with_routes
from carryover.targets import Target, resolve
from carryover.vllm_plugin.install import version_is_tried

# The ingress sheds load itself, with an answer that says so; Serve's queue must never fill first.
_NO_LIMIT = 1_000_000
# What an experiment is about: when one of these changes, statistics begin anew.
_IDENTITY = ("target", "drafter", "num_speculative_tokens", "own_settings")


def build_application(config: ServeConfig, *, target: Target | None = None) -> Application:
    """Build the application; nothing is started.

    Args:
        config: of the application.
        target: the resolved target; None resolves `config.target`.

    Raises:
        ConfigError: a drafter is missing or does not fit, or vLLM does not know a setting.
        TargetError: the target cannot be had.
        EnvironmentProblem: too little memory for the KV caches.
    """
    target = target or resolve(config.target)
    config = check_drafters(config)
    check_target(config, target)
    config = size_kv_cache(config, target=target)
    described = {arm.name: describe(config, arm) for arm in config.arms}
    models = {arm.name: llm_config(config, arm, target=target) for arm in config.arms}
    return bind_front(
        config,
        arms={name: build_llm_deployment(model) for name, model in models.items()},
        cards={name: to_model_metadata(name, model) for name, model in models.items()},
        described=described,
    )


def bind_front(
    config: ServeConfig,
    *,
    arms: Mapping[str, Application],
    cards: Mapping[str, Any],
    described: Mapping[str, dict[str, Any]],
) -> Application:
    """Put the ingress and the controller in front of the arms' deployments.

    Args:
        config: of the application.
        arms: deployment of each arm, bound.
        cards: what `/v1/models` tells about each, in OpenAI's form.
        described: by arm, what goes into a card's metadata.
    """
    names = [arm.name for arm in config.arms]
    traffic = config.traffic.resolve(arms=names, application=config.name)
    settings = FrontSettings(
        model=config.model,
        control=config.control.name,
        traffic=traffic,
        ingress=config.ingress,
        keys=config.security.keys,
        admin_keys=config.security.admin_keys,
        seeds=config.resources.device != "cpu" or plugin_is_active(),
        replicas=config.resources.replicas,
        described=dict(described),
    )
    front = serve.deployment(
        with_routes(ArmIngress, allowed_origins=config.ingress.allowed_origins),
        num_replicas=config.ingress.replicas,
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options={"num_cpus": 0.1},
        # Weights in Serve's own `user_config` are taken over live.
        user_config={},
    )
    return front.bind(
        llm_deployments=dict(arms),
        model_cards=dict(cards),
        settings=settings,
        controller=controller_deployment.deployment(
            traffic,
            arms=names,
            described={
                name: {key: described[name].get(key) for key in _IDENTITY} for name in names
            },
        ),
    )


def plugin_is_active() -> bool:
    """Whether engines load our vLLM plugin, which makes per-request seeds safe on CPU."""
    chosen = os.environ.get("VLLM_PLUGINS")
    ours = {
        entry.name
        for entry in entry_points(group="vllm.general_plugins")
        if entry.value.startswith("carryover.")
    }
    named = ours if chosen is None else ours & set(chosen.split(","))
    return bool(named) and version_is_tried()


def describe(config: ServeConfig, arm: Arm) -> dict[str, Any]:
    """What `/v1/models` tells about an arm, so that a bench can see what it compares."""
    engine = config.engine_of(arm)
    differences = sorted(engine_differences(config.engine, engine))
    return {
        "model": config.model,
        "target": config.target,
        "control": arm.name == config.control.name,
        "drafter": None if arm.drafter is None else str(arm.drafter),
        "num_speculative_tokens": arm.num_speculative_tokens,
        "engine": engine.model_dump(mode="json"),
        "allowed_differences": list(config.allowed_differences),
        "differences": differences,
        "own_settings": {name: engine_setting(engine, name) for name in differences},
    }
