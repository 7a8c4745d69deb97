"""A tiny target whose texts look enough like words for the prompt filters."""

from pathlib import Path

from carryover.targets import Target, resolve
from carryover.testing import tiny_target


def make_talker(folder: Path) -> Target:
    """Write a tiny target that writes letters and spaces, and ends a turn now and then.

    Every hidden state gets a large constant in its first dimension, which the head turns into a
    bonus for the wanted tokens and a malus for all others.
    """
    import torch

    tiny_target(folder, architecture="qwen3", num_heads=2, num_kv_heads=1, num_layers=2)
    target = resolve(str(folder))
    model, tokenizer = target.load_model(), target.load_tokenizer()
    wanted = torch.full((len(tokenizer),), -6.0)
    for word, number in tokenizer.get_vocab().items():
        if word.lstrip("Ġ").isalpha() and word.isascii() | word.startswith("Ġ"):
            wanted[number] = 1.0
    wanted[tokenizer.eos_token_id] = 1.2
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 5.0
        model.lm_head.weight[:, 0] = wanted
        model.lm_head.weight[:, 1:] *= 20.0
    model.save_pretrained(folder)
    return Target(name=str(folder), path=str(folder))
