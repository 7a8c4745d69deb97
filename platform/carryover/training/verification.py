"""The frozen target over recorded sequences, and over the proposals of all their anchors at once.

`read_target` runs the packed sequence once and keeps every layer's keys and values (the prefix).
`verify` then runs the proposals of all anchors as one sequence of up to A * B rows in which each
row attends to its anchor's prefix and, causally, to the earlier proposals of its own anchor. The
block-diagonal mask over all proposals is never built, so work and memory are linear in anchors. An
accepted proposal is the recorded token, whose row the prefix has: only rejected ones are run.

Both replace the attention function of the model through transformers' `AttentionInterface`, so
any causal language model that takes its attention from there works, in its own positions (RoPE),
sliding windows included. What would change the rule (attention soft caps, sinks, chunked or
linear attention, models that are not causal) is refused. Shapes: see drafters/blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from carryover.drafters.attention import Chunk, block_attention, plan_chunks
from carryover.drafters.blocks import Blocks
from carryover.drafters.drafting import MAX_LOGITS
from carryover.errors import TargetError

_IMPLEMENTATION = "carryover"
# Stands for the final norm among layer indices.
_LAST = -1
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}

# One layer's attention: (layer index, query, key, value, scale, window) to output; heads second,
# as transformers has them.
_Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
_ATTEND: ContextVar[_Attend] = ContextVar("carryover_attention")

# Of each layer: its index, heads and head size of its keys, and of its values.
PrefixShapes = Sequence[tuple[int, tuple[int, int], tuple[int, int]]]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a packed sequence by layer index, each [T, K, E], RoPE applied."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def joined_TP(self) -> torch.Tensor:
        """All layers' keys and values side by side, in the order of the layers."""
        return torch.cat(
            [x.flatten(1) for layer in sorted(self.layers) for x in self.layers[layer]], dim=1
        )

    def shapes(self) -> PrefixShapes:
        """What `split` takes apart by."""
        return [
            (layer, *(tuple(x.shape[1:]) for x in self.layers[layer]))
            for layer in sorted(self.layers)
        ]

    @classmethod
    def split(cls, joined_TP: torch.Tensor, shapes: PrefixShapes) -> Prefix:
        """Undo `joined_TP`."""
        layers, start = {}, 0
        for layer, *of_key_and_value in shapes:
            parts = []
            for heads, size in of_key_and_value:
                end = start + heads * size
                parts.append(joined_TP[:, start:end].unflatten(1, (heads, size)))
                start = end
            layers[layer] = tuple(parts)
        return cls(layers)

    def to(self, device: torch.device | str) -> Prefix:
        """Copy to a device."""
        return Prefix(
            {
                layer: (key.to(device), value.to(device))
                for layer, (key, value) in self.layers.items()
            }
        )


@dataclass(frozen=True)
class TargetStates:
    """States of some rows. Layer id i is transformers' `hidden_states[i]`.

    Attributes:
        hidden_NC: the selected layers' states, concatenated.
        last_hidden_ND: input of the final norm; None if the pass ended before it.
    """

    hidden_NC: torch.Tensor
    last_hidden_ND: torch.Tensor | None


@torch.no_grad()
def read_target(
    model: PreTrainedModel,
    *,
    input_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
    layer_ids: Sequence[int],
) -> tuple[TargetStates, Prefix]:
    """Run the target over packed documents that do not see each other.

    Args:
        model: the frozen target.
        input_ids_T: token ids.
        position_ids_T: positions; each 0 begins a document.
        layer_ids: which states to return.

    Raises:
        TargetError: an architecture that is not supported.
    """
    starts = (position_ids_T == 0).nonzero().squeeze(1).tolist()
    documents = [
        slice(low, high)
        for low, high in zip(starts, [*starts[1:], len(position_ids_T)], strict=True)
    ]
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer, query, key, value, scale, window):
        layers[layer] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        parts = [
            _causal(query[:, :, rows], key[:, :, rows], value[:, :, rows], scale, window)
            for rows in documents
        ]
        return torch.cat(parts, dim=2)

    states = _run(model, input_ids_T, position_ids_T, layer_ids, attend)
    return states, Prefix(layers)


