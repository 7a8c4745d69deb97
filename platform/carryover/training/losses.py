"""Loss of block drafters against recorded tokens and the teacher's distribution, in chunks.

Logits over a vocabulary are the largest tensors of a training step, and none of them survives
here. The teacher's distribution is computed once for each supervised position, though many
blocks supervise the same one; and since the loss is a scalar, the gradients with respect to the
drafter's hidden states and head are formed in the forward pass, one chunk of rows at a time.

With p the teacher's and q = softmax(z) the drafter's distribution over the draft vocabulary, and
z = W h (+ W2 e for the Markov head):

    ce = lse(z) - z[label]                   gradient in z: q - onehot(label)
    kl = lse(z) - p.z + p.log p              gradient in z: q - p
    tv = 1 - sum min(p, q)                   gradient in z: q * (sum of q where q < p) - q [q < p]

p.z = h.(W^T p) needs one vector for each *position*, not one logit row for each slot. A row
therefore costs its own logits and one product q W, whatever number of terms is on.

Shapes: N supervised slots, sorted by position; P teacher positions; V draft vocabulary; D hidden
size; R rank of the Markov head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from pydantic import Field, model_validator
from torch.autograd.function import once_differentiable

from carryover.config import Config
from carryover.drafters.teacher import Teacher

# Logits held at a time, in elements: 24 MiB of float32 on CPU, about its last-level cache.
_CPU_CHUNK = 6 << 20
_GPU_CHUNK = 128 << 20


class LossSettings(Config):
    """Weights of the loss terms and of the block positions."""

    ce: float = Field(default=0.0, ge=0, description="cross-entropy with the recorded token")
    kl: float = Field(default=1.0, ge=0, description="KL from the teacher's distribution")
    tv: float = Field(default=0.0, ge=0, description="total variation from the teacher's")
    gamma: float = Field(
        default=4.0,
        gt=0,
        description="block position k weighs exp(-(k-1)/gamma) "
        "(DFlash: 4 for blocks of 8 slots, 5 for 10, 7 for 16)",
    )

    @model_validator(mode="after")
    def _some_term(self) -> LossSettings:
        if not (self.ce or self.kl or self.tv):
            raise ValueError("all loss weights are 0; set at least one of ce, kl, tv above 0")
        return self

    @property
    def uses_teacher(self) -> bool:
        """Whether a term needs the teacher's distribution."""
        return bool(self.kl or self.tv)


class StepSettings(Config):
    """What one training step does with a packed sequence."""

    num_anchors: int = Field(default=64, ge=1, description="anchors per packed sequence")
    loss: LossSettings = LossSettings()


def position_weights(positions: torch.Tensor, gamma: float) -> torch.Tensor:
    """Weight of block position k = 1..B: exp(-(k-1)/gamma)."""
    return torch.exp(-(positions.float() - 1) / gamma)


@dataclass(frozen=True)
class SlotLosses:
    """Per-slot results, without gradient.

    Attributes:
        loss_N: weighted sum of the terms, before position weights.
        predicted_N: the drafter's most likely draft token.
        truth_P: the teacher's most likely draft token at each position; None without a teacher.
    """

    loss_N: torch.Tensor
    predicted_N: torch.Tensor
    truth_P: torch.Tensor | None


