"""Everything that `platform train` can be told."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from carryover.config import Config
from carryover.drafters.carried import CarriedSettings
from carryover.drafters.settings import DrafterSettings
from carryover.training.losses import StepSettings
from carryover.training.optimizer import OptimizerSettings


def _is_folder_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("a name has letters, digits, '.', '_' and '-', and no others")
    return name


RunName = Annotated[str, AfterValidator(_is_folder_name)]
"""Name of a run, which is also that of its folder."""


class BatchSettings(Config):
    """What one optimizer step sees."""

    sequence_length: int = Field(
        1024,
        ge=16,
        description="Capacity of a pack in tokens. Longer sequences lose their response's end.",
    )
    packs_per_step: int = Field(
        1,
        ge=1,
        description="Packs that one optimizer step averages over, on all workers together. Each "
        "worker accumulates the gradients of packs_per_step / num_workers packs.",
    )


class HiddenStateSettings(Config):
    """Where the target's hidden states come from."""

    cache: Literal["none", "disk"] = Field(
        "none",
        description="none: the target runs in every step. disk: it runs once over the data, and "
        "its states are kept in Arrow files; worth it for small data seen several times.",
    )
    cache_folder: str = Field(
        "runs/hidden_states", description="Folder of the Arrow files; shared by all nodes and runs."
    )
    cache_dtype: Literal["float16", "bfloat16", "float32"] = Field(
        "float16",
        description="Type of stored states. float16 is the more precise half type but ends at "
        "65,504, which some targets (Gemma) exceed; that is refused, with the advice to use "
        "bfloat16.",
    )
    cache_prefix: bool = Field(
        False,
        description="With cache=disk, for carryover training and its control: keep the target's "
        "keys and values of all layers too. The target then runs over the proposals alone, and "
        "seeds and arms share the files. 23 KB a token for the embedded target, 147 KB for "
        "Qwen3-4B.",
    )


class EvaluationSettings(Config):
    """Held-out evaluation: acceptance of the drafter's own proposals, decoded round by round."""

    every_steps: int = Field(100, ge=1, description="Evaluate after this many steps.")
    held_out_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of the rows that is never trained on."
    )
    max_sequences: int = Field(
        32, ge=1, description="Hold out no more rows than this; greedy ones are taken first."
    )


class ContinuationSettings(Config):
    """What carryover and control training, which begin at a checkpoint, do differently."""

    epochs: float = Field(3.0, gt=0, description="How often every pack is seen (paper: 3).")
    lr: float | None = Field(None, gt=0, description="Peak learning rate; null: optimizer.lr.")
    trained: Literal["all", "attention"] = Field(
        "all",
        description="all: every weight. attention: MLPs and the Markov head stay as they are; to "
        "read carried rows is attention's work, and a shipped file then holds what differs from "
        "its baseline alone.",
    )


class CheckpointSettings(Config):
    """When the run is saved, and how much of it is kept."""

    every_steps: int = Field(100, ge=1, description="Write a checkpoint after this many steps.")
    keep: int = Field(
        2, ge=1, description="Newest checkpoints that stay; the best one stays besides."
    )


class ResourceSettings(Config):
    """Where the job runs."""

    address: str | None = Field(
        None, description="Ray cluster to use, such as auto; null starts one on this machine."
    )
    num_workers: int = Field(1, ge=1, description="Processes that train together.")
    cpus_per_worker: float | None = Field(
        None, gt=0, description="Cores of each worker; null: this machine's, divided evenly."
    )
    gpus_per_worker: int = Field(
        0, ge=0, le=1, description="1: each worker has a GPU and talks by nccl. 0: CPU and gloo."
    )
    parallelism: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="How workers keep the drafter: ddp copies it, fsdp shards what is trained and "
        "its optimizer, and is what computes in bfloat16. auto: fsdp on GPUs or in bfloat16, else "
        "ddp.",
    )
    max_restarts: int = Field(
        1, ge=0, description="How often lost workers are started again from the last checkpoint."
    )
    start_timeout_s: float = Field(
        120, gt=0, description="How long to wait for the cluster to provide the workers."
    )


