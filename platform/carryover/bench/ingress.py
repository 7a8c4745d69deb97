"""What our ingress costs: its latency and requests/s against Ray's own, before one stub engine.

    python -m carryover.bench.ingress --json

Both fronts run in one Ray Serve instance, behind the same HTTP proxy, each before a deployment of
the same stub engine that answers at once. Latency is measured one request at a time, the fronts
taking turns; throughput with many at once, in alternating blocks. A front's numbers include
everything: HTTP, proxy, the front, the call to the stub and back.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "stub"
_PATHS = {"ours": "/ours", "stock": "/stock"}
_PROMPT = "What is the capital of France? " * 8


def main(argv: list[str] | None = None) -> None:
    """Measure, and print a table or one JSON object."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(options, Path(folder))
    print(json.dumps(report) if options.json else _table(report))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start both fronts, and measure them in turns."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from carryover.local_ray import start_local_ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_local_ray(
        num_cpus=4, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR, object_store_memory=256 * 2**20,
    )  # fmt: skip
    try:
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )  # fmt: skip
        serve.run(stock_front(), name="stock", route_prefix=_PATHS["stock"])
        serve.run(our_front(folder), name="ours", route_prefix=_PATHS["ours"])
        return asyncio.run(_measure(options, f"http://127.0.0.1:{port}"))
    finally:
        ray.shutdown()


def our_front(folder: Path, **changes: Any) -> Any:
    """Our application, with the stub for the engine of its one arm.

    Args:
        folder: for the controller's state.
        changes: sections of `ServeConfig` to change.
    """
    from carryover.serving.application import bind_front
    from carryover.serving.config import ServeConfig

    config = ServeConfig.parse(
        {
            "name": "ours", "model": MODEL, "arms": [{"name": "plain"}],
            "resources": {"device": "cpu"},
            "traffic": {"state": str(folder / "state"), "record": False,
                        "max_queue_per_arm": 1000},
            **changes,
        }
    )  # fmt: skip
    names = [arm.name for arm in config.arms]
    return bind_front(
        config,
        arms={name: _stub(name) for name in names},
        cards={name: card(name) for name in names},
        described={name: {} for name in names},
    )


def stock_front() -> Any:
    """Ray's own ingress before the same stub, as `build_openai_app` deploys it."""
    from ray import serve
    from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress

    front = serve.deployment(
        make_fastapi_ingress(OpenAiIngress), num_replicas=1, max_ongoing_requests=1_000_000,
        ray_actor_options={"num_cpus": 0.1},
    )  # fmt: skip
    return front.bind(llm_deployments={MODEL: _stub(MODEL)}, model_cards={MODEL: card(MODEL)})


def card(name: str) -> Any:
    """A model card as `ray.serve.llm` makes them."""
    from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard

    return ModelCard(
        id=name, object="model", owned_by="stub", permission=[], metadata={"model_id": name}
    )


def _stub(name: str) -> Any:
    from ray import serve

    from carryover.bench.stub_engine import StubServer

    deployed = serve.deployment(
        StubServer, name=f"StubServer:{name}", max_ongoing_requests=1_000_000,
        ray_actor_options={"num_cpus": 0.1},
    )  # fmt: skip
    return deployed.bind(name)


