"""One engine as a user starts it, with vLLM's own child processes; prints what it answered.

    python plugin_process.py TARGET SPECULATIVE_CONFIG_JSON ENGINE_ARGUMENTS_JSON
"""

from __future__ import annotations

import json
import sys

# Marks the line of the answer among what vLLM's processes print.
RESULT = "answered: "


def main(target: str, speculative: str, arguments: str) -> None:
    """Answer a few prompts at temperature 0."""
    import plugin_models as models
    from vllm import LLM

    from carryover.engine import close_engine

    llm = LLM(
        target, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
        max_num_batched_tokens=1024, kv_cache_memory_bytes=64 << 20, disable_log_stats=False,
        seed=0, speculative_config=json.loads(speculative), **json.loads(arguments),
    )  # fmt: skip
    texts = models.generate(llm, models.random_prompts(6))
    values = models.speculative_counters(llm)
    close_engine(llm)
    print(f"\n{RESULT}{json.dumps({'texts': texts, 'counters': values})}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
