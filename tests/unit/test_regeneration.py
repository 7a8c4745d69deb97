"""Which requests a regeneration makes, and what it keeps, without an engine."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryover.data.prompts import Prompt
from carryover.data.regeneration import (
    RegenerateConfig,
    Regeneration,
    expected_length,
    render_chat,
)
from carryover.data.responses import open_responses, read_responses
from carryover.engine_worker import Completion
from carryover.errors import ConfigError, DataError, TargetError
from carryover.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


def prompts(*texts):
    return [Prompt(n, "s", "c", t if isinstance(t, tuple) else (t,)) for n, t in enumerate(texts)]


def regeneration(folder, given, **options):
    defaults = {"max_new_tokens": 20, "engine": {"max_model_len": 100}}
    config = RegenerateConfig.parse({**defaults, **options})
    store = open_responses(folder, target={}, sampling=config.sampling())
    return Regeneration(config, given, TOKENIZER, store), store


def answer(request, text="Fine.", finish="stop"):
    ids = TOKENIZER(text)["input_ids"] + [EOS] * (finish == "stop")
    return Completion(request.id, list(request.prompt_ids), ids, finish)


def run(work, limit=None):
    """Answer everything, or the first `limit` requests."""
    requests = list(work.requests())[:limit]
    while requests:
        requests += work.handle(answer(requests.pop(0)))


def test_rows_hold_what_the_engine_read_and_wrote(tmp_path):
    work, store = regeneration(tmp_path, prompts("Hello?", "Who?", "Why?"), top_p=0.9)
    requests = list(work.requests())
    assert [TOKENIZER.decode(request.prompt_ids) for request in requests] == [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        for text in ("Hello?", "Who?", "Why?")
    ]
    assert [(r.id, r.temperature, r.top_p) for r in requests] == [
        (0, 0.0, 1.0), (1, 0.8, 0.9), (2, 0.0, 1.0),
    ]  # fmt: skip
    assert {request.max_tokens for request in requests} == {20}
    work.handle(answer(requests[1], "b", finish="length"))
    work.handle(answer(requests[0], "a"))
    assert (work.left, work.total) == (1, 3)
    store.close()
    first, second = read_responses(tmp_path).to_pylist()
    assert (first["id"], first["finish"]) == (1, "length")
    assert first["response_ids"] == TOKENIZER("b")["input_ids"]
    assert second["prompt_ids"] == requests[0].prompt_ids and second["response_ids"][-1] == EOS
    assert (first["source"], first["category"]) == ("s", "c")
    assert work.counts.done == 2 and work.counts.cut == 1


def test_conversations_are_answered_turn_by_turn_and_kept_whole(tmp_path):
    given = prompts(("One?", "Two?", "Three?"), ("Solo?",))
    work, store = regeneration(tmp_path, given, max_turns=2)
    assert work.total == 3
    first, solo = work.requests()
    assert (first.id, solo.id) == (0, 2)
    (second,) = work.handle(answer(first, "Reply"))
    assert store.ids == set(), "half a conversation must not be kept"
    assert second.id == 1 and second.temperature == first.temperature
    assert TOKENIZER.decode(second.prompt_ids) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nReply<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert work.handle(answer(second)) == []
    assert store.ids == {0, 1}
    assert work.handle(answer(solo)) == [] and store.ids == {0, 1, 2}
    assert work.left == 0
    store.close()


def test_a_conversation_that_grows_too_long_ends_early(tmp_path):
    # too long for a second turn after a long reply
    given = prompts(("One?", "Two?"))
    work, store = regeneration(tmp_path, given, max_turns=2, max_new_tokens=60)
    (first,) = work.requests()
    assert work.handle(answer(first, "word " * 40)) == []
    assert store.ids == {0}
    assert (work.counts.too_long, work.total, work.left) == (1, 1, 0)
    store.close()
    work, store = regeneration(tmp_path, given, max_turns=2, max_new_tokens=60)
    assert list(work.requests()) == [], "it would be asked at every resume"
    store.close()


def test_prompts_that_cannot_be_answered_are_counted(tmp_path):
    given = prompts("Short?", "long " * 90, "Bad?")
    work, store = regeneration(tmp_path, given)
    short, bad = work.requests()
    assert (short.id, bad.id, work.counts.too_long) == (0, 2, 1)
    work.handle(Completion(bad.id, bad.prompt_ids, [], "refused", "no such token"))
    work.handle(answer(short))
    assert (work.counts.refused, work.first_refusal) == (1, "no such token")
    assert (work.total, work.left) == (1, 0)
    assert store.ids == {0}
    store.close()


def test_excluded_prompts_are_left_out(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"turns": ["HELLO  there", "And who are you?"]}) + "\n")
    given = prompts("Hello there!", "And who are you", "Other?")
    work, store = regeneration(tmp_path / "s", given, exclude=[str(path)])
    assert [request.id for request in work.requests()] == [2]
    assert work.counts.excluded == 2 and work.total == 1
    store.close()


def test_system_messages_and_template_arguments(tmp_path, monkeypatch):
    system = Prompt(0, "s", "c", ("Hi",), system="Mine.")
    given = [system, Prompt(1, "s", "c", ("Hi",))]
    monkeypatch.setattr(
        TOKENIZER, "chat_template", TOKENIZER.chat_template + "{{ '<think>' if thinking }}"
    )
    options = {"system_prompt": "Default.", "chat_template_kwargs": {"thinking": True}}
    work, store = regeneration(tmp_path, given, **options)
    mine, default = (TOKENIZER.decode(request.prompt_ids) for request in work.requests())
    assert mine.startswith("<|im_start|>system\nMine.<|im_end|>") and mine.endswith("<think>")
    assert default.startswith("<|im_start|>system\nDefault.<|im_end|>")
    store.close()


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    kills=st.lists(st.integers(0, 10), max_size=4),
    max_turns=st.integers(1, 3),
    seed=st.integers(),
)
def test_interrupted_work_is_resumed_without_loss_or_repetition(
    tmp_path_factory, turns, kills, max_turns, seed
):
    """Completions arrive in any order, and each life ends after some of them."""
    folder = tmp_path_factory.mktemp("s")
    given = prompts(*(tuple(f"{n} {t}" for t in range(count)) for n, count in enumerate(turns)))
    order, answered = random.Random(seed), []
    for kill in [*kills, None]:
        work, store = regeneration(folder, given, max_turns=max_turns)
        pending = list(work.requests())
        assert not {request.id for request in pending} & store.ids
        while pending and kill != 0:
            request = pending.pop(order.randrange(len(pending)))
            pending += work.handle(answer(request, f"reply {request.id}"))
            kill = None if kill is None else kill - 1
        answered.append(work.counts.done)
        store._lock.close()
    rows = read_responses(folder)
    wanted = [
        n * max_turns + turn
        for n, count in enumerate(turns)
        for turn in range(min(count, max_turns))
    ]
    assert sorted(rows.column("id").to_pylist()) == wanted
    assert sum(answered) == len(wanted), "something was answered twice"


def test_a_changed_prompts_file_is_noticed(tmp_path):
    work, store = regeneration(tmp_path, prompts("Hello?", "Who?"))
    run(work)
    store.close()
    work, store = regeneration(tmp_path, prompts("Hello?", "Who?", "More?"))
    assert [request.id for request in work.requests()] == [2]
    assert work.counts.stored == 2
    store.close()
    work, store = regeneration(tmp_path, prompts("Hello?", "Changed?"))
    with pytest.raises(DataError, match=r"row 1 answers another prompt than 1 of the prompts"):
        list(work.requests())
    store.close()


def test_a_template_that_writes_the_date_does_not_stop_a_resume(tmp_path, monkeypatch):
    template = TOKENIZER.chat_template
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ 'Monday.' }}" + template)
    work, store = regeneration(tmp_path, prompts("Hello you?", "Who?"))
    run(work, limit=1)
    store.close()
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ 'Tuesday.' }}" + template)
    work, store = regeneration(tmp_path, prompts("Hello you?", "Who?"))
    assert [request.id for request in work.requests()] == [1]
    store.close()


def test_other_sampling_settings_do_not_mix(tmp_path):
    work, store = regeneration(tmp_path, prompts("Hello?"))
    run(work)
    store.close()
    for change in ({"temperatures": [1.0]}, {"max_new_tokens": 21}, {"top_k": 5}, {"max_turns": 2}):
        with pytest.raises(DataError, match="other settings"):
            regeneration(tmp_path, prompts("Hello?"), **change)
    # what decides no response may change
    for change in ({"engine": {"max_model_len": 200, "seed": 5}}, {"pool": {"engines": 2}}):
        regeneration(tmp_path, prompts("Hello?"), **change)[1].close()


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="max_new_tokens 100 leaves no room for a prompt"):
        RegenerateConfig.parse({"max_new_tokens": 100, "engine": {"max_model_len": 100}})
    with pytest.raises(ConfigError, match="temperatures lie between 0 and 2"):
        RegenerateConfig.parse({"temperatures": [0.5, -1]})
    with pytest.raises(ConfigError, match="did you mean 'path'"):
        RegenerateConfig.parse({"prompts": [{"paths": "x"}]})
    assert RegenerateConfig.parse({}).max_prompt_tokens == 1024 - 256


def test_targets_without_a_chat_template_are_refused(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    with pytest.raises(TargetError, match="has no chat template"):
        render_chat(TOKENIZER, [{"role": "user", "content": "x"}])
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('no systems') }}")
    with pytest.raises(TargetError, match="refuses messages of system, user: no systems"):
        render_chat(
            TOKENIZER,
            [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}],
        )


def test_the_expected_length_is_right_while_most_responses_run():
    rng = random.Random(1)
    limit, chance = 200, 0.01
    lengths = []
    for _ in range(4000):
        length = 1
        while length < limit and rng.random() >= chance:
            length += 1
        lengths.append(length)
    mean = sum(lengths) / len(lengths)
    # everything so far: all responses have run for 30 tokens at most
    early = 30
    stopped = sum(length < early for length in lengths)
    generated = sum(min(length, early) for length in lengths)
    assert expected_length(limit=limit, stopped=stopped, generated=generated) == pytest.approx(
        mean, rel=0.05
    )
    naive = sum(length for length in lengths if length < early) / stopped
    assert naive < mean / 4
    assert expected_length(limit=limit, stopped=0, generated=500) == limit
    assert expected_length(limit=limit, stopped=0, generated=0) == limit
    assert expected_length(limit=limit, stopped=3, generated=3) == 1
