"""`platform serve` and `platform bench online` as users run them: two vLLM arms on Ray Serve."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pyarrow.parquet as pq
import pytest

from carryover.bench.online import OnlineConfig, run
from carryover.errors import ConfigError, ServingError
from carryover.serving.assignment import assign
from carryover.serving.config import ServeConfig
from carryover.tracking import Tracker

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ARMS = ("autoregressive", "dflash")
ONE_ARM = "arms=[{name: autoregressive}]"
PROPOSAL_LENGTH = 3
START_TIMEOUT_S = 1200
QUESTIONS = [
    ("chat", "What is the capital of France?"),
    ("chat", "Tell me about the quick brown fox and the lazy dog."),
    ("math", "Solve 12 + 30."),
    ("math", "Count from one to ten."),
    ("code", "Write a function that adds two numbers and returns the sum."),
    ("code", "def add(a, b):"),
]


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    """Configuration file of two arms on a tiny target."""
    from plugin_models import add_carryover, make_drafter, make_target

    folder = tmp_path_factory.mktemp("serving")
    target = make_target(folder / "target")
    # not called dflash: vLLM would guess the method from the name if it were not given
    baseline = make_drafter(target, folder / "baseline", steps=150, proposal_length=PROPOSAL_LENGTH)
    drafter = add_carryover(baseline, folder / "proposer", target)
    config = ServeConfig.parse(
        {
            "name": "tiny",
            "model": "tiny/llama",
            "target": target.path,
            # a small token budget, so that prompts are read in several steps
            "engine": {
                "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 0.03,
                "extra": {"max_num_batched_tokens": 64},
            },
            "arms": [{"name": "autoregressive"}, {"name": "dflash", "drafter": str(drafter)}],
            "http": {"port": 0},
            "resources": {"device": "cpu"},
            "traffic": {
                "state": str(folder / "state"), "record": False, "max_queue_per_arm": 256,
                # a killed engine would have the guard send everything to the other arm
                "evaluation_period_s": 3600,
            },
        }
    )  # fmt: skip
    path = folder / "application.yaml"
    path.write_text(config.to_yaml())
    return path


class Serving:
    """A `platform serve` process, up to its ready line."""

    def __init__(self, application, *flags):
        command = [sys.executable, "-m", "carryover", "serve", "--config", str(application), *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.url = self.metrics_url = None
        self.state = application.parent / "state"

    def wait_until_ready(self):
        line = self.process.stdout.readline()
        match = re.search(r"ready (http://\S+)/v1", line)
        if match is None:
            raise AssertionError(f"not ready: {line}{self.process.communicate(timeout=180)[1]}")
        self.url = match.group(1)
        self.process.stdout.readline()
        self.metrics_url = self.process.stdout.readline().removeprefix("metrics ").strip()
        return self

    def admin(self, action, **arguments):
        key = (self.state / "admin.key").read_text().strip()
        answer = httpx.post(
            f"{self.url}/admin/traffic/{action}", json=arguments, timeout=60,
            headers={"authorization": f"Bearer {key}"},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        return answer.json()

    def engines(self):
        """Process ids of the engines."""
        return {process.pid for process in self.tree() if "VLLM::" in " ".join(_title(process))}

    def gauge(self, name):
        """Sum of one of vLLM's gauges over the arms."""
        lines = httpx.get(self.metrics_url).text.splitlines()
        found = [line for line in lines if line.startswith(f"ray_vllm_{name}{{")]
        assert found, name
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def wait_until(self, what, timeout_s=180):
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.2)

    def tree(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=270)


def _title(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def serving(application):
    server = Serving(application)
    try:
        yield server.wait_until_ready()
    finally:
        server.end()


@pytest.fixture
def client(serving):
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"category": category, "prompt": text} for category, text in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ask(client, arm, text="What is the capital of France?", **settings):
    settings = {"temperature": 0, "max_tokens": 24, **settings}
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=arm, messages=messages, **settings)


