"""The bench on a stock `vllm serve`, against `vllm bench serve`, and on engines of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from carryover.bench import crosscheck, offline
from carryover.bench.online import OnlineConfig, run
from carryover.errors import ConfigError, ServingError
from carryover.serving.config import Arm

pytestmark = pytest.mark.vllm

PROPOSAL_LENGTH = 3
# one engine under two names: whatever is found between these arms is noise or a fault of the bench
NAMES = ("first", "second")
COUNT = 8
ENGINE = {"max_model_len": 256, "max_num_seqs": 1, "kv_cache_gib": 0.02}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny target, a drafter, the same as a Carryover checkpoint, and prompts."""
    from plugin_models import add_carryover, make_drafter, make_target

    folder = tmp_path_factory.mktemp("bench")
    target = make_target(folder / "target")
    drafter = make_drafter(target, folder / "proposer", steps=100, proposal_length=PROPOSAL_LENGTH)
    add_carryover(drafter, folder / "carryover", target)
    crosscheck.write_prompts(folder / "prompts.jsonl", COUNT)
    return folder


@pytest.fixture(scope="module")
def url(models):
    with crosscheck.stock_server(
        str(models / "target"), names=NAMES, drafter=models / "proposer",
        num_speculative_tokens=PROPOSAL_LENGTH, log=models / "server.log",
        flags=["--max-model-len", "256", "--max-num-seqs", "8"],
    ) as url:  # fmt: skip
        yield url


def settings(url, models, **changes):
    values = {
        "url": url, "prompts": str(models / "prompts.jsonl"), "max_tokens": 24, "block_size": 4,
        "out": models / "runs",
    }  # fmt: skip
    return OnlineConfig(**{**values, **changes})


def test_vllms_own_bench_finds_the_same(url, models):
    """Every round and token is the same; the strict bound on speed is `bench.crosscheck`'s."""
    common = {"model": "first", "prompts": models / "prompts.jsonl", "count": COUNT,
              "max_tokens": 48, "concurrency": 1, "folder": models}  # fmt: skip
    theirs = crosscheck.run_theirs(url, target=str(models / "target"), **common)
    ours = crosscheck.run_ours(url, **common)
    found = crosscheck.differences(theirs, ours)
    print(f"throughput, ours over theirs: {found['throughput_ratio']:.3f}")
    assert found["equal"] and found["valid"], found
    assert ours.counters_agree and found["num_drafts"]["ours"] > 0
    length = ours.summaries["first"].acceptance_length.value
    assert length == pytest.approx(theirs["spec_decode_acceptance_length"])
    assert ours.summaries["first"].position_rates == pytest.approx(
        theirs["spec_decode_per_position_acceptance_rates"]
    )
    # a machine with other work moves this by a factor; a mix-up of units would by a thousand
    assert 0.1 < found["throughput_ratio"] < 10


@pytest.mark.slow
def test_an_engine_compared_with_itself_shows_no_difference_but_noise(url, models):
    result = run(
        settings(url, models, concurrency=[1, 4], rate=20.0, temperature=[0.0, 1.0],
                 goodput={"e2e_ms": 60_000}, ignore_eos=True)
    )  # fmt: skip
    assert result.valid, result.findings
    assert [cell.condition.title for cell in result.cells] == [
        f"T={t} {load}" for t in (0, 1) for load in ("c=1", "c=4", "rate=20/s")
    ]
    greedy = result.cells[0]
    first, second = (greedy.summaries[name] for name in NAMES)
    assert first.num_drafts == second.num_drafts > 0
    assert greedy.gains["second"].acceptance_difference.value == 0
    assert greedy.comparisons["second"].differing == 0
    for cell in result.cells:
        for summary in cell.summaries.values():
            assert summary.output_tokens == COUNT * 24 and summary.good == COUNT
    # texts of other batches may part where two tokens tie; then it is looked into
    for cell in result.cells[1:3]:
        if cell.comparisons["second"].differing:
            ties = cell.ties["second"]
            assert ties.wide == 0 and ties.near + ties.same_again + ties.unknown > 0


