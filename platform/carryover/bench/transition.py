"""Draft-verify-draft over all anchors at once, against one anchor after another.

    python -m carryover.bench.transition --json

Three ratios, on the embedded target and CPU, from one run:

- `parallel_over_sequential`: anchors/s of the parallel procedure over those of a rollout that
  takes the anchors one by one and keeps what a decoder keeps: the target's keys and values, and
  the drafter's of the committed states. Both run draft 1, verification and draft 2, each from the
  token ids on, and their results are compared.
- `carryover_over_control`: time of a whole training step (backward included) with carried context
  over one with `carry=False`.
- `memory_growth`: peak memory of a carryover step above what was resident before it, with twice
  the anchors over that with the anchors given; each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from carryover.bench.memory import reset_peak, status_bytes


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the ratios."""
    options = _parser().parse_args(arguments)
    if options.peak_of:
        print(json.dumps(_peak(options)))
        return
    drafter, model, batch = _inputs(options)
    report = {
        **_transition(drafter, model, batch, options),
        **_control(drafter, model, batch, options),
        **_memory(sys.argv[1:] if arguments is None else arguments, options),
        "options": {name: value for name, value in vars(options).items() if name != "peak_of"},
    }
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        if name != "options":
            print(f"{name:36} {value:10.3f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.transition")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--regime", choices=("dflash", "markov"), default="dflash")
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="length of the sequence")
    parser.add_argument("--proposal-length", type=int, default=7)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="repeats; the fastest counts")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    return parser


