"""One vLLM engine in this process's care, with settings that work on CPU and GPU alike.

On CPU the engine runs inside the calling process: starting takes half as long as with vLLM's two
child processes, and nothing is left behind when the process dies. On GPU vLLM's own engine process
is kept, which overlaps scheduling with computing.

Start the process with `carryover.runtime.engine_environment()` (commands do so through the
guardian): thread counts and preloaded libraries cannot be changed later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from carryover.config import Config
from carryover.errors import CheckpointError, ConfigError, EnvironmentProblem, TargetError
from carryover.runtime import has_gpu

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm import LLM

    from carryover.targets import Target

GIB = 2**30
# vLLM's CPU cache blocks; a sequence occupies whole blocks.
_CPU_BLOCK_TOKENS = 128
_CPU_MEMORY_SHARE = 0.5
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EngineConfig(Config):
    """Settings of a vLLM engine; null means: what suits the device."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: float32 on CPU (bfloat16 is slow without AMX), the checkpoint's on GPU",
    )
    max_model_len: int = Field(1024, ge=16, description="prompt and response together, in tokens")
    max_num_seqs: int = Field(96, ge=1, description="requests decoded together")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="null on CPU: what the sequences need, within half the free memory"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs of one engine")
    enforce_eager: bool | None = Field(None, description="null: true on CPU, false on GPU")
    seed: int = Field(0, ge=0, description="of the engine; requests carry none (CPU cannot)")
    extra: dict[str, Any] = Field(
        default_factory=dict, description="further vLLM engine arguments, passed as they are"
    )


class PoolConfig(Config):
    """How many engines run, and on what."""

    engines: int = Field(1, ge=1, description="Ray actors with one engine each")
    cpus_per_engine: float | None = Field(
        None, gt=0, description="null: the machine's cores shared out on CPU, 1 on GPU"
    )
    ray_address: str | None = Field(
        None, description="of a running cluster; null: $RAY_ADDRESS, or one for this command"
    )


