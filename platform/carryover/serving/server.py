"""The replica of an arm: `ray.serve.llm`'s server, saying why an engine does not start."""

import gc
import json
import os
from typing import Any

from carryover.serving.failure import Cause, find_cause, read_tail
from carryover.serving.preload import without_gc

# A replica's process begins with importing this module.
with without_gc():
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
    from ray.serve.llm import LLMConfig
    from ray.serve.llm.deployment import LLMServer

# Marks the cause in the exception that Ray passes on as text.
CAUSE_MARK = "carryover-cause: "


class ArmServer(LLMServer):
    """One replica: a vLLM engine and the OpenAI methods on it."""

    async def __init__(self, llm_config: LLMConfig, **kwargs: Any) -> None:
        """Start the engine; Ray Serve awaits this.

        Raises:
            EngineFailure: the engine does not start.
        """
        on_cpu = llm_config.accelerator_config.kind == "cpu"
        engine = {"engine_cls": CpuEngine} if on_cpu else {}
        await super().__init__(llm_config, **engine, **kwargs)

    async def start(self) -> None:
        """Start the engine, and turn its failure into its own words."""
        try:
            await super().start()
        except Exception as error:
            cause = find_cause(_own_log()) or find_cause(f"{type(error).__name__}: {error}")
            raise EngineFailure(cause or Cause(str(error), None)) from error
        # As vLLM's own server does: collecting among what now stays would stall streams.
        gc.collect()
        gc.freeze()


class CpuEngine(VLLMEngine):
    """vLLM's CPU engine with model and scheduler in one process.

    Ray asks for the multi-process executor, which puts the model into one more process: about
    10 s of CPU to start it, 0.6 GiB, and a message to it in every step, for nothing on CPU, where
    thread binding comes from the environment anyway.
    """

    def _prepare_engine_config(self, callback_ctx: Any) -> Any:
        arguments, frontend, config = super()._prepare_engine_config(callback_ctx)
        if config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = "uni"
        return arguments, frontend, config


class EngineFailure(RuntimeError):
    """An engine's own error, in a form that survives Ray's passing it on as text."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(CAUSE_MARK + json.dumps({"error": cause.error, "fix": cause.fix}))

    def __reduce__(self) -> tuple:
        return RuntimeError, self.args


def read_cause(message: str) -> Cause | None:
    """Read the cause back from a message of Ray's; None if there is none in it."""
    for line in message.splitlines():
        _, mark, text = line.partition(CAUSE_MARK)
        if mark:
            try:
                return Cause(**json.loads(text))
            except (ValueError, TypeError):
                continue
    return None


def _own_log() -> str:
    """What this process and the engine below it wrote; Ray sends both to files."""
    files = {os.path.realpath(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2)}
    return "\n".join(read_tail(file) for file in sorted(files) if os.path.isfile(file))