@pytest.mark.slow
def test_a_stock_servers_arms_are_told_apart_by_their_names_in_the_counters(url, models):
    alone = run(settings(url, models, arms=["first"]))
    assert alone.counters_agree and set(alone.counters) == {"first"}
    both = run(settings(url, models))
    # vLLM counts both names under the first
    assert both.counters_agree and set(both.counters) == {"first + second"}


def command(kind, *flags, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "carryover", "bench", kind, *flags, "--tracking-uri",
         f"sqlite:///{folder}/mlflow.db"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def wait_for_units(folder, count, *, timeout_s=480):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        files = list(folder.glob("out/*/units.jsonl"))
        if files and files[0].read_text().count("\n") >= count:
            return files[0].parent
        time.sleep(0.02)
    raise AssertionError("no unit was finished")


@pytest.mark.slow
def test_a_killed_command_is_resumed_and_ctrl_c_leaves_a_partial_result(url, models, tmp_path):
    flags = ["--url", url, "--prompts", str(models / "prompts.jsonl"), "--max-tokens", "150",
             "--set", "block_size=1", "--out", str(tmp_path / "out")]  # fmt: skip
    killed = command("online", *flags, folder=tmp_path)
    folder = wait_for_units(tmp_path, 2)
    killed.kill()
    killed.communicate()
    finished = (folder / "units.jsonl").read_text().count("\n")
    assert finished < 2 * COUNT and not (folder / "report.html").exists()

    resumed = command("online", "--resume", str(folder), folder=tmp_path)
    deadline = time.monotonic() + 480
    while (folder / "units.jsonl").read_text().count("\n") < finished + 3:
        assert time.monotonic() < deadline and resumed.poll() is None, resumed.communicate()
        time.sleep(0.02)
    resumed.send_signal(signal.SIGINT)
    out, log = resumed.communicate(timeout=720)
    assert resumed.returncode == 130, log
    assert (
        "PARTIAL" in out and "interrupted" in log and f"--resume {folder}" in log.replace("\n", "")
    )
    assert (folder / "report.html").exists()

    last = command("online", "--resume", str(folder), folder=tmp_path)
    out, log = last.communicate(timeout=720)
    assert last.returncode == 0, log
    assert "PARTIAL" not in out and "acceptance length" in out
    assert pq.read_metadata(folder / "requests.parquet").num_rows == 2 * COUNT


@pytest.fixture(scope="module")
def engines(models):
    """Settings of an offline bench of three arms."""
    arms = [Arm(name="autoregressive"), Arm(name="baseline", drafter=models / "proposer"),
            Arm(name="carryover", drafter=models / "carryover")]  # fmt: skip
    return offline.OfflineConfig(
        target=str(models / "target"), arms=arms, engine=ENGINE, temperature=[0.0, 1.0],
        prompts=str(models / "prompts.jsonl"), num_prompts=4, max_tokens=24, block_size=2,
        out=models / "offline",
    )  # fmt: skip


def is_engine(process):
    try:
        return "offline_worker" in " ".join(process.cmdline())
    except psutil.Error:
        # It ended in between.
        return False


def test_offline_arms_stand_side_by_side_and_give_the_targets_text(engines):
    result = offline.run(engines)
    assert result.valid and result.partial is None, result.findings
    assert (result.reference, result.baseline) == ("autoregressive", "baseline")
    assert [cell.condition.title for cell in result.cells] == ["T=0", "T=1"]
    greedy = result.cells[0]
    assert {arm: c.differing for arm, c in greedy.comparisons.items()} == {
        "baseline": 0, "carryover": 0,
    }  # fmt: skip
    for arm in ("baseline", "carryover"):
        summary = greedy.summaries[arm]
        assert summary.acceptance_length.value == pytest.approx(1 + sum(summary.position_rates))
        assert len(summary.position_rates) == PROPOSAL_LENGTH
        assert result.counters[arm]["num_drafts"] > summary.num_drafts > 0
    assert result.counters_agree
    assert {r.response.cached_tokens for r in result.requests} == {0}
    assert not any(is_engine(child) for child in psutil.Process().children())


def test_prompts_that_are_too_long_are_refused_at_once_or_fail_alone(engines, tmp_path):
    """As a server would answer one with 400: the engine lives on, and every row is kept."""
    prompts = tmp_path / "prompts.jsonl"
    turns = ["Tell me of rivers.", "river " * 5000, "Tell me of hills."]
    prompts.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    update = {
        "arms": engines.arms[:1], "prompts": str(prompts), "num_prompts": 3, "temperature": [0.0],
        "out": tmp_path / "out",
    }  # fmt: skip
    config = engines.model_copy(update=update)
    with pytest.raises(ConfigError, match=r"1 of 3 prompts do not fit .*\n?.*max_model_len=\d{4}"):
        offline.run(config)
    assert not (tmp_path / "out").exists()
    result = offline.run(config.model_copy(update={"max_failure_share": 0.5}))
    assert result.summaries["autoregressive"].failed == 1
    tokens = {r.prompt_id: r.response.output_tokens for r in result.requests}
    assert sorted(count > 0 for count in tokens.values()) == [False, True, True]
    (failed,) = [r.response.error for r in result.requests if not r.ok]
    assert "context length" in failed


@pytest.mark.slow
def test_an_engine_that_dies_is_a_clear_error_and_one_at_a_time_goes_on(engines, monkeypatch):
    from carryover.bench import offline_engines

    config = engines.model_copy(
        update={
            "arms": engines.arms[1:], "engines_at_once": 1, "turns": 1, "temperature": (0.0,),
        }
    )  # fmt: skip
    send = offline_engines.EngineProcess.send
    calls = []

    def dying(self, conversations, sampling, advance):
        calls.append(self.arm)
        # the fifth is the first block of the second arm, after each arm's warm-up
        if len(calls) == 5:
            os.kill(self._process.pid, signal.SIGKILL)
        return send(self, conversations, sampling, advance)

    monkeypatch.setattr(offline_engines.EngineProcess, "send", dying)
    partial = []
    with pytest.raises(ServingError, match=r"engine of arm '\w+' ended \(exit status -9\)"):
        offline.run(config, on_partial=partial.append)
    monkeypatch.undo()
    (folder,) = [
        path for path in Path(config.out).iterdir()
        if json.loads((path / "bench.json").read_text())["conditions"] == ["T=0"]
    ]  # fmt: skip
    finished = (folder / "units.jsonl").read_text()
    assert finished.count("\n") == 2
    result = offline.run(resume=folder)
    assert (folder / "units.jsonl").read_text().startswith(finished)
    assert result.valid and len(result.requests) == 2 * 4
    assert any("one engine ran at a time" in finding.text for finding in result.findings)
    assert list(folder.glob("engine-*.log"))


def test_a_server_that_does_not_start_says_why(models, tmp_path):
    with (
        pytest.raises(ServingError, match=r"did not start: \w*Error: (?!Engine core)"),
        crosscheck.stock_server(
            str(models / "target"), names=["m"], log=tmp_path / "server.log",
            flags=["--max-model-len", "256", "--kv-cache-memory-bytes", "128"],
        ),
    ):  # fmt: skip
        pass


def test_without_a_size_the_server_asks_for_little_memory(url, models):
    """vLLM's CPU engine would ask for 92% of it, which a machine that does anything lacks."""
    log = (models / "server.log").read_text()
    assert f"'kv_cache_memory_bytes': {crosscheck.CPU_KV_CACHE_BYTES}" in log
