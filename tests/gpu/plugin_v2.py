"""On a GPU, in about five minutes: is V2 the same as V1, and what does carrying cost there?

    python tests/gpu/plugin_v2.py [--json]

Parity: tiny trained drafters of both regimes in float32 on vLLM's V1 and V2 runners (V2 with CUDA
graphs), one request at a time and in a mixed batch. All texts must be the target's own; drafts,
accepted tokens and carried rows of the two runners must agree up to near-ties.

Overhead: a 0.6B-sized random target on V2 with graphs, proposal length 15, equal synthetic
acceptance: time per output token of a Carryover checkpoint over its baseline, per batch size.

Exit status 0 if everything holds, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_carried_rows")
REGIMES = ("dflash", "markov")
BATCHES = (1, 8, 32)
# Runners may pick differently at near-ties, after which a request's rounds differ.
PARITY_TOLERANCE = 0.02
OVERHEAD_GOAL = 1.05
LENGTH = 15


def main() -> int:
    """Run every part in a process of its own and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", choices=("v1", "v2", "overhead"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        folder = Path(options.folder)
        result = overhead(folder) if options.part == "overhead" else parity(folder)
        print(json.dumps(result))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        v1, v2, cost = (run(part, folder) for part in ("v1", "v2", "overhead"))
    report = judge(v1, v2, cost)
    print(json.dumps(report) if options.json else table(report))
    return 0 if report["passed"] else 1


def run(part: str, folder: str) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "0" if part == "v1" else "1"}
    command = [sys.executable, __file__, "--part", part, "--folder", folder]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_models(folder: Path) -> None:
    """Targets and drafters for all parts."""
    import plugin_models as models

    from carryover.drafters.carried import CarriedSettings
    from carryover.drafters.checkpoint import initialise, save
    from carryover.drafters.settings import DrafterSettings

    tiny = models.make_target(folder / "tiny", "qwen3")
    large = models.make_target(
        folder / "large", "qwen3", hidden_size=1024, num_heads=16, num_kv_heads=8, num_layers=28,
        scale=1.0,
    )  # fmt: skip
    for regime in REGIMES:
        baseline = models.make_drafter(tiny, folder / f"tiny-{regime}", regime)
        models.add_carryover(baseline, folder / f"tiny-{regime}-carried", tiny)
        drafter = initialise(regime, large, DrafterSettings(num_layers=5, proposal_length=LENGTH))
        save(drafter, folder / f"large-{regime}", {})
        drafter.add_carried_context(CarriedSettings())
        save(drafter, folder / f"large-{regime}-carried", {})


def parity(folder: Path) -> dict[str, Any]:
    """Texts and counters of this process's runner."""
    import plugin_models as models

    from carryover.targets import resolve

    target = resolve(str(folder / "tiny"))
    prompts = models.random_prompts(8)
    settings: dict[str, Any] = {
        "attention_config": {"backend": "TRITON_ATTN"},
        "enforce_eager": os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0",
        "kv_cache_memory_bytes": 256 << 20,
    }
    results: dict[str, Any] = {}
    model = target.load_model()
    results["truth"] = [models.greedy(model, prompt, 40) for prompt in prompts]
    for regime in REGIMES:
        checkpoint = folder / f"tiny-{regime}-carried"
        speculative = {"attention_backend": "TRITON_ATTN"}
        with models.engine(target, checkpoint, speculative=speculative, **settings) as llm:
            runner = type(models.runner_of(llm)).__module__
            alone = [models.generate(llm, [prompt])[0] for prompt in prompts]
            counts = {name: models.counter(llm, f"spec_decode_{name}") for name in COUNTERS}
            mixed = models.generate(llm, prompts)
        results[regime] = {"alone": alone, "mixed": mixed, "counts": counts, "runner": runner}
    return results


def overhead(folder: Path) -> dict[str, Any]:
    """Milliseconds per output token of baseline and Carryover checkpoints, by batch size."""
    import plugin_models as models

    from carryover.targets import resolve

    target = resolve(str(folder / "large"))
    prompts = models.random_prompts(max(BATCHES), low=64, high=65)
    results: dict[str, Any] = {}
    for regime in REGIMES:
        for suffix in ("", "-carried"):
            speculative = {
                "method": "dspark" if regime == "markov" else "dflash",
                "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4.0,
            }  # fmt: skip
            with models.engine(
                target, folder / f"large-{regime}{suffix}", speculative=speculative,
                dtype="bfloat16", enforce_eager=False, max_num_seqs=max(BATCHES),
                max_num_batched_tokens=4096, kv_cache_memory_bytes=4 << 30,
            ) as llm:  # fmt: skip
                times = {}
                for batch in BATCHES:
                    models.generate(llm, prompts[:batch], max_tokens=64)
                    seconds = []
                    for _ in range(3):
                        started = time.perf_counter()
                        models.generate(llm, prompts[:batch], max_tokens=256)
                        seconds.append(time.perf_counter() - started)
                    times[str(batch)] = 1000 * min(seconds) / 256
            results[regime + suffix] = times
    return results


def judge(v1: dict[str, Any], v2: dict[str, Any], cost: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, and whether it holds."""
    failures, counts, ratios = [], {}, {}
    for regime in REGIMES:
        if "gpu.model_runner" not in v2[regime]["runner"]:
            failures.append(f"{regime}: V2 ran {v2[regime]['runner']}")
        for name, result in (("V1", v1), ("V2", v2)):
            for kind in ("alone", "mixed"):
                if result[regime][kind] != result["truth"]:
                    failures.append(f"{regime}: {name} {kind} is not the target's own text")
        counts[regime] = {"v1": v1[regime]["counts"], "v2": v2[regime]["counts"]}
        for name in COUNTERS:
            one, other = (counts[regime][runner][name] for runner in ("v1", "v2"))
            if abs(one - other) > PARITY_TOLERANCE * max(one, other):
                failures.append(f"{regime}: {name} is {one} on V1 and {other} on V2")
        ratios[regime] = {
            batch: round(cost[f"{regime}-carried"][batch] / cost[regime][batch], 3)
            for batch in cost[regime]
        }
        for batch, ratio in ratios[regime].items():
            if ratio > OVERHEAD_GOAL:
                failures.append(f"{regime}: batch {batch} costs {ratio} of the baseline's time")
    return {
        "passed": not failures, "failures": failures, "counts": counts,
        "time_per_token_ratio": ratios, "ms_per_token": cost,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    lines = []
    for regime in REGIMES:
        for runner, counts in report["counts"][regime].items():
            values = ", ".join(f"{name} {value}" for name, value in counts.items())
            lines.append(f"{regime} on {runner}: {values}")
        ratios = ", ".join(
            f"{batch}: {ratio}" for batch, ratio in report["time_per_token_ratio"][regime].items()
        )
        lines.append(f"{regime}: Carryover over baseline, ms per token by batch: {ratios}")
    return "\n".join([*lines, *report["failures"], "passed" if report["passed"] else "FAILED"])


if __name__ == "__main__":
    sys.exit(main())
