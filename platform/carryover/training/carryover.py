"""The draft-verify-draft step: parallel over anchors, three stages in sequence.

1. Draft 1, without gradient: proposals at every anchor, nothing carried.
2. Verify, without gradient: the frozen target reads every anchor's proposals.
3. Draft 2, with gradient: the anchor moves past the accepted proposals and the correction token,
   `anchor + a + 1` on the *recorded* response, and predicts the recorded tokens after it,
   attending to the committed states before it and to its own rejected states.

The recorded response is a sample of the target, at temperature 0 and above: the recorded token is
what the target's draw came out as. So at every temperature a proposal is accepted while it equals
the recorded token, and labels are never regenerated.

The control arm (`carry=False`) drafts, shifts and supervises alike, and carries nothing. It skips
the verification pass, whose result it would not read: `a` needs the recorded tokens alone. So
both arms see the same anchors in the same number of optimizer steps, and the difference in time
is what carrying costs. Shapes: see drafters/blocks.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from carryover.drafters.blocks import Blocks, Carried
from carryover.drafters.carried import carry as carried_fields
from carryover.drafters.drafting import draft
from carryover.drafters.models import BlockDrafter
from carryover.errors import ConfigError
from carryover.training.anchors import anchored_blocks, draw_anchors, shift_anchors
from carryover.training.batch import Batch
from carryover.training.step import StepResult, StepSettings, recorded_acceptance, supervise
from carryover.training.verification import Prefix, predictions, read_target, verify


def carryover_step(
    drafter: nn.Module,
    target_model: PreTrainedModel | None,
    batch: Batch,
    *,
    settings: StepSettings,
    generator: torch.Generator | None = None,
    carry: bool,
) -> StepResult:
    """Draft, verify and draft again at sampled anchors.

    Args:
        drafter: wrapped (DDP, FSDP) or not. With `carry`, one with carried context.
        target_model: the frozen target; None will do without `carry`.
        batch: packed sequence with the target's states. Without `batch.prefix`, carrying takes
            one more pass of the target over the sequence.
        settings: anchors and loss.
        generator: CPU generator of the anchors.
        carry: False is the control arm.

    Returns:
        Loss and metrics of `supervise` for draft 2, and:
            accepted_length/draft_1, accepted_length/draft_2: mean accepted proposals.
            fully_accepted: share of anchors whose B proposals were all accepted.
            carried_rows: mean rejected states that a supervised block could attend to.
            marker_norm: length of the marker.
            seconds/draft_1, seconds/verify, seconds/draft_2: time of each stage (draft 2:
                forward and loss; the backward pass is the caller's).

    Raises:
        ConfigError: `carry` with a baseline drafter.
        DataError: the batch has no anchor.
        TargetError: the target's architecture cannot be verified in parallel.
    """
    core: BlockDrafter = getattr(drafter, "module", drafter)
    interface = core.carried_settings
    if carry and interface is None:
        raise ConfigError("this drafter has no carried context; add it before training with it")
    seconds: dict[str, torch.Tensor] = {}
    anchors_A = draw_anchors(batch, settings.num_anchors, generator=generator)
    blocks = anchored_blocks(batch, anchors_A)
    with _timed(seconds, "draft_1", anchors_A.device):
        tokens_AB = draft(drafter, batch.context, blocks)
        accepted_A = recorded_acceptance(batch, anchors_A, tokens_AB)
    fields = {}
    with _timed(seconds, "verify", anchors_A.device):
        if carry:
            fields = carried_after(core, target_model, batch, blocks, tokens_AB, accepted_A)
    with _timed(seconds, "draft_2", anchors_A.device):
        shifted_A, kept = shift_anchors(batch, anchors_A, accepted_A)
        blocks = replace(
            anchored_blocks(batch, shifted_A),
            **select(fields, kept),
        )
        result = supervise(drafter, batch, shifted_A, blocks, settings.loss)
    metrics = {
        "accepted_length/draft_1": accepted_A.float().mean(),
        "accepted_length/draft_2": result.metrics["accepted_length"],
        "fully_accepted": (accepted_A == tokens_AB.shape[1]).float().mean(),
        "carried_rows": _mean_carried(blocks),
        **{f"seconds/{stage}": value for stage, value in seconds.items()},
    }
    if carry and interface.mark == "embedding":
        marker = core.carryover_marker.detach()
        # Sharded parameters (FSDP) are put together first.
        metrics["marker_norm"] = getattr(marker, "full_tensor", lambda: marker)().norm()
    return StepResult(result.loss, result.metrics | metrics)


def carried_after(
    drafter: BlockDrafter,
    target_model: PreTrainedModel,
    batch: Batch,
    blocks: Blocks,
    tokens_AB: torch.Tensor,
    accepted_A: torch.Tensor,
) -> dict[str, Carried | torch.Tensor]:
    """Verify a round's proposals, and return what it leaves to the next draft: fields of `Blocks`.

    Args:
        drafter: with carried context, not wrapped.
        target_model: the frozen target.
        batch: packed sequence; without `batch.prefix` the target reads it first.
        blocks: the round's blocks.
        tokens_AB: its proposals.
        accepted_A: how many of them pass, which the recorded text then continues with.
    """
    interface = drafter.carried_settings
    hidden_ABC = predictions_AB = None
    # the tokens themselves need no target
    if interface.carried != "draft_tokens":
        by_prediction = interface.carried == "target_tokens"
        states = verify(
            target_model,
            prefix=batch.prefix or _read_prefix(target_model, batch, drafter.target_layer_ids),
            blocks=blocks,
            tokens_AB=tokens_AB,
            layer_ids=drafter.target_layer_ids,
            accepted_A=accepted_A,
            last_hidden=by_prediction,
        )
        hidden_ABC = states.hidden_NC
        if by_prediction:
            predictions_AB = predictions(target_model, states.last_hidden_ND)
    return carried_fields(
        interface,
        hidden_ABC=hidden_ABC,
        positions_A=blocks.positions_A,
        proposals_AB=tokens_AB,
        predictions_AB=predictions_AB,
        accepted_A=accepted_A,
    )


def _read_prefix(
    target_model: PreTrainedModel, batch: Batch, layer_ids: Sequence[int]
) -> Prefix:
    return read_target(
        target_model,
        input_ids_T=batch.input_ids_T,
        position_ids_T=batch.position_ids_T,
        layer_ids=layer_ids,
    )[1]


def select(
    fields: dict[str, Carried | torch.Tensor], kept_A: torch.Tensor
) -> dict[str, Carried | torch.Tensor]:
    """What is carried for some of the blocks."""
    return {
        name: value[kept_A]
        if isinstance(value, torch.Tensor)
        else Carried(value.hidden_ARC[kept_A], value.positions_AR[kept_A], value.valid_AR[kept_A])
        for name, value in fields.items()
    }


def _mean_carried(blocks: Blocks) -> torch.Tensor:
    """Mean carried rows or hints of a block."""
    shown = torch.zeros(1, device=blocks.tokens_A.device)
    if blocks.carried is not None:
        shown = blocks.carried.valid_AR
    elif blocks.hints_AS is not None:
        shown = blocks.hints_AS >= 0
    return shown.sum() / max(len(blocks), 1)


@contextmanager
def _timed(seconds: dict[str, torch.Tensor], stage: str, device: torch.device) -> Iterator[None]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    yield
    seconds[stage] = torch.tensor(now() - started)
