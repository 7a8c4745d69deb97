"""Per-request seeds on vLLM's CPU build.

While a prompt is still being read, vLLM 0.32 samples from its last row, discards the sample, and
winds the request's random generator back by its offset. CPU generators have no offset, so a
request with a seed and a chunked prompt ends the engine with "CPU Generator does not use offset".
Here the generator's state is kept before such a step and restored after it, which is what winding
back is for; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def restoring(original: Callable) -> Callable:
    """Wrap `CPUModelRunner._sample`: generators of discarded rows end as they began."""

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        before = {row: generator.get_state() for row, generator in _discarded(self).items()}
        output = original(self, logits, spec_decode_metadata)
        for row, state in before.items():
            self.input_batch.generators[row].set_state(state)
        return output

    return _sample


def hiding(original: Callable) -> Callable:
    """Wrap `CPUModelRunner._bookkeeping_sync`: it finds no generator to wind back."""

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = _discarded(self)
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return original(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    return _bookkeeping_sync


def _discarded(runner: Any) -> dict[int, Any]:
    """Generators of the rows whose sample is discarded in this step; usually none."""
    generators = runner.input_batch.generators
    if not generators:
        return {}
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    return {int(row): generators[int(row)] for row in rows if int(row) in generators}
