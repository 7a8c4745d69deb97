"""One engine of an offline bench, in a process of its own.

`python -m carryover.bench.offline_worker` is started by `bench.offline_engines`.

It reads one JSON object a line from its input and writes one a line to its output:

    {"start": {...}}                          -> {"ready": {...}}
    {"send": [[message, ...], ...], ...}      -> {"response": {...}} each, then {"counted": {...}}
    {"choices": [message, ...], ...}          -> {"choices": [...] or null}

What the engine prints goes to the error stream. It ends when its input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from carryover.bench.client import TOP_LOGPROBS, Choice, Response, Sampling
from carryover.data.regeneration import render_chat

_COUNTERS = "vllm:spec_decode_"


def main() -> None:
    """Serve the parent process until it closes the input."""
    # Ctrl-C is the parent's business, which then closes the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        message = json.loads(line)
        if "start" in message:
            engine = Engine(**message["start"])
            answers: Iterator[dict[str, Any]] = iter([{"ready": engine.details()}])
        elif "send" in message:
            answers = engine.send(message["send"], Sampling(**message["sampling"]))
        else:
            found = engine.choices(message["choices"], Sampling(**message["sampling"]))
            answers = iter([{"choices": found and [asdict(choice) for choice in found]}])
        for answer in answers:
            out.write(json.dumps(answer) + "\n")


class Engine:
    """A vLLM engine that answers one request at a time, and times it.

    Args:
        target: name of the target.
        engine: values of an EngineConfig.
        drafter: checkpoint folder; None decodes autoregressively.
        num_speculative_tokens: proposal length, with a drafter.
    """

    def __init__(
        self,
        target: str,
        engine: dict[str, Any],
        drafter: str | None,
        num_speculative_tokens: int | None,
    ) -> None:
        from vllm.exceptions import VLLMClientError

        from carryover.engine import EngineConfig, drafter_config, start_engine
        from carryover.targets import resolve

        config, speculative = EngineConfig.parse(engine), None
        if drafter is not None:
            speculative = drafter_config(
                Path(drafter), num_speculative_tokens=num_speculative_tokens
            )
            extra = {**config.extra, "per_request_spec_decode_metrics": "summary"}
            config = config.model_copy(update={"extra": extra})
        found = resolve(target)
        self._llm = start_engine(found, config, speculative=speculative, log_stats=True)
        self._tokenizer = found.load_tokenizer()
        self._count = 0
        # what a server would answer with 400, such as a prompt that is too long
        self._refusals = (ValueError, TypeError, VLLMClientError)

    def details(self) -> dict[str, Any]:
        """What runs, for the record."""
        import vllm

        model = self._llm.llm_engine.vllm_config.model_config
        return {
            "vllm": vllm.__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "pid": os.getpid(),
        }

    def send(
        self, conversations: list[list[dict[str, str]]], sampling: Sampling
    ) -> Iterator[dict[str, Any]]:
        """Answer conversations one after the other; then what vLLM counted meanwhile."""
        before = self._counters()
        for messages in conversations:
            yield {"response": asdict(self._answer(messages, sampling))}
        after = self._counters()
        yield {"counted": {name: value - before.get(name, 0.0) for name, value in after.items()}}

    def choices(self, messages: list[dict[str, str]], sampling: Sampling) -> list[Choice] | None:
        """The tokens of an answer with their probabilities; None if it is refused."""
        try:
            name = self._add(messages, sampling, logprobs=TOP_LOGPROBS)
        except self._refusals:
            return None
        found: list[Choice] = []
        for output in self._outputs(name):
            for token, places in zip(output.token_ids, output.logprobs, strict=True):
                others = {str(number): place.logprob for number, place in places.items()}
                found.append(Choice(str(token), others[str(token)], others))
        return found

    def _answer(self, messages: list[dict[str, str]], sampling: Sampling) -> Response:
        self._llm.reset_prefix_cache()
        response = Response(started_s=time.perf_counter())
        try:
            name = self._add(messages, sampling)
        except self._refusals as error:
            response.error = str(error).strip().splitlines()[0][:500]
            return response
        # the prompt is rendered; from here on it is the engine's time
        response.started_s = self._added_s
        tokens = 0
        for output in self._outputs(name):
            now_s = time.perf_counter() - response.started_s
            if output.token_ids:
                tokens += len(output.token_ids)
                response.ttft_s = now_s if response.ttft_s is None else response.ttft_s
                response.latency_s = now_s
            response.text += output.text
            response.finish = output.finish_reason or response.finish
            if output.spec_decode_metrics is not None:
                response.take_speculation(output.spec_decode_metrics.to_dict())
        response.output_tokens = tokens
        response.prompt_tokens, response.cached_tokens = self._prompt_tokens, self._cached_tokens
        response.close()
        return response

    def _add(
        self, messages: list[dict[str, str]], sampling: Sampling, *, logprobs: int | None = None
    ) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        thinking = {} if sampling.thinking is None else {"enable_thinking": sampling.thinking}
        prompt_ids = render_chat(self._tokenizer, messages, **thinking)
        # as vLLM's server: what a request does not set is the model's generation_config.json's
        params = self._llm.get_default_sampling_params()
        params = SamplingParams(
            temperature=sampling.temperature, top_p=params.top_p, top_k=params.top_k,
            min_p=params.min_p, repetition_penalty=params.repetition_penalty,
            max_tokens=sampling.max_tokens, ignore_eos=sampling.ignore_eos, logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._count += 1
        name = str(self._count)
        self._added_s = time.perf_counter()
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
        return name

    def _outputs(self, name: str) -> Iterator[Any]:
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == name:
                    self._prompt_tokens = len(output.prompt_token_ids)
                    self._cached_tokens = output.num_cached_tokens
                    yield output.outputs[0]

    def _counters(self) -> dict[str, float]:
        found = {}
        for metric in self._llm.get_metrics():
            if not metric.name.startswith(_COUNTERS):
                continue
            name = metric.name.removeprefix(_COUNTERS)
            if hasattr(metric, "values"):
                found |= {f"{name}.{place}": float(v) for place, v in enumerate(metric.values)}
            elif hasattr(metric, "value"):
                found[name] = float(metric.value)
        return found


if __name__ == "__main__":
    main()
