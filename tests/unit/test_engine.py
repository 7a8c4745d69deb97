"""Engine arguments for a target, and how much KV cache a CPU engine asks for."""

from types import SimpleNamespace

import pytest

from carryover import engine as engine_module
from carryover.engine import (
    GIB,
    EngineConfig,
    cpu_kv_cache_bytes,
    engine_kwargs,
    kv_bytes_per_token,
)
from carryover.errors import ConfigError, EnvironmentProblem
from carryover.targets import resolve

SMOLLM = SimpleNamespace(
    num_hidden_layers=30, num_key_value_heads=3, num_attention_heads=9, hidden_size=576
)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(engine_module, "has_gpu", lambda: False)


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(engine_module, "has_gpu", lambda: True)


def test_cpu_arguments(tiny_llama, on_cpu):
    target = resolve(str(tiny_llama))
    kwargs = engine_kwargs(target, EngineConfig(max_model_len=256, max_num_seqs=7, seed=3))
    assert kwargs.pop("kv_cache_memory_bytes") > 0
    assert kwargs == {
        "model": str(tiny_llama), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 7,
        "tensor_parallel_size": 1, "enforce_eager": True, "seed": 3, "disable_log_stats": True,
    }  # fmt: skip


def test_gpu_arguments(tiny_llama, on_gpu):
    config = EngineConfig(tensor_parallel_size=2, extra={"limit_mm_per_prompt": {"image": 0}})
    speculative = {"model": "drafter", "num_speculative_tokens": 7}
    kwargs = engine_kwargs(
        resolve(str(tiny_llama)), config, speculative=speculative, log_stats=True
    )
    assert kwargs["dtype"] == "auto" and kwargs["enforce_eager"] is False
    assert kwargs["gpu_memory_utilization"] == 0.9 and "kv_cache_memory_bytes" not in kwargs
    assert kwargs["distributed_executor_backend"] == "mp"
    assert kwargs["speculative_config"] == speculative
    assert kwargs["limit_mm_per_prompt"] == {"image": 0}
    assert kwargs["disable_log_stats"] is False


def test_what_is_set_by_hand_is_kept(tiny_llama, on_cpu):
    config = EngineConfig(dtype="bfloat16", enforce_eager=False, kv_cache_gib=0.5)
    kwargs = engine_kwargs(resolve(str(tiny_llama)), config)
    assert kwargs["dtype"] == "bfloat16" and kwargs["enforce_eager"] is False
    assert kwargs["kv_cache_memory_bytes"] == GIB // 2


def test_impossible_settings_are_refused(tiny_llama, on_cpu):
    target = resolve(str(tiny_llama))
    with pytest.raises(ConfigError, match="max_model_len 4096 exceeds the 2048 positions"):
        engine_kwargs(target, EngineConfig(max_model_len=4096))
    with pytest.raises(ConfigError, match=r"engine\.extra repeats dtype, seed"):
        engine_kwargs(target, EngineConfig(extra={"seed": 1, "dtype": "float16"}))


def test_bytes_of_a_token():
    # 30 layers, keys and values, 3 heads of 64, 4 bytes
    assert kv_bytes_per_token(SMOLLM, dtype="float32") == 30 * 2 * 3 * 64 * 4
    assert kv_bytes_per_token(SMOLLM, dtype="bfloat16") == 30 * 2 * 3 * 64 * 2
    wide = SimpleNamespace(**{**vars(SMOLLM), "head_dim": 128, "num_key_value_heads": None})
    assert kv_bytes_per_token(wide, dtype="float32") == 30 * 2 * 9 * 128 * 4


def test_the_cache_is_what_is_needed_or_half_of_what_is_free():
    config = EngineConfig(max_model_len=200, max_num_seqs=10)
    sequence = 256 * kv_bytes_per_token(SMOLLM, dtype="float32")
    assert cpu_kv_cache_bytes(SMOLLM, config, dtype="float32", free_bytes=100 * GIB) == (
        11 * sequence
    )
    assert cpu_kv_cache_bytes(SMOLLM, config, dtype="float32", free_bytes=8 * sequence) == (
        4 * sequence
    )
    with_drafter = cpu_kv_cache_bytes(
        SMOLLM, config, dtype="float32", free_bytes=100 * GIB, speculative=True
    )
    assert with_drafter == 11 * (sequence + sequence // 4)
    with pytest.raises(EnvironmentProblem, match=r"half of the free memory is 0\.0"):
        cpu_kv_cache_bytes(SMOLLM, config, dtype="float32", free_bytes=3 * sequence)
