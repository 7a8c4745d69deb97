"""A vLLM engine that is advanced a few steps at a time, so that its caller can keep it full.

It holds no threads and knows nothing of Ray: `jobs.engine_pool` runs it in actors, and a single
process can use it as it is.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carryover.engine import EngineConfig, start_engine

if TYPE_CHECKING:
    from carryover.targets import Target


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine is asked for.

    Attributes:
        id: unique among the unfinished requests of a pool.
        prompt_ids: token ids that the engine reads.
        max_tokens: of the response.
        temperature: 0 is greedy.
        top_p: nucleus; 1 keeps all tokens.
        top_k: 0 keeps all tokens.
        stop_ids: tokens that end the response, besides the target's own.
        stop_texts: texts that end the response.
    """

    id: int
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine answered.

    Attributes:
        id: the request's.
        prompt_ids: what the engine read.
        token_ids: what it wrote, the stop token included.
        finish: `stop`, `length`, or `refused` (then `error` says why).
        error: why the engine refused.
    """

    id: int
    prompt_ids: list[int]
    token_ids: list[int]
    finish: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Advance:
    """What one call to an engine achieved.

    Attributes:
        finished: requests that ended.
        generated: tokens written, over all requests.
        read: prompt tokens of the requests that began.
        pending_tokens: tokens written so far for requests that are not finished.
    """

    finished: list[Completion]
    generated: int
    read: int
    pending_tokens: int


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Where an engine runs."""

    host: str
    pid: int


class EngineWorker:
    """An engine and the responses that it is working on."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._responses: dict[str, list[int]] = {}

    def start(self, target: Target, config: EngineConfig) -> tuple[EngineProcess, dict[str, Any]]:
        """Start the engine.

        Returns:
            Where it runs, and its name, version, dtype, device, length limit and seed.

        Raises:
            UserError: as `carryover.engine.start_engine`.
        """
        self._engine = start_engine(target, config).llm_engine
        import vllm

        model = self._engine.vllm_config.model_config
        details = {
            "name": "vllm",
            "version": vllm.__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": self._engine.vllm_config.device_config.device_type,
            "max_model_len": model.max_model_len,
            "seed": model.seed,
        }
        return EngineProcess(socket.gethostname(), os.getpid()), details

    def advance(self, requests: list[Request], steps: int) -> Advance:
        """Accept requests, then run up to `steps` engine steps.

        A request that the engine refuses comes back at once, and harms no other.
        """
        finished = [refusal for request in requests if (refusal := self._add(request))]
        generated = read = 0
        for _ in range(steps):
            if not self._engine.has_unfinished_requests():
                break
            for output in self._engine.step():
                response = self._responses[output.request_id]
                if not response:
                    read += len(output.prompt_token_ids)
                response.extend(output.outputs[0].token_ids)
                generated += len(output.outputs[0].token_ids)
                if output.finished:
                    finished.append(
                        Completion(
                            id=int(output.request_id),
                            prompt_ids=list(output.prompt_token_ids),
                            token_ids=self._responses.pop(output.request_id),
                            finish=output.outputs[0].finish_reason,
                        )
                    )
        return Advance(finished, generated, read, sum(map(len, self._responses.values())))

    def drop(self) -> None:
        """Forget all unfinished requests."""
        self._engine.abort_request(list(self._responses))
        self._responses.clear()

    def _add(self, request: Request) -> Completion | None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        try:
            # No seed: a per-request one kills the CPU engine, whose generators know no offsets.
            params = SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=request.max_tokens,
                stop_token_ids=list(request.stop_ids),
                stop=list(request.stop_texts),
                detokenize=bool(request.stop_texts),
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": request.prompt_ids}
            self._engine.add_request(str(request.id), prompt, params)
        except (VLLMClientError, ValueError, TypeError) as error:
            return Completion(request.id, request.prompt_ids, [], "refused", str(error))
        self._responses[str(request.id)] = []
        return None
