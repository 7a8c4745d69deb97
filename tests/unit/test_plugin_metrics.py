"""Counting carried rows in the scheduler, and where the counts are exported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from carryover.vllm_plugin import register
from carryover.vllm_plugin.metrics import COUNTERS, kept_rows


@given(
    st.integers(0, 15), st.integers(1, 200), st.integers(2, 16), st.integers(20, 200), st.booleans()
)
def test_kept_rows_always_fit(
    rejected: int, committed: int, num_query: int, max_model_len: int, whole_or_none: bool
) -> None:
    kept = kept_rows(
        rejected=rejected, committed=committed, num_query=num_query, max_model_len=max_model_len,
        whole_or_none=whole_or_none,
    )  # fmt: skip
    assert 0 <= kept <= rejected
    assert kept == 0 or committed + kept + num_query <= max_model_len
    if committed + rejected + num_query <= max_model_len:
        assert kept == rejected
    elif whole_or_none:
        assert kept == 0


def speculative(section: dict | None) -> SimpleNamespace:
    config = SimpleNamespace() if section is None else SimpleNamespace(carryover=section)
    return SimpleNamespace(
        num_speculative_tokens=3, draft_model_config=SimpleNamespace(hf_config=config)
    )


def scheduler(section: dict | None, *, num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        log_stats=True, num_spec_tokens=3, max_model_len=32, use_v2_model_runner=False,
        vllm_config=SimpleNamespace(speculative_config=speculative(section)),
        requests={"a": SimpleNamespace(num_tokens=num_tokens)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_tokens", "accepted", "rows", "drafts", "cut"),
    [(10, 1, 2, 1, 0), (10, 3, 0, 0, 0), (28, 1, 0, 0, 1)],
    ids=["rejections are carried", "nothing rejected", "at the longest sequence"],
)
def test_the_scheduler_counts_what_drafts_leave(
    num_tokens: int, accepted: int, rows: int, drafts: int, cut: int
) -> None:
    register()
    from vllm.v1.core.sched.scheduler import Scheduler

    stats = Scheduler.make_spec_decoding_stats(
        scheduler({}, num_tokens=num_tokens), None, 3, accepted, None, "a"
    )
    counts = (stats.num_carried_rows, stats.num_carried_drafts, stats.num_cut_drafts)
    assert counts == (rows, drafts, cut)
    assert stats.num_accepted_tokens == accepted


def test_a_baseline_counts_nothing() -> None:
    register()
    from vllm.v1.core.sched.scheduler import Scheduler

    stats = Scheduler.make_spec_decoding_stats(
        scheduler(None, num_tokens=10), None, 3, 0, None, "a"
    )
    assert stats.num_carried_rows == stats.num_carried_drafts == stats.num_cut_drafts == 0
    assert stats.num_drafts == 1


def exporter(section: dict | None):
    register()
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    return SpecDecodingProm(speculative(section), ["model_name", "engine"], {0: ["tiny", "0"]})


def test_counters_are_exported_with_vllms_labels() -> None:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    unregister_vllm_metrics()
    stats = SpecDecodingStats.new(3)
    try:
        prom = exporter({})
        stats.num_carried_rows, stats.num_carried_drafts = 5, 2
        prom.observe(stats)
        prom.observe(stats)
        labels = {"model_name": "tiny", "engine": "0"}
        values = [REGISTRY.get_sample_value(f"{name}_total", labels) for _, name, _ in COUNTERS]
        assert values == [10, 4, 0]
    finally:
        unregister_vllm_metrics()


def test_a_baseline_exports_nothing_of_ours() -> None:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    unregister_vllm_metrics()
    try:
        exporter(None).observe(SpecDecodingStats.new(3))
        names = {metric.name for metric in REGISTRY.collect()}
        assert not names & {name for _, name, _ in COUNTERS}
        assert "vllm:spec_decode_num_drafts" in names
    finally:
        unregister_vllm_metrics()


def test_ray_metrics_are_made_by_the_same_patched_class() -> None:
    register()
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    exported = RayPrometheusStatLogger._spec_decoding_cls
    assert exported.__init__ is SpecDecodingProm.__init__
    assert exported.observe is SpecDecodingProm.observe
    assert exported._counter_cls is not SpecDecodingProm._counter_cls
