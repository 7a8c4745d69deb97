"""Which of a target's own texts become prompts."""

import pytest

from carryover.config import Config
from carryover.data.prompts import PROMPTS, read_prompts
from carryover.data.store import RowStore
from carryover.data.synthesis import (
    Elicitation,
    Synthesis,
    SynthesizeConfig,
    default_elicitations,
    why_not_a_prompt,
)
from carryover.engine_worker import Completion
from carryover.errors import ConfigError
from carryover.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def synthesis(folder, **settings):
    given = {"elicitations": [{}], "min_tokens": 2, **settings}
    config = SynthesizeConfig.parse(given)
    store = RowStore(folder, schema=PROMPTS, target={}, settings=config.settings())
    return Synthesis(config, TOKENIZER, store), store


def answer(number, text, finish="stop"):
    ids = TOKENIZER(text)["input_ids"] + [TOKENIZER.eos_token_id] * (finish == "stop")
    return Completion(id=number, prompt_ids=[1], token_ids=ids, finish=finish)


# The refused ones are what the embedded target wrote, shortened.
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How do I prepare for a job interview?", None),
        ("Can you provide a JavaScript function to find the maximum of three numbers?", None),
        ("I am a new employee. How do I plan to be successful?", None),
        (" takes a list of integers and returns the maximum.\n\nExample: [1, 2]\nOutput: 2", None),
        ("What is the capital of France?\nAnswer: Paris.", "answers itself"),
        ("How much does the ball cost?\n#### 1\n\nThe answer is 1.1", "answers itself"),
        ("What are the two coins?\nA:", "answers itself"),
        ("Add 10 to make 20.\nSolution: 10 + 10", "answers itself"),
        ("Hello!\nAI: I'm just a chatbot.", "answers itself"),
        ("How can I assist you in improving my writing?", "speaks as the assistant"),
        ("Yes, 11 is 7 and 75 is 19.", "speaks as the assistant"),
        ("Sure, let me help.", "speaks as the assistant"),
        ("I want a plan. As an AI, I'm here to help.", "speaks as the assistant"),
        ("sum = 3 + 3 + 3 + 3 + 3 + 3 + 3 + 3 + 3 + 3 + 3 + 3", "repeats itself"),
        ("What sets a list apart from a tuple, and when is a list better than a tuple?", None),
        ("It is anything you want to do. " * 3, "repeats itself"),
        ("broken \ufffd text", "not text"),
        ("bell \x07", "not text"),
    ],
)
def test_texts_that_are_no_request_are_left_out(text, reason):
    assert why_not_a_prompt(text) == reason


def test_a_text_that_repeats_its_system_message_is_left_out():
    system = "You are a math tutor. The user gives you a word problem to solve."
    text = "The user gives you a word problem and numbers."
    assert why_not_a_prompt(text, system=system) == "repeats the system message"
    assert why_not_a_prompt(text) is None


def test_prompts_are_kept_in_the_order_of_the_requests(tmp_path):
    work, store = synthesis(tmp_path, num_prompts=3)
    requests = work.requests()
    asked = [next(requests).id for _ in range(5)]
    assert asked == [0, 1, 2, 3, 4]
    work.handle(answer(3, "The fourth one asked?"))
    work.handle(answer(1, "The second one asked, and a longer one?"))
    assert work.found == 0, "a short one that ends early must not be preferred"
    work.handle(answer(0, "cut", finish="length"))
    work.handle(answer(2, "The second one asked,  and a LONGER one"))
    work.handle(answer(4, "What came last?"))
    assert work.complete
    work.handle(answer(5, "What came too late?"))
    store.close()
    prompts = read_prompts(tmp_path)
    assert [prompt.turns[0] for prompt in prompts] == [
        "The second one asked, and a longer one?", "The fourth one asked?", "What came last?",
    ]  # fmt: skip
    assert {prompt.source for prompt in prompts} == {"self"}
    assert work.rejected == {"not ended": 1, "repeats another": 1}
    assert work.attempts == 5


