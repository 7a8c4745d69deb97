"""The user's place in chat templates of the kinds that are in use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryover.data.user_turns import find_user_turn, split_at_user_text
from carryover.errors import TargetError
from carryover.testing import tiny_tokenizer

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ message['content'] + '</s>' }}{% endif %}{% endfor %}"
)
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}{% else %}"
    "{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
CHATML = tiny_tokenizer().chat_template
CASES = {
    # template: special tokens, then what stops a user turn: its token or its text
    "chatml": (CHATML, [], "<|im_end|>", None),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
        None,
    ),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>", None),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "[/INST]", None),
    "mistral in plain text": (MISTRAL, ["<s>", "</s>"], None, "[/INST]"),
    "alpaca": (ALPACA, [], None, "### Response:"),
}
TOKENIZERS = {}


def tokenizer_for(name):
    if name not in TOKENIZERS:
        template, tokens, _, _ = CASES[name]
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": tokens})
        tokenizer.chat_template = template
        TOKENIZERS[name] = tokenizer
    return TOKENIZERS[name]


@pytest.mark.parametrize("name", CASES)
def test_the_turn_ends_where_the_template_ends_it(name):
    tokenizer = tokenizer_for(name)
    turn = find_user_turn(tokenizer)
    _, _, stop_token, stop_text = CASES[name]
    stop_ids = [tokenizer.eos_token_id]
    if stop_token is not None:
        stop_ids.append(tokenizer.convert_tokens_to_ids(stop_token))
    assert list(turn.stop_ids) == list(dict.fromkeys(stop_ids))
    assert turn.stop_texts == (() if stop_text is None else (stop_text,))


@pytest.mark.parametrize("name", CASES)
@given(
    words=st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1)
    .map(str.strip)
    .filter(bool)
)
def test_the_frame_and_any_text_make_the_rendered_message(name, words):
    tokenizer = tokenizer_for(name)
    before, after = split_at_user_text(tokenizer, [])
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == before + words + after
    assert tokenizer.decode(find_user_turn(tokenizer).prefix_ids) == before


def test_a_system_message_comes_before_the_turn():
    turn = find_user_turn(tokenizer_for("chatml"), system="Be brief.")
    before = tokenizer_for("chatml").decode(turn.prefix_ids)
    assert before == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    with pytest.raises(TargetError, match="refuses a system message: System role not supported"):
        find_user_turn(tokenizer_for("gemma"), system="Be brief.")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("nothing", "shows a user message 0 times"),
        ("{{ messages[0]['content'] + messages[0]['content'] }}", "shows a user message 2 times"),
    ],
)
def test_templates_that_hide_the_message_are_refused(template, message):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(TargetError, match=message):
        find_user_turn(tokenizer)


def test_a_turn_that_nothing_ends_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert find_user_turn(tokenizer).stop_ids == (tokenizer.eos_token_id,)
    tokenizer.eos_token = None
    with pytest.raises(TargetError, match="nothing that ends a user turn"):
        find_user_turn(tokenizer)


def test_the_longest_special_token_ends_the_turn():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im", "<|im_e"]})
    assert find_user_turn(tokenizer).stop_ids == (tokenizer.eos_token_id,)