@torch.no_grad()
def verify(
    model: PreTrainedModel,
    *,
    prefix: Prefix,
    blocks: Blocks,
    tokens_AB: torch.Tensor,
    layer_ids: Sequence[int],
    accepted_A: torch.Tensor | None = None,
    last_hidden: bool = True,
) -> TargetStates:
    """Run the target over the proposals after every anchor.

    Args:
        model: the frozen target.
        prefix: of the packed sequence that the anchors lie in.
        blocks: the anchors. The anchor itself is the recorded token at packed row `ends_A`, so
            its proposals attend to the rows `starts_A .. ends_A`, both included.
        tokens_AB: proposals.
        layer_ids: which states to return.
        accepted_A: how many proposals of each anchor equal the recorded tokens; these are not run
            again, and their states are left zero. None runs all.
        last_hidden: False ends the pass at the last of `layer_ids`.

    Returns:
        States of the proposals, [A, B, ...].

    Raises:
        TargetError: an architecture that is not supported, or a window shorter than B.
    """
    A, B = tokens_AB.shape
    device = tokens_AB.device
    if accepted_A is None:
        accepted_A = torch.zeros(A, dtype=torch.long, device=device)
    place_B = torch.arange(B, device=device)
    run_AB = place_B >= accepted_A[:, None]
    block_N, proposal_N = run_AB.nonzero(as_tuple=True)
    slot_N = proposal_N - accepted_A[block_N]
    positions_AB = blocks.positions_A[:, None] + place_B + 1
    starts, ends = blocks.starts_A.tolist(), (blocks.ends_A + 1 + accepted_A).tolist()
    later_1BB = torch.ones(B, B, dtype=torch.bool, device=device).triu(1)[None]
    plans: dict[int | None, list[Chunk]] = {}

    def by_block(x_1HNE: torch.Tensor) -> torch.Tensor:
        """The rows of each block from its first slot on; the rest is padding, which none sees."""
        x_ABHE = x_1HNE.new_zeros(A, B, x_1HNE.shape[1], x_1HNE.shape[3])
        x_ABHE[block_N, slot_N] = x_1HNE[0].transpose(0, 1)
        return x_ABHE

    def attend(layer, query, key, value, scale, window):
        if window is not None and window < B:
            raise TargetError(
                f"the target's sliding window of {window} rows is shorter than the {B} proposals"
            )
        if window not in plans:
            plans[window] = plan_chunks(
                starts,
                ends,
                queries_per_block=B * query.shape[1],
                device=device,
                window=window,
                slots=B,
            )
        # what was read from disk may be of a shorter type
        prefix_key_TKE, prefix_value_TKE = (x.to(query.dtype) for x in prefix.layers[layer])
        out_ABHE = block_attention(
            by_block(query),
            prefix_key_TKE,
            prefix_value_TKE,
            by_block(key),
            by_block(value),
            chunks=plans[window],
            own_closed_ASO=later_1BB,
            scale=scale,
        )
        return out_ABHE[block_N, slot_N].transpose(0, 1)[None]

    def by_proposal(x_NX: torch.Tensor) -> torch.Tensor:
        x_ABX = x_NX.new_zeros(A, B, x_NX.shape[1])
        x_ABX[run_AB] = x_NX
        return x_ABX

    states = _run(
        model, tokens_AB[run_AB], positions_AB[run_AB], layer_ids, attend, last_hidden=last_hidden
    )
    last = states.last_hidden_ND
    return TargetStates(by_proposal(states.hidden_NC), None if last is None else by_proposal(last))


