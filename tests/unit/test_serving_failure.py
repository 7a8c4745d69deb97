"""An engine's own error is found in its log, past what only passes it on."""

import pytest

from carryover.serving.failure import find_cause, read_tail

HEAD = "\x1b[0;36m(EngineCore pid=29)\x1b[0;0m ERROR 11-29 20:04:44 [core.py:1482] "
ENGINE_LOG = f"""\
INFO 11-29 20:04:40 [core.py:120] Initializing a V1 LLM engine
{HEAD}EngineCore failed to start.
{HEAD}Traceback (most recent call last):
{HEAD}  File "core.py", line 1, in run
{HEAD}ValueError: To serve at least one request with max seq len (4096), 0.5 GiB is needed
(EngineCore pid=29) Process EngineCore:
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


def test_the_first_error_counts_and_its_fix_is_given():
    cause = find_cause(ENGINE_LOG)
    assert cause.error.startswith("ValueError: To serve at least one request")
    assert "engine.kv_cache_gib" in cause.fix


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "free memory"),
        ("ValueError: Available memory (1/2 GiB) on kv cache allocation is less", "free memory"),
        ("ValueError: User-specified max_model_len (9) is greater than the derived", "max_model"),
        ("RuntimeError: size mismatch for fc.weight", "checkpoint verify"),
        ("ValueError: Model architectures ['X'] are not supported for now.", "checkpoint verify"),
        ("AssertionError: max_num_batched_tokens must be at least 16", "max_num_batched_tokens"),
    ],
)
def test_known_errors_come_with_what_to_do(line, fix):
    assert fix in find_cause(f"noise\n{line}\n").fix


def test_an_unknown_error_is_given_as_it_is():
    cause = find_cause("KeyError: 'layers.0'")
    assert cause.error == "KeyError: 'layers.0'" and cause.fix is None


def test_pydantic_says_what_is_wrong_on_its_next_lines():
    log = (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n"
        "  Value error, drafter has 3 layers [type=value_error]\n"
    )
    assert "drafter has 3 layers" in find_cause(log).error


def test_an_error_that_is_only_passed_on_is_better_than_none():
    cause = find_cause("RuntimeError: Engine core initialization failed. See root cause above.")
    assert cause.error.startswith("RuntimeError: Engine core")


def test_a_killed_worker_is_told_apart():
    cause = find_cause(
        "ERROR 11-29 20:04:44 [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: -9)"
    )
    assert "memory" in cause.fix


def test_a_log_without_an_error_has_no_cause():
    assert find_cause("INFO 11-29 20:04:40 [core.py:1] all is well\nErrors: 0\n") is None


def test_the_end_of_a_log_is_read_and_an_absent_one_is_empty(tmp_path):
    path = tmp_path / "log"
    path.write_text("x" * 300_000 + "\nKeyError: 1\n")
    assert find_cause(read_tail(path)).error == "KeyError: 1"
    assert read_tail(tmp_path / "absent") == ""
