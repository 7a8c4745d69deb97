"""The reference decoder: speculative decoding with carried context, in the order of METHOD.

Nothing is cached: every round runs the target over the whole text, so the code is the
definition. Requests of a batch do not influence each other. Shapes: see drafters/blocks.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from carryover.decoding.acceptance import Acceptance, accept_greedy, accept_sampled
from carryover.drafters.blocks import Blocks, Carried, Context
from carryover.drafters.carried import carry as carried_fields
from carryover.drafters.drafting import draft, draft_sampled
from carryover.drafters.models import BlockDrafter


@dataclass(frozen=True)
class Round:
    """One draft and its verification.

    Attributes:
        anchor_position: n, the number of committed states before the round.
        proposals: the B tokens.
        accepted: a, how many passed (before any cut at a stop token or the length limit).
        carried_positions: positions of the rows that the round leaves to the next draft.
        carried_RC: their states; None if tokens are carried, or nothing.
    """

    anchor_position: int
    proposals: list[int]
    accepted: int
    carried_positions: list[int]
    carried_RC: torch.Tensor | None


@dataclass
class Decoded:
    """One request's outcome.

    Attributes:
        tokens: generated ids, the stop token included.
        finish: `stop` or `length`.
        rounds: in order; the first token comes from the prompt alone, before any round.
    """

    tokens: list[int] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    rounds: list[Round] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean of `a + 1` over the rounds."""
        return 1 + sum(r.accepted for r in self.rounds) / max(len(self.rounds), 1)


@dataclass
class _Request:
    text: list[int]  # prompt and generated tokens; the last one is the anchor
    committed_TC: torch.Tensor  # states of all tokens but the anchor
    left: dict[str, Carried | torch.Tensor]  # by the last round, one row each; see `carry`
    decoded: Decoded


@torch.no_grad()
def decode(
    target_model: PreTrainedModel,
    drafter: BlockDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    draft_sampling: Literal["greedy", "true"] = "greedy",
    carry: bool = True,
    generator: torch.Generator | None = None,
) -> list[Decoded]:
    """Decode prompts together.

    Args:
        target_model: the frozen target.
        drafter: a drafter for it.
        prompts: token ids, at least one each.
        max_new_tokens: limit of each request.
        stop_token_ids: tokens that end a request.
        temperature: of the target, and of the drafter where it samples.
        draft_sampling: at temperature above 0, pick proposals greedily, or draw them from the
            drafter's distribution.
        carry: False hides the carried context from a drafter that has it.
        generator: of all draws.
    """
    interface = drafter.carried_settings if carry else None
    sampled = temperature > 0 and draft_sampling == "true"
    requests = []
    for prompt, logits_TV, states_TC in _run(target_model, drafter, [list(p) for p in prompts]):
        probs_V = (logits_TV[-1] / (temperature or 1.0)).softmax(-1)
        first = (
            probs_V.argmax() if temperature == 0 else probs_V.multinomial(1, generator=generator)
        )
        requests.append(_Request([*prompt, int(first)], states_TC, {}, Decoded()))
        _emit(requests[-1], [int(first)], stop_token_ids, max_new_tokens)

    while active := [request for request in requests if request.decoded.finish is None]:
        context, blocks = _draft_inputs(active)
        draft_probs_ABV = None
        if sampled:
            proposals_AB, draft_probs_ABV = draft_sampled(
                drafter, context, blocks, temperature=temperature, generator=generator
            )
        else:
            proposals_AB = draft(drafter, context, blocks)
        length = proposals_AB.shape[1]
        texts = [r.text + p for r, p in zip(active, proposals_AB.tolist(), strict=True)]
        verified = _run(target_model, drafter, texts)
        logits_ARV = torch.stack([logits_TV[-length - 1 :] for _, logits_TV, _ in verified])
        hidden_ABC = torch.stack([states_TC[-length:] for _, _, states_TC in verified])
        outcome = _accept(proposals_AB, logits_ARV, draft_probs_ABV, temperature, generator)
        left = {}
        if interface is not None:
            left = carried_fields(
                interface,
                hidden_ABC=hidden_ABC,
                positions_A=blocks.positions_A,
                proposals_AB=proposals_AB,
                predictions_AB=logits_ARV[:, 1:].argmax(-1),
                accepted_A=outcome.accepted_A,
            )
        for index, (request, (_, _, states_TC)) in enumerate(zip(active, verified, strict=True)):
            accepted, anchor = int(outcome.accepted_A[index]), len(request.text) - 1
            request.left = {name: _row(value, index) for name, value in left.items()}
            request.decoded.rounds.append(
                Round(anchor, proposals_AB[index].tolist(), accepted, *_carried(request.left))
            )
            new = [*proposals_AB[index, :accepted].tolist(), int(outcome.next_A[index])]
            request.text += new
            request.committed_TC = states_TC[: anchor + accepted + 1]
            _emit(request, new, stop_token_ids, max_new_tokens)
    return [request.decoded for request in requests]