async def _measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    import aiohttp

    random.seed(0)
    connector = aiohttp.TCPConnector(limit=0)
    report: dict[str, Any] = {
        "requests": options.requests, "concurrency": options.concurrency,
        "tokens": options.tokens, "seconds": options.seconds,
    }  # fmt: skip
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(front: str, stream: bool) -> tuple[float, float]:
            return await _ask(session, url + _PATHS[front], stream=stream, tokens=options.tokens)

        for stream in (False, True):
            await _latency(ask, stream, options.requests // 5)
            await asyncio.gather(*(ask(front, stream) for front in _PATHS for _ in range(64)))
        ratios = {"p50_latency_ratio": [], "throughput_ratio": []}
        for stream in (False, True):
            kind = "stream" if stream else "whole"
            times = await _latency(ask, stream, options.requests)
            rates = await _throughput(ask, stream, options)
            found = {
                front: {
                    "p50_ms": 1000 * statistics.median(total for _, total in times[front]),
                    "p99_ms": 1000 * _quantile([total for _, total in times[front]], 0.99),
                    "first_byte_p50_ms": 1000 * statistics.median(f for f, _ in times[front]),
                    "requests_per_s": statistics.median(rates[front]),
                }
                for front in _PATHS
            }
            ours, stock = found["ours"], found["stock"]
            found["p50_latency_ratio"] = ours["p50_ms"] / stock["p50_ms"]
            found["first_byte_p50_ratio"] = ours["first_byte_p50_ms"] / stock["first_byte_p50_ms"]
            found["throughput_ratio"] = ours["requests_per_s"] / stock["requests_per_s"]
            for name, values in ratios.items():
                values.append(found[name])
            report[kind] = found
    # The worse of the two kinds, so that neither hides behind the other.
    report["p50_latency_ratio"] = max(ratios["p50_latency_ratio"])
    report["throughput_ratio"] = min(ratios["throughput_ratio"])
    return report


async def _latency(ask: Any, stream: bool, requests: int) -> dict[str, list]:
    times: dict[str, list] = {front: [] for front in _PATHS}
    for _ in range(requests):
        # Random order: whoever comes second could profit from the first.
        for front in random.sample(list(_PATHS), len(_PATHS)):
            times[front].append(await ask(front, stream))
    return times


async def _throughput(ask: Any, stream: bool, options: argparse.Namespace) -> dict[str, list]:
    rates: dict[str, list] = {front: [] for front in _PATHS}

    async def worker(front: str, until: float) -> int:
        done = 0
        while time.perf_counter() < until:
            await ask(front, stream)
            done += 1
        return done

    for block in range(options.blocks):
        order = list(_PATHS) if block % 2 == 0 else list(reversed(_PATHS))
        for front in order:
            started = time.perf_counter()
            until = started + options.seconds
            counts = await asyncio.gather(
                *(worker(front, until) for _ in range(options.concurrency))
            )
            rates[front].append(sum(counts) / (time.perf_counter() - started))
    return rates


async def _ask(session: Any, url: str, *, stream: bool, tokens: int) -> tuple[float, float]:
    """One request; returns seconds to the first byte of the answer, and to its end."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": tokens, "temperature": 0, "stream": stream,
    }  # fmt: skip
    started = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        first = 0.0
        data = b""
        async for part in answer.content.iter_any():
            first = first or time.perf_counter() - started
            data = part
        total = time.perf_counter() - started
        if answer.status != 200 or (stream and not data.endswith(b"data: [DONE]\n\n")):
            raise RuntimeError(f"{url} answered {answer.status}: {data[-300:]!r}")
    return first, total


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{'':24}{'stock':>12}{'ours':>12}{'ratio':>10}",
    ]
    for kind in ("whole", "stream"):
        found = report[kind]
        for name, unit in (
            ("p50_ms", "p50, ms"), ("first_byte_p50_ms", "first byte, ms"),
            ("requests_per_s", "requests/s"),
        ):  # fmt: skip
            stock, ours = found["stock"][name], found["ours"][name]
            label = f"{kind}: {unit}"
            lines.append(f"{label:24}{stock:12.2f}{ours:12.2f}{ours / stock:10.3f}")
    lines.append(
        f"p50_latency_ratio {report['p50_latency_ratio']:.3f} (goal: at most 1.05), "
        f"throughput_ratio {report['throughput_ratio']:.3f} (goal: at least 0.95)"
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carryover.bench.ingress")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--requests", type=int, default=300, help="per front and kind, one by one")
    parser.add_argument("--concurrency", type=int, default=16, help="for throughput")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one block of throughput")
    parser.add_argument("--blocks", type=int, default=4, help="of throughput, per front and kind")
    return parser


if __name__ == "__main__":
    main()