def test_models_are_the_logical_one_and_the_arms(client):
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["tiny/llama", *ARMS]
    assert cards["tiny/llama"].metadata["arms"] == list(ARMS)
    plain, drafted = (cards[arm].metadata["carryover"] for arm in ARMS)
    assert plain["drafter"] is None and plain["control"]
    assert drafted["num_speculative_tokens"] == PROPOSAL_LENGTH and not drafted["control"]
    assert plain["engine"] == drafted["engine"]
    assert client.models.retrieve("tiny/llama").id == "tiny/llama"


def test_arms_give_the_same_greedy_text_streaming_and_not(client):
    texts = set()
    for arm in (*ARMS, "tiny/llama"):
        texts.add(ask(client, arm).choices[0].message.content)
        stream = ask(client, arm, stream=True)
        texts.add("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    assert len(texts) == 1
    assert texts.pop()


def test_the_answer_names_its_arm_and_tells_its_acceptance(client):
    expected = {"autoregressive": ARMS[0], "dflash": ARMS[1], "tiny/llama": ARMS[0]}
    for model, arm in expected.items():
        messages = [{"role": "user", "content": "hello"}]
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=16, temperature=0
        )
        assert raw.headers["x-carryover-arm"] == arm
        speculative = raw.parse().metrics["speculative_decoding"]
        if arm == "dflash":
            assert speculative["num_spec_tokens"] == PROPOSAL_LENGTH
            assert speculative["num_spec_steps"] > 0
        else:
            assert speculative is None


def test_a_trained_drafter_is_used_as_what_it_is(client):
    """On text it was trained on it must accept proposals; loaded as a plain model it would not."""
    from plugin_models import random_prompts

    drafts = accepted = 0
    for prompt in random_prompts(8):
        answer = client.completions.create(
            model="dflash", prompt=prompt, max_tokens=40, temperature=0
        )
        speculative = answer.metrics["speculative_decoding"]
        drafts += speculative["num_spec_steps"]
        accepted += speculative["num_accepted_draft_tokens"]
    # guessing among 320 tokens would give about 1.01
    assert 1 + accepted / drafts > 1.1


def test_completions_work_too(client):
    answers = [
        client.completions.create(model=arm, prompt="one two", max_tokens=8, temperature=0)
        for arm in ARMS
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].usage.completion_tokens == 8


def test_a_seed_with_sampling_leaves_the_engines_alive(client):
    long = "one two three four five six " * 12

    def sample(number):
        arm = ARMS[number % 2]
        return ask(client, arm, long, temperature=1.0, seed=number // 4, max_tokens=16)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(sample, range(16)))
    assert all(answer.usage.completion_tokens == 16 for answer in answers)
    assert all(ask(client, arm).choices for arm in ARMS)


def test_bad_requests_are_refused_and_the_engines_live_on(serving, client):
    with pytest.raises(openai.NotFoundError):
        ask(client, "no-such-arm")
    with pytest.raises(openai.BadRequestError):
        ask(client, "dflash", max_tokens=-1)
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, "dflash", "word " * 400, stream=stream)
        assert caught.value.status_code == 413 and caught.value.code == "context_length_exceeded"
    malformed = httpx.post(
        f"{serving.url}/v1/chat/completions", content=b'{"model": ',
        headers={"Content-Type": "application/json"},
    )  # fmt: skip
    assert malformed.status_code == 400 and "error" in malformed.json()
    assert all(ask(client, arm).choices for arm in ARMS)