class TrainConfig(Config):
    """A training run of a drafter."""

    name: RunName = Field(
        "drafter", description="Name of the run, and of its folder in runs_folder."
    )
    target: str = Field("embedded", description="Hub name, local folder, or embedded.")
    data: str | None = Field(
        None,
        description="Responses of the target: a folder or file of Parquet, or JSON lines (--data).",
    )
    regime: Literal["dflash", "markov"] = Field(
        "dflash",
        description="dflash: all tokens of a block at once. markov: a first-order head on top.",
    )
    drafter: DrafterSettings = DrafterSettings()
    carried: CarriedSettings = CarriedSettings()
    batch: BatchSettings = BatchSettings()
    step: StepSettings = StepSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    epochs: float = Field(1.0, gt=0, description="How often every pack is seen.")
    continuation: ContinuationSettings = ContinuationSettings()
    max_steps: int | None = Field(
        None, ge=1, description="Stop after this many optimizer steps, if epochs do not stop first."
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What the drafter computes in; its weights and the optimizer are float32 in "
        "any case. auto: bfloat16 on GPUs, else float32.",
    )
    target_precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="What the frozen target computes in. auto: bfloat16 on GPUs and on CPUs with "
        "instructions for it (there 2.6 times as fast), else float32.",
    )
    seed: int = Field(0, ge=0, description="Decides weights, data order and anchors.")
    hidden_states: HiddenStateSettings = HiddenStateSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    resources: ResourceSettings = ResourceSettings()
    verify_first: bool = Field(
        True, description="Load the drafter into stock vLLM with its target before the first step."
    )
    runs_folder: str = Field(
        "runs/train", description="Folder of runs; with workers on several machines a shared one."
    )
    experiment: str = Field("train", description="MLflow experiment.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        workers, packs = self.resources.num_workers, self.batch.packs_per_step
        if packs % workers:
            below, above = packs - packs % workers, packs - packs % workers + workers
            raise ValueError(
                f"batch.packs_per_step ({packs}) must be a multiple of resources.num_workers "
                f"({workers}); take {' or '.join(str(n) for n in (below, above) if n)}"
            )
        if self.precision == "bfloat16" and self.resources.parallelism == "ddp":
            raise ValueError(
                "precision bfloat16 needs resources.parallelism fsdp (or auto), which keeps "
                "float32 weights beside the bfloat16 ones; ddp does not"
            )
        if self.drafter.proposal_length + 2 > self.batch.sequence_length:
            raise ValueError(
                f"drafter.proposal_length ({self.drafter.proposal_length}) does not fit into "
                f"batch.sequence_length ({self.batch.sequence_length})"
            )
        return self

    @property
    def parallelism(self) -> Literal["ddp", "fsdp"]:
        """How workers keep the drafter."""
        if self.resources.parallelism != "auto":
            return self.resources.parallelism
        sharded = self.resources.gpus_per_worker or self.precision == "bfloat16"
        return "fsdp" if sharded else "ddp"

    def continued(self, *, regime: str, drafter: DrafterSettings) -> Self:
        """The settings of a run that begins at a checkpoint: its drafter, and `continuation`."""
        optimizer = self.optimizer
        if self.continuation.lr is not None:
            optimizer = optimizer.model_copy(update={"lr": self.continuation.lr})
        return self.model_copy(
            update={
                "regime": regime,
                "drafter": drafter,
                "optimizer": optimizer,
                "epochs": self.continuation.epochs,
            }
        )

    def resolved(self, *, fast_bfloat16: bool) -> Self:
        """Replace `auto` precisions by what suits the workers.

        Args:
            fast_bfloat16: whether the CPU multiplies matrices faster in bfloat16.
        """
        gpu = self.resources.gpus_per_worker > 0
        choices = {"precision": gpu, "target_precision": gpu or fast_bfloat16}
        update = {
            name: "bfloat16" if short else "float32"
            for name, short in choices.items()
            if getattr(self, name) == "auto"
        }
        return self.parse(self.model_dump() | update)

    def fingerprint(self) -> dict[str, object]:
        """The settings that decide what a step does: a resumed run must not change them.

        Where it runs, how often it saves or evaluates, and where the states are kept may change.
        """
        free = {
            "name", "data", "target", "resources", "checkpoints", "hidden_states", "verify_first",
            "runs_folder", "experiment",
        }  # fmt: skip
        settings = self.model_dump(mode="json", exclude=free)
        settings["evaluation"].pop("every_steps")
        settings["optimizer"].pop("max_skipped_steps")
        return settings


def changed_settings(before: dict, after: dict, prefix: str = "") -> list[str]:
    """Lines that say which settings differ, by dotted name."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += changed_settings(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {json.dumps(old)} before, {json.dumps(new)} now")
    return lines


def derived_seed(*parts: int | str) -> int:
    """A seed that is a function of these values alone, for generators that need no saved state."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
