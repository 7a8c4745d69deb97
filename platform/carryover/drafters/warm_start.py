"""Start a drafter from the last layers of its target, where their shapes agree.

With `fc` passing on the last selected state and `hidden_norm` at one, a copied layer computes the
keys and values of committed states as the target's own layer nearly does. A random drafter must
first outgrow the embedding of the mask token, which fills its residual stream and, through the
tied LM head, predicts itself.

Measured on the embedded target (3 layers, B = 7, 8,192 draft tokens, 32 anchors a step, KL on
held-out responses): 26.3 random against 5.8 copied before training, 3.28 against 2.74 after 60
steps; copied is at 3.04 after 30.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

from carryover.drafters.models import BlockDrafter
from carryover.drafters.target_weights import read_tensors
from carryover.targets import Target

# Decoders of the drafter's own make: two norms a layer, a SiLU-gated MLP, no biases.
_LIKE_THE_DRAFTER = ("llama", "mistral", "qwen3")
_HEADS = ("q_proj", "k_proj", "v_proj")
_GATES = ("gate_proj", "up_proj")

logger = logging.getLogger(__name__)


def start_from_target(drafter: BlockDrafter, target: Target) -> bool:
    """Copy the target's last layers into the drafter, in place.

    Args:
        drafter: untrained.
        target: its target.

    Returns:
        Whether the layers fit; if not, the drafter is as it was.
    """
    config, layers = target.load_config(), len(drafter.layers)
    reason = _misfit(drafter, config)
    if reason is not None:
        logger.info("the drafter starts from random weights: %s", reason)
        return False
    first = config.num_hidden_layers - layers
    norms = ("q_norm", "k_norm") if config.model_type == "qwen3" else ()
    names = {
        (index, name): f".layers.{first + index}.{name}.weight"
        for index in range(layers)
        for name in (
            "input_layernorm", "post_attention_layernorm", "mlp.down_proj", "self_attn.o_proj",
            *(f"mlp.{gate}" for gate in _GATES),
            *(f"self_attn.{head}" for head in (*_HEADS, *norms)),
        )
    }  # fmt: skip
    found = read_tensors(list(names.values()), target)
    with torch.no_grad():
        for index in range(layers):
            _copy_layer(
                drafter.layers[index],
                {name: found[full].float() for (at, name), full in names.items() if at == index},
            )
        hidden = drafter.hidden_size
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:].fill_diagonal_(1.0)
    logger.info("the drafter starts from the target's layers %d to %d", first, first + layers - 1)
    return True


def _misfit(drafter: BlockDrafter, config: PretrainedConfig) -> str | None:
    """Why the target's layers cannot be copied; None if they can."""
    if config.model_type not in _LIKE_THE_DRAFTER:
        return f"layers of {config.model_type} differ in kind from the drafter's"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "the target's layers have biases"
    own = drafter.config.transformer_layer_config
    if own.num_hidden_layers > config.num_hidden_layers:
        return "the drafter has more layers than the target"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theirs = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
    }
    different = [name for name, value in theirs.items() if getattr(own, name) != value]
    return f"{', '.join(different)} differ from the target's" if different else None


def _copy_layer(layer: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy one layer; its norms' gains go into the projections behind them.

    So committed states, which come through `hidden_norm` alone, are projected with the same gain.
    """
    attention, mlp = layer.self_attn, layer.mlp
    for name in _HEADS:
        weight = tensors[f"self_attn.{name}"] * tensors["input_layernorm"]
        getattr(attention, name).weight.copy_(weight)
    attention.o_proj.weight.copy_(tensors["self_attn.o_proj"])
    for name in _GATES:
        getattr(mlp, name).weight.copy_(
            tensors[f"mlp.{name}"] * tensors["post_attention_layernorm"]
        )
    mlp.down_proj.weight.copy_(tensors["mlp.down_proj"])
    for projection, norm in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
        gain = tensors.get(f"self_attn.{norm}")
        if gain is None:
            # Targets without this norm: the size that a head's entries have on average, and not
            # less than a fresh norm's, with which attention can still learn to be sharp.
            gain = getattr(attention, projection).weight.square().sum(1).mean().sqrt().clamp(min=1)
        getattr(attention, norm).weight.copy_(gain)
