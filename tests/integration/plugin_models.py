"""Tiny targets and drafters for tests of the vLLM plugin, and what its rounds look like.

The drafters are trained for a few seconds on the target's own greedy text, so that rounds accept
some proposals and reject others.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from carryover.drafters.carried import CarriedSettings
from carryover.drafters.checkpoint import initialise, load, save
from carryover.drafters.settings import DrafterSettings
from carryover.targets import Target, resolve
from carryover.testing import tiny_target
from carryover.training.batch import Batch
from carryover.training.step import StepSettings, baseline_step

if TYPE_CHECKING:
    from vllm import LLM

PROPOSAL_LENGTH = 5
# vLLM's CPU attention has kernels for head sizes from 32.
SHAPE = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "num_layers": 4}
# Random weights large enough that greedy text does not repeat one token.
SCALES = {"llama": 8.0, "qwen3": 6.0, "gemma4": 3.0}


def make_target(folder: Path, architecture: str = "llama", **settings: Any) -> Target:
    """A tiny random target whose greedy text is varied."""
    values = {**SHAPE, "scale": SCALES[architecture], **settings}
    return resolve(str(tiny_target(folder, architecture=architecture, **values)))


def random_prompts(
    count: int, *, seed: int = 0, low: int = 4, high: int = 40, vocab_size: int = 300
) -> list[list[int]]:
    """Prompts of ordinary tokens, of random lengths; the first n are the same for any count."""
    prompts = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        length = int(torch.randint(low, high, (), generator=generator))
        prompts.append(torch.randint(10, vocab_size, (length,), generator=generator).tolist())
    return prompts


def greedy(model: Any, prompt: Sequence[int], length: int, *, eos: int | None = None) -> list[int]:
    """The target's own greedy text, without a cache: the plainest truth there is."""
    tokens = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            token = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)
        if token == eos:
            break
    return tokens[len(prompt) :]


def make_drafter(
    target: Target,
    folder: Path,
    regime: str = "dflash",
    *,
    steps: int = 300,
    proposal_length: int = PROPOSAL_LENGTH,
    **settings: Any,
) -> Path:
    """A baseline checkpoint that has learned the greedy text after the first random prompts."""
    torch.manual_seed(0)
    settings = DrafterSettings(
        proposal_length=proposal_length,
        **{"num_layers": 2, "target_layer_ids": (1, 3), **settings},
    )
    batch = _greedy_batch(target, settings.target_layer_ids) if steps else None
    counts = None
    if settings.draft_vocab_size is not None:
        # Without special tokens: random text holds even the one that fills mask slots.
        counts = Counter(t for t in batch.input_ids_T.tolist() if t >= 10)
    drafter = initialise(regime, target, settings, token_counts=counts, seed=0)
    trainable = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    step_settings = StepSettings(num_anchors=128)
    for _ in range(steps):
        loss = baseline_step(drafter, batch, settings=step_settings, generator=generator).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return save(drafter, folder, {"made_by": "a test"})


def add_carryover(baseline: Path, folder: Path, target: Target, *, scale: float = 0.1) -> Path:
    """The same drafter as a Carryover checkpoint, with a random marker."""
    drafter = load(baseline, target)
    drafter.add_carried_context(CarriedSettings())
    generator = torch.Generator().manual_seed(0)
    marker = drafter.carryover_marker
    marker.data.copy_(scale * torch.randn(marker.shape, generator=generator))
    return save(drafter, folder, {"made_by": "a test"})


