"""Refusing an engine that cannot serve its Carryover checkpoint, before the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from carryover.errors import ServingError
from carryover.targets import tokenizer_sha256
from carryover.vllm_plugin import reading


class UnsupportedEngine(ServingError, ValueError):
    """Engine settings that do not fit the checkpoint; a ValueError, as vLLM's own refusals are."""


def check_engine(vllm_config: Any, *, batch_was_chosen: bool) -> None:
    """Check a whole VllmConfig against the Carryover checkpoint in it, if there is one.

    Args:
        vllm_config: vLLM's configuration of the engine that is about to start.
        batch_was_chosen: whether the caller set max_num_seqs or max_num_batched_tokens. vLLM's
            defaults are left alone: its scheduler then runs fewer requests at once.

    Raises:
        UnsupportedEngine: lists everything that does not fit, each with its fix.
    """
    section = reading.section_of(vllm_config.speculative_config)
    if section is None:
        return
    problems = [
        *_proposal_problems(vllm_config, section),
        *_target_problems(vllm_config, section["target"]),
        *_untried(vllm_config),
    ]
    if batch_was_chosen:
        problems += _batch_problems(vllm_config)
    if problems:
        checkpoint = vllm_config.speculative_config.model
        raise UnsupportedEngine(
            f"cannot serve the Carryover checkpoint {checkpoint}:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def _proposal_problems(vllm_config: Any, section: dict[str, Any]) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    longest = section["block_size"] - 1
    if speculative.num_speculative_tokens > longest:
        yield (
            f"num_speculative_tokens {speculative.num_speculative_tokens} exceeds the "
            f"checkpoint's {longest}; set it to {longest} or less, or train with a larger block"
        )
    if speculative.disable_padded_drafter_batch:
        yield (
            "disable_padded_drafter_batch removes the rejected rows that Carryover carries; "
            "leave it unset"
        )
    layers = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
    depth = vllm_config.model_config.get_total_num_hidden_layers()
    outside = [layer for layer in layers if not 0 <= layer < depth]
    if outside:
        yield (
            f"aux_hidden_state_layer_ids {outside} are out of range: the target has outputs 0 "
            f"(embeddings) to {depth - 1}; train with layers in that range"
        )
    if list(layers) != sorted(set(layers)):
        yield (
            f"aux_hidden_state_layer_ids {list(layers)} are not ascending and distinct, and vLLM "
            "concatenates states in ascending order; train with ascending layers"
        )


def _target_problems(vllm_config: Any, expected: dict[str, Any]) -> Iterator[str]:
    """Differences between the engine's target and the one that the drafter was made for."""
    model = vllm_config.model_config
    text = model.hf_text_config
    found = {
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
    }
    if expected.get("tokenizer_sha256") and model.tokenizer and not model.skip_tokenizer_init:
        found["tokenizer_sha256"] = _tokenizer_sha256(model)
    for key, value in found.items():
        if key in expected and expected[key] != value:
            yield (
                f"the target's {key} is {value!r}, the drafter was made for {expected[key]!r} "
                f"({expected.get('name', 'another target')}); serve that target, or a drafter "
                "made for this one"
            )


def _tokenizer_sha256(model: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision,
        trust_remote_code=model.trust_remote_code,
    )  # fmt: skip
    return tokenizer_sha256(tokenizer)


def _untried(vllm_config: Any) -> Iterator[str]:
    """Combinations that nobody tried, or whose slots the row arithmetic does not describe."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    if vllm_config.lora_config is not None:
        yield "LoRA adapters were not tried with Carryover; unset enable_lora"
    if model.quantization is not None:
        yield (
            f"a quantised target ({model.quantization}) was not tried with Carryover; "
            "serve the unquantised target"
        )
    if draft.quantization is not None:
        yield (
            f"a quantised drafter ({draft.quantization}) was not tried with Carryover; "
            "serve the unquantised checkpoint"
        )
    cache_types = {vllm_config.cache_config.cache_dtype, speculative.kv_cache_dtype or "auto"}
    quantised = sorted(
        str(kind) for kind in cache_types if "fp8" in str(kind) or "int" in str(kind)
    )
    if quantised:
        yield (
            f"a quantised KV cache ({', '.join(quantised)}) was not tried with Carryover; "
            "set kv_cache_dtype to auto"
        )
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism was not tried with Carryover; set pipeline_parallel_size to 1"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield (
            "context parallelism spreads a request's slots over ranks, which carried rows do not "
            "support; set decode_context_parallel_size and prefill_context_parallel_size to 1"
        )
    if speculative.num_speculative_tokens_per_batch_size is not None:
        yield (
            "num_speculative_tokens_per_batch_size was not tried with Carryover; "
            "set num_speculative_tokens alone"
        )
    if speculative.enable_adaptive_verification:
        yield "adaptive verification was not tried with Carryover; unset it"
    if model.uses_mrope or draft.uses_mrope:
        yield "targets with multi-dimensional rotary positions are not supported by DFlash drafting"


def _batch_problems(vllm_config: Any) -> Iterator[str]:
    scheduler = vllm_config.scheduler_config
    length = vllm_config.speculative_config.num_speculative_tokens
    # vLLM's scheduler charges a decoding request for B+1 verified rows and B draft slots.
    rows = 2 * length + 1
    if scheduler.max_num_seqs * rows > scheduler.max_num_batched_tokens:
        fitting = max(1, scheduler.max_num_batched_tokens // rows)
        yield (
            f"max_num_seqs {scheduler.max_num_seqs} with {length} proposals needs "
            f"max_num_batched_tokens {scheduler.max_num_seqs * rows}, got "
            f"{scheduler.max_num_batched_tokens}: requests would wait for their turn to draft; "
            f"set max_num_batched_tokens to {scheduler.max_num_seqs * rows}, or max_num_seqs to "
            f"{fitting}"
        )
