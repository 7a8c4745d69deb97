"""Where a chat template lets the user speak: what comes before the turn, and what ends it.

Sampling from the tokens before the turn makes a target write user turns of its own (as Magpie does,
arXiv 2406.08464). The place is found by rendering a marked message, so it works for any template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from carryover.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTINEL = "carryover0sentinel0text"


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The frame of a user turn in a rendered conversation.

    Attributes:
        prefix_ids: tokens before the user's text.
        stop_ids: tokens that end it.
        stop_texts: texts that end it, where the template ends it without a special token.
    """

    prefix_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]


def find_user_turn(tokenizer: PreTrainedTokenizerBase, *, system: str | None = None) -> UserTurn:
    """Find where the chat template puts the first user message.

    Args:
        tokenizer: with a chat template.
        system: system message before it; None leaves it to the template.

    Raises:
        TargetError: there is no template, or it does not show the message, or shows it twice, or
            refuses a system message.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    before, after = split_at_user_text(tokenizer, messages)
    special = _leading_special_token(tokenizer, after)
    stop_ids = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    if special is not None:
        stop_ids.append(special)
    stop_text = after.strip().split("\n")[0] if special is None else ""
    if special is None and not stop_text and not stop_ids:
        raise TargetError(
            f"the chat template of {tokenizer.name_or_path} has nothing that ends a user turn"
        )
    return UserTurn(
        prefix_ids=tuple(tokenizer(before, add_special_tokens=False)["input_ids"]),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        stop_texts=(stop_text,) if stop_text else (),
    )


def split_at_user_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[str, str]:
    """Render `messages` and one user message, and cut that message's text out.

    Returns:
        What the template writes before the user's text, and after it (up to where the assistant
        would begin).

    Raises:
        TargetError: as `find_user_turn`.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise TargetError(
            f"{tokenizer.name_or_path} has no chat template, so it has no user turn to sample; "
            "use an instruction-tuned target, or prompts from a file"
        )
    try:
        rendered = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": _SENTINEL}],
            add_generation_prompt=True,
            tokenize=False,
        )
    except (TemplateError, ValueError) as error:
        raise TargetError(
            f"the chat template of {tokenizer.name_or_path} refuses "
            f"{'a system message' if messages else 'a single user message'}: {error}"
        ) from None
    count = rendered.count(_SENTINEL)
    if count != 1:
        raise TargetError(
            f"the chat template of {tokenizer.name_or_path} shows a user message {count} times; "
            "it must show it once for user turns to be sampled"
        )
    before, after = rendered.split(_SENTINEL)
    return before, after


def _leading_special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Id of the special token that `text` begins with (white space aside), if it does."""
    text = text.lstrip()
    found = [
        (len(token.content), number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content and text.startswith(token.content)
    ]
    return max(found)[1] if found else None
