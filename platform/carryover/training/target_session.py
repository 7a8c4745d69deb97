"""From a configuration to the training of a target that is ready to run.

The driver makes the run's beginning (random weights, tokenizer, blocks of ids), which every worker
reads: all train the same model on the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from carryover.errors import CheckpointError
from carryover.targets import Target
from carryover.training.checkpointed import Reporter
from carryover.training.snapshots import Snapshots
from carryover.training.target_config import TargetTrainConfig
from carryover.training.target_loop import TargetLoop
from carryover.training.target_text import blocks_of, split_blocks, train_tokenizer
from carryover.training.workers import Workers

_BLOCKS = "blocks.npy"


@dataclass(frozen=True)
class TargetAssignment:
    """What every worker is told.

    Attributes:
        config: the run's settings, with a resolved precision.
        run_folder: absolute path, the same on all workers.
    """

    config: TargetTrainConfig
    run_folder: Path

    @property
    def initial(self) -> Path:
        """The beginning: model, tokenizer and blocks."""
        return self.run_folder / "initial"


def make_initial(
    config: TargetTrainConfig, texts: list[str], writer: Target, folder: Path
) -> None:
    """Write random weights, a tokenizer made from the text, and the text in its ids.

    Raises:
        DataError: the text is too small for the settings.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = config.shape
    tokenizer = train_tokenizer(texts, writer.load_tokenizer(), shape.vocab_size)
    blocks = blocks_of(texts, tokenizer, config.block_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_attention_heads,
                num_key_value_heads=shape.num_key_value_heads,
                intermediate_size=shape.intermediate_size,
                max_position_embeddings=shape.max_position_embeddings,
                tie_word_embeddings=True,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    np.save(folder / _BLOCKS, blocks, allow_pickle=False)


def read_blocks(assignment: TargetAssignment) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out blocks of a run that has begun.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = assignment.initial / _BLOCKS
    try:
        blocks = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; begin with --restart") from None
    return split_blocks(blocks, assignment.config.evaluation.held_out_blocks)


def build_target_loop(
    assignment: TargetAssignment, *, workers: Workers, reporter: Reporter
) -> TargetLoop:
    """Load everything and return the loop, at the run's last checkpoint if it has one.

    Raises:
        CheckpointError: a file of the run is damaged.
    """
    config = assignment.config
    snapshots = Snapshots(assignment.run_folder, keep=config.checkpoints.keep)
    resume_from = snapshots.latest()
    start = Target(name=config.name, path=str(resume_from or assignment.initial))
    blocks, held_out = read_blocks(assignment)
    model = start.load_model(dtype=torch.float32).requires_grad_(True)
    return TargetLoop(
        config,
        model=model.to(workers.device),
        tokenizer=start.load_tokenizer(),
        blocks=blocks,
        held_out=held_out,
        snapshots=snapshots,
        workers=workers,
        reporter=reporter,
        resume_from=resume_from,
    )
