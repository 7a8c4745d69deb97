"""Engines that do not fit their checkpoint are refused before anything starts, with the fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plugin_models as models
import pytest
from safetensors.torch import load_file, save_file

from carryover.targets import Target
from carryover.vllm_plugin import reading, validation
from carryover.vllm_plugin.reading import UnsupportedCheckpoint
from carryover.vllm_plugin.validation import UnsupportedEngine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return models.make_target(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained checkpoints of both regimes, with and without carried context."""
    folder = tmp_path_factory.mktemp("drafters")
    made = {}
    for regime in ("dflash", "markov"):
        baseline = models.make_drafter(target, folder / regime, regime, steps=0)
        made[regime] = baseline
        made[f"carryover-{regime}"] = models.add_carryover(
            baseline, folder / f"carryover-{regime}", target
        )
    return made


def engine_config(target: Target, drafter: Path, **settings: Any):
    """What vLLM would start, without starting it."""
    from vllm import EngineArgs

    speculative = {"model": str(drafter), "num_speculative_tokens": models.PROPOSAL_LENGTH}
    speculative.update(settings.pop("speculative", {}))
    values = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, **settings}
    return EngineArgs(
        model=target.path, speculative_config=speculative, **values
    ).create_engine_config()


@pytest.fixture
def edited(drafters: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the Carryover DFlash checkpoint with its config changed."""

    def edit(change: Callable[[dict], None]) -> Path:
        copy = tmp_path / "edited"
        shutil.copytree(drafters["carryover-dflash"], copy)
        config = json.loads((copy / "config.json").read_text())
        change(config)
        (copy / "config.json").write_text(json.dumps(config))
        return copy

    return edit


@pytest.mark.parametrize("regime", ["dflash", "markov"])
def test_checkpoint_and_length_are_all_it_takes(
    target: Target, drafters: dict[str, Path], regime: str
) -> None:
    """The method comes from the checkpoint, whatever its folder is called."""
    config = engine_config(target, drafters[f"carryover-{regime}"]).speculative_config
    assert config.method == "dflash", "on this runner both regimes are DFlash to vLLM"
    assert reading.section_of(config)["block_size"] == models.PROPOSAL_LENGTH + 1
    assert reading.is_markov(config) == (regime == "markov")


def test_length_defaults_to_the_checkpoints(target: Target, drafters: dict[str, Path]) -> None:
    config = engine_config(
        target, drafters["carryover-markov"], speculative={"num_speculative_tokens": None}
    )
    assert config.speculative_config.num_speculative_tokens == models.PROPOSAL_LENGTH


def test_the_markov_baseline_starts_on_this_runner(
    target: Target, drafters: dict[str, Path]
) -> None:
    config = engine_config(target, drafters["markov"]).speculative_config
    assert config.method == "dflash"
    assert reading.section_of(config) is None


def test_a_dflash_baseline_is_configured_by_stock_code_alone(
    target: Target, drafters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an explicit method, our wrappers must hand on exactly what they were given."""
    checked = []
    monkeypatch.setattr(validation, "_proposal_problems", lambda *_: checked.append(True))
    config = engine_config(target, drafters["dflash"], speculative={"method": "dflash"})
    draft = config.speculative_config.draft_model_config
    assert draft.architectures == ["DFlashDraftModel"]
    assert not hasattr(draft.hf_config, "carryover")
    assert not checked


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculative": {"num_speculative_tokens": 9}},
            r"num_speculative_tokens 9 exceeds the checkpoint's 5; set it to 5 or less",
        ),
        (
            {"speculative": {"disable_padded_drafter_batch": True}},
            r"disable_padded_drafter_batch removes the rejected rows .* leave it unset",
        ),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 512},
            r"max_num_seqs 64 with 5 proposals needs max_num_batched_tokens 704, got 512"
            r"[\s\S]*or max_num_seqs to 46",
        ),
        ({"enable_lora": True}, r"LoRA adapters were not tried with Carryover; unset enable_lora"),
        (
            {"kv_cache_dtype": "fp8"},
            r"a quantised KV cache \(fp8.*\) was not tried .* set kv_cache_dtype to auto",
        ),
        (
            {
                "speculative": {
                    "num_speculative_tokens_per_batch_size": [
                        {"batch_size": 1, "num_speculative_tokens": 3}
                    ]
                }
            },
            r"num_speculative_tokens_per_batch_size",
        ),
    ],
    ids=["length", "padded", "batch", "lora", "kv-cache", "dynamic"],
)
def test_settings_that_do_not_fit(
    target: Target, drafters: dict[str, Path], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(target, drafters["carryover-dflash"], **settings)


def test_vllms_own_defaults_are_never_refused(target: Target, drafters: dict[str, Path]) -> None:
    """Sizes that cannot draft for all requests at once work in stock vLLM, only more slowly."""
    config = engine_config(target, drafters["carryover-dflash"])
    config.scheduler_config.max_num_batched_tokens = 64
    validation.check_engine(config, batch_was_chosen=False)
    with pytest.raises(UnsupportedEngine, match="requests would wait for their turn to draft"):
        validation.check_engine(config, batch_was_chosen=True)


@pytest.mark.parametrize(
    ("shape", "key"),
    [
        ({"num_layers": 6}, "num_hidden_layers"),
        ({"vocab_size": 352}, "vocab_size"),
        ({"hidden_size": 128, "num_heads": 4}, "hidden_size"),
    ],
)
def test_another_target_is_refused(
    drafters: dict[str, Path], tmp_path: Path, shape: dict[str, int], key: str
) -> None:
    other = models.make_target(tmp_path / "other", "qwen3", **shape)
    with pytest.raises(
        UnsupportedEngine, match=rf"the target's {key} is \d+, the drafter was made"
    ):
        engine_config(other, drafters["carryover-dflash"])


def test_the_same_shape_with_another_tokenizer_is_refused(
    target: Target, drafters: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target.path, copy)
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.get)[20:22]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedEngine, match="tokenizer_sha256"):
        engine_config(models.resolve(str(copy)), drafters["carryover-dflash"])


