"""Text that one target wrote, as training material of another: a tokenizer and blocks of ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from carryover.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


def read_texts(table: pa.Table, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Whole conversations, with the chat template's own marks.

    Args:
        table: see `carryover.data.responses.read_responses`.
        tokenizer: of the target that gave the responses.
    """
    columns = (table[name].to_pylist() for name in ("prompt_ids", "response_ids"))
    ids = [prompt + response for prompt, response in zip(*columns, strict=True)]
    return tokenizer.batch_decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def train_tokenizer(
    texts: Iterable[str], like: PreTrainedTokenizerBase, vocab_size: int
) -> PreTrainedTokenizerBase:
    """A tokenizer of the same kind with its own merges: same special tokens and chat template.

    Raises:
        DataError: the text is too small for so many tokens.
    """
    made = like.train_new_from_iterator(texts, vocab_size, show_progress=False)
    if len(made) != vocab_size:
        raise DataError(
            f"the text gives a vocabulary of {len(made):,} tokens, and shape.vocab_size asks for "
            f"{vocab_size:,}; lower it to {len(made)}, or train on more text"
        )
    return made


def blocks_of(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, block_length: int
) -> np.ndarray:
    """All texts one after the other, cut into blocks: int32 [blocks, block_length].

    Raises:
        DataError: less than three blocks.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ids = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    flat = np.concatenate([np.asarray(row, dtype=np.int32) for row in ids["input_ids"]])
    count = len(flat) // block_length
    if count < 3:
        raise DataError(
            f"the text has {len(flat):,} tokens, less than three blocks of {block_length}; give "
            "more responses, or lower block_length"
        )
    return flat[: count * block_length].reshape(count, block_length)


def split_blocks(blocks: np.ndarray, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out blocks; those held out are spread evenly, at most a tenth of all."""
    count = min(held_out, max(1, len(blocks) // 10))
    places = np.linspace(0, len(blocks) - 1, count).round().astype(int)
    return np.delete(blocks, places, axis=0), blocks[places]
