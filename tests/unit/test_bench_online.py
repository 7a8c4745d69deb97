"""The online bench against a real HTTP server whose answers are known."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web

from carryover.bench.online import OnlineConfig, run
from carryover.errors import ConfigError, ServingError

ENGINE = {"max_model_len": 256, "dtype": "auto"}
ABOUT = {
    "plain": {"target": "t", "drafter": None, "engine": ENGINE},
    "fast": {"target": "t", "drafter": "no-folder", "num_speculative_tokens": 3, "engine": ENGINE},
}
TOKENS = 8


class Server:
    """Answers 8 tokens in 20 ms on arm `plain` and 10 ms on `fast`, which accepts 1 of 3."""

    def __init__(self):
        self.bodies, self.running, self.most = [], 0, 0
        self.die_after = self.break_arm = None
        self.misroute = False
        self.rounds = 0

    async def models(self, request):
        cards = [{"id": name, "metadata": {"carryover": about}} for name, about in ABOUT.items()]
        return web.json_response({"data": [{"id": "logical"}, *cards]})

    async def metrics(self, request):
        lines = [f'# TYPE vllm:spec_decode_{name} counter\nvllm:spec_decode_{name}_total'
                 f'{{model_name="fast"{place}}} {float(value)}'
                 for name, place, value in self._counters()]  # fmt: skip
        return web.Response(text="\n".join(lines) + "\n")

    def _counters(self):
        yield "num_drafts", "", self.rounds
        yield "num_draft_tokens", "", 3 * self.rounds
        yield "num_accepted_tokens", "", self.rounds
        for position in range(3):
            value = self.rounds if position == 0 else 0
            yield "num_accepted_tokens_per_pos", f',position="{position}"', value

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        measured = "Warm-up" not in body["messages"][0]["content"]
        count = sum("Warm-up" not in b["messages"][0]["content"] for b in self.bodies)
        if self.die_after is not None and measured and count > self.die_after:
            request.transport.close()
            return web.Response()
        arm = body["model"]
        if arm == self.break_arm and body["messages"][0]["content"].startswith("prompt"):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02 if arm == "plain" else 0.01)
        self.running -= 1
        if body.get("logprobs"):
            return web.json_response({"choices": [{"logprobs": {"content": []}}]})
        headers = {"x-carryover-arm": "plain" if self.misroute else arm}
        answer = web.StreamResponse(headers=headers)
        await answer.prepare(request)
        speculative = None
        if arm == "fast":
            self.rounds += 4
            speculative = {
                "num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 4,
                "acceptance_histogram": [0, 4, 0, 0],
            }  # fmt: skip
        usage = {"prompt_tokens": 5, "completion_tokens": TOKENS}
        chunks = [
            {"choices": [{"delta": {"content": "one "}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": "two"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage, "metrics": {"speculative_decoding": speculative}},
        ]
        for chunk in chunks:
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


@contextmanager
def serving(server):
    ready, stop, found = threading.Event(), None, {}

    async def main():
        nonlocal stop
        stop = asyncio.Event()
        found["loop"] = asyncio.get_running_loop()
        application = web.Application()
        application.router.add_get("/v1/models", server.models)
        application.router.add_get("/metrics", server.metrics)
        application.router.add_post("/v1/chat/completions", server.chat)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found["url"] = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait(10)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(stop.set)
        thread.join(10)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pages and quiet metrics pages are tested elsewhere."""
    monkeypatch.setattr("carryover.bench.html.write_report", lambda result, path: None)
    monkeypatch.setattr("carryover.bench.statistics.RESAMPLES", 200)
    monkeypatch.setattr("carryover.bench.counters.QUIET_S", 0.05)
    monkeypatch.setattr("carryover.bench.counters.POLL_S", 0.01)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def url(server):
    with serving(server) as url:
        yield url


@pytest.fixture
def settings(url, tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"prompt {n}", "category": "ab"[n % 2]} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"url": url, "prompts": str(path), "out": tmp_path / "out", "max_tokens": TOKENS}


def measured(server):
    return [body for body in server.bodies if "Warm-up" not in body["messages"][0]["content"]]