@torch.no_grad()
def predictions(model: PreTrainedModel, last_hidden_ABD: torch.Tensor) -> torch.Tensor:
    """The target's most likely next token after each row, [A, B], a few rows' logits at a time."""
    norm, head = model.get_decoder().norm, model.get_output_embeddings()
    rows = last_hidden_ABD.flatten(0, 1)
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    return torch.cat([head(norm(part)).argmax(-1) for part in rows.split(size)]).view(
        last_hidden_ABD.shape[:2]
    )


def _run(
    model: PreTrainedModel,
    input_ids_N: torch.Tensor,
    position_ids_N: torch.Tensor,
    layer_ids: Sequence[int],
    attend: _Attend,
    *,
    last_hidden: bool = True,
) -> TargetStates:
    decoder = model.get_decoder()
    _check_architecture(decoder)
    if not len(input_ids_N):
        none = decoder.get_input_embeddings().weight.new_zeros(0, decoder.config.hidden_size)
        return TargetStates(none.repeat(1, len(layer_ids)), none if last_hidden else None)
    wanted = [*layer_ids, _LAST] if last_hidden else layer_ids
    with (
        _attention(decoder, attend),
        _captured(decoder, wanted) as seen,
        suppress(_Enough),
    ):
        decoder(input_ids=input_ids_N[None], position_ids=position_ids_N[None], use_cache=False)
    hidden_NC = torch.cat([seen[layer_id][0] for layer_id in layer_ids], dim=-1)
    return TargetStates(hidden_NC, seen[_LAST][0] if last_hidden else None)


class _Enough(Exception):
    """All states that were asked for are there."""


@contextmanager
def _attention(decoder: nn.Module, attend: _Attend) -> Iterator[None]:
    """Let the decoder's layers attend through `attend`."""
    AttentionInterface.register(_IMPLEMENTATION, _interface)
    config = decoder.config
    before = config._attn_implementation
    token = _ATTEND.set(attend)
    # No mask function is registered under this name, so transformers builds no mask.
    config._attn_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
        _ATTEND.reset(token)


@contextmanager
def _captured(decoder: nn.Module, keys: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the inputs of layers by index, and of the final norm as `_LAST`.

    The forward pass ends, with `_Enough`, where the last of them is found.
    """
    seen: dict[int, torch.Tensor] = {}

    def keep(key: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            seen[key] = args[0] if args else kwargs["hidden_states"]
            if len(seen) == len(modules):
                raise _Enough

        return hook

    modules = {key: decoder.norm if key == _LAST else decoder.layers[key] for key in keys}
    hooks = [
        module.register_forward_pre_hook(keep(key), with_kwargs=True)
        for key, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _check_architecture(decoder: nn.Module) -> None:
    name = type(decoder).__name__
    config = decoder.config
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise TargetError(f"{name} has no decoder layers and final norm to read states from")
    kinds = set(getattr(config, "layer_types", None) or []) - _KNOWN_LAYER_TYPES
    if kinds:
        raise TargetError(f"{name} has layers of type {', '.join(sorted(kinds))}, not supported")
    if getattr(config, "attn_logit_softcapping", None):
        raise TargetError(f"{name} caps its attention scores, which is not supported")


def _interface(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: heads second in, rows second out."""
    name = type(module).__name__
    if attention_mask is not None:
        raise TargetError(f"{name} brings an attention mask of its own, which is not supported")
    if not getattr(module, "is_causal", True):
        raise TargetError(f"{name} is not causal")
    if others.get("s_aux") is not None or others.get("softcap") is not None:
        raise TargetError(f"{name} uses attention sinks or soft caps, which are not supported")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    attend = _ATTEND.get()
    out = attend(module.layer_idx, query, key, value, scaling, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention within one document, [1, heads, rows, E]."""
    rows = query.shape[2]
    mask = None
    if window is not None and rows > window:
        mask = torch.ones(rows, rows, dtype=torch.bool, device=query.device)
        mask = mask.tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
