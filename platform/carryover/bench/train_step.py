"""Our training step against speculators' own forward and backward, on the same batch on CPU.

    python -m carryover.bench.train_step --json

Each side runs in a process of its own, so that peak memory is its own: the highest resident set
during the steps, less what was resident before them. Weights and data are random: neither time
nor memory depends on them. Ratios are ours over speculators'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from carryover.bench.memory import reset_peak, status_bytes

SIDES = ("ours", "speculators")


def main(arguments: list[str] | None = None) -> None:
    """Measure both sides and print the ratios."""
    options = _parser().parse_args(arguments)
    if options.side:
        print(json.dumps(measure(options)))
        return
    results = {side: _run(side, sys.argv[1:] if arguments is None else arguments) for side in SIDES}
    ours, theirs = (results[side] for side in SIDES)
    report = {
        "tokens_per_s_ratio": round(theirs["seconds"] / ours["seconds"], 3),
        "peak_memory_ratio": round(ours["peak_bytes"] / theirs["peak_bytes"], 3),
        **results,
        "options": {name: value for name, value in vars(options).items() if name != "side"},
    }
    if options.json:
        print(json.dumps(report))
        return
    for side, result in results.items():
        print(
            f"{side:12} {result['seconds']:7.2f} s/step {result['tokens_per_s']:8.1f} tokens/s "
            f"{result['peak_bytes'] / 2**30:6.2f} GiB"
        )
    print(f"tokens/s ratio {report['tokens_per_s_ratio']} (goal: at least 2.5)")
    print(f"peak memory ratio {report['peak_memory_ratio']} (goal: at most 0.35)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Time and peak memory of one side, in this process."""
    import torch

    torch.manual_seed(0)
    drafter, batch = _drafter(options), _batch(options)
    step = _our_step(drafter, batch, options)
    if options.side == "speculators":
        step = _their_step(drafter, batch, options)
    before = reset_peak()
    seconds = []
    for _ in range(options.steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        drafter.zero_grad(set_to_none=True)
    best = min(seconds)
    return {
        "seconds": best,
        "tokens_per_s": options.tokens / best,
        "peak_bytes": status_bytes("VmHWM") - before,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.train_step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--regime", choices=("dflash", "markov"), default="dflash")
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16, help="anchor and mask slots of a block")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the sequence")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=2, help="steps a side; the fastest counts")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser


def _run(side: str, arguments: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "carryover.bench.train_step", *arguments, "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _drafter(options: argparse.Namespace) -> Any:
    import torch
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from transformers import Qwen3Config

    from carryover.drafters.models import DRAFTERS

    if options.threads:
        torch.set_num_threads(options.threads)
    heads = options.hidden // 64
    layer_config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        head_dim=64,
        layer_types=["full_attention"] * options.layers,
    )
    layer_config._attn_implementation = "eager"
    values = {
        "transformer_layer_config": layer_config,
        "draft_vocab_size": options.vocab,
        "block_size": options.slots,
        "aux_hidden_state_layer_ids": list(range(1, options.layers + 1)),
        "mask_token_id": 0,
        "sample_from_anchor": False,
    }
    markov = options.regime == "markov"
    if markov:
        config = DSparkSpeculatorConfig(
            **values, enable_confidence_head=False, confidence_head_with_markov=False
        )
    else:
        config = DFlashSpeculatorConfig(**values)
    stock = DSparkDraftModel if markov else DFlashDraftModel
    drafter = (DRAFTERS[options.regime] if options.side == "ours" else stock)(config)
    head = torch.nn.Parameter(
        torch.randn(options.vocab, options.hidden) * 0.05, requires_grad=False
    )
    for module in (drafter.embed_tokens, drafter.lm_head, drafter.verifier_lm_head):
        module.weight = head
    return drafter


def _batch(options: argparse.Namespace) -> Any:
    import torch

    from carryover.training.batch import Batch

    tokens, hidden = options.tokens, options.hidden
    response = torch.ones(tokens, dtype=torch.bool)
    # A prompt before the response; and no labels in the last block, where speculators takes no
    # anchors: so both sides draw from the same positions.
    response[: tokens // 16] = False
    response[-options.slots :] = False
    return Batch(
        input_ids_T=torch.randint(1, options.vocab, (tokens,)),
        position_ids_T=torch.arange(tokens),
        document_ids_T=torch.zeros(tokens, dtype=torch.long),
        response_mask_T=response,
        hidden_TC=torch.randn(tokens, options.layers * hidden),
        last_hidden_TD=torch.randn(tokens, hidden),
    )


def _our_step(drafter: Any, batch: Any, options: argparse.Namespace) -> Any:
    import torch

    from carryover.training.losses import LossSettings
    from carryover.training.step import StepSettings, baseline_step

    settings = StepSettings(num_anchors=options.anchors, loss=LossSettings(kl=1.0))
    generator = torch.Generator().manual_seed(0)
    return lambda: baseline_step(
        drafter, batch, settings=settings, generator=generator
    ).loss.backward()


def _their_step(drafter: Any, batch: Any, options: argparse.Namespace) -> Any:
    from speculators.losses import resolve_loss_config

    extra = {}
    if options.regime == "markov":
        extra["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]

    def step() -> None:
        _, loss, _ = drafter(
            hidden_states=batch.hidden_TC[None],
            input_ids=batch.input_ids_T[None],
            loss_mask=batch.response_mask_T[None].float(),
            verifier_last_hidden_states=batch.last_hidden_TD[None],
            document_ids=batch.document_ids_T[None],
            position_ids=batch.position_ids_T[None],
            loss_config=resolve_loss_config("kl_div", "eager"),
            max_anchors=options.anchors,
            **extra,
        )
        loss.backward()

    return step


if __name__ == "__main__":
    main()
