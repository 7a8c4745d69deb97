"""Carryover on a real engine, at every edge: nothing may change the text.

The engine is small on purpose: blocks of 32 slots, 64 rows per step, sequences of at most 256
tokens, and a KV cache that cannot hold four of them. What it answers is held to an engine of the
same settings without speculation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import plugin_models as models
import pytest

from carryover.targets import Target

# A broken engine would keep its requests, and later tests would wait for them.
pytestmark = pytest.mark.vllm
BLOCK = 32
MAX_MODEL_LEN = 256
SETTINGS = {
    "block_size": BLOCK,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 24,
}
PROMPTS = models.random_prompts(8)


@dataclass
class Case:
    """Requests and their settings, answered by both engines."""

    prompts: list[list[int]]
    samplings: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samplings = self.samplings or [{}] * len(self.prompts)


def boundary_prompts() -> list[list[int]]:
    long = models.random_prompts(1, seed=5, low=200, high=201)[0]
    return [long[:n] for n in (1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)]


def long_prompts() -> list[list[int]]:
    return models.random_prompts(4, seed=6, low=130, high=200)


def structured() -> list[dict]:
    from vllm.sampling_params import StructuredOutputsParams

    def rule(**kind: Any) -> dict:
        return {
            "structured_outputs": StructuredOutputsParams(**kind), "ignore_eos": False,
            "max_tokens": 24,
        }  # fmt: skip

    return [
        rule(regex=r"[a-f]{3,12}x"),
        rule(choice=["Paris", "London", "Rome"]),
        rule(regex=r"(ab|cd)+!"),
        {"max_tokens": 24},
    ]


CASES = {
    "block boundaries": lambda: Case(boundary_prompts()),
    "chunked prefill": lambda: Case(long_prompts()),
    "max_tokens": lambda: Case(
        PROMPTS[:6], [{"max_tokens": n} for n in (1, 2, models.PROPOSAL_LENGTH + 1, 7, 11, 30)]
    ),
    "longest sequence": lambda: Case(
        [p[:n] for p, n in zip(long_prompts(), (130, 131, 132, 129), strict=True)],
        [{"max_tokens": None}] * 4,
    ),
    "preemption": lambda: Case(
        models.random_prompts(4, seed=7, low=100, high=120), [{"max_tokens": 130}] * 4
    ),
    "penalties": lambda: Case(
        PROMPTS[:4], [{"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {}, {"min_tokens": 9}]
    ),
    "structured output": lambda: Case(PROMPTS[:4], structured()),
    "logprobs": lambda: Case(PROMPTS[:4], [{"logprobs": 3, "max_tokens": 20}] * 4),
    "prompt logprobs": lambda: Case(PROMPTS[:3], [{"prompt_logprobs": 1, "max_tokens": 9}] * 3),
    "several answers": lambda: Case(
        PROMPTS[:3], [{"n": 3, "temperature": 1.0, "top_k": 1, "max_tokens": 12}] * 3
    ),
}


@dataclass
class Engines:
    """The speculating engine, and what the plain one answered."""

    llm: Any
    plain: dict[str, list[Any]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return models.make_target(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def engines(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("drafter")
    baseline = models.make_drafter(target, folder / "baseline")
    checkpoint = models.add_carryover(baseline, folder / "carryover", target)
    with models.engine(target, **SETTINGS) as llm:
        plain = {name: answer(llm, make()) for name, make in CASES.items()}
    with models.engine(target, checkpoint, **SETTINGS) as llm:
        yield Engines(llm, plain)


@pytest.fixture(autouse=True)
def blocks_are_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the engine must be idle, and no KV block in use."""
    yield
    if "engines" in request.fixturenames:
        assert_idle(request.getfixturevalue("engines").llm)


