"""Every place where the plugin replaces something of vLLM, with the reason.

vLLM offers hooks for most of what Carryover needs: the plugin entry point, the registries of
checkpoint readers and of model classes, and methods to override in proposers and speculators.
What is below has no hook. Each entry names the parameters that upstream's function had in the
versions tried; a test compares them, so that a changed vLLM is noticed before it is served.

The last entries repair faults of vLLM's CPU build. They also act on baseline checkpoints, and on
CPU only: left alone, the faults end engines, or falsify every comparison made on CPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MARK = "carryover_patch"


@dataclass(frozen=True)
class Patch:
    """One replaced attribute of a vLLM class or module.

    Attributes:
        module: where it lives.
        owner: the class; None: the module itself.
        attribute: what is replaced; None: the class itself changes in place.
        reason: why no hook of vLLM does it.
        parameters: of upstream's function, in order; for a class, its fields.
        wrap: takes upstream's function (or class) and returns ours.
    """

    module: str
    owner: str | None
    attribute: str | None
    reason: str
    parameters: tuple[str, ...]
    wrap: Callable[[Any], Any]

    def load_owner(self) -> Any:
        """Import the class or module."""
        module = importlib.import_module(self.module)
        return module if self.owner is None else getattr(module, self.owner)

    def apply(self) -> None:
        """Replace, unless that is done already."""
        owner = self.load_owner()
        if self.attribute is None:
            if _MARK not in owner.__dict__:
                self.wrap(owner)
                setattr(owner, _MARK, True)
            return
        original = getattr(owner, self.attribute)
        if hasattr(original, _MARK):
            return
        replacement = self.wrap(original)
        functools.update_wrapper(replacement, original)
        setattr(replacement, _MARK, True)
        static = self.attribute == "__new__"
        setattr(owner, self.attribute, staticmethod(replacement) if static else replacement)


def apply_all() -> None:
    """Apply every patch; harmless when repeated."""
    for patch in PATCHES:
        patch.apply()


def _completing_settings(original: Callable) -> Callable:
    from carryover.vllm_plugin.speculative_settings import complete

    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        complete(self)
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


def _checking_engine(original: Callable) -> Callable:
    from carryover.vllm_plugin.validation import check_engine

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch_was_chosen = self.max_num_seqs is not None or self.max_num_batched_tokens is not None
        vllm_config = original(self, *args, **kwargs)
        check_engine(vllm_config, batch_was_chosen=batch_was_chosen)
        return vllm_config

    return create_engine_config


def _choosing_proposer(original: Callable) -> Callable:
    def __new__(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from carryover.vllm_plugin.proposer import proposer_class

        return object.__new__(proposer_class(cls, vllm_config))

    return __new__


def _choosing_speculator(original: Callable) -> Callable:
    def __new__(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from carryover.vllm_plugin.speculator import speculator_class

        return object.__new__(speculator_class(cls, vllm_config))

    return __new__


def _adding_fields(stats_class: type) -> type:
    from carryover.vllm_plugin.metrics import add_fields

    return add_fields(stats_class)


def _counting(original: Callable) -> Callable:
    from carryover.vllm_plugin.metrics import counting

    return counting(original)


def _creating_counters(original: Callable) -> Callable:
    from carryover.vllm_plugin.metrics import creating_counters

    return creating_counters(original)


def _observing(original: Callable) -> Callable:
    from carryover.vllm_plugin.metrics import observing

    return observing(original)


def _restoring_seeds(original: Callable) -> Callable:
    from carryover.vllm_plugin.cpu_seeds import restoring

    return restoring(original)


def _hiding_seeds(original: Callable) -> Callable:
    from carryover.vllm_plugin.cpu_seeds import hiding

    return hiding(original)


def _leaving_nothing_alone(original: Callable) -> Callable:
    from carryover.vllm_plugin.cpu_sampling import leaving_nothing_alone

    return leaving_nothing_alone(original)


def _spreading(original: Callable) -> Callable:
    from carryover.vllm_plugin.cpu_sampling import spreading

    return spreading(original)


def _norming_layer_by_layer(original: Callable) -> Callable:
    from carryover.vllm_plugin.cpu_norm import layer_by_layer

    return layer_by_layer(original)


PATCHES = (
    Patch(
        module="vllm.engine.arg_utils",
        owner="EngineArgs",
        attribute="create_speculative_config",
        reason="vLLM guesses the drafting method from the folder's name, and refuses the Markov "
        "head on its V1 runner; the checkpoint says what it is",
        parameters=("self", "target_model_config", "target_parallel_config"),
        wrap=_completing_settings,
    ),
    Patch(
        module="vllm.engine.arg_utils",
        owner="EngineArgs",
        attribute="create_engine_config",
        reason="no hook sees the whole configuration before engine processes start, and a wrong "
        "pair of target and drafter must not cost a model load",
        parameters=("self", "usage_context", "headless"),
        wrap=_checking_engine,
    ),
    Patch(
        module="vllm.v1.spec_decode.dflash",
        owner="DFlashProposer",
        attribute="__new__",
        reason="the V1 runner names its proposer class in code",
        parameters=("args", "kwargs"),
        wrap=_choosing_proposer,
    ),
    Patch(
        module="vllm.v1.worker.gpu.spec_decode.dflash.speculator",
        owner="DFlashSpeculator",
        attribute="__new__",
        reason="the V2 runner names its speculator classes in code; DSparkSpeculator inherits this",
        parameters=("args", "kwargs"),
        wrap=_choosing_speculator,
    ),
    Patch(
        module="vllm.v1.spec_decode.metrics",
        owner="SpecDecodingStats",
        attribute=None,
        reason="statistics cross from scheduler to front end in this class alone",
        parameters=(
            "num_spec_tokens",
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_accepted_tokens_per_pos",
            "num_draft_tokens_per_pos",
        ),
        wrap=_adding_fields,
    ),
    Patch(
        module="vllm.v1.core.sched.scheduler",
        owner="Scheduler",
        attribute="make_spec_decoding_stats",
        reason="the one place that sees each request's proposals and acceptances",
        parameters=(
            "self",
            "spec_decoding_stats",
            "num_draft_tokens",
            "num_accepted_tokens",
            "num_invalid_spec_tokens",
            "request_id",
        ),
        wrap=_counting,
    ),
    Patch(
        module="vllm.v1.spec_decode.metrics",
        owner="SpecDecodingProm",
        attribute="__init__",
        reason="vLLM's statistics plug-ins are for its asynchronous server only; this class "
        "serves Prometheus, get_metrics() and Ray alike",
        parameters=(
            "self",
            "speculative_config",
            "labelnames",
            "per_engine_labelvalues",
            "is_diffusion",
        ),
        wrap=_creating_counters,
    ),
    Patch(
        module="vllm.v1.spec_decode.metrics",
        owner="SpecDecodingProm",
        attribute="observe",
        reason="as above",
        parameters=("self", "spec_decoding_stats", "engine_idx"),
        wrap=_observing,
    ),
    Patch(
        module="vllm.v1.worker.cpu_model_runner",
        owner="CPUModelRunner",
        attribute="_sample",
        reason="fault of the CPU build: a request with a seed can end the engine",
        parameters=("self", "logits", "spec_decode_metadata"),
        wrap=_restoring_seeds,
    ),
    Patch(
        module="vllm.v1.worker.cpu_model_runner",
        owner="CPUModelRunner",
        attribute="_bookkeeping_sync",
        reason="as above",
        parameters=(
            "self",
            "scheduler_output",
            "sampler_output",
            "logits",
            "hidden_states",
            "num_scheduled_tokens",
        ),
        wrap=_hiding_seeds,
    ),
    Patch(
        module="vllm.model_executor.models.qwen3_dflash",
        owner="DFlashQwen3Model",
        attribute="_normalize_context_k",
        reason="fault of the CPU build: every drafter layer's context keys get the first layer's "
        "norm, so that trained drafters propose something else than they should",
        parameters=("self", "all_k"),
        wrap=_norming_layer_by_layer,
    ),
    Patch(
        module="vllm.v1.sample.ops.topk_topp_sampler",
        owner=None,
        attribute="apply_top_k_only",
        reason="fault of the CPU build: with speculation, a request that sets top_k alone ends the "
        "engine in the first step without proposals ('max(): ... input.numel() == 0')",
        parameters=("logits", "k"),
        wrap=_leaving_nothing_alone,
    ),
    Patch(
        module="vllm.v1.sample.rejection_sampler",
        owner=None,
        attribute="expand_batch_to_tokens",
        reason="fault of the CPU build: temperature, top-k and top-p of proposals are read from "
        "memory that nobody wrote",
        parameters=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
        wrap=_spreading,
    ),
)
