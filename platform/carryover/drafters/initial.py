"""A new drafter for a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.utils import resolve_draft_intermediate_size
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import PretrainedConfig, Qwen3Config

from carryover.drafters.mask_token import find_mask_token
from carryover.drafters.models import DRAFTERS, BlockDrafter
from carryover.drafters.settings import DrafterSettings, resolve_layer_ids
from carryover.drafters.target_weights import borrow_target_weights
from carryover.drafters.warm_start import start_from_target
from carryover.errors import ConfigError
from carryover.targets import Target

# Tensors that say which tokens a drafter proposes, or have a row for each.
_OF_THE_VOCABULARY = ("d2t", "t2d", "lm_head.weight", "verifier_lm_head.weight")
_MARKOV_OUTPUT = "markov_head.markov_w2.weight"


def initialise(
    regime: str,
    target: Target,
    settings: DrafterSettings,
    *,
    token_counts: Mapping[int, int] | None = None,
    seed: int = 0,
    like: BlockDrafter | None = None,
) -> BlockDrafter:
    """Make an untrained drafter, in float32 on CPU.

    Args:
        regime: a key of `DRAFTERS`.
        target: gives the shape, the embedding, the LM head and the final norm.
        settings: the drafter's own shape.
        token_counts: how often each token occurs in the responses; chooses a reduced
            vocabulary, and shows that the mask token is unused.
        seed: of the weights that are random.
        like: a drafter of the same shape, whose weights it takes over, whatever its regime. With
            as many tokens in its vocabulary they stay those; else they are chosen anew. What a
            Markov head lacks then starts as none: its second factor is zero.

    Raises:
        ConfigError: settings that do not fit the target.
        TargetError: the target lacks a weight.
    """
    if regime not in DRAFTERS:
        raise ConfigError(f"unknown drafting regime {regime!r}; known: {', '.join(DRAFTERS)}")
    config = target.load_config()
    mask_token_id = find_mask_token(target.load_tokenizer(), config, settings.mask_token_id)
    if token_counts and token_counts.get(mask_token_id):
        raise ConfigError(
            f"the mask token {mask_token_id} occurs {token_counts[mask_token_id]} times in the "
            "responses; set mask_token_id to a token that never occurs"
        )
    d2t, t2d = _vocabulary(settings, config, token_counts)
    values: dict[str, Any] = {
        "transformer_layer_config": _layer_config(settings, config),
        "draft_vocab_size": config.vocab_size if d2t is None else d2t.shape[0],
        "block_size": settings.proposal_length + 1,
        "aux_hidden_state_layer_ids": resolve_layer_ids(settings, config.num_hidden_layers),
        "mask_token_id": mask_token_id,
        "sample_from_anchor": False,
        # vLLM reads this key for every layer: false would run full attention causally there.
        "sliding_window_non_causal": True,
        "speculators_config": SpeculatorsConfig(
            algorithm="dspark" if regime == "markov" else "dflash",
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=settings.proposal_length)
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=target.path, architectures=[target.identity()["architecture"]]
            ),
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if regime == "markov":
            drafter = DRAFTERS[regime](
                DSparkSpeculatorConfig(
                    **values,
                    markov_rank=_markov_rank(settings, like),
                    markov_head_type="vanilla",
                    enable_confidence_head=False,
                    confidence_head_with_markov=False,
                )
            )
        else:
            drafter = DRAFTERS[regime](DFlashSpeculatorConfig(**values))
    if d2t is not None:
        drafter.load_vocab_mappings(t2d, d2t)
    borrow_target_weights(drafter, target, lm_head=True)
    if like is not None:
        _take_over(drafter, like)
        borrow_target_weights(drafter, target, lm_head=False)
    elif settings.start == "target":
        start_from_target(drafter, target)
    drafter.target_identity = target.identity()
    return drafter


def _markov_rank(settings: DrafterSettings, like: BlockDrafter | None) -> int:
    known = like is not None and like.markov_head is not None
    return like.config.markov_rank if known else settings.markov_rank


def _take_over(drafter: BlockDrafter, like: BlockDrafter) -> None:
    own = drafter.state_dict()
    taken = {name: value for name, value in like.state_dict().items() if name in own}
    if drafter.draft_vocab_size != like.draft_vocab_size:
        for name in (*_OF_THE_VOCABULARY, _MARKOV_OUTPUT):
            taken.pop(name, None)
    misfits = [name for name, value in taken.items() if value.shape != own[name].shape]
    if misfits:
        raise ConfigError(f"the drafter to begin at has another shape: {', '.join(misfits[:4])}")
    drafter.load_state_dict(taken, strict=False)
    if drafter.markov_head is not None and _MARKOV_OUTPUT not in taken:
        _take_over_markov_output(drafter, like)


def _take_over_markov_output(drafter: BlockDrafter, like: BlockDrafter) -> None:
    """Rows of the Markov head's second factor for tokens that both propose, the others zero."""
    output = drafter.markov_head.markov_w2.weight.data.zero_()
    if like.markov_head is None:
        return
    vocabulary_size = drafter.embed_tokens.num_embeddings
    rows = output.new_zeros(vocabulary_size, output.shape[1])
    rows[_proposable(like, vocabulary_size)] = like.markov_head.markov_w2.weight.data
    output.copy_(rows[_proposable(drafter, vocabulary_size)])


def _proposable(drafter: BlockDrafter, vocabulary_size: int) -> torch.Tensor:
    """Tokens of the target's vocabulary that it proposes, in the order of its own: int64."""
    tokens = drafter.draft_to_target
    return torch.arange(vocabulary_size) if tokens is None else tokens


def _layer_config(settings: DrafterSettings, config: PretrainedConfig) -> Qwen3Config:
    """The drafter's decoder: Qwen3 layers (what vLLM serves) in the target's proportions."""
    heads = settings.num_attention_heads or config.num_attention_heads
    key_heads = settings.num_key_value_heads or config.num_key_value_heads
    if heads % key_heads:
        raise ConfigError(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {key_heads}"
        )
    head_dim = (
        settings.head_dim
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    layer_config = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=settings.intermediate_size or resolve_draft_intermediate_size(config),
        num_hidden_layers=settings.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=_rope_parameters(config),
        tie_word_embeddings=False,
        use_sliding_window=False,
        layer_types=["full_attention"] * settings.num_layers,
    )
    # Only speculators' own forward reads it, and its default wants a compiler.
    layer_config._attn_implementation = "eager"
    return layer_config


def _rope_parameters(config: PretrainedConfig) -> dict[str, Any]:
    """The target's RoPE; of targets with one for each layer type, the base of the full layers."""
    parameters = config.rope_parameters
    if "rope_theta" not in parameters:
        parameters = {"rope_theta": parameters["full_attention"]["rope_theta"]}
    kept = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
    return {"rope_type": "default", **kept}


def _vocabulary(
    settings: DrafterSettings, config: PretrainedConfig, token_counts: Mapping[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Draft-to-target offsets and target-to-draft mask of a reduced vocabulary."""
    size = settings.draft_vocab_size
    if size is None or size == config.vocab_size:
        return None, None
    if size > config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {size} exceeds the target's {config.vocab_size} tokens; "
            "lower it, or leave it out to draft over all of them"
        )
    if not token_counts:
        raise ConfigError(
            f"draft_vocab_size {size} needs the token counts of the responses, and none are given"
        )
    return build_vocab_mappings_from_distribution(dict(token_counts), size, config.vocab_size)
