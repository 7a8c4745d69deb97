"""The plugin's hold on vLLM: what it replaces is as it was in the versions tried."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from importlib.metadata import entry_points
from types import SimpleNamespace

import msgspec
import pytest
import vllm
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

from carryover.vllm_plugin import install, patches, reading, register
from carryover.vllm_plugin.metrics import COUNTERS


def upstream(patch: patches.Patch):
    """vLLM's own function behind a patch, applied or not."""
    current = getattr(patch.load_owner(), patch.attribute)
    return getattr(current, "__wrapped__", current)


@pytest.mark.parametrize(
    "patch", patches.PATCHES, ids=lambda p: f"{p.owner or p.module}.{p.attribute}"
)
def test_upstream_is_as_it_was_when_tried(patch: patches.Patch) -> None:
    """A vLLM whose function changed its parameters must be read again before it is patched."""
    if patch.attribute is None:
        ours = {name for name, _, _ in COUNTERS}
        fields = [f.name for f in dataclasses.fields(patch.load_owner()) if f.name not in ours]
        assert tuple(fields) == patch.parameters
        return
    if patch.attribute == "__new__":
        assert upstream(patch) is object.__new__, "upstream now chooses the class itself"
        return
    assert tuple(inspect.signature(upstream(patch)).parameters) == patch.parameters
    assert patch.reason


# Methods of vLLM's classes that ours override or call, with upstream's parameters.
OVERRIDDEN = {
    ("vllm.v1.spec_decode.dflash", "DFlashProposer"): {
        "set_inputs_first_pass": (
            "self", "target_token_ids", "next_token_ids", "target_positions",
            "target_hidden_states", "token_indices_to_sample", "cad", "num_rejected_tokens_gpu",
        ),
        "_sample_draft_tokens": ("self", "hidden_states", "sampling_metadata"),
        "_sample_from_logits": ("self", "logits", "sampling_metadata"),
        "validate_same_kv_cache_group": ("self", "kv_cache_config"),
    },
    ("vllm.v1.worker.gpu.spec_decode.dflash.speculator", "DFlashSpeculator"): {
        "prepare_context_anchor": ("self", "input_batch", "num_rejected"),
        "capture": ("self",),
        "_prepare_graph_forward": ("self", "num_reqs", "attn_metadata"),
        "_precompute_context_kv": ("self", "start", "end", "dummy_run"),
        "_build_uniform_attn_metadata": (
            "self", "batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound",
            "step", "causal", "dcp_local_seq_lens",
        ),
    },
    ("vllm.model_executor.models.qwen3_dspark", "Qwen3DSparkForCausalLM"): {
        "compute_draft_logits": ("self", "hidden_states"),
        "markov_embed": ("self", "token_ids"),
        "markov_bias": ("self", "markov_embed"),
        "map_draft_to_target": ("self", "draft_ids"),
        "load_weights": ("self", "weights"),
    },
    ("vllm.config", "VllmConfig"): {
        "num_lookahead_tokens": ("self",),
    },
}  # fmt: skip


@pytest.mark.parametrize("place", OVERRIDDEN, ids=lambda place: place[1])
def test_overridden_methods_are_as_they_were_when_tried(place: tuple[str, str]) -> None:
    owner = getattr(importlib.import_module(place[0]), place[1])
    for name, parameters in OVERRIDDEN[place].items():
        method = inspect.getattr_static(owner, name)
        function = method.fget if isinstance(method, property) else getattr(owner, name)
        assert tuple(inspect.signature(function).parameters) == parameters, name


def test_vllm_reserves_the_slots_that_carried_rows_need() -> None:
    """B+1 slots past the verified rows, for both regimes: what `rows.py` builds on."""
    from vllm.config import VllmConfig

    for method in ("dflash", "dspark"):
        draft = SimpleNamespace(hf_config=SimpleNamespace(sample_from_anchor=False))
        speculative = SimpleNamespace(
            use_dflash=lambda method=method: method == "dflash",
            use_dspark=lambda method=method: method == "dspark",
            draft_model_config=draft,
        )
        config = SimpleNamespace(speculative_config=speculative, num_speculative_tokens=7)
        assert VllmConfig.num_lookahead_tokens.fget(config) == 8


def test_registering_again_changes_nothing() -> None:
    register()
    before = [
        getattr(p.load_owner(), p.attribute) if p.attribute else p.load_owner().__init__
        for p in patches.PATCHES
    ]
    readers = dict(SUPPORTED_SPECULATORS_TYPES)
    register()
    after = [
        getattr(p.load_owner(), p.attribute) if p.attribute else p.load_owner().__init__
        for p in patches.PATCHES
    ]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert readers == SUPPORTED_SPECULATORS_TYPES


def test_vllm_finds_the_entry_point() -> None:
    found = entry_points(group="vllm.general_plugins", name="carryover")
    assert [point.value for point in found] == ["carryover.vllm_plugin:register"]


def test_readers_leave_a_baseline_config_as_stock_vllm_makes_it() -> None:
    register()
    config = {
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 7,
        "draft_vocab_size": 11,
        "block_size": 4,
        "markov_rank": 2,
    }
    for algorithm in reading.ARCHITECTURES:
        reader = SUPPORTED_SPECULATORS_TYPES[algorithm]
        ours, stock = {}, {}
        reader(config_dict=dict(config), pre_trained_config=ours)
        reader.stock_reader(config_dict=dict(config), pre_trained_config=stock)
        assert ours == stock


def test_an_untried_version_is_refused_with_the_versions_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only Carryover checkpoints are refused; everything else starts as if without plugin."""
    register()
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    applied = []
    monkeypatch.setattr(patches, "apply_all", lambda: applied.append(True))
    register()
    assert not applied
    reader = SUPPORTED_SPECULATORS_TYPES["dflash"]
    baseline = {"aux_hidden_state_layer_ids": [1], "mask_token_id": 7}
    reader(config_dict=dict(baseline), pre_trained_config={})
    with pytest.raises(install.UntriedVersion, match=r"need vLLM 0\.32\.0, got 0\.99\.0"):
        reader(config_dict={**baseline, "carryover": {}}, pre_trained_config={})


def test_a_local_build_label_is_not_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", f"{install.TRIED_VERSIONS[0]}+cpu")
    assert install.version_is_tried()


def test_statistics_keep_their_fields_and_cross_processes() -> None:
    """The in-place change of vLLM's statistics survives vLLM's own serialisation."""
    register()
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    stats = SpecDecodingStats.new(3)
    stats.observe_draft(num_draft_tokens=3, num_accepted_tokens=1)
    stats.num_carried_rows += 2
    assert stats.num_accepted_tokens_per_pos == [1, 0, 0]
    assert SpecDecodingStats.new(3).num_draft_tokens_per_pos == [0, 0, 0]
    sent = msgspec.msgpack.encode(SchedulerStats(spec_decoding_stats=stats))
    received = msgspec.msgpack.decode(sent, type=SchedulerStats).spec_decoding_stats
    assert received == stats
    assert received.num_carried_rows == 2