def test_the_split_measures_what_the_engines_did(serving, client):
    weights = {"autoregressive": 0.5, "dflash": 0.5}
    serving.admin("set", weights=weights)
    keys = (f"session-{number}" for number in range(99))
    key = next(
        key for key in keys if assign(weights, key=key, salt="tiny", uniform=0).arm == "dflash"
    )
    told = Counter()
    arms = set()
    for number in range(16):
        stream = number % 2 == 0
        asked = {"stream_options": {"include_usage": True}} if stream else {}
        raw = client.chat.completions.with_raw_response.create(
            model="tiny/llama", messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=12, temperature=0, stream=stream, extra_headers={"x-session-id": key},
            **asked,
        )  # fmt: skip
        arms.add(raw.headers["x-carryover-arm"])
        assert raw.headers["x-carryover-reason"] == "sticky"
        parsed = raw.parse()
        last = list(parsed)[-1] if stream else parsed
        drafts = last.metrics["speculative_decoding"]
        told["tokens"] += last.usage.completion_tokens
        told["rounds"] += drafts["num_spec_steps"]
        told["accepted"] += drafts["num_accepted_draft_tokens"]
    assert arms == {"dflash"}

    def row():
        return next(row for row in serving.admin("show")["arms"] if row["arm"] == "dflash")

    serving.wait_until(lambda: row()["requests"] == 16, timeout_s=60)
    seen = row()
    assert seen["output_tokens"] == told["tokens"] and seen["failures"] == 0
    assert seen["ttft_p50_s"] > 0 and seen["tpot_p50_s"] > 0
    expected = 1 + told["accepted"] / told["rounds"]
    assert seen["acceptance_length"] == pytest.approx(expected)


def test_weights_change_live_and_engines_keep_running(serving, client):
    engines = serving.engines()
    with ThreadPoolExecutor(4) as pool:
        load = [
            pool.submit(ask, client, "tiny/llama", f"question {number}", stream=number % 2 == 0)
            for number in range(24)
        ]
        serving.admin("set", weights={"autoregressive": 0, "dflash": 100})
        for request in load:
            answer = request.result()
            assert answer.choices if hasattr(answer, "choices") else list(answer)
    raw = client.chat.completions.with_raw_response.create(
        model="tiny/llama", messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert raw.headers["x-carryover-arm"] == "dflash"
    assert serving.engines() == engines and len(engines) == 2


def test_clients_that_go_away_leave_nothing_in_the_engines(serving, client):
    serving.admin("set", weights={"autoregressive": 50, "dflash": 50})
    body = {
        "model": "tiny/llama", "max_tokens": 200, "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me everything."}],
    }  # fmt: skip

    async def leave():
        async with httpx.AsyncClient(timeout=60) as session:
            async def one(number):
                if number % 4 == 0:
                    try:
                        async with asyncio.timeout(0.2 + number / 400):
                            await session.post(f"{serving.url}/v1/chat/completions", json=body)
                    except TimeoutError:
                        pass
                    return
                streamed = {**body, "stream": True}
                async with session.stream(
                    "POST", f"{serving.url}/v1/chat/completions", json=streamed
                ) as answer:
                    async for _ in answer.aiter_lines():
                        break

            for first in range(0, 200, 20):
                await asyncio.gather(*(one(first + number) for number in range(20)))

    asyncio.run(leave())
    for gauge in ("num_requests_running", "num_requests_waiting"):
        serving.wait_until(lambda gauge=gauge: serving.gauge(gauge) == 0, timeout_s=120)
    # idle engines do not update it; a short request to each makes them
    assert all(ask(client, arm, max_tokens=2).choices for arm in ARMS)
    serving.wait_until(lambda: serving.gauge("kv_cache_usage_perc") < 0.2, timeout_s=60)