def test_every_problem_is_listed_at_once(target: Target, drafters: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedEngine) as caught:
        engine_config(
            target, drafters["carryover-dflash"], enable_lora=True,
            speculative={"num_speculative_tokens": 9},
        )  # fmt: skip
    assert str(caught.value).count("\n  - ") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["carryover"].update(format_version=2),
            "format_version is 2, this plugin reads",
        ),
        (lambda c: c["carryover"].update(carried="draft_tokens"), "serves 'hidden_states' only"),
        (lambda c: c["carryover"].update(mark="projector"), "serves 'embedding' or 'none' only"),
        (lambda c: c["carryover"].pop("target"), "target, the identity of the target, is missing"),
        (lambda c: c.update(carryover=1), "must be a mapping"),
        (lambda c: c.update(sliding_window_non_causal=False), "set it to true"),
        (lambda c: c.update(sample_from_anchor=True), "needs sample_from_anchor false"),
        (
            lambda c: c["transformer_layer_config"].update(
                layer_types=["sliding_attention", "sliding_attention"]
            ),
            "sliding-window layers",
        ),
        (
            lambda c: c.update(aux_hidden_state_layer_ids=[1, 4]),
            r"aux_hidden_state_layer_ids \[4\] are out of range",
        ),
        (
            lambda c: c.update(aux_hidden_state_layer_ids=[3, 1]),
            "not ascending and distinct",
        ),
    ],
)
def test_checkpoints_that_vllm_cannot_serve(
    target: Target,
    edited: Callable[..., Path],
    change: Callable[[dict], None],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(target, edited(change))


def test_a_missing_marker_is_noticed_when_weights_load(
    target: Target, drafters: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(drafters["carryover-dflash"], copy)
    tensors = load_file(copy / "model.safetensors")
    del tensors["carryover_marker"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match="carryover_marker is missing"):
        models.start(target, copy)


def test_drafter_layers_in_several_cache_groups(tmp_path: Path) -> None:
    """A target of mixed attention types, on the V1 runner."""
    gemma = models.make_target(tmp_path / "gemma", "gemma4")
    baseline = models.make_drafter(gemma, tmp_path / "baseline", steps=0)
    checkpoint = models.add_carryover(baseline, tmp_path / "carryover", gemma)
    with pytest.raises(UnsupportedEngine, match="set disable_hybrid_kv_cache_manager to true"):
        models.start(gemma, checkpoint)
