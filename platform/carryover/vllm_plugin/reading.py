"""How vLLM reads the `carryover` section of a checkpoint's config.json.

vLLM keeps one reader per speculators algorithm in a registry; ours run the stock reader, and add
to its result only where the section exists. What they add travels to every vLLM process inside
the drafter's `hf_config`, and is the only thing that anything in this package dispatches on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from carryover.errors import CheckpointError
from carryover.vllm_plugin.install import refuse_untried_version

SECTION = "carryover"
FORMAT_VERSIONS = (1,)
# What is carried, and how it is marked; the rest of the interface ablation is not served.
SERVED = {"carried": ("hidden_states",), "mark": ("embedding", "none")}
# vLLM takes the first architecture it knows; the stock name stays behind ours because vLLM's
# configuration code looks for it.
ARCHITECTURES = {"dflash": "CarryoverDFlashModel", "dspark": "CarryoverMarkovModel"}
MODEL_CLASSES = {
    "CarryoverDFlashModel": "carryover.vllm_plugin.model:CarryoverDFlashForCausalLM",
    "CarryoverMarkovModel": "carryover.vllm_plugin.model:CarryoverMarkovForCausalLM",
}


class UnsupportedCheckpoint(CheckpointError, ValueError):
    """A Carryover checkpoint that vLLM cannot serve; a ValueError, as vLLM's own refusals are."""


def register_readers() -> None:
    """Put our readers before vLLM's own for the algorithms that Carryover extends."""
    from vllm.transformers_utils.configs.speculators.algos import (
        SUPPORTED_SPECULATORS_TYPES,
        register_speculator,
    )

    for algorithm in ARCHITECTURES:
        stock = SUPPORTED_SPECULATORS_TYPES[algorithm]
        if not hasattr(stock, "stock_reader"):
            register_speculator(algorithm)(_reader(algorithm, stock))


def section_of(speculative_config: Any) -> dict[str, Any] | None:
    """The checkpoint's `carryover` section, or None if this engine serves something else.

    Args:
        speculative_config: vLLM's SpeculativeConfig, or None for an engine without speculation.
    """
    draft = getattr(speculative_config, "draft_model_config", None)
    return getattr(getattr(draft, "hf_config", None), SECTION, None)


def is_markov(speculative_config: Any) -> bool:
    """Whether the drafter is a speculators checkpoint with a first-order correction head."""
    draft = getattr(speculative_config, "draft_model_config", None)
    config = getattr(draft, "hf_config", None)
    architectures = getattr(config, "architectures", None) or []
    return "Qwen3DSparkModel" in architectures and hasattr(config, "sample_from_anchor")


def fills_in(config: Mapping[str, Any]) -> bool:
    """Whether a DSpark config describes the block that Carryover uses: anchor, then masks.

    Args:
        config: the checkpoint's config.json.
    """
    return not config.get("sample_from_anchor", False) and (
        config.get("markov_head_type", "vanilla") == "vanilla"
    )


def _reader(algorithm: str, stock: Callable[..., None]) -> Callable[..., None]:
    def read(config_dict: dict, pre_trained_config: dict) -> None:
        stock(config_dict=config_dict, pre_trained_config=pre_trained_config)
        section = config_dict.get(SECTION)
        if section is None:
            return
        refuse_untried_version()
        _check(section, config_dict)
        pre_trained_config[SECTION] = {**section, "block_size": config_dict["block_size"]}
        pre_trained_config["architectures"] = [
            ARCHITECTURES[algorithm], *pre_trained_config["architectures"],
        ]  # fmt: skip

    read.stock_reader = stock
    return read


def _check(section: Any, config: Mapping[str, Any]) -> None:
    """Refuse what this plugin does not implement.

    Raises:
        UnsupportedCheckpoint: says what was found and what to do.
    """
    if not isinstance(section, Mapping):
        raise UnsupportedCheckpoint(
            f"config.json: {SECTION!r} must be a mapping, got {type(section).__name__}; "
            "save the checkpoint again"
        )
    version = section.get("format_version")
    if version not in FORMAT_VERSIONS:
        raise UnsupportedCheckpoint(
            f"config.json: {SECTION}.format_version is {version!r}, this plugin reads "
            f"{', '.join(map(str, FORMAT_VERSIONS))}; install the release that wrote it"
        )
    for key, served in SERVED.items():
        if section.get(key) not in served:
            raise UnsupportedCheckpoint(
                f"config.json: {SECTION}.{key} is {section.get(key)!r}, vLLM serves "
                f"{' or '.join(map(repr, served))} only; other interfaces run in the reference "
                "decoder"
            )
    if not isinstance(section.get("target"), Mapping):
        raise UnsupportedCheckpoint(
            f"config.json: {SECTION}.target, the identity of the target, is missing; "
            "save the checkpoint again"
        )
    if not fills_in(config):
        raise UnsupportedCheckpoint(
            "config.json: Carryover needs sample_from_anchor false and markov_head_type "
            f"'vanilla', got {config.get('sample_from_anchor')!r} and "
            f"{config.get('markov_head_type', 'vanilla')!r}; train with these settings"
        )
    layers = config["transformer_layer_config"]
    if "sliding_attention" in (layers.get("layer_types") or []):
        raise UnsupportedCheckpoint(
            "config.json: the drafter has sliding-window layers; carried rows sit past the "
            "committed ones, so a window would drop committed rows: train with full attention"
        )
    if config.get("speculators_model_type") == "dflash" and not config.get(
        "sliding_window_non_causal", True
    ):
        raise UnsupportedCheckpoint(
            "config.json: sliding_window_non_causal is false, and vLLM then runs the drafter "
            "causally, though speculators trains full attention bidirectionally; set it to true"
        )