def test_bench_measures_both_arms_and_records_them(serving, prompts, tmp_path):
    tracker = Tracker(folder=tmp_path)
    seen = []
    result = run(
        OnlineConfig(
            url=f"{serving.url}/v1", prompts=str(prompts), concurrency=2, max_tokens=24,
            block_size=3, out=tmp_path / "bench", metrics_url=serving.metrics_url,
        ),
        tracker=tracker,
        on_progress=lambda done, total, arm: seen.append((done, total, arm)),
    )  # fmt: skip
    assert result.reference == "autoregressive"
    assert [done for done, _, _ in seen] == list(range(1, 13))
    plain, drafted = (result.summaries[arm] for arm in ARMS)
    assert plain.requests == drafted.requests == len(QUESTIONS)
    assert plain.failed == drafted.failed == 0
    assert plain.acceptance_length is None
    assert 1 <= drafted.acceptance_length.value <= PROPOSAL_LENGTH + 1
    assert drafted.acceptance_length.value == pytest.approx(1 + sum(drafted.position_rates))
    assert drafted.output_tokens == plain.output_tokens > 0
    comparison = result.comparisons["dflash"]
    assert comparison.differing == 0 and comparison.prompts == len(QUESTIONS)
    assert comparison.speedup.value == pytest.approx(
        drafted.output_tokens_per_s.value / plain.output_tokens_per_s.value
    )
    assert result.counters_agree is True, (result.counters, drafted)
    # The plugin's counters reach Ray's metrics page beside vLLM's.
    counted = result.counters["dflash"]
    assert 0 < counted["num_carried_drafts"] <= counted["num_drafts"]
    assert counted["num_carried_drafts"] <= counted["num_carried_rows"]
    assert counted["num_carried_rows"] <= (
        counted["num_draft_tokens"] - counted["num_accepted_tokens"]
    )

    rows = pq.read_table(result.folder / "requests.parquet").to_pylist()
    assert len(rows) == 2 * len(QUESTIONS)
    assert {row["arm"] for row in rows} == set(ARMS)
    assert all(row["tpot_s"] > 0 and row["text"] for row in rows)

    runs = tracker.client().search_runs(
        [tracker.client().get_experiment_by_name("bench").experiment_id]
    )
    parent = next(found for found in runs if found.info.run_id == result.run_id)
    children = {
        found.data.tags["carryover.arm"]: found for found in runs
        if found.data.tags.get("mlflow.parentRunId") == result.run_id
    }  # fmt: skip
    assert parent.info.status == "FINISHED" and parent.data.params["concurrency"] == "2"
    assert set(children) == set(ARMS)
    recorded = children["dflash"].data.metrics
    assert recorded["acceptance_length"] == pytest.approx(drafted.acceptance_length.value)
    assert recorded["speedup"] == pytest.approx(comparison.speedup.value)
    assert set(children["autoregressive"].data.metrics) <= set(recorded)


def test_bench_command_prints_the_table(serving, prompts, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "carryover", "bench", "online", "--url", serving.url,
         "--prompts", str(prompts), "-n", "2", "--max-tokens", "8", "--out", str(tmp_path),
         "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"],
        capture_output=True, text=True, timeout=360, cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in ("acceptance length", "speed-up", "TPOT", *ARMS):
        assert word in done.stdout
    assert "requests.parquet" in done.stderr


def test_bench_counts_failures_and_keeps_their_rows(serving, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(
        json.dumps({"prompt": "hello"}) + "\n" + json.dumps({"prompt": "word " * 400}) + "\n"
    )
    config = OnlineConfig(
        url=serving.url, prompts=str(path), max_tokens=8, out=tmp_path / "bench", arms=["dflash"]
    )
    with pytest.raises(ServingError, match="1 of the 2 requests of this bench failed"):
        run(config)
    rows = pq.read_table(next((tmp_path / "bench").glob("*/requests.parquet"))).to_pylist()
    assert sorted(row["status"] for row in rows) == [200, 413]
    assert sum(row["error"] is None for row in rows) == 1


def test_bench_refuses_what_cannot_be_compared(serving, prompts):
    with pytest.raises(ConfigError, match="it has: autoregressive, dflash"):
        run(OnlineConfig(url=serving.url, prompts=str(prompts), arms=["dflahs"]))
    with pytest.raises(ServingError, match="platform serve"):
        run(OnlineConfig(url="http://127.0.0.1:9", prompts=str(prompts)))


def test_a_killed_engine_costs_no_client_an_error_and_comes_back(serving, client):
    serving.admin("set", weights={"autoregressive": 50, "dflash": 50})
    replica = next(
        process for process in serving.tree()
        if re.match(r"ray::ServeReplica:tiny:ArmServer:dflash\b", " ".join(_title(process)))
    )  # fmt: skip

    def arm_of(number):
        raw = client.chat.completions.with_raw_response.create(
            model="tiny/llama", messages=[{"role": "user", "content": f"number {number}"}],
            max_tokens=8, temperature=0,
        )  # fmt: skip
        return raw.headers["x-carryover-arm"], raw.headers["x-carryover-reason"]

    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(arm_of, number) for number in range(60)]
        load[4].result()
        replica.kill()
        answers = [request.result() for request in load]
    assert ("autoregressive", "fallback:down") in answers
    serving.wait_until(lambda: any(arm_of(0)[0] == "dflash" for _ in range(8)), timeout_s=300)

    def log():
        return [entry["action"] for entry in serving.admin("log")["entries"]]

    serving.wait_until(lambda: "arm up" in log(), timeout_s=60)
    assert log().index("arm down") < log().index("arm up")


