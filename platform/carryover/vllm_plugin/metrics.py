"""Counters of carried rows, beside vLLM's own counters of speculative decoding.

vLLM's scheduler knows, without asking the device, how many proposals of each request were
rejected; those rows are what the next draft carries. The counts ride to the front end in vLLM's
own per-step statistics, and are exported wherever vLLM exports those: Prometheus, `get_metrics()`
and Ray metrics.

    vllm:spec_decode_num_carried_rows    rejected rows kept for the next draft
    vllm:spec_decode_num_carried_drafts  drafts that had at least one
    vllm:spec_decode_num_cut_drafts      drafts whose rows did not all fit below max_model_len
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from carryover.vllm_plugin import reading

# Field of vLLM's SpecDecodingStats, counter, and its help text.
COUNTERS = (
    (
        "num_carried_rows",
        "vllm:spec_decode_num_carried_rows",
        "Rejected target states carried into the next draft.",
    ),
    (
        "num_carried_drafts",
        "vllm:spec_decode_num_carried_drafts",
        "Drafts that had carried rows.",
    ),
    (
        "num_cut_drafts",
        "vllm:spec_decode_num_cut_drafts",
        "Drafts whose carried rows were cut at max_model_len.",
    ),
)


def kept_rows(
    *, rejected: int, committed: int, num_query: int, max_model_len: int, whole_or_none: bool
) -> int:
    """Rows that a draft carries of those that were rejected.

    Args:
        rejected: proposals after the first failure.
        committed: committed states, the anchor's position.
        num_query: rows of a block, B+1.
        max_model_len: slots that a request can have.
        whole_or_none: the V1 runner drafts only where block and rows all fit; V2 drops the rows
            that do not.
    """
    room = max_model_len - num_query - committed
    if whole_or_none and room < rejected:
        return 0
    return min(rejected, max(room, 0))


def add_fields(stats_class: type) -> type:
    """Give vLLM's per-step statistics one integer field per counter, 0 by default, in place.

    In place because the class is named in the annotations by which vLLM's processes decode each
    other's messages.
    """
    for field in dataclasses.fields(stats_class):
        if field.default_factory is not dataclasses.MISSING:
            # `dataclass` removes these from the class once it has read them.
            factory = dataclasses.field(default_factory=field.default_factory)
            setattr(stats_class, field.name, factory)
    for name, _, _ in COUNTERS:
        stats_class.__annotations__[name] = int
        setattr(stats_class, name, 0)
    for generated in ("__init__", "__repr__", "__eq__"):
        # `dataclass` keeps a method that the class defines.
        delattr(stats_class, generated)
    return dataclasses.dataclass(stats_class)


def counting(original: Callable) -> Callable:
    """Wrap `Scheduler.make_spec_decoding_stats`: count what each verified draft leaves."""

    def make_spec_decoding_stats(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        stats = original(
            self, spec_decoding_stats, num_draft_tokens, num_accepted_tokens,
            num_invalid_spec_tokens, request_id,
        )  # fmt: skip
        rejected = num_draft_tokens - num_accepted_tokens
        if (
            stats is None
            or rejected <= 0
            or reading.section_of(self.vllm_config.speculative_config) is None
        ):
            return stats
        kept = kept_rows(
            rejected=rejected,
            # The step's own tokens are not appended yet: the anchor before it is the last token.
            committed=self.requests[request_id].num_tokens + num_accepted_tokens,
            num_query=1 + self.num_spec_tokens,
            max_model_len=self.max_model_len,
            whole_or_none=not self.use_v2_model_runner,
        )
        stats.num_carried_rows += kept
        stats.num_carried_drafts += kept > 0
        stats.num_cut_drafts += kept < rejected
        return stats

    return make_spec_decoding_stats


def creating_counters(original: Callable) -> Callable:
    """Wrap `SpecDecodingProm.__init__`: make our counters with vLLM's class and labels."""

    def __init__(
        self: Any,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        is_diffusion: bool = False,
    ) -> None:
        original(self, speculative_config, labelnames, per_engine_labelvalues, is_diffusion)
        self.carryover_counters = {}
        if reading.section_of(speculative_config) is None:
            return
        for field, name, documentation in COUNTERS:
            counter = self._counter_cls(
                name=name, documentation=documentation, labelnames=labelnames
            )
            self.carryover_counters[field] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    return __init__


def observing(original: Callable) -> Callable:
    """Wrap `SpecDecodingProm.observe`: advance our counters with vLLM's."""

    def observe(self: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        original(self, spec_decoding_stats, engine_idx)
        for field, engines in self.carryover_counters.items():
            engines[engine_idx].inc(getattr(spec_decoding_stats, field, 0))

    return observe
