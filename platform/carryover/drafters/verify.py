"""Does a drafter serve: loads it into stock vLLM with its target, and checks every token.

vLLM's text is compared with the target's own greedy choice by teacher forcing: transformers reads
prompt and text once, and each token must be the one with the highest logit. That is the definition
of greedy decoding, costs one forward pass, and shows by how much a token that differs was missed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carryover.drafters import checkpoint
from carryover.errors import CheckpointError, ServingError, TargetError, UserError
from carryover.targets import Target, identity_differences, resolve

if TYPE_CHECKING:
    import torch
    from vllm import LLM

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the larger of two numbers.",
    "Count from one to ten.",
    "Translate into German: The weather is fine today.",
)
MAX_TOKENS = 32
MAX_MODEL_LEN = 512
# Two sums of the same numbers differ by this share of the logits' spread, no more.
_NEAR_TIE = {"torch.float32": 1e-3}
_NEAR_TIE_HALF = 0.05


@dataclass(frozen=True)
class VerifyReport:
    """What serving a drafter for a few tokens came to.

    Attributes:
        num_drafts: rounds of all prompts.
        num_accepted: proposals accepted in them.
        num_carried_rows: rejected states carried; None for a baseline drafter.
        tokens_per_s: output tokens of all prompts together, in one batch.
        near_ties: tokens whose logit is within rounding of the highest one.
        largest_gap: how far below the highest logit a token of the text was at most, in standard
            deviations of its logits; 0 if each was the highest.
    """

    folder: str
    target: str
    engine: str
    kind: str
    regime: str
    proposal_length: int
    num_prompts: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    num_carried_rows: int | None
    tokens_per_s: float
    near_ties: int
    largest_gap: float

    @property
    def acceptance_length(self) -> float:
        """Mean accepted length plus the correction or bonus token."""
        return 1 + self.num_accepted / self.num_drafts

    def __str__(self) -> str:
        ties = f" but for {self.near_ties} near-ties" if self.near_ties else ""
        return (
            f"{self.engine} serves the {self.kind} {self.regime} drafter: {self.num_tokens} tokens "
            f"of {self.num_prompts} prompts are the target's own greedy text{ties}, acceptance "
            f"length {self.acceptance_length:.2f}, {self.tokens_per_s:.1f} tokens/s"
        )


def verify(folder: str | Path, target: Target | None = None) -> VerifyReport:
    """Serve a drafter with its target in this process for a few tokens.

    Args:
        folder: the checkpoint's folder.
        target: default: the one that the checkpoint names.

    Raises:
        CheckpointError: not a checkpoint, made for another target, or refused by vLLM.
        TargetError: the target cannot be found or read.
        ServingError: the text is not the target's greedy text, or nothing was drafted.
    """
    described = checkpoint.describe(folder)
    target = target or resolve(described["target"]["name"])
    _check_target(described, target)
    tokenizer = target.load_tokenizer()
    prompts = [_prompt_ids(tokenizer, text) for text in PROMPTS]
    served = _serve(described, target, prompts)
    gaps = [
        gap
        for prompt, response in zip(prompts, served.responses, strict=True)
        for gap in greedy_gaps(served.reference, prompt, response)
    ]
    tolerance = _NEAR_TIE.get(str(served.dtype), _NEAR_TIE_HALF)
    wrong = [gap for gap in gaps if not gap <= tolerance]
    if wrong:
        raise ServingError(
            f"vLLM's text with the drafter {folder} is not the target's greedy text: "
            f"{len(wrong)} of {len(gaps)} tokens differ, by up to {max(wrong):.3g} standard "
            f"deviations of the logits (rounding explains {tolerance:g}); check the versions with "
            "`platform doctor`, and do not serve it"
        )
    if not served.counters["vllm:spec_decode_num_drafts"]:
        raise ServingError(
            f"vLLM generated {len(gaps)} tokens without drafting once; "
            f"max_model_len {MAX_MODEL_LEN} may leave no room for "
            f"{described['proposal_length']} proposals"
        )
    return VerifyReport(
        folder=str(folder),
        target=target.name,
        engine=served.engine,
        kind=described["kind"],
        regime=described["regime"],
        proposal_length=described["proposal_length"],
        num_prompts=len(prompts),
        num_tokens=len(gaps),
        num_drafts=served.counters["vllm:spec_decode_num_drafts"],
        num_accepted=served.counters["vllm:spec_decode_num_accepted_tokens"],
        num_carried_rows=served.counters.get("vllm:spec_decode_num_carried_rows")
        if described["kind"] == "carryover"
        else None,
        tokens_per_s=len(gaps) / served.wall_s,
        near_ties=sum(gap > 0 for gap in gaps),
        largest_gap=max(gaps),
    )


def greedy_gaps(model: Any, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """How far each response token's logit is below the highest, in standard deviations.

    Args:
        model: a transformers causal LM.
        prompt: token ids.
        response: token ids.

    Returns:
        One number for each response token; 0 where it is the greedy choice.
    """
    import torch

    ids_1T = torch.tensor([[*prompt, *response]], device=model.device)
    with torch.no_grad():
        logits_1TV = model(ids_1T[:, :-1]).logits
    logits_RV = logits_1TV[0, len(prompt) - 1 :].float()
    chosen_R1 = ids_1T[0, len(prompt) :, None]
    gaps_R = (logits_RV.amax(-1) - logits_RV.gather(-1, chosen_R1)[:, 0]) / logits_RV.std(-1)
    return gaps_R.tolist()


@dataclass(frozen=True)
class _Served:
    responses: list[list[int]]
    counters: dict[str, int]
    wall_s: float
    engine: str
    dtype: torch.dtype
    reference: Any


def _serve(described: dict[str, Any], target: Target, prompts: list[list[int]]) -> _Served:
    from carryover.engine import close_engine
    from carryover.runtime import has_gpu

    engine = _start(described, target, num_prompts=len(prompts))
    import vllm

    try:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        engine.generate(requests, sampling, use_tqdm=False)  # compiles and warms up
        engine.reset_prefix_cache()
        before = _counters(engine)
        began = time.perf_counter()
        outputs = engine.generate(requests, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - began
        counters = {name: value - before[name] for name, value in _counters(engine).items()}
        dtype = engine.llm_engine.model_config.dtype
    finally:
        close_engine(engine)
    device = "cuda" if has_gpu() else "cpu"
    return _Served(
        responses=[list(output.outputs[0].token_ids) for output in outputs],
        counters=counters,
        wall_s=wall_s,
        engine=f"vLLM {vllm.__version__} on {device}",
        dtype=dtype,
        reference=target.load_model(dtype=dtype, device=device),
    )


def _start(described: dict[str, Any], target: Target, *, num_prompts: int) -> LLM:
    from carryover.engine import EngineConfig, drafter_config, start_engine

    positions = getattr(target.load_config(), "max_position_embeddings", MAX_MODEL_LEN)
    config = EngineConfig(max_model_len=min(MAX_MODEL_LEN, positions), max_num_seqs=num_prompts)
    speculative = drafter_config(
        described["folder"], num_speculative_tokens=described["proposal_length"]
    )
    try:
        return start_engine(target, config, speculative=speculative, log_stats=True)
    except TargetError as error:
        if isinstance(error.__cause__, UserError):  # the plugin's own words
            raise error.__cause__ from None
        reason = str(error.__cause__ or error)
        raise CheckpointError(
            f"vLLM refuses the drafter {described['folder']}: {reason}"
        ) from error


def _counters(engine: LLM) -> dict[str, int]:
    return {
        metric.name: metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


def _check_target(described: dict[str, Any], target: Target) -> None:
    identity = target.identity()
    expected = {
        "hidden_size": described["hidden_size"],
        "vocab_size": described["target_vocab_size"],
        **described["target"],
    }
    differences = identity_differences(expected, identity)
    if differences:
        raise CheckpointError(
            f"{described['folder']} was not made for the target {target.name!r}:\n  "
            + "\n  ".join(differences)
            + "\ngive the drafter's own target with --target"
        )


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer(text).input_ids
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_dict=True
    ).input_ids
