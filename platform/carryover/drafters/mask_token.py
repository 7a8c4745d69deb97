"""The token that fills mask slots: a real row of the target's embedding that no text uses."""

from __future__ import annotations

import re

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from carryover.errors import ConfigError

# How tokenizers call the tokens they keep free: <mask>, <|reserved_special_token_0|>, <unused7>,
# <extra_id_3>, <empty_output>.
_UNUSED_NAME = re.compile(r"mask|reserved|unused|extra_id|empty", re.IGNORECASE)


def find_mask_token(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, requested: int | None = None
) -> int:
    """Return the id for mask slots.

    In order: the one requested; the tokenizer's own mask token; the first embedding row that no
    token has; a special token that is named as unused. Never the padding or an end-of-text
    token: those occur in text, and a drafter must not confuse them with a mask.

    Args:
        tokenizer: the target's.
        config: the target's text configuration.
        requested: an id that the user chose.

    Raises:
        ConfigError: the requested id is out of range or in use, or the target has no free row.
    """
    taken = _tokens_in_use(tokenizer, config)
    if requested is not None:
        if not 0 <= requested < config.vocab_size:
            raise ConfigError(
                f"mask_token_id {requested} is not a row of the embedding; "
                f"choose one within 0..{config.vocab_size - 1}"
            )
        if requested in taken:
            raise ConfigError(
                f"mask_token_id {requested} is {tokenizer.convert_ids_to_tokens(requested)!r}, "
                "which text uses; choose a reserved token, or leave it out to have one found"
            )
        return requested
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own < config.vocab_size and own not in taken:
        return own
    vocabulary = tokenizer.get_vocab()
    first_free = max(vocabulary.values()) + 1
    if first_free < config.vocab_size:
        return first_free
    named = sorted(
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if _UNUSED_NAME.search(token.content) and index < config.vocab_size and index not in taken
    )
    if named:
        return named[0]
    raise ConfigError(
        "the target has no unused embedding row for mask slots: all "
        f"{config.vocab_size} rows belong to tokens, and none is named as reserved; "
        "set mask_token_id to a token that never occurs in your text"
    )


def _tokens_in_use(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> set[int]:
    """Special tokens that appear in text: begin, end, padding, unknown, chat template."""
    found = {
        getattr(source, name, None)
        for source in (tokenizer, config)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    }
    ids = set()
    for value in found - {None}:
        ids.update(value if isinstance(value, list | tuple) else [value])
    template = tokenizer.chat_template or ""
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.content in str(template):
            ids.add(index)
    return ids
