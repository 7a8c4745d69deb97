"""Prompts and responses from real vLLM engines in real Ray actors, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
from talker import make_talker

from carryover.data.prompts import PROMPTS, read_prompts
from carryover.data.regeneration import RegenerateConfig, render_chat
from carryover.data.responses import read_responses, responses_metadata
from carryover.data.store import read_metadata, read_store
from carryover.data.synthesis import SynthesizeConfig
from carryover.engine import EngineConfig, PoolConfig
from carryover.engine_worker import Request
from carryover.errors import ConfigError, DataError, EnvironmentProblem, TargetError
from carryover.targets import Target

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

ENGINE = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.05, "seed": 1}


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return make_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def pool(talker):
    from jobs.engine_pool import EnginePool

    with EnginePool(talker, EngineConfig(**ENGINE), PoolConfig(cpus_per_engine=1)) as started:
        yield started


def write_prompts(path, count):
    lines = [
        json.dumps({"prompt": f"Say {n} and add", "category": "abc"[n % 3]}) for n in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def regenerate_config(talker, prompts, out, **changes):
    given = {
        "target": talker.name, "prompts": [{"path": str(prompts)}], "out": str(out),
        "max_new_tokens": 24, "engine": ENGINE, **changes,
    }  # fmt: skip
    return RegenerateConfig.parse(given)


def test_responses_are_the_engines_own(talker, pool, tmp_path):
    import torch

    from jobs.regenerate import RegenerationProgress, regenerate

    prompts = write_prompts(tmp_path / "p.jsonl", 40)
    config = regenerate_config(talker, prompts, tmp_path / "out")
    events = []
    summary = regenerate(config, pool=pool, report=events.append)
    table = read_responses(tmp_path / "out")
    rows = {row["id"]: row for row in table.to_pylist()}
    assert sorted(rows) == list(range(40)) and summary.rows == 40
    assert {number: row["temperature"] for number, row in rows.items()} == pytest.approx(
        {number: 0.8 * (number % 2) for number in range(40)}
    )
    assert Counter(row["category"] for row in rows.values()) == {"a": 14, "b": 13, "c": 13}
    tokenizer, model = talker.load_tokenizer(), talker.load_model()
    for number, row in rows.items():
        messages = [{"role": "user", "content": f"Say {number} and add"}]
        assert row["prompt_ids"] == render_chat(tokenizer, messages)
        ended = row["response_ids"][-1] == tokenizer.eos_token_id
        assert row["finish"] == ("stop" if ended else "length")
        assert ended or len(row["response_ids"]) == 24
        assert tokenizer.eos_token_id not in row["response_ids"][:-1]
    assert summary.counts.cut == sum(row["finish"] == "length" for row in rows.values())
    assert summary.counts.response_tokens == sum(len(r["response_ids"]) for r in rows.values())
    assert {row["finish"] for row in rows.values()} == {"stop", "length"}
    # greedy rows are what the target itself says next, token by token
    for number in (0, 2, 4):
        ids = torch.tensor([rows[number]["prompt_ids"] + rows[number]["response_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        start = len(rows[number]["prompt_ids"])
        chosen = logits[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        assert (logits[start - 1 : -1].max(1).values - chosen).max() < 1e-3
    metadata = responses_metadata(table)
    assert metadata["target"] == talker.identity()
    assert metadata["engine"]["name"] == "vllm" and metadata["engine"]["dtype"] == "float32"
    assert metadata["settings"]["max_new_tokens"] == 24
    assert {"torch", "transformers"} <= set(metadata["versions"])
    progress = [event for event in events if isinstance(event, RegenerationProgress)]
    assert progress[-1].rows == progress[-1].total == 40
    assert [e.rows for e in progress] == sorted(e.rows for e in progress)
    # again: nothing is asked, and engines of another target would be refused
    asked = pool.generated_tokens
    again = regenerate(config, pool=pool)
    assert (again.counts.done, again.rows, pool.generated_tokens) == (0, 40, asked)
    other = regenerate_config(talker, prompts, tmp_path / "o", engine={"max_model_len": 300})
    with pytest.raises(ValueError, match="asked for"):
        regenerate(other, pool=pool)


def test_conversations_go_on_from_the_targets_own_replies(talker, pool, tmp_path):
    from jobs.regenerate import regenerate

    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"turns": ["First", "Second", "Third"]}) + "\n")
    config = regenerate_config(talker, path, tmp_path / "out", max_turns=2, max_new_tokens=8)
    regenerate(config, pool=pool)
    first, second = read_responses(tmp_path / "out").to_pylist()
    assert (first["id"], second["id"]) == (0, 1)
    tokenizer = talker.load_tokenizer()
    reply = tokenizer.decode(first["response_ids"], skip_special_tokens=True)
    conversation = [
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "Second"},
    ]
    assert first["prompt_ids"] == render_chat(tokenizer, conversation[:1])
    assert second["prompt_ids"] == render_chat(tokenizer, conversation)


def test_a_target_writes_its_own_prompts(talker, pool, tmp_path):
    from jobs.synthesize import SynthesisProgress, synthesize

    config = SynthesizeConfig.parse(
        {
            "target": talker.name, "out": str(tmp_path / "out"), "num_prompts": 12,
            "max_tokens": 60, "temperature": 1.0, "max_attempts_per_prompt": 40, "engine": ENGINE,
            "elicitations": [{"category": "free", "weight": 2},
                             {"category": "led", "opening": "Add the"}],
        }
    )  # fmt: skip
    events = []
    summary = synthesize(config, pool=pool, report=events.append)
    prompts = read_prompts(tmp_path / "out")
    assert summary.found == len(prompts) == 12
    assert summary.attempts == 12 + sum(summary.rejected.values())
    assert {prompt.category for prompt in prompts} == {"free", "led"}
    assert all(p.turns[0].startswith("Add the") for p in prompts if p.category == "led")
    assert len({prompt.turns[0] for prompt in prompts}) == 12
    assert not any("<|im_" in prompt.turns[0] for prompt in prompts)
    assert read_metadata(tmp_path / "out")["target"] == talker.identity()
    assert read_metadata(tmp_path / "out")["engine"]["name"] == "vllm"
    found = [event.found for event in events if isinstance(event, SynthesisProgress)]
    assert found == sorted(found) and found[-1] == 12
    assert pool.in_flight == 0, "unfinished attempts must not go on"
    more = config.model_copy(update={"num_prompts": 14})
    assert synthesize(more, pool=pool).added == 2
    assert read_prompts(tmp_path / "out")[:12] == prompts
    assert synthesize(config, pool=pool).added == 0
    # it gives up when too little is usable, and keeps what was found
    hopeless = SynthesizeConfig.parse(
        {**config.model_dump(), "out": str(tmp_path / "h"), "min_tokens": 60, "num_prompts": 3,
         "max_attempts_per_prompt": 4}
    )  # fmt: skip
    with pytest.raises(DataError, match=r"attempts gave \d+ of 3 prompts \(left out: "):
        synthesize(hopeless, pool=pool)
    assert pool.in_flight == 0


def test_a_bad_request_harms_no_other(pool):
    from jobs.engine_pool import drain

    vocab = pool.target.load_config().vocab_size
    requests = [
        Request(id=0, prompt_ids=[65] * 10, max_tokens=4),
        Request(id=1, prompt_ids=[65] * 500, max_tokens=4),
        Request(id=2, prompt_ids=[vocab + 5], max_tokens=4),
        Request(id=3, prompt_ids=[65], max_tokens=4, temperature=-1.0),
        Request(id=4, prompt_ids=[66], max_tokens=4, temperature=0.7, top_k=3),
    ]
    found = {}
    for _ in drain(pool, requests, lambda done: found.update({done.id: done}) or []):
        pass
    assert {number: done.finish for number, done in found.items()} == {
        0: found[0].finish, 1: "refused", 2: "refused", 3: "refused", 4: found[4].finish,
    }  # fmt: skip
    assert found[0].finish in ("stop", "length") and found[4].finish in ("stop", "length")
    assert "256" in found[1].error and "temperature" in found[3].error
    assert pool.restarts == 0


def test_a_dead_engine_is_replaced_and_its_work_done_again(talker, pool, tmp_path):
    import ray

    from jobs.regenerate import RegenerationProgress, regenerate

    killed = []

    def kill_once(event):
        if isinstance(event, RegenerationProgress) and event.rows >= 5 and not killed:
            killed.append(pool._engines[0].actor)
            ray.kill(killed[0])

    prompts = write_prompts(tmp_path / "p.jsonl", 60)
    config = regenerate_config(talker, prompts, tmp_path / "out")
    summary = regenerate(config, pool=pool, report=kill_once)
    assert killed and summary.restarts == 1
    ids = read_responses(tmp_path / "out").column("id").to_pylist()
    assert sorted(ids) == list(range(60))


def test_the_disk_is_checked_after_the_warm_up(talker, pool, tmp_path, monkeypatch):
    from jobs import regenerate as job

    monkeypatch.setattr(job, "WARM_UP_S", 0.0)
    prompts = write_prompts(tmp_path / "p.jsonl", 100)
    config = regenerate_config(talker, prompts, tmp_path / "out")
    events = []
    monkeypatch.setattr(job, "_BYTES_PER_ROW", 10**15)
    with pytest.raises(EnvironmentProblem, match=r"rows so far are kept"):
        job.regenerate(config, pool=pool, report=events.append)
    pool.drop()
    (estimate,) = [event for event in events if isinstance(event, job.Estimate)]
    assert 0 < estimate.rows <= 100 and 1 <= estimate.tokens_per_response <= 24
    assert estimate.tokens_per_s > 0 and estimate.seconds > 0
    monkeypatch.undo()
    assert job.regenerate(config, pool=pool).rows == 100


def test_settings_that_cannot_start_are_the_users_to_mend(talker, pool, tmp_path):
    from jobs.engine_pool import EnginePool

    with (
        pytest.raises(ConfigError, match=r"5000 engines need 5000 CPUs, and the Ray cluster has"),
        EnginePool(talker, EngineConfig(**ENGINE), PoolConfig(engines=5000)),
    ):
        pass
    broken = Target(name="broken", path=str(tmp_path))
    with (
        pytest.raises(TargetError, match="cannot read the configuration of target 'broken'"),
        EnginePool(broken, EngineConfig(**ENGINE), PoolConfig(cpus_per_engine=0.5)),
    ):
        pass


def run_command(repository, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "carryover", "data", *map(str, arguments)],
        cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_rows(folder, count, process, *, timeout_s=480):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        try:
            found = read_responses(folder).num_rows
        except DataError:
            found = 0
        if found >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {count} rows after {timeout_s} s")


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_killed_and_interrupted_runs_lose_and_repeat_nothing(talker, tmp_path, repository):
    """kill -9 in the middle, Ctrl-C in the middle, then to the end; each by the command."""
    # slow engines where a run is stopped halfway, a fast one for the rest
    count, out = 900, tmp_path / "out"
    prompts = write_prompts(tmp_path / "p.jsonl", count)
    arguments = [
        "regenerate", "--target", talker.name, "--prompts", prompts, "--out", out,
        "--set", "max_new_tokens=24", "--set", "engine.max_model_len=256",
        "--set", "engine.kv_cache_gib=0.05",
    ]  # fmt: skip
    slow, fast = (("--set", f"engine.max_num_seqs={number}") for number in (2, 64))
    process = run_command(repository, *arguments, *slow)
    kept = wait_for_rows(out, 30, process)
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(children) > 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while not all(map(is_gone, children)):
        assert time.monotonic() < deadline, "processes outlived the killed command"
        time.sleep(0.1)
    first = read_responses(out)
    assert kept <= first.num_rows < count

    process = run_command(repository, *arguments, *slow)
    kept = wait_for_rows(out, first.num_rows + 30, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 130, output
    assert "the same command goes on from there" in output
    assert "Traceback" not in output
    second = read_responses(out)
    assert kept <= second.num_rows < count
    assert second.slice(0, first.num_rows).equals(first.cast(second.schema))

    process = run_command(repository, *arguments, *fast)
    output = process.communicate(timeout=1200)[0]
    assert process.returncode == 0, output
    assert f"{count:,} responses" in output and f"{second.num_rows:,} there before" in output
    last = read_responses(out)
    assert sorted(last.column("id").to_pylist()) == list(range(count))
    assert last.slice(0, second.num_rows).equals(second.cast(last.schema))

    # with everything there, no engine is started
    process = run_command(repository, *arguments)
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 0 and "starting" not in output, output


def test_equal_seeds_write_equal_prompts(talker, pool, tmp_path):
    from jobs.engine_pool import EnginePool
    from jobs.synthesize import synthesize

    def write(name, seed, engines):
        config = SynthesizeConfig.parse(
            {
                "target": talker.name, "out": str(tmp_path / name), "num_prompts": 6,
                "max_tokens": 60, "temperature": 1.0, "max_attempts_per_prompt": 40,
                "elicitations": [{}], "engine": {**ENGINE, "seed": seed},
            }
        )  # fmt: skip
        synthesize(config, pool=engines)
        return read_store(tmp_path / name, PROMPTS).column("prompt").to_pylist()

    texts = []
    for name in ("one", "two"):
        settings = EngineConfig(**{**ENGINE, "seed": 7})
        with EnginePool(talker, settings, PoolConfig(cpus_per_engine=0.5)) as engines:
            texts.append(write(name, 7, engines))
            process = engines._engines[0].process.pid
        assert is_gone(process), "its memory must be free for what comes next"
    assert texts[0] == texts[1] != write("three", ENGINE["seed"], pool)
