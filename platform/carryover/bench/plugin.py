"""What carrying rows costs in vLLM: draft step and whole engine, as ratios of one run.

    python -m carryover.bench.plugin --json

One engine on vLLM's V1 runner serves a Markov Carryover drafter for the embedded target. Every
round accepts the same number of proposals, whatever they are (vLLM's own synthetic acceptance
does not run on CPU). Draft steps cycle through four variants, each the exact code path of its
kind, so that a busy machine slows all alike:

    DFlash, DFlash with carried rows, Markov, Markov with carried rows

The variants without carried rows skip the plugin's part of the step, which is all that a stock
baseline checkpoint's step is. `end_to_end_ratio` is the median over pairs of whole generations of
one engine, with and without carrying, in alternating order. `plugin_off_over_absent` compares the
stock DFlash baseline in processes of their own, with the plugin registered and with vLLM told to
load no plugin.

Weights of the drafter are random: time does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from carryover.guardian import guard
from carryover.runtime import engine_environment

VARIANTS = ("dflash", "dflash_carried", "markov", "markov_carried")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print the ratios."""
    options = _parser().parse_args(arguments)
    argv = sys.argv[1:] if arguments is None else arguments
    guard(
        environment={**engine_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        argv=[sys.executable, "-P", "-m", "carryover.bench.plugin", *argv],
    )
    if options.side:
        print(json.dumps(_stock_speed(options)))
        return
    with tempfile.TemporaryDirectory(prefix="carryover-bench-") as folder:
        checkpoints = make_checkpoints(options, Path(folder))
        report = measure(options, checkpoints["markov_carried"])
        if options.plugin_runs:
            report["plugin_off_over_absent"] = _plugin_off_over_absent(options, folder, argv)
    report["options"] = {k: v for k, v in vars(options).items() if k not in ("side", "folder")}
    print(json.dumps(report) if options.json else _table(report))


def make_checkpoints(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """Untrained drafters: the stock DFlash baseline and Markov with a marker."""
    import torch

    from carryover.drafters.carried import CarriedSettings
    from carryover.drafters.checkpoint import initialise, save
    from carryover.drafters.settings import DrafterSettings
    from carryover.targets import resolve

    target = resolve(options.target)
    settings = DrafterSettings(num_layers=options.layers, proposal_length=options.proposal_length)
    baseline = initialise("dflash", target, settings)
    carried = initialise("markov", target, settings)
    carried.add_carried_context(CarriedSettings())
    torch.nn.init.normal_(carried.carryover_marker, std=0.1)
    provenance = {"made_by": "carryover.bench.plugin"}
    return {
        "dflash": save(baseline, folder / "dflash", provenance),
        "markov_carried": save(carried, folder / "markov-carried", provenance),
    }


def measure(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Time draft steps and generations of one engine."""
    llm = _engine(options, checkpoint)
    _accept_always(llm, options.accepted)
    stepper = _Stepper(llm)
    _generate(llm, options, max(options.batches), tokens=8)
    steps = {}
    for batch in options.batches:
        stepper.cycle(VARIANTS, batch)
        tokens = len(VARIANTS) * options.steps * (1 + options.accepted)
        _generate(llm, options, batch, tokens=tokens)
        steps[batch] = {name: stepper.median_s(name) for name in VARIANTS}
    speeds = _end_to_end(llm, options, stepper)
    profile = _profile(llm, options, stepper) if options.profile else None
    _close(llm)
    pairs = [carried / plain for plain, carried in zip(*speeds.values(), strict=True)]
    report = {
        "draft_step_ratio": _ratios(steps, "dflash_carried", "dflash"),
        "markov_draft_step_ratio": _ratios(steps, "markov_carried", "markov"),
        "markov_over_dflash": _ratios(steps, "markov", "dflash"),
        "end_to_end_ratio": round(statistics.median(pairs), 3),
        "end_to_end_pairs": [round(ratio, 3) for ratio in pairs],
        "draft_step_ms": {
            str(batch): {name: round(1000 * s, 3) for name, s in by_name.items()}
            for batch, by_name in steps.items()
        },
        "tokens_per_s": {name: [round(s, 1) for s in values] for name, values in speeds.items()},
    }
    return report if profile is None else {**report, "profile": profile}


def _end_to_end(
    llm: Any, options: argparse.Namespace, stepper: _Stepper
) -> dict[str, list[float]]:
    """Tokens/s of generations without and with carrying, in pairs whose order alternates.

    A pair lies seconds apart, so that what else the machine does weighs on both alike.
    """
    names = ("dflash", "dflash_carried")
    speeds = {name: [] for name in names}
    for number in range(options.repeats):
        for name in names if number % 2 == 0 else reversed(names):
            stepper.only(name)
            speeds[name].append(_generate(llm, options, options.end_to_end_batch))
    return speeds


def _runner(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def _accept_always(llm: Any, accepted: int) -> None:
    """Let every full round accept exactly `accepted` proposals; the target still runs."""
    runner = _runner(llm)
    sample = runner._sample

    def _sample(logits: Any, metadata: Any) -> Any:
        output = sample(logits, metadata)
        lengths = metadata.num_draft_tokens
        if lengths and min(lengths) == max(lengths) > accepted:
            drafts = metadata.draft_token_ids.view(len(lengths), -1)
            output.sampled_token_ids[:, : accepted + 1] = drafts[:, : accepted + 1]
            output.sampled_token_ids[:, accepted + 1 :] = -1
        return output

    runner._sample = _sample


class _Stepper:
    """Chooses the variant of each draft step of a running proposer, and times it."""

    def __init__(self, llm: Any) -> None:
        from vllm.v1.spec_decode.dflash import DFlashProposer

        self.proposer = _runner(llm).drafter
        self._ours = {
            name: getattr(self.proposer, name)
            for name in ("set_inputs_first_pass", "_sample_draft_tokens", "propose")
        }
        self._stock = {
            name: getattr(DFlashProposer, name).__get__(self.proposer) for name in self._ours
        }
        self._variants: tuple[str, ...] = ("markov_carried",)
        self._batch: int | None = None
        self._number = 0
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.proposer.propose = self._propose

    def cycle(self, variants: tuple[str, ...], batch: int) -> None:
        """Take the variants in turn, and time steps in which `batch` requests all decode."""
        self._variants, self._batch = variants, batch
        self._seconds.clear()

    def only(self, variant: str) -> None:
        """Take one variant, and time nothing."""
        self._variants, self._batch = (variant,), None

    def median_s(self, variant: str) -> float:
        """Median time of the steps since `cycle`, without the first few."""
        return statistics.median(self._seconds[variant][2:])

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        variant = self._variants[self._number % len(self._variants)]
        self._number += 1
        carried, markov = variant.endswith("carried"), variant.startswith("markov")
        chosen = (self._ours if carried else self._stock)["set_inputs_first_pass"]
        self.proposer.set_inputs_first_pass = chosen
        chosen = (self._ours if markov else self._stock)["_sample_draft_tokens"]
        self.proposer._sample_draft_tokens = chosen
        started = time.perf_counter()
        drafts = self._ours["propose"](*args, **kwargs)
        seconds = time.perf_counter() - started
        metadata = kwargs["common_attn_metadata"]
        # Rows of a prompt would be timed otherwise.
        decoding = metadata.num_actual_tokens == metadata.num_reqs * (1 + drafts.shape[1])
        if decoding and metadata.num_reqs == self._batch:
            self._seconds[variant].append(seconds)
        return drafts


def _engine(options: argparse.Namespace, checkpoint: Path, **speculative: Any) -> Any:
    from carryover.engine import EngineConfig, quiet_vllm, start_engine
    from carryover.targets import resolve

    quiet_vllm()
    batch = max(*options.batches, options.end_to_end_batch)
    config = EngineConfig(
        max_model_len=options.max_model_len,
        max_num_seqs=batch,
        extra={"max_num_batched_tokens": max(2048, batch * (2 * options.proposal_length + 1))},
    )
    settings = {
        "model": str(checkpoint),
        "num_speculative_tokens": options.proposal_length,
        **speculative,
    }
    return start_engine(resolve(options.target), config, speculative=settings)


def _close(llm: Any) -> None:
    from carryover.engine import close_engine

    close_engine(llm)


def _generate(
    llm: Any, options: argparse.Namespace, batch: int, *, tokens: int | None = None
) -> float:
    """Generate for a whole batch; returns output tokens per second."""
    from vllm import SamplingParams

    tokens = options.tokens if tokens is None else tokens
    tokens = min(tokens, options.max_model_len - options.prompt - options.proposal_length)
    prompts = [
        {"prompt_token_ids": [100 + (7 * i + j) % 1000 for j in range(options.prompt)]}
        for i in range(batch)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _profile(llm: Any, options: argparse.Namespace, stepper: _Stepper) -> str:
    """Where a Carryover draft step spends its time: torch's table of its named parts."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from carryover.vllm_plugin import proposer as rows_of

    def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"## {name}"):
                return function(*args, **kwargs)

        return call

    stepper.only("markov_carried")
    ours, rows = dict(stepper._ours), ("find_carried", "mark_rows", "place_queries")
    model = stepper.proposer.model
    functions = {name: getattr(rows_of, name) for name in rows}
    try:
        for name, function in functions.items():
            setattr(rows_of, name, named(name, function))
        for name, function in ours.items():
            stepper._ours[name] = named(name, function)
        model.precompute_and_store_context_kv = named(
            "context keys and values", model.precompute_and_store_context_kv
        )
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            _generate(llm, options, options.end_to_end_batch, tokens=40)
    finally:
        for name, function in functions.items():
            setattr(rows_of, name, function)
        stepper._ours.update(ours)
        del model.precompute_and_store_context_kv
    lines = [
        f"{event.key[3:]:28} {event.cpu_time_total / 1000:10.1f} ms {event.count:6} calls"
        for event in recorded.key_averages()
        if event.key.startswith("## ")
    ]
    return "\n".join(sorted(lines))


def _plugin_off_over_absent(options: argparse.Namespace, folder: str, argv: list[str]) -> float:
    """Stock DFlash baseline: tokens/s with the plugin registered over tokens/s without it."""
    speeds = defaultdict(list)
    for _ in range(options.plugin_runs):
        for side in ("registered", "absent"):
            command = [sys.executable, "-P", "-m", "carryover.bench.plugin", *argv]
            environment = dict(os.environ)
            if side == "absent":
                environment["VLLM_PLUGINS"] = ""
            done = subprocess.run(
                [*command, "--side", side, "--folder", folder], env=environment,
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            speeds[side].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return round(statistics.median(speeds["registered"]) / statistics.median(speeds["absent"]), 3)


def _stock_speed(options: argparse.Namespace) -> float:
    """Best tokens/s of the stock DFlash baseline in this process."""
    from carryover.vllm_plugin.patches import PATCHES

    llm = _engine(options, Path(options.folder) / "dflash", method="dflash")
    patched = any(hasattr(p.load_owner().__dict__.get(p.attribute), "carryover_patch")
                  for p in PATCHES if p.attribute and p.attribute != "__new__")  # fmt: skip
    assert patched == (options.side == "registered")
    _generate(llm, options, options.end_to_end_batch, tokens=8)
    best = max(_generate(llm, options, options.end_to_end_batch) for _ in range(options.repeats))
    _close(llm)
    return best


def _ratios(steps: dict[int, dict[str, float]], over: str, under: str) -> dict[str, float]:
    return {str(batch): round(by[over] / by[under], 3) for batch, by in steps.items()}


def _table(report: dict[str, Any]) -> str:
    lines = ["draft step, ms  " + "".join(f"{name:>16}" for name in VARIANTS)]
    for batch, by_name in report["draft_step_ms"].items():
        lines.append(f"  batch {batch:8}" + "".join(f"{by_name[n]:16.3f}" for n in VARIANTS))
    goals = {
        "draft_step_ratio": "goal: at most 1.05 each",
        "markov_draft_step_ratio": "with carried rows over without",
        "markov_over_dflash": "what the correction head costs",
        "end_to_end_ratio": "tokens/s at equal acceptance; goal: at least 0.97",
        "plugin_off_over_absent": "stock baseline, plugin registered over absent; goal: 1.00",
    }
    lines += [f"{key}: {report[key]} ({goal})" for key, goal in goals.items() if key in report]
    return "\n".join([*lines, *([report["profile"]] if "profile" in report else [])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.plugin")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", default="embedded", help="target model")
    parser.add_argument("--layers", type=int, default=3, help="layers of the drafter")
    parser.add_argument("--proposal-length", type=int, default=7)
    parser.add_argument("--accepted", type=int, default=2, help="proposals accepted in every round")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=20, help="timed draft steps per variant")
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an end-to-end request")
    parser.add_argument("--end-to-end-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=8, help="pairs of end-to-end runs")
    parser.add_argument(
        "--plugin-runs", type=int, default=1, help="processes with and without plugin; 0: skip"
    )
    parser.add_argument("--profile", action="store_true", help="add torch's profile of the step")
    parser.add_argument("--side", choices=("registered", "absent"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
