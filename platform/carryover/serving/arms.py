"""From an arm of the configuration to a `ray.serve.llm` deployment of vLLM."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.serve.llm import LLMConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from carryover.engine import (
    GIB,
    cpu_kv_cache_bytes,
    drafter_config,
    engine_kwargs,
    free_memory,
)
from carryover.errors import ConfigError
from carryover.runtime import engine_environment
from carryover.serving.config import Arm, ServeConfig
from carryover.serving.server import ArmServer
from carryover.targets import Target

# Ray gives the deployment of a model id this name.
DEPLOYMENT_PREFIX = f"{ArmServer.__name__}:"
_HEALTH_CHECK_PERIOD_S = 2.0
_ENVIRONMENT_NAMES = (
    "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD", "KMP_AFFINITY",
    "VLLM_NO_USAGE_STATS", "TOKENIZERS_PARALLELISM",
)  # fmt: skip


class LocalModel(CallbackBase):
    """Skips Ray's download step for a target that is already a folder.

    The step starts one more process per replica, which imports vLLM to find nothing to download.
    """

    async def on_before_node_init(self) -> None:
        """Called by the engine before it would download the model."""
        self.ctx.run_init_node = False


def deployment_name(arm: str) -> str:
    """Name of the arm's deployment in Ray Serve."""
    return DEPLOYMENT_PREFIX + arm


def engine_arguments(config: ServeConfig, arm: Arm, *, target: Target) -> dict[str, Any]:
    """vLLM's engine arguments for one arm.

    Those of two arms differ in the drafter, and in `allowed_differences`.

    Raises:
        ConfigError: a setting that does not fit the target, or that vLLM does not know.
        EnvironmentProblem: too little free memory for the KV cache.
    """
    engine = config.engine_of(arm)
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in engine.extra:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"engine.extra.{name}: vLLM has no such engine argument{hint}")
    speculative = None
    if arm.drafter is not None:
        speculative = drafter_config(arm.drafter, num_speculative_tokens=arm.num_speculative_tokens)
    arguments = engine_kwargs(
        target, engine, speculative=speculative, log_stats=True,
        gpu=config.resources.device == "gpu",
    )  # fmt: skip
    # Ray names the model itself.
    del arguments["model"]
    # Metrics in every response, so that acceptance can be attributed to a request and an arm.
    arguments["enable_per_request_metrics"] = True
    if speculative is not None:
        arguments["per_request_spec_decode_metrics"] = "summary"
    return arguments


def size_kv_cache(config: ServeConfig, *, target: Target) -> ServeConfig:
    """Set the KV cache of CPU engines, so that all arms have the same and together fit.

    Raises:
        EnvironmentProblem: too little free memory for one sequence in every replica.
    """
    if config.resources.device != "cpu" or config.engine.kv_cache_gib is not None:
        return config
    replicas = len(config.arms) * config.resources.replicas
    size = cpu_kv_cache_bytes(
        target.load_config(),
        config.engine,
        dtype="float32" if config.engine.dtype == "auto" else config.engine.dtype,
        free_bytes=free_memory() // replicas,
        speculative=any(arm.drafter is not None for arm in config.arms),
    )
    engine = config.engine.model_copy(update={"kv_cache_gib": size / GIB})
    return config.model_copy(update={"engine": engine})


def llm_config(config: ServeConfig, arm: Arm, *, target: Target) -> LLMConfig:
    """The deployment of one arm: `resources.replicas` replicas of a vLLM engine.

    Args:
        config: after `check_drafters` and `size_kv_cache`, so that nothing is left open.
        arm: one of its arms.
        target: the resolved target.

    Raises:
        ConfigError: an engine setting that vLLM does not know.
    """
    resources = config.resources
    if resources.device == "gpu":
        worker = {"GPU": resources.gpus_per_worker}
    else:
        worker = {"CPU": resources.cpus_per_replica}
    local = {"callback_class": LocalModel} if Path(target.path).is_dir() else {}
    return LLMConfig(
        model_loading_config={"model_id": arm.name, "model_source": target.path},
        engine_kwargs=engine_arguments(config, arm, target=target),
        accelerator_type=resources.accelerator_type,
        placement_group_config={
            "bundles": [worker for _ in range(config.engine_of(arm).tensor_parallel_size)]
        },
        deployment_config={
            "num_replicas": resources.replicas,
            # A dead engine is replaced this soon; meanwhile other arms answer.
            "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
            # The replica itself only forwards; the reservation that counts is the bundle's.
            "ray_actor_options": {"num_cpus": 0.1},
        },
        experimental_configs={"stream_batching_interval_ms": config.http.stream_interval_ms},
        callback_config=local,
        server_cls=ArmServer,
        log_engine_metrics=True,
        runtime_env={"env_vars": worker_environment(log_prompts=config.security.log_prompts)},
    )


def worker_environment(*, log_prompts: bool = False) -> dict[str, str]:
    """Thread and preload settings for Ray's workers, which do not take them from this process."""
    present = {name: os.environ[name] for name in _ENVIRONMENT_NAMES if name in os.environ}
    logs = {"RAYLLM_ENABLE_REQUEST_PROMPT_LOGS": str(int(log_prompts))}
    return present | engine_environment() | logs