def block_loss(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    settings: LossSettings,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    positions_N: torch.Tensor,
    teacher: Teacher | None,
    markov: tuple[torch.Tensor, torch.Tensor] | None = None,
    max_elements: int | None = None,
) -> tuple[torch.Tensor, SlotLosses]:
    """Weighted sum over slots of the settings' loss terms, with gradient.

    Args:
        hidden_ND: drafter states after the final norm.
        weight_VD: the drafter's LM head.
        settings: weights of the terms (`gamma` is the caller's, through `weights_N`).
        labels_N: recorded token in the draft vocabulary, or -1: the `ce` term skips the slot.
        weights_N: float32; what each slot's loss is multiplied with in the sum.
        positions_N: index into the teacher's P positions, not descending.
        teacher: needed if `settings.uses_teacher`.
        markov: embeddings `W1[previous token]` [N, R] and `W2` [V, R].
        max_elements: bound on the logits held at a time.

    Returns:
        The scalar loss, and the per-slot results.
    """
    if max_elements is None:
        max_elements = _CPU_CHUNK if hidden_ND.device.type == "cpu" else _GPU_CHUNK
    if not settings.uses_teacher:
        teacher = None
    elif teacher is None:
        raise ValueError("the kl and tv terms need the teacher's states, and there are none")
    factors = [hidden_ND.to(weight_VD.dtype), weight_VD]
    if markov is not None:
        factors += [markov[0].to(markov[1].dtype), markov[1]]
    chunk = _Chunking(
        labels_N, weights_N, positions_N, teacher, settings,
        rows=max(1, max_elements // weight_VD.shape[0]), with_grad=torch.is_grad_enabled(),
    )  # fmt: skip
    loss, loss_N, predicted_N, truth_P = _BlockLoss.apply(chunk, *factors)
    return loss, SlotLosses(loss_N, predicted_N, truth_P if teacher is not None else None)


@dataclass(frozen=True)
class _Chunking:
    """Inputs of `_BlockLoss` that take no gradient."""

    labels_N: torch.Tensor
    weights_N: torch.Tensor
    positions_N: torch.Tensor
    teacher: Teacher | None
    settings: LossSettings
    rows: int
    with_grad: bool


@dataclass
class _Factor:
    """One summand x W^T of the logits, with its gradients; F is D or R."""

    x_NF: torch.Tensor
    weight_VF: torch.Tensor
    grad_x_NF: torch.Tensor | None
    grad_weight_VF: torch.Tensor | None


@dataclass
class _TeacherChunk:
    """The teacher at some positions: distribution, its mean of each W, its negative entropy."""

    p_QV: torch.Tensor
    means: list[torch.Tensor]
    negentropy_Q: torch.Tensor


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chunking: _Chunking, *tensors: torch.Tensor):
        factors = []
        for index in range(0, len(tensors), 2):
            x, weight = tensors[index : index + 2]
            needs_weight = chunking.with_grad and ctx.needs_input_grad[index + 2]
            factors.append(
                _Factor(
                    x,
                    weight,
                    torch.empty_like(x) if chunking.with_grad else None,
                    torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None,
                )
            )
        slots, device = tensors[0].shape[0], tensors[0].device
        loss_N = torch.empty(slots, dtype=torch.float32, device=device)
        predicted_N = torch.empty(slots, dtype=torch.long, device=device)
        num_positions = 0 if chunking.teacher is None else chunking.teacher.hidden_PD.shape[0]
        truth_P = torch.empty(num_positions, dtype=torch.long, device=device)
        if chunking.teacher is None:
            for rows in _slices(0, slots, chunking.rows):
                _supervise(chunking, factors, rows, None, 0, loss_N, predicted_N)
        else:
            edges = torch.arange(num_positions + 1, device=device)
            first_row = torch.searchsorted(chunking.positions_N, edges).tolist()
            for at in _slices(0, num_positions, chunking.rows):
                all_rows = slice(first_row[at.start], first_row[at.stop])
                teacher = _teach(chunking, factors, at, all_rows, truth_P)
                for rows in _slices(all_rows.start, all_rows.stop, chunking.rows):
                    _supervise(chunking, factors, rows, teacher, at.start, loss_N, predicted_N)
        gradients = [g for f in factors for g in (f.grad_x_NF, f.grad_weight_VF)]
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.mark_non_differentiable(loss_N, predicted_N, truth_P)
        return loss_N @ chunking.weights_N, loss_N, predicted_N, truth_P

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        return None, *(
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )


def _teach(
    chunking: _Chunking,
    factors: list[_Factor],
    at: slice,
    rows: slice,
    truth_P: torch.Tensor,
) -> _TeacherChunk:
    """Teacher's side of some positions, and its part of the weights' gradients."""
    teacher = chunking.teacher
    logits_QV = _product(teacher.hidden_PD[at], teacher.weight_VD)
    if teacher.softcap is not None:
        logits_QV.div_(teacher.softcap).tanh_().mul_(teacher.softcap)
    top_Q, truth_P[at] = logits_QV.max(-1)
    p_QV = logits_QV.softmax(-1)
    lse_Q = top_Q - p_QV.gather(1, truth_P[at][:, None]).squeeze(1).log()
    # in place, the last use of the logits; a batched dot product (gemv by row) takes twice as long
    mean_logit_Q = logits_QV.mul_(p_QV).sum(-1)
    means = []
    kl = chunking.settings.kl
    for factor in factors if kl else ():
        p = p_QV.to(factor.weight_VF.dtype)
        means.append((p @ factor.weight_VF).float())
        if factor.grad_weight_VF is not None:
            # p is the same for all rows of a position: add their inputs first.
            weighted = factor.x_NF[rows].float() * (kl * chunking.weights_N[rows, None])
            sums_QF = torch.zeros_like(means[-1]).index_add_(
                0, chunking.positions_N[rows] - at.start, weighted
            )
            factor.grad_weight_VF.sub_(p.T @ sums_QF.to(p.dtype))
    return _TeacherChunk(p_QV, means, mean_logit_Q - lse_Q)


