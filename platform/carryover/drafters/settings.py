"""Shape of a drafter: what a training configuration sets, and what it takes from the target."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from carryover.config import Config
from carryover.errors import ConfigError


class DrafterSettings(Config):
    """A new drafter. What is not given is taken from the target."""

    num_layers: int = Field(default=3, ge=1, description="decoder layers of the drafter (paper: 5)")
    proposal_length: int = Field(
        default=7, ge=1, description="tokens proposed per round, B (paper: 15)"
    )
    target_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="target states that the drafter reads: i is hidden_states[i] of transformers "
        "(0: embeddings); default: one per drafter layer, spread evenly",
    )
    draft_vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="propose only the most frequent tokens of the responses; default: all tokens",
    )
    mask_token_id: int | None = Field(
        default=None, ge=0, description="unused token that fills mask slots; default: found"
    )
    markov_rank: int = Field(default=256, ge=1, description="rank of the Markov head")
    start: Literal["target", "random"] = Field(
        default="target",
        description="initial layers: copies of the target's last ones where their shapes agree "
        "(Llama, Mistral, Qwen3; random elsewhere, and the log says so), or random",
    )
    intermediate_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)


def resolve_layer_ids(settings: DrafterSettings, num_target_layers: int) -> list[int]:
    """Target layer ids of a new drafter.

    The default spreads `num_layers` ids evenly over `2 .. N-2`, as DFlash does.

    Raises:
        ConfigError: ids out of range, repeated or not ascending.
    """
    if settings.target_layer_ids is None:
        low = min(2, num_target_layers - 1)
        high = max(num_target_layers - 2, low)
        count = min(settings.num_layers, high - low + 1)
        step = (high - low) / max(count - 1, 1)
        return [round(low + index * step) for index in range(count)]
    ids = list(settings.target_layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise ConfigError(
            f"target_layer_ids must be ascending, distinct and within 0..{num_target_layers - 1} "
            f"for a target with {num_target_layers} layers, got {ids}; id i is hidden_states[i]"
        )
    return ids