def start(target: Target, drafter: Path | None = None, **settings: Any) -> LLM:
    """An engine inside this process; the drafter's proposal length unless told otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    speculative = settings.pop("speculative", {})
    values: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        "seed": 0,
        **settings,
    }
    if drafter is not None:
        config = json.loads((drafter / "config.json").read_text())
        values["speculative_config"] = {
            "model": str(drafter), "num_speculative_tokens": config["block_size"] - 1,
            **speculative,
        }  # fmt: skip
    return LLM(target.path, **values)


@contextmanager
def engine(target: Target, drafter: Path | None = None, **settings: Any) -> Iterator[LLM]:
    """An engine that is closed at the end."""
    from carryover.engine import close_engine

    llm = start(target, drafter, **settings)
    try:
        yield llm
    finally:
        close_engine(llm)


def runner_of(llm: LLM) -> Any:
    """The model runner of an engine inside this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: LLM) -> Any:
    """The scheduler of an engine inside this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


@dataclass
class Round:
    """One draft of one request."""

    committed: int
    anchor: int
    proposals: list[int]
    rejected: int
    carried: int
    carried_hidden: torch.Tensor | None


@dataclass
class Recorder:
    """Collects the rounds of an engine's requests, by request id, in order."""

    rounds: dict[str, list[Round]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, step: Any) -> None:
        """Take one draft step of the batch."""
        carried = step.carried
        for row, name in enumerate(step.request_ids):
            if not step.drafting[row]:
                continue
            first, kept = (
                (0, 0) if carried is None else (int(carried.first_R[row]), int(carried.kept_R[row]))
            )
            self.rounds[name].append(
                Round(
                    committed=-1 if carried is None else int(carried.committed_R[row]),
                    anchor=int(step.anchors_R[row]),
                    proposals=step.proposals_RB[row].tolist(),
                    rejected=0 if carried is None else int(carried.rejected_R[row]),
                    carried=kept,
                    carried_hidden=step.context_TH[first : first + kept] if kept else None,
                )
            )

    def in_order(self) -> list[list[Round]]:
        """Rounds of each request, in the order in which requests were made."""
        return [
            self.rounds[name] for name in sorted(self.rounds, key=lambda n: int(n.split("-")[0]))
        ]


@contextmanager
def recording(llm: LLM) -> Iterator[Recorder]:
    """Watch the proposer of an engine inside this process."""
    recorder, drafter = Recorder(), runner_of(llm).drafter
    drafter.observer = recorder
    try:
        yield recorder
    finally:
        drafter.observer = None


def generate(llm: LLM, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Token ids that the engine answers; temperature 0 and 40 tokens unless told otherwise."""
    outputs = complete(llm, prompts, [sampling] * len(prompts))
    return [list(output.outputs[0].token_ids) for output in outputs]


def complete(llm: LLM, prompts: Sequence[Sequence[int]], samplings: Sequence[dict]) -> list[Any]:
    """The engine's outputs, each prompt with its own settings on top of `generate`'s."""
    from vllm import SamplingParams

    defaults = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    parameters = [SamplingParams(**{**defaults, **sampling}) for sampling in samplings]
    return llm.generate(inputs, parameters, use_tqdm=False)


def counter(llm: LLM, name: str) -> Any:
    """Value of one of the engine's counters, or the values of a vector."""
    for metric in llm.get_metrics():
        if metric.name == f"vllm:{name}":
            return metric.values if hasattr(metric, "values") else metric.value
    raise KeyError(name)


def speculative_counters(llm: LLM) -> dict[str, Any]:
    """All of the engine's counters of speculative decoding."""
    return {
        metric.name: metric.values if hasattr(metric, "values") else metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode")
    }


def _greedy_batch(target: Target, layer_ids: Sequence[int]) -> Batch:
    """Prompts with greedy responses, packed, with the target's states."""
    model = target.load_model()
    texts = [(prompt, greedy(model, prompt, 40)) for prompt in random_prompts(16)]
    kept_input: list[torch.Tensor] = []
    norm = model.get_decoder().norm
    handle = norm.register_forward_pre_hook(lambda _, inputs: kept_input.append(inputs[0][0]))
    hidden, ids, positions, documents, responses = [], [], [], [], []
    for number, (prompt, response) in enumerate(texts):
        tokens = torch.tensor(prompt + response)
        with torch.no_grad():
            states = model(tokens[None], output_hidden_states=True).hidden_states
        hidden.append(torch.cat([states[i][0] for i in layer_ids], dim=-1))
        ids.append(tokens)
        positions.append(torch.arange(len(tokens)))
        documents.append(torch.full((len(tokens),), number))
        mask = torch.zeros(len(tokens), dtype=torch.bool)
        mask[len(prompt) :] = True
        responses.append(mask)
    handle.remove()
    return Batch(
        input_ids_T=torch.cat(ids), position_ids_T=torch.cat(positions),
        document_ids_T=torch.cat(documents), response_mask_T=torch.cat(responses),
        hidden_TC=torch.cat(hidden), last_hidden_TD=torch.cat(kept_input),
    )  # fmt: skip
