"""Tiny random models of the real classes, with a real tokenizer: for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>", "<|reserved_1|>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. What is the capital of France? It is Paris.",
    "user assistant system Write a function that adds two numbers and returns the sum of them.",
    "def add(a, b):\n    return a + b\n# one two three four five six seven eight nine ten",
    "Translate the sentence into English: Guten Morgen, wie geht es dir? Solve 12 + 30 = 42.",
)


def tiny_target(
    folder: str | Path,
    *,
    architecture: str = "llama",
    vocab_size: int = 320,
    hidden_size: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 2048,
    scale: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write a tiny random target with tokenizer and chat template, and return its folder.

    Args:
        folder: where to write; made if missing.
        architecture: `llama`, `qwen3`, `gemma3` (sliding and full layers) or `gemma4`.
        vocab_size: of the model and the tokenizer; at least 300 (bytes and special tokens).
        hidden_size: a multiple of `num_heads`.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        max_position_embeddings: longest sequence.
        scale: multiplies the matrices; above 1 makes the next-token distribution sharper.
        seed: of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(vocab_size)
    config = tiny_config(
        architecture, vocab_size=vocab_size, hidden_size=hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(scale)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_config(
    architecture: str,
    *,
    num_hidden_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    **settings: Any,
) -> PretrainedConfig:
    """Configuration of a tiny model of a real class.

    Raises:
        ValueError: unknown architecture.
    """
    import transformers

    shape = {
        "num_hidden_layers": num_hidden_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": 2 * hidden_size,
        "head_dim": hidden_size // num_attention_heads,
        **settings,
    }
    if architecture == "llama":
        return transformers.LlamaConfig(**shape, tie_word_embeddings=True)
    if architecture == "qwen3":
        return transformers.Qwen3Config(**shape, tie_word_embeddings=False)
    mixed = [
        "full_attention" if (i + 1) % 2 == 0 else "sliding_attention"
        for i in range(num_hidden_layers)
    ]
    if architecture == "gemma3":
        return transformers.Gemma3TextConfig(
            **shape, layer_types=mixed, sliding_window=64, query_pre_attn_scalar=shape["head_dim"]
        )
    if architecture == "gemma4":
        return transformers.Gemma4TextConfig(
            **shape, layer_types=mixed, sliding_window=64, global_head_dim=shape["head_dim"],
            hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        )  # fmt: skip
    raise ValueError(f"unknown architecture {architecture!r}; known: llama, qwen3, gemma3, gemma4")


def tiny_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with ChatML special tokens and exactly `vocab_size` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)}, got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_CORPUS, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|unused_{index}|>" for index in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