def test_sigterm_stops_everything_in_order(serving):
    tree = serving.tree()
    titles = [" ".join(_title(process)) for process in tree]
    assert sum("VLLM::" in title for title in titles) >= 2 and any("raylet" in t for t in titles)
    serving.process.send_signal(signal.SIGTERM)
    _, log = serving.process.communicate(timeout=270)
    assert serving.process.returncode == 0, log
    assert "nothing is left running" in log
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert not alive


def test_sigkill_leaves_no_process(application):
    server = Serving(application, "--set", ONE_ARM).wait_until_ready()
    tree = server.tree()
    assert any("VLLM::" in " ".join(_title(process)) for process in tree)
    server.process.kill()
    server.process.wait(timeout=30)
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert not alive


def test_an_engine_that_does_not_start_says_why(application):
    server = Serving(application, "--set", "engine.kv_cache_gib=0.00001", "--set", ONE_ARM)
    _, log = server.process.communicate(timeout=START_TIMEOUT_S)
    assert server.process.returncode == 2, log
    assert "arm 'autoregressive' did not start: ValueError: No available memory" in log
    assert "fix: raise engine.kv_cache_gib" in log
    assert "Traceback" not in log


def test_arms_differ_in_nothing_but_the_drafter(application):
    from carryover.serving.arms import engine_arguments, size_kv_cache
    from carryover.serving.config import check_drafters
    from carryover.targets import resolve

    config = check_drafters(ServeConfig.load(application, overrides=["engine.kv_cache_gib=null"]))
    target = resolve(config.target)
    config = size_kv_cache(config, target=target)
    plain, drafted = (engine_arguments(config, arm, target=target) for arm in config.arms)
    speculative = drafted.pop("speculative_config")
    assert drafted.pop("per_request_spec_decode_metrics") == "summary"
    assert plain == drafted
    assert speculative["method"] == "dflash"
    assert speculative["num_speculative_tokens"] == PROPOSAL_LENGTH
    assert plain["kv_cache_memory_bytes"] > 0 and plain["max_num_batched_tokens"] == 64


def test_an_engine_setting_that_vllm_does_not_know_is_refused(application):
    from carryover.serving.arms import engine_arguments
    from carryover.targets import resolve

    config = ServeConfig.load(application, overrides=["engine.extra.enable_prefix_cachin=true"])
    with pytest.raises(ConfigError, match="did you mean 'enable_prefix_caching'"):
        engine_arguments(config, config.control, target=resolve(config.target))


def test_ray_serves_own_tools_validate_and_build_the_application(application, ray_cluster):
    from pydantic import ValidationError
    from ray.serve import Application
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build_app

    from serve_apps.ab import build

    values = ServeConfig.load(application).model_dump(mode="json")
    assert isinstance(build_app(build, values), Application)
    with pytest.raises(ValidationError, match="arm"):
        build_app(build, {**values, "arms": []})