def _supervise(
    chunking: _Chunking,
    factors: list[_Factor],
    rows: slice,
    teacher: _TeacherChunk | None,
    first_position: int,
    loss_N: torch.Tensor,
    predicted_N: torch.Tensor,
) -> None:
    """Losses, predictions and gradients of one chunk of slots."""
    settings, labels_M = chunking.settings, chunking.labels_N[rows]
    logits_MV = _product(factors[0].x_NF[rows], factors[0].weight_VF)
    for factor in factors[1:]:
        logits_MV += _product(factor.x_NF[rows], factor.weight_VF)
    top_M, predicted_M = logits_MV.max(-1)
    ce_M = settings.ce * (labels_M >= 0).float()
    label_logit_M = logits_MV.gather(1, labels_M.clamp(min=0)[:, None]).squeeze(1)
    q_MV = logits_MV.softmax(-1)
    del logits_MV
    lse_M = top_M - q_MV.gather(1, predicted_M[:, None]).squeeze(1).log()
    # d(loss)/dz = scale_M * q - ce * onehot(label) - kl * p, before tv's elementwise part.
    scale_M = ce_M + settings.kl
    loss_M = scale_M * lse_M - ce_M * label_logit_M
    at_M = None
    if teacher is not None:
        at_M = chunking.positions_N[rows] - first_position
        loss_M += settings.kl * teacher.negentropy_Q[at_M]
        for factor, mean_QF in zip(factors, teacher.means, strict=bool(settings.kl)):
            loss_M -= settings.kl * (factor.x_NF[rows].float() * mean_QF[at_M]).sum(-1)
    if settings.tv:
        p_MV = teacher.p_QV[at_M]
        loss_M += settings.tv * (1 - torch.minimum(p_MV, q_MV).sum(-1))
        below_MV = (q_MV < p_MV).float()
        scale_MV = (scale_M + settings.tv * (q_MV * below_MV).sum(-1))[:, None]
        q_MV *= scale_MV - settings.tv * below_MV
        scale_M = torch.ones_like(scale_M)
    loss_N[rows], predicted_N[rows] = loss_M, predicted_M
    if not chunking.with_grad:
        return
    weights_M = chunking.weights_N[rows]
    for index, factor in enumerate(factors):
        q = q_MV.to(factor.weight_VF.dtype)
        grad_MF = (q @ factor.weight_VF).float() * scale_M[:, None]
        if settings.ce:
            grad_MF -= ce_M[:, None] * factor.weight_VF[labels_M.clamp(min=0)]
        if settings.kl:
            grad_MF -= settings.kl * teacher.means[index][at_M]
        factor.grad_x_NF[rows] = (grad_MF * weights_M[:, None]).to(factor.x_NF.dtype)
        if factor.grad_weight_VF is not None:
            x = factor.x_NF[rows].float() * weights_M[:, None]
            factor.grad_weight_VF += q.T @ (x * scale_M[:, None]).to(q.dtype)
            if settings.ce:
                factor.grad_weight_VF.index_add_(0, labels_M.clamp(min=0), -ce_M[:, None] * x)


def _product(x_MF: torch.Tensor, weight_VF: torch.Tensor) -> torch.Tensor:
    """x W^T in float32, also for 16-bit inputs."""
    if x_MF.dtype == torch.float32:
        return x_MF @ weight_VF.T
    if x_MF.is_cuda:
        return torch.mm(x_MF, weight_VF.T, out_dtype=torch.float32)
    return (x_MF @ weight_VF.T).float()


def _slices(start: int, stop: int, size: int) -> list[slice]:
    """`start .. stop` in even parts of at most `size`."""
    length = stop - start
    parts = -(-length // size)
    edges = [start + length * part // parts for part in range(parts + 1)] if parts else []
    return [slice(low, high) for low, high in pairwise(edges)]
