"""Everything that `platform train target` can be told."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.training.config import CheckpointSettings, ResourceSettings, RunName
from carryover.training.optimizer import OptimizerSettings


class TargetShape(Config):
    """A Llama with tied embeddings; the defaults make 7.3 million parameters."""

    vocab_size: int = Field(4096, ge=300, description="Of its own byte-level BPE tokenizer.")
    hidden_size: int = Field(256, ge=16, description="Multiple of num_attention_heads.")
    num_layers: int = Field(8, ge=1)
    num_attention_heads: int = Field(4, ge=1)
    num_key_value_heads: int = Field(2, ge=1, description="Divides num_attention_heads.")
    intermediate_size: int = Field(768, ge=16)
    max_position_embeddings: int = Field(2048, ge=64, description="Longest sequence it serves.")

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        return self


class TargetEvaluationSettings(Config):
    """Held-out evaluation: cross-entropy."""

    every_steps: int = Field(100, ge=1, description="Evaluate after this many steps.")
    held_out_blocks: int = Field(32, ge=1, description="Blocks of text that are never trained on.")


class TargetTrainConfig(Config):
    """Training of a small target from scratch, on text that another target wrote."""

    name: RunName = Field("laboratory", description="Name of the run, and of its folder.")
    data: str | None = Field(
        None, description="Responses of the target that wrote the text: Parquet or JSON lines."
    )
    writer: str = Field("embedded", description="The target that wrote it: reads its token ids.")
    shape: TargetShape = TargetShape()
    block_length: int = Field(512, ge=16, description="Tokens of a training sequence.")
    blocks_per_step: int = Field(16, ge=1, description="Over all workers together.")
    optimizer: OptimizerSettings = OptimizerSettings(lr=2e-3, weight_decay=0.1)
    epochs: float = Field(20.0, gt=0, description="How often every block is seen.")
    max_steps: int | None = Field(
        None, ge=1, description="Stop after this many optimizer steps, if epochs do not stop first."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What products are computed in; weights and optimizer are float32. auto: "
        "bfloat16 on GPUs and on CPUs with instructions for it.",
    )
    seed: int = Field(0, ge=0, description="Decides weights and the order of blocks.")
    evaluation: TargetEvaluationSettings = TargetEvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    resources: ResourceSettings = ResourceSettings()
    runs_folder: str = Field("runs/targets", description="Folder of runs.")
    experiment: str = Field("targets", description="MLflow experiment.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.blocks_per_step % self.resources.num_workers:
            raise ValueError(
                f"blocks_per_step ({self.blocks_per_step}) must be a multiple of "
                f"resources.num_workers ({self.resources.num_workers})"
            )
        if self.block_length > self.shape.max_position_embeddings:
            raise ValueError(
                f"block_length ({self.block_length}) exceeds shape.max_position_embeddings "
                f"({self.shape.max_position_embeddings})"
            )
        if self.resources.parallelism == "fsdp":
            raise ValueError("a small target is copied, not sharded: resources.parallelism is ddp")
        return self

    def resolved(self, *, fast_bfloat16: bool) -> Self:
        """Replace an `auto` precision by what suits the workers.

        Args:
            fast_bfloat16: whether the CPU multiplies matrices faster in bfloat16.
        """
        if self.precision != "auto":
            return self
        short = self.resources.gpus_per_worker > 0 or fast_bfloat16
        return self.model_copy(update={"precision": "bfloat16" if short else "float32"})

    def fingerprint(self) -> dict[str, object]:
        """The settings that decide what a step does: a resumed run must not change them."""
        free = {"name", "data", "writer", "resources", "checkpoints", "runs_folder", "experiment"}
        settings = self.model_dump(mode="json", exclude=free)
        settings["evaluation"].pop("every_steps")
        settings["optimizer"].pop("max_skipped_steps")
        return settings