def _run(
    model: PreTrainedModel, drafter: BlockDrafter, texts: list[list[int]]
) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Each text with the target's logits [T, V] and selected states [T, C] at all its tokens.

    Texts are padded behind their end, where causal attention does not look.
    """
    device = drafter.fc.weight.device
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long, device=device)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = torch.cat([out.hidden_states[i] for i in drafter.target_layer_ids], dim=-1)
    return [
        (text, logits[: len(text)].float(), rows[: len(text)])
        for text, logits, rows in zip(texts, out.logits, states, strict=True)
    ]


def _draft_inputs(requests: list[_Request]) -> tuple[Context, Blocks]:
    """All requests' committed states one after another, and one block for each."""
    device = requests[0].committed_TC.device
    lengths = torch.tensor([len(r.committed_TC) for r in requests], device=device)
    ends_A = lengths.cumsum(0)
    context = Context(
        hidden_TC=torch.cat([r.committed_TC for r in requests]),
        positions_T=torch.cat([torch.arange(n, device=device) for n in lengths.tolist()]),
    )
    fields = {name: _stack([r.left[name] for r in requests]) for name in requests[0].left}
    carried = fields.get("carried")
    if carried is not None and not carried.valid_AR.any():
        fields = {}
    return context, Blocks(
        tokens_A=torch.tensor([r.text[-1] for r in requests], device=device),
        positions_A=lengths,
        starts_A=ends_A - lengths,
        ends_A=ends_A,
        **fields,
    )


def _accept(
    proposals_AB: torch.Tensor,
    logits_ARV: torch.Tensor,
    draft_probs_ABV: torch.Tensor | None,
    temperature: float,
    generator: torch.Generator | None,
) -> Acceptance:
    if temperature == 0:
        return accept_greedy(proposals_AB, logits_ARV)
    probs_ARV = (logits_ARV / temperature).softmax(-1)
    return accept_sampled(proposals_AB, probs_ARV, draft_probs_ABV, generator=generator)


def _emit(
    request: _Request, tokens: list[int], stop_token_ids: Collection[int], max_new_tokens: int
) -> None:
    """Add tokens to the output, up to the first stop token or the limit."""
    decoded = request.decoded
    for token in tokens:
        decoded.tokens.append(token)
        if token in stop_token_ids:
            decoded.finish = "stop"
        elif len(decoded.tokens) == max_new_tokens:
            decoded.finish = "length"
        if decoded.finish is not None:
            return


def _row(value: Carried | torch.Tensor, index: int) -> Carried | torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value[index]
    return Carried(value.hidden_ARC[index], value.positions_AR[index], value.valid_AR[index])


def _stack(rows: list[Carried] | list[torch.Tensor]) -> Carried | torch.Tensor:
    if isinstance(rows[0], torch.Tensor):
        return torch.stack(rows)
    return Carried(
        hidden_ARC=torch.stack([row.hidden_ARC for row in rows]),
        positions_AR=torch.stack([row.positions_AR for row in rows]),
        valid_AR=torch.stack([row.valid_AR for row in rows]),
    )


def _carried(left: dict[str, Carried | torch.Tensor]) -> tuple[list[int], torch.Tensor | None]:
    """Positions and states of the rows that exist."""
    rows = left.get("carried")
    if rows is None:
        return [], None
    return rows.positions_AR[rows.valid_AR].tolist(), rows.hidden_ARC[rows.valid_AR]