def assert_idle(llm: Any) -> None:
    scheduler = models.scheduler_of(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    pool = scheduler.kv_cache_manager.block_pool
    # vLLM keeps the null block for itself.
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert scheduler.kv_cache_manager.usage == 0


def answer(llm: Any, case: Case) -> list[Any]:
    return models.complete(llm, case.prompts, case.samplings)


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_text_is_as_without_speculation(engines: Engines, name: str) -> None:
    outputs = answer(engines.llm, CASES[name]())
    assert tokens(outputs) == tokens(engines.plain[name])
    assert [o.outputs[0].finish_reason for o in outputs] == [
        o.outputs[0].finish_reason for o in engines.plain[name]
    ]


def test_the_cases_are_what_their_names_say(engines: Engines) -> None:
    """Proposals are accepted and rejected, prompts are cut, requests preempted, limits reached."""
    llm = engines.llm
    answer(llm, CASES["preemption"]())
    answer(llm, CASES["longest sequence"]())
    assert models.counter(llm, "num_preemptions") > 0
    ends = [
        len(o.prompt_token_ids) + len(o.outputs[0].token_ids)
        for o in engines.plain["longest sequence"]
    ]
    assert ends == [MAX_MODEL_LEN] * 4
    assert all(len(prompt) > 64 for prompt in long_prompts())
    drafts = models.counter(llm, "spec_decode_num_drafts")
    assert 0.05 * drafts < models.counter(llm, "spec_decode_num_accepted_tokens")
    assert 0.2 * drafts < models.counter(llm, "spec_decode_num_carried_drafts") < drafts


def test_logprobs_are_as_without_speculation(engines: Engines) -> None:
    for kind in ("logprobs", "prompt logprobs"):
        outputs = answer(engines.llm, CASES[kind]())
        for ours, plain in zip(outputs, engines.plain[kind], strict=True):
            rows = [(ours.outputs[0].logprobs or [], plain.outputs[0].logprobs or [])]
            rows.append((ours.prompt_logprobs or [], plain.prompt_logprobs or []))
            for our_rows, plain_rows in rows:
                assert len(our_rows) == len(plain_rows)
                for one, other in zip(our_rows, plain_rows, strict=True):
                    assert (one is None) == (other is None)
                    if one is not None:
                        assert one.keys() == other.keys()
                        for token, value in one.items():
                            assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_stop_inside_a_block(engines: Engines) -> None:
    """By a stop token, wherever in the block it falls, and by a stop string."""
    (plain,) = models.generate(engines.llm, [PROMPTS[0]])
    for token in dict.fromkeys(plain):
        end = plain.index(token) + 1
        (stopped,) = models.generate(engines.llm, [PROMPTS[0]], stop_token_ids=[token])
        assert stopped == plain[:end]
    tokenizer = engines.llm.get_tokenizer()
    for position in (3, 8, 15):
        string = tokenizer.decode([plain[position]])
        (output,) = models.complete(engines.llm, [PROMPTS[0]], [{"stop": [string]}])
        text = tokenizer.decode(plain)
        assert output.outputs[0].text == text[: text.index(string)]
        assert output.outputs[0].finish_reason == "stop"


def test_prefix_hits_do_not_lower_acceptance(engines: Engines) -> None:
    """Shared prefixes and repeats: the drafter's cached rows must be as good as fresh ones."""
    prefix = models.random_prompts(1, seed=8, low=100, high=101)[0]
    prompts = [prefix + p for p in PROMPTS[:3]] + [prefix + PROMPTS[0]]
    llm = engines.llm
    results = []
    for reset in (True, False, False):
        if reset:
            llm.reset_prefix_cache()
        before = [
            models.counter(llm, f"spec_decode_num_{k}") for k in ("drafts", "accepted_tokens")
        ]
        hits = models.counter(llm, "prefix_cache_hits")
        texts = [models.generate(llm, [prompt])[0] for prompt in prompts]
        after = [models.counter(llm, f"spec_decode_num_{k}") for k in ("drafts", "accepted_tokens")]
        results.append((texts, [b - a for a, b in zip(before, after, strict=True)]))
        assert models.counter(llm, "prefix_cache_hits") > hits
    cold, *warm = results
    for texts, counts in warm:
        assert texts == cold[0]
        assert counts == cold[1], "drafts and accepted tokens after a prefix hit"


def test_greedy_requests_do_not_feel_sampled_ones(engines: Engines) -> None:
    alone = models.generate(engines.llm, PROMPTS[:4], max_tokens=30)
    mixed = [{"temperature": 1.0 if i % 2 else 0.0, "max_tokens": 30} for i in range(4)]
    outputs = models.complete(engines.llm, PROMPTS[:4], mixed)
    assert [list(outputs[i].outputs[0].token_ids) for i in (0, 2)] == [alone[0], alone[2]]
    assert [len(outputs[i].outputs[0].token_ids) for i in (1, 3)] == [30, 30]


def test_a_seed_never_ends_the_engine(engines: Engines) -> None:
    """Seeded requests whose prompts are read in chunks; and a seed means the same text again."""
    samplings = [{"temperature": 1.0, "seed": 40 + i, "max_tokens": 20} for i in range(4)]
    first = tokens(models.complete(engines.llm, long_prompts(), samplings))
    engines.llm.reset_prefix_cache()
    # One after another: other chunks, other neighbours, the same draws.
    second = [
        tokens(models.complete(engines.llm, [prompt], [sampling]))[0]
        for prompt, sampling in zip(long_prompts(), samplings, strict=True)
    ]
    assert first == second


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 2.0}, {"logprobs": 10_000},
        {"stop_token_ids": ["x"]}, {"allowed_token_ids": [10**9]}, {"logit_bias": {10**9: 1.0}},
        {"bad_words": [""]}, {"n": 0}, {"min_tokens": 9, "max_tokens": 3},
    ],
    ids=lambda sampling: next(iter(sampling)),
)  # fmt: skip
def test_a_malformed_request_is_refused_and_the_engine_lives(
    engines: Engines, sampling: dict
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises((ValueError, TypeError, VLLMValidationError)):
        models.complete(engines.llm, [PROMPTS[0]], [sampling])
    assert_answers(engines)


@pytest.mark.parametrize("prompt", [[], [1] * MAX_MODEL_LEN, [10**6]], ids=["empty", "long", "id"])
def test_a_malformed_prompt_is_refused_and_the_engine_lives(
    engines: Engines, prompt: list[int]
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises((ValueError, VLLMValidationError)):
        models.complete(engines.llm, [prompt], [{}])
    assert_answers(engines)


def assert_answers(engines: Engines) -> None:
    case = CASES["max_tokens"]()
    (output,) = models.complete(engines.llm, case.prompts[3:4], case.samplings[3:4])
    assert tokens([output]) == tokens(engines.plain["max_tokens"][3:4])


def test_random_arrivals_and_aborts(engines: Engines) -> None:
    """200 requests; those that are not aborted answer as they do alone."""
    from vllm import SamplingParams

    chance = random.Random(0)
    engine = engines.llm.llm_engine
    # A few prompts of each kind, so that texts can be compared without 200 reference runs.
    prompts = [*PROMPTS, *long_prompts()]
    lengths = [chance.randrange(1, 40) for _ in prompts]
    alone = [
        models.generate(engines.llm, [prompt], max_tokens=length)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    waiting = [(f"r{i}", chance.randrange(len(prompts))) for i in range(200)]
    chosen = dict(waiting)
    running: set[str] = set()
    aborted: set[str] = set()
    texts: dict[str, list[int]] = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(chance.choice([0, 0, 1, 2, 6]), len(waiting))):
            name, index = waiting.pop()
            sampling = SamplingParams(temperature=0, max_tokens=lengths[index], ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": prompts[index]}, sampling)
            running.add(name)
        if running and chance.random() < 0.15:
            name = chance.choice(sorted(running))
            running.remove(name)
            aborted.add(name)
            engine.abort_request([name])
        for output in engine.step():
            if output.finished and output.request_id in running:
                running.remove(output.request_id)
                texts[output.request_id] = list(output.outputs[0].token_ids)
    assert len(texts) + len(aborted) == 200
    assert len(aborted) > 20
    for name, text in texts.items():
        assert text == alone[chosen[name]]


def test_counters_say_what_happened(engines: Engines) -> None:
    """Carried rows are the rejected ones: checked against what the proposer itself did."""
    names = ["num_carried_rows", "num_carried_drafts", "num_cut_drafts", "num_drafts"]
    names += ["num_draft_tokens", "num_accepted_tokens"]
    before = [models.counter(engines.llm, f"spec_decode_{name}") for name in names]
    with models.recording(engines.llm) as recorder:
        models.generate(engines.llm, PROMPTS[:3], max_tokens=20)
    after = [models.counter(engines.llm, f"spec_decode_{name}") for name in names]
    rows, drafts, cut, num_drafts, proposed, accepted = (
        b - a for a, b in zip(before, after, strict=True)
    )
    rounds = [r for request in recorder.rounds.values() for r in request]
    # A step may run past a request's end, unseen by the scheduler's counters.
    assert 0 <= sum(r.carried for r in rounds) - rows <= 3 * models.PROPOSAL_LENGTH
    assert rows == proposed - accepted
    assert 0 < drafts <= num_drafts
    assert cut == 0


def test_rows_are_dropped_at_the_longest_sequence(engines: Engines) -> None:
    """This runner stops drafting near the end; the counter of cut drafts says so."""
    before = models.counter(engines.llm, "spec_decode_num_cut_drafts")
    case = CASES["longest sequence"]()
    with models.recording(engines.llm) as recorder:
        models.complete(engines.llm, case.prompts[:1], case.samplings[:1])
    assert models.counter(engines.llm, "spec_decode_num_cut_drafts") > before
    width = 1 + models.PROPOSAL_LENGTH
    for one in recorder.in_order()[0]:
        assert one.committed + one.carried + width <= MAX_MODEL_LEN