def _inputs(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """An untrained Carryover drafter, the target, and a random sequence without states."""
    from carryover.drafters.carried import CarriedSettings
    from carryover.drafters.initial import initialise
    from carryover.drafters.settings import DrafterSettings
    from carryover.targets import resolve
    from carryover.training.batch import Batch

    torch.manual_seed(0)
    target = resolve(options.target)
    settings = DrafterSettings(num_layers=options.layers, proposal_length=options.proposal_length)
    drafter = initialise(options.regime, target, settings)
    drafter.add_carried_context(CarriedSettings())
    tokens = options.tokens
    batch = Batch(
        input_ids_T=torch.randint(100, drafter.verifier_vocab_size, (tokens,)),
        position_ids_T=torch.arange(tokens),
        document_ids_T=torch.zeros(tokens, dtype=torch.long),
        response_mask_T=torch.arange(tokens) >= tokens // 8,
        hidden_TC=torch.empty(0),
        last_hidden_TD=None,
    )
    return drafter, target.load_model(dtype=torch.float32), batch


def _transition(
    drafter: Any, model: Any, batch: Any, options: argparse.Namespace
) -> dict[str, float]:
    from carryover.training.anchors import draw_anchors

    generator = torch.Generator().manual_seed(0)
    anchors_A = draw_anchors(batch, options.anchors, generator=generator)
    parallel, in_parallel = _fastest(
        lambda: _parallel(drafter, model, batch, anchors_A), options.steps
    )
    sequential, one_by_one = _fastest(
        lambda: _sequential(drafter, model, batch, anchors_A), options.steps
    )
    same = [
        (mine == other).float().mean().item()
        for mine, other in zip(in_parallel, one_by_one, strict=True)
    ]
    return {
        "parallel_over_sequential": sequential / parallel,
        "parallel_anchors_per_s": len(anchors_A) / parallel,
        "sequential_anchors_per_s": len(anchors_A) / sequential,
        "agreement_draft_1": same[0],
        "agreement_draft_2": same[1],
    }


@torch.no_grad()
def _parallel(
    drafter: Any, model: Any, batch: Any, anchors_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Proposals of both drafts, [A, B] each."""
    from dataclasses import replace

    from carryover.drafters.carried import carry
    from carryover.drafters.drafting import draft
    from carryover.training.anchors import anchored_blocks
    from carryover.training.step import recorded_acceptance
    from carryover.training.verification import verify

    batch = _with_states(drafter, model, batch)
    blocks = anchored_blocks(batch, anchors_A)
    first_AB = draft(drafter, batch.context, blocks)
    accepted_A = recorded_acceptance(batch, anchors_A, first_AB)
    states = verify(
        model,
        prefix=batch.prefix,
        blocks=blocks,
        tokens_AB=first_AB,
        layer_ids=drafter.target_layer_ids,
    )
    fields = carry(
        drafter.carried_settings,
        hidden_ABC=states.hidden_NC,
        positions_A=blocks.positions_A,
        proposals_AB=first_AB,
        predictions_AB=None,
        accepted_A=accepted_A,
    )
    shifted_A = (anchors_A + accepted_A + 1).clamp(max=len(batch) - 1)
    blocks = replace(anchored_blocks(batch, shifted_A), **fields)
    return first_AB, draft(drafter, batch.context, blocks)


@torch.no_grad()
def _sequential(
    drafter: Any, model: Any, batch: Any, anchors_A: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one anchor after another, with the caches that a decoder keeps."""
    from transformers import DynamicCache

    decoder, layer_ids = model.get_decoder(), drafter.target_layer_ids
    out = decoder(
        input_ids=batch.input_ids_T[None], use_cache=True, past_key_values=DynamicCache(),
        output_hidden_states=True,
    )  # fmt: skip
    states_TC = torch.cat([out.hidden_states[index][0] for index in layer_ids], dim=-1)
    prefix = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
    context = _DraftContext(drafter, states_TC, batch.position_ids_T)
    length, found = drafter.proposal_length, []
    for anchor in anchors_A.tolist():
        first_B = context.draft(batch.input_ids_T[anchor], anchor, None, None)
        cache = DynamicCache()
        for index, (keys, values) in enumerate(prefix):
            cache.update(keys[:, :, :anchor], values[:, :, :anchor], index)
        text = torch.cat((batch.input_ids_T[anchor, None], first_B))
        out = decoder(
            input_ids=text[None], position_ids=anchor + torch.arange(length + 1)[None],
            past_key_values=cache, output_hidden_states=True,
        )  # fmt: skip
        rows_RC = torch.cat([out.hidden_states[index][0] for index in layer_ids], dim=-1)
        recorded = batch.input_ids_T[anchor + 1 : anchor + 1 + length]
        accepted = int((first_B[: len(recorded)] == recorded).long().cumprod(0).sum())
        shifted = min(anchor + accepted + 1, len(batch) - 1)
        second_B = context.draft(
            batch.input_ids_T[shifted], shifted, rows_RC[accepted + 1 :],
            anchor + torch.arange(accepted + 1, length + 1),
        )  # fmt: skip
        found.append((first_B, second_B))
    return torch.stack([one for one, _ in found]), torch.stack([two for _, two in found])


class _DraftContext:
    """A drafter for one anchor at a time, with its keys and values of the committed states."""

    def __init__(self, drafter: Any, states_TC: torch.Tensor, positions_T: torch.Tensor) -> None:
        self._drafter = drafter
        fused_TD = drafter.hidden_norm(drafter.fc(states_TC))
        self._layers = [self._project(layer, fused_TD, positions_T) for layer in drafter.layers]

    def draft(
        self,
        anchor_token: torch.Tensor,
        position: int,
        carried_RC: torch.Tensor | None,
        carried_positions_R: torch.Tensor | None,
    ) -> torch.Tensor:
        """B proposals after the anchor."""
        drafter, slots = self._drafter, self._drafter.config.block_size
        tokens_S = torch.full((slots,), drafter.mask_token_id)
        tokens_S[0] = anchor_token
        positions_S = position + torch.arange(slots)
        hidden_SD = drafter.embed_tokens(tokens_S)
        carried_RD = None
        if carried_RC is not None:
            carried_RD = drafter.hidden_norm(drafter.fc(carried_RC) + drafter.carryover_marker)
        for layer, (key_KTE, value_KTE) in zip(drafter.layers, self._layers, strict=True):
            normed_SD = layer.input_layernorm(hidden_SD)
            parts = [(key_KTE[:, :position], value_KTE[:, :position])]
            if carried_RD is not None:
                parts.append(self._project(layer, carried_RD, carried_positions_R))
            parts.append(self._project(layer, normed_SD, positions_S))
            attention = layer.self_attn
            query_SHE = attention.q_norm(
                attention.q_proj(normed_SD).unflatten(-1, (-1, attention.head_dim))
            )
            query_HSE = drafter._rope(positions_S, normed_SD).rotate(query_SHE).transpose(0, 1)
            out_HSE = torch.nn.functional.scaled_dot_product_attention(
                query_HSE[None],
                torch.cat([key for key, _ in parts], dim=1)[None],
                torch.cat([value for _, value in parts], dim=1)[None],
                enable_gqa=True,
            )[0]
            hidden_SD = hidden_SD + attention.o_proj(out_HSE.transpose(0, 1).flatten(1))
            hidden_SD = hidden_SD + layer.mlp(layer.post_attention_layernorm(hidden_SD))
        logits_BV = drafter.norm(hidden_SD[1:]) @ drafter.lm_head.weight.T
        if drafter.markov_head is None:
            return logits_BV.argmax(-1)
        tokens = [anchor_token]
        for logits_V in logits_BV:
            embedded_R, weight_VR = drafter.markov_factors(tokens[-1])
            tokens.append((logits_V + weight_VR @ embedded_R).argmax())
        return torch.stack(tokens[1:])

    def _project(
        self, layer: Any, rows_ND: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = layer.self_attn
        key, value = (
            projection(rows_ND).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.k_proj, attention.v_proj)
        )
        key = self._drafter._rope(positions_N, rows_ND).rotate(attention.k_norm(key))
        return key.transpose(0, 1), value.transpose(0, 1)


def _control(drafter: Any, model: Any, batch: Any, options: argparse.Namespace) -> dict[str, float]:
    def timed(carry: bool) -> float:
        return _fastest(
            lambda: _step(drafter, model, batch, options.anchors, carry), options.steps
        )[0]

    carryover, control = timed(True), timed(False)
    return {
        "carryover_over_control": carryover / control,
        "carryover_step_s": carryover,
        "control_step_s": control,
    }


def _step(drafter: Any, model: Any, batch: Any, num_anchors: int, carry: bool) -> None:
    """One training step from the token ids on, without the optimizer."""
    from carryover.training.carryover import carryover_step
    from carryover.training.step import StepSettings

    result = carryover_step(
        drafter,
        model,
        _with_states(drafter, model, batch),
        settings=StepSettings(num_anchors=num_anchors),
        generator=torch.Generator().manual_seed(0),
        carry=carry,
    )
    result.loss.backward()
    drafter.zero_grad(set_to_none=True)


def _with_states(drafter: Any, model: Any, batch: Any) -> Any:
    """The batch with the states and the prefix that one pass of the target gives."""
    from dataclasses import replace

    from carryover.training.verification import read_target

    states, prefix = read_target(
        model,
        input_ids_T=batch.input_ids_T,
        position_ids_T=batch.position_ids_T,
        layer_ids=drafter.target_layer_ids,
    )
    return replace(
        batch, hidden_TC=states.hidden_NC, last_hidden_TD=states.last_hidden_ND, prefix=prefix
    )


def _memory(arguments: list[str], options: argparse.Namespace) -> dict[str, float]:
    def peak(num_anchors: int) -> int:
        command = [sys.executable, "-m", "carryover.bench.transition", *arguments]
        done = subprocess.run(
            [*command, "--peak-of", str(num_anchors)], stdout=subprocess.PIPE, text=True, check=True
        )
        return json.loads(done.stdout.strip().splitlines()[-1])["peak_bytes"]

    once, twice = peak(options.anchors), peak(2 * options.anchors)
    return {
        "memory_growth": twice / once,
        "peak_mib": once / 2**20,
        "peak_mib_twice_the_anchors": twice / 2**20,
    }


def _peak(options: argparse.Namespace) -> dict[str, int]:
    """Peak memory of one carryover step above what was resident before it."""
    drafter, model, batch = _inputs(options)
    _step(drafter, model, batch, 4, True)  # allocations of the first use
    before = reset_peak()
    _step(drafter, model, batch, options.peak_of, True)
    return {"peak_bytes": status_bytes("VmHWM") - before}


def _fastest(run: Callable[[], Any], steps: int) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(steps):
        started = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - started)
    return best, result


if __name__ == "__main__":
    main()