def test_elicitations_take_turns_by_weight_and_openings_are_kept(tmp_path):
    elicitations = [
        {"category": "code", "opening": "Write a function that", "weight": 2},
        {"category": "chat", "system": "Be brief."},
    ]
    work, store = synthesis(tmp_path, elicitations=elicitations, num_prompts=3, max_tokens=50)
    requests = [request for request, _ in zip(work.requests(), range(6), strict=False)]
    texts = [TOKENIZER.decode(request.prompt_ids) for request in requests]
    code = "<|im_start|>user\nWrite a function that"
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert texts == [code, code, chat] * 2
    opening = len(TOKENIZER("Write a function that")["input_ids"])
    assert [request.max_tokens for request in requests[:3]] == [50 - opening, 50 - opening, 50]
    assert all(TOKENIZER.eos_token_id in request.stop_ids for request in requests)
    for number, text in enumerate([" adds two numbers.", " ", "What is it?", " sorts."]):
        work.handle(answer(number, text))
    store.close()
    assert [(p.category, p.turns[0]) for p in read_prompts(tmp_path)] == [
        ("code", "Write a function that adds two numbers."), ("chat", "What is it?"),
        ("code", "Write a function that sorts."),
    ]  # fmt: skip
    assert work.rejected == {"too short": 1}


def test_a_second_run_extends_and_does_not_repeat(tmp_path):
    elicitations = [{"opening": "Explain"}]
    work, store = synthesis(tmp_path, elicitations=elicitations, num_prompts=1)
    work.handle(answer(0, " the origin of species to me."))
    store.close()
    work, store = synthesis(tmp_path, elicitations=elicitations, num_prompts=2)
    assert (work.found, work.complete) == (1, False)
    work.handle(answer(0, " the origin of species, to me!"))
    assert work.rejected == {"repeats another": 1}
    work.handle(answer(1, " gravity to a child."))
    assert work.complete
    store.close()
    assert [prompt.id for prompt in read_prompts(tmp_path)] == [0, 1]


def test_the_number_of_attempts_follows_what_was_kept(tmp_path):
    work, store = synthesis(tmp_path, num_prompts=100, max_attempts_per_prompt=1)
    assert work.wanted == 200
    for number in range(50):
        word = LETTERS[number % 26] * (2 + number // 26)
        work.handle(answer(number, f"What is {word}?"))
    assert work.found == 50 and 50 <= work.wanted <= 52
    for number in range(50, 99):
        work.handle(answer(number, "x", finish="length"))
    assert not work.exhausted and work.wanted > 95
    work.handle(answer(99, "x", finish="length"))
    assert work.exhausted
    store.close()


def test_stop_texts_do_not_end_up_in_prompts(tmp_path, monkeypatch):
    alpaca = "{{ '### Instruction:\n' + messages[0]['content'] + '\n\n### Response:\n' }}"
    monkeypatch.setattr(TOKENIZER, "chat_template", alpaca)
    work, store = synthesis(tmp_path, num_prompts=1)
    assert next(work.requests()).stop_texts == ("### Response:",)
    work.handle(answer(0, "Who are you?\n\n### Response:"))
    store.close()
    assert read_prompts(tmp_path)[0].turns == ("Who are you?",)


def test_settings_are_checked_and_decide_what_mixes():
    with pytest.raises(ConfigError, match="min_tokens 20 exceeds max_tokens 10"):
        SynthesizeConfig.parse({"min_tokens": 20, "max_tokens": 10})
    config = SynthesizeConfig.parse({})
    assert isinstance(config, Config) and len(default_elicitations()) >= 8
    assert {e.category for e in config.elicitations} >= {"code", "math", "translation", "qa"}
    more = SynthesizeConfig.parse({"num_prompts": 5, "out": "elsewhere"})
    assert more.settings() == config.settings()
    hotter = SynthesizeConfig.parse({"temperature": 1.0})
    assert hotter.settings() != config.settings()
    assert Elicitation().system is None
