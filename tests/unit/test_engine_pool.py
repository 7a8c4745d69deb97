"""How fast a pool of engines is said to be."""

import pytest

from carryover.engine import EngineConfig, PoolConfig
from carryover.engine_worker import Request
from carryover.targets import Target
from jobs import engine_pool
from jobs.engine_pool import EnginePool


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(engine_pool.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def pool():
    return EnginePool(Target("t", "t"), EngineConfig(max_num_seqs=8), PoolConfig())


def reading(pool, clock, *, seconds, generated, filling=False):
    if pool._began is None:
        pool._began = clock[0]
        pool._speed.append((clock[0], pool.generated_tokens))
    clock[0] += seconds
    pool.generated_tokens += generated
    pool._measure(filling=filling)


def test_the_speed_leaves_out_the_filling_of_engines(pool, clock):
    assert (pool.tokens_per_s, pool.measured_s) == (0.0, 0.0)
    reading(pool, clock, seconds=5, generated=10, filling=True)
    assert pool.tokens_per_s == 0.0
    reading(pool, clock, seconds=2, generated=600)
    reading(pool, clock, seconds=2, generated=200)
    assert (pool.tokens_per_s, pool.measured_s) == (200.0, 4.0)
    # reading further prompts is part of going on
    reading(pool, clock, seconds=4, generated=0, filling=True)
    assert (pool.tokens_per_s, pool.measured_s) == (100.0, 8.0)


def test_long_prompts_do_not_put_off_the_speed_for_ever(pool, clock):
    for _ in range(7):
        reading(pool, clock, seconds=5, generated=50, filling=True)
    assert pool.tokens_per_s == 10.0


def test_the_speed_is_that_of_the_last_seconds(pool, clock):
    for _ in range(30):
        reading(pool, clock, seconds=1, generated=10)
    for _ in range(30):
        reading(pool, clock, seconds=1, generated=70)
    assert pool.tokens_per_s == 70.0 and pool.measured_s <= engine_pool.SPEED_WINDOW_S


def test_a_pause_between_two_pieces_of_work_does_not_count(pool, clock):
    for _ in range(3):
        reading(pool, clock, seconds=1, generated=10)
    clock[0] += 1000
    pool.submit(Request(id=0, prompt_ids=[1], max_tokens=1))
    assert pool.tokens_per_s == 0.0
    reading(pool, clock, seconds=1, generated=30)
    reading(pool, clock, seconds=1, generated=30)
    assert pool.tokens_per_s == 30.0


def test_a_pool_serves_one_target_up_to_one_length(pool):
    pool.check(Target("other name", "t"), max_model_len=1024)
    with pytest.raises(ValueError, match="asked for x up to 5"):
        pool.check(Target("t", "x"), max_model_len=5)
    with pytest.raises(ValueError, match="asked for t up to 2000"):
        pool.check(Target("t", "t"), max_model_len=2000)
