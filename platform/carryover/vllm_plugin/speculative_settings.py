"""Completing vLLM's speculative settings from what a checkpoint says about itself.

Two things that stock vLLM 0.32 does not do when `speculative_config` names a Carryover
checkpoint: it guesses the method from the folder's name, and it knows the Markov head on its V2
runner only. On V1 a Markov checkpoint runs as method `dflash`, which it is but for the picking of
tokens, and the proposer adds that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carryover.vllm_plugin import reading
from carryover.vllm_plugin.reading import ARCHITECTURES, SECTION


def complete(engine_arguments: Any) -> None:
    """Set method and proposal length of an EngineArgs where the checkpoint decides them.

    Nothing changes for a checkpoint that stock vLLM serves on the runner in use.
    """
    settings = dict(engine_arguments.speculative_config or {})
    model = engine_arguments.spec_model or settings.get("model")
    method = engine_arguments.spec_method or settings.get("method")
    if not isinstance(model, str) or method not in (None, *ARCHITECTURES):
        return
    config = _read(model, settings.get("revision"))
    algorithm = config.get("speculators_model_type")
    if algorithm not in ARCHITECTURES or (method or algorithm) != algorithm:
        return
    carries = SECTION in config
    on_v1 = algorithm == "dspark" and reading.fills_in(config) and uses_v1_runner()
    if not carries and not on_v1:
        return
    wanted = "dflash" if on_v1 else algorithm
    if engine_arguments.spec_method is not None:
        engine_arguments.spec_method = wanted
    else:
        settings["method"] = wanted
    given = engine_arguments.spec_tokens or settings.get("num_speculative_tokens")
    if given is None:
        settings["num_speculative_tokens"] = config["block_size"] - 1
    engine_arguments.speculative_config = settings


def uses_v1_runner() -> bool:
    """Whether an engine with a DFlash or Markov drafter would run on vLLM's V1 model runner."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    return not HAS_TRITON if chosen is None else not chosen


def _read(model: str, revision: str | None) -> Mapping[str, Any]:
    """The drafter's config.json; empty where vLLM itself should say that there is none."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model, revision=revision)[0]
    except (OSError, ValueError):
        return {}
