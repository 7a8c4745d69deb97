"""What a drafter borrows from its target and never trains: embedding, LM head, final norm."""

from __future__ import annotations

import loguru
import torch
from speculators.utils.loading import load_model_layers
from torch import nn
from transformers import PretrainedConfig

from carryover.drafters.models import BlockDrafter
from carryover.errors import TargetError
from carryover.targets import Target

# Factors that some targets put on their logits or hidden states before the softmax. The teacher
# here is LM head after final norm, with a soft cap at most, so these would make it wrong.
_UNKNOWN_LOGIT_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier")


def borrow_target_weights(drafter: BlockDrafter, target: Target, *, lm_head: bool) -> None:
    """Set the drafter's frozen weights from the target's files.

    Parameters that hold the same numbers are one tensor: the drafter's LM head and the
    teacher's, and with tied embeddings the embedding too.

    Args:
        drafter: changed in place; its vocabulary mapping must be set.
        target: the target.
        lm_head: whether to set a reduced drafter LM head too (a loaded checkpoint has its own).

    Raises:
        TargetError: a weight is missing or of another shape, or the target changes its logits
            in a way that the teacher here does not know.
    """
    config = target.load_config()
    _check_logit_factors(config, target)
    tied = config.tie_word_embeddings
    found = read_tensors(
        ["embed_tokens.weight", "model.norm.weight", *([] if tied else ["lm_head.weight"])], target
    )
    embedding = _frozen(found["embed_tokens.weight"], config, target)
    head = embedding if tied else _frozen(found["lm_head.weight"], config, target)
    drafter.embed_tokens.weight = embedding
    if drafter.use_draft_vocab:
        rows = head.detach()[drafter.t2d]
        head = nn.Parameter(rows, requires_grad=False)
        if lm_head:
            drafter.lm_head.weight = nn.Parameter(rows.clone(), requires_grad=False)
    else:
        drafter.lm_head.weight = head
    drafter.verifier_lm_head.weight = head
    drafter.verifier_norm.load_state_dict({"weight": found["model.norm.weight"]})
    for module in (drafter.verifier_norm, drafter.lm_head):
        module.requires_grad_(False)
    drafter.teacher_softcap = getattr(config, "final_logit_softcapping", None)


def _check_logit_factors(config: PretrainedConfig, target: Target) -> None:
    for name in _UNKNOWN_LOGIT_FACTORS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise TargetError(
                f"target {target.name!r} multiplies its logits ({name}="
                f"{getattr(config, name)}), which is not supported; use a target without it"
            )


def read_tensors(names: list[str], target: Target) -> dict[str, torch.Tensor]:
    """Tensors by the ends of their names, so that nested (multimodal) checkpoints work too.

    Raises:
        TargetError: the files cannot be read, or lack a tensor.
    """
    # speculators logs a warning and the path for every file it opens.
    loguru.logger.disable("speculators.utils.loading")
    try:
        found = load_model_layers(names, target.path)
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read the weights of target {target.name!r}: {error}") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise TargetError(
            f"target {target.name!r} has no tensor that ends in {' or '.join(missing)}; "
            "copy or download it again"
        )
    return found


def _frozen(weight: torch.Tensor, config: PretrainedConfig, target: Target) -> nn.Parameter:
    expected = (config.vocab_size, config.hidden_size)
    if tuple(weight.shape) != expected:
        raise TargetError(
            f"target {target.name!r} has an embedding or LM head of shape {tuple(weight.shape)}; "
            f"its config.json says {expected}; copy or download it again"
        )
    return nn.Parameter(weight, requires_grad=False)