def engine_kwargs(
    target: Target,
    config: EngineConfig | None = None,
    *,
    speculative: Mapping[str, Any] | None = None,
    log_stats: bool = False,
    gpu: bool | None = None,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` or `vllm.AsyncEngineArgs`.

    Args:
        target: the model to serve.
        config: defaults if None.
        speculative: vLLM's `speculative_config`, as `drafter_config` gives it; None decodes
            autoregressively.
        log_stats: keep counters, so that `LLM.get_metrics()` works.
        gpu: whether the engine will run on a GPU; None: if this machine has one.

    Raises:
        ConfigError: `max_model_len` is more than the target's positions, or `extra` repeats a key.
        EnvironmentProblem: too little free memory for the KV cache.
    """
    config = config or EngineConfig()
    shape = target.load_config()
    longest = getattr(shape, "max_position_embeddings", None)
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the {longest} positions of target "
            f"{target.name!r}; set max_model_len to at most {longest}"
        )
    gpu = has_gpu() if gpu is None else gpu
    kwargs: dict[str, Any] = {
        "model": target.path,
        "dtype": "float32" if config.dtype == "auto" and not gpu else config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": not gpu if config.enforce_eager is None else config.enforce_eager,
        "seed": config.seed,
        "disable_log_stats": not log_stats,
    }
    if gpu:
        kwargs["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.tensor_parallel_size > 1:
        # Inside a Ray actor vLLM would choose Ray, whose placement the actor already decided.
        kwargs["distributed_executor_backend"] = "mp"
    if config.kv_cache_gib is not None:
        kwargs["kv_cache_memory_bytes"] = int(config.kv_cache_gib * GIB)
    elif not gpu:
        kwargs["kv_cache_memory_bytes"] = cpu_kv_cache_bytes(
            shape,
            config,
            dtype=kwargs["dtype"],
            free_bytes=free_memory(),
            speculative=bool(speculative),
        )
    if speculative is not None:
        kwargs["speculative_config"] = dict(speculative)
    repeated = sorted(kwargs.keys() & config.extra.keys())
    if repeated:
        raise ConfigError(
            f"engine.extra repeats {', '.join(repeated)}; set the engine key of that name instead"
        )
    return {**kwargs, **config.extra}


def drafter_config(folder: str | Path, *, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter checkpoint, the drafting method always named.

    Without it stock vLLM 0.32 guesses the method from the folder's *name*, and loads a DFlash
    drafter whose path does not say so as a plain draft model, which then accepts nothing.

    Args:
        folder: checkpoint in speculators' format.
        num_speculative_tokens: proposal length.

    Raises:
        CheckpointError: the folder's config.json names no method.
    """
    folder = Path(folder).expanduser().resolve()
    try:
        method = json.loads((folder / "config.json").read_text())["speculators_model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{folder} is no drafter checkpoint: its config.json is missing or names no "
            "speculators_model_type; give a folder in speculators' format"
        ) from None
    return {
        "model": str(folder),
        "method": method,
        "num_speculative_tokens": num_speculative_tokens,
    }


def start_engine(
    target: Target,
    config: EngineConfig | None = None,
    *,
    speculative: Mapping[str, Any] | None = None,
    log_stats: bool = False,
) -> LLM:
    """Start an engine (the embedded target on 2 cores: about half a minute).

    Arguments and errors are those of `engine_kwargs`; further:

    Raises:
        TargetError: vLLM refuses the target or the settings.
    """
    kwargs = engine_kwargs(target, config, speculative=speculative, log_stats=log_stats)
    quiet_vllm()
    if not has_gpu():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    try:
        return LLM(**kwargs)
    except (ValueError, TypeError) as error:
        raise TargetError(f"vLLM cannot start target {target.name!r}: {error}") from error


def close_engine(engine: LLM) -> None:
    """Stop an engine and free what it holds, child processes included."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory(shutdown_ray=False)
    gc.collect()


def quiet_vllm() -> None:
    """Leave only vLLM's warnings, unless the user chose a level; call before importing vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def cpu_kv_cache_bytes(
    shape: PretrainedConfig,
    config: EngineConfig,
    *,
    dtype: str,
    free_bytes: int,
    speculative: bool = False,
) -> int:
    """Size of the CPU engine's KV cache: what full sequences need, bounded by free memory.

    Args:
        shape: text config of the target.
        config: gives the number and length of sequences.
        dtype: of the cache.
        free_bytes: memory available now.
        speculative: keep a quarter more, for the drafter's own layers.

    Raises:
        EnvironmentProblem: not even one full sequence fits.
    """
    per_sequence = -(-config.max_model_len // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    per_sequence *= kv_bytes_per_token(shape, dtype=dtype)
    if speculative:
        per_sequence += per_sequence // 4
    budget = int(free_bytes * _CPU_MEMORY_SHARE)
    # One sequence more than can run, since vLLM keeps one block for itself.
    needed = per_sequence * (config.max_num_seqs + 1)
    if budget < 2 * per_sequence:
        raise EnvironmentProblem(
            f"a sequence of {config.max_model_len} tokens needs {2 * per_sequence / GIB:.2f} GiB "
            f"of KV cache, and half of the free memory is {budget / GIB:.2f} GiB; "
            "free some memory or lower max_model_len"
        )
    return min(needed, budget)


def kv_bytes_per_token(shape: PretrainedConfig, *, dtype: str) -> int:
    """Bytes that one token takes in the KV cache over all layers (an upper bound where layers
    share a cache or slide)."""
    return kv_numbers_per_token(shape) * _DTYPE_BYTES[dtype]


def kv_numbers_per_token(shape: PretrainedConfig) -> int:
    """How many numbers the keys and values of one token are, over all layers."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * heads * head_dim


def free_memory() -> int:
    """Bytes that can be allocated: the machine's, or the container's if that is less."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
