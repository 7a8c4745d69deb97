"""The Ray Serve application of a configuration: one deployment per arm behind one ingress."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from ray.serve import Application
from ray.serve.llm import LLMServingArgs, build_openai_app

from carryover.serving.arms import llm_config, size_kv_cache
from carryover.serving.config import Arm, ServeConfig, check_drafters, check_target
from carryover.serving.ingress import ArmIngress
from carryover.targets import Target, resolve
from carryover.vllm_plugin.install import version_is_tried


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
    arguments = LLMServingArgs(
        llm_configs=[llm_config(config, arm, target=target) for arm in config.arms],
        ingress_cls_config={
            "ingress_cls": ArmIngress,
            "ingress_extra_kwargs": {
                "model": config.model,
                "control": config.control.name,
                "seeds": config.resources.device != "cpu" or plugin_is_active(),
                "described": {arm.name: describe(config, arm) for arm in config.arms},
            },
        },
        ingress_deployment_config={
            "num_replicas": 1,
            "ray_actor_options": {"num_cpus": 0.1},
        },
    )
    return build_openai_app(arguments)


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
    return {
        "model": config.model,
        "target": config.target,
        "control": arm.name == config.control.name,
        "drafter": None if arm.drafter is None else str(arm.drafter),
        "num_speculative_tokens": arm.num_speculative_tokens,
        "engine": config.engine.model_dump(mode="json"),
    }