def test_every_load_is_measured_on_both_arms_and_agrees_with_the_counters(server, settings):
    config = OnlineConfig(**settings, concurrency=[1, 4], rate=100.0, thinking=False)
    result = run(config)
    assert result.valid and result.counters_agree, result.findings
    assert [cell.condition.title for cell in result.cells] == [
        "T=0 c=1", "T=0 c=4", "T=0 rate=100/s",
    ]  # fmt: skip
    assert result.counters["fast"]["num_drafts"] == 3 * 8 * 4
    assert result.cells[0].summaries["fast"].acceptance_length.value == 2.0
    bodies = measured(server)
    assert len(bodies) == 3 * 2 * 8
    # no request may find a prefix that another one left in the cache
    assert len({body["cache_salt"] for body in bodies}) == len(bodies)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in bodies)
    assert 2 <= server.most <= 8


def test_an_open_loop_does_not_wait_for_answers(server, settings):
    result = run(OnlineConfig(**settings, concurrency=[], rate=2000.0, arms=["plain"]))
    # eight arrivals in about 4 ms, answers of 20 ms
    assert server.most > 4
    assert result.cells[0].condition.rate == 2000.0


def test_salts_are_left_out_when_prefixes_may_be_shared(server, settings):
    run(OnlineConfig(**settings, arms=["plain"], cold_prefixes=False))
    assert all("cache_salt" not in body for body in server.bodies)


def test_an_answer_from_another_arm_is_a_failure(server, settings):
    server.misroute = True
    with pytest.raises(ServingError, match="arm 'plain' answered in place of 'fast'"):
        run(OnlineConfig(**settings))


def test_a_server_that_dies_is_a_clear_error_and_what_was_finished_is_kept(server, settings):
    server.die_after, partial = 11, []
    with pytest.raises(ServingError, match="stopped answering"):
        run(OnlineConfig(**settings, block_size=2), on_partial=partial.append)
    (result,) = partial
    # the block in which it died is not kept
    assert len(result.requests) == 8
    server.die_after = None
    resumed = run(resume=result.folder)
    assert len(resumed.requests) == 16 and resumed.partial is None
    # the first process's requests were counted by nobody; the second one's agree
    assert resumed.valid and resumed.counters_agree


def test_prompts_that_are_refused_are_failures_not_a_dead_server(server, settings):
    server.break_arm = "fast"
    result = run(OnlineConfig(**settings, max_failure_share=1.0))
    assert result.cells[0].summaries["fast"].failed == 8
    assert {r.response.error for r in result.requests if r.arm == "fast"} == {"too long"}


def test_a_key_from_the_environment_is_sent(server, settings, monkeypatch):
    seen = set()
    original = server.chat

    async def chat(request):
        seen.add(request.headers.get("Authorization"))
        return await original(request)

    monkeypatch.setenv("CARRYOVER_API_KEY", "secret")
    server.chat = chat
    with serving(server) as url:
        result = run(OnlineConfig(**{**settings, "url": url}, arms=["plain"], num_prompts=2))
    assert seen == {"Bearer secret"}
    assert "secret" not in (result.folder / "bench.json").read_text()


def test_loads_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="concurrency starts at 1"):
        OnlineConfig.parse({**settings, "concurrency": [0]})
    with pytest.raises(ConfigError, match="at least one concurrency or rate"):
        OnlineConfig.parse({**settings, "concurrency": []})
    with pytest.raises(ConfigError, match="rate"):
        OnlineConfig.parse({**settings, "rate": -1})
    with pytest.raises(ConfigError, match="the reference 'x' must be among"):
        run(OnlineConfig(**settings, reference="x"))


def test_one_value_is_written_as_one_and_durations_are_read(settings):
    config = OnlineConfig.parse({**settings, "temperature": [0.0, 1.0], "budget_s": "1.5m"})
    assert config.concurrency == (1,) and config.budget_s == 90.0
    text = config.to_yaml()
    assert "\nconcurrency: 1\n" in text and "temperature:\n- 0.0\n- 1.0\n" in text
    assert OnlineConfig.load(None, overrides=["prompts=x", "concurrency=8"]).concurrency == (8,)
    with pytest.raises(ConfigError, match="such as 10m"):
        OnlineConfig.parse({**settings, "budget_s": "soon"})


def test_progress_counts_up_to_all_requests(settings):
    seen = []
    run(OnlineConfig(**settings), on_progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(1, 17))
    assert {total for _, total, _ in seen} == {16} and {arm for *_, arm in seen} == set(ABOUT)
