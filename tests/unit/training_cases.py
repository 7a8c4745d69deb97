"""Shared by the tests of drafters and training: small targets, drafters and packed batches."""

import torch

from carryover.drafters import checkpoint
from carryover.drafters.carried import CarriedSettings
from carryover.drafters.settings import DrafterSettings
from carryover.targets import resolve
from carryover.training.batch import Batch
from carryover.training.verification import read_target

LAYER_IDS = (1, 3)


def make_drafter(
    folder, regime="dflash", *, carried=None, token_counts=None, seed=0, like=None, **settings
):
    """An untrained drafter for the tiny target in `folder`."""
    defaults = {"num_layers": 2, "target_layer_ids": LAYER_IDS, "markov_rank": 16}
    settings = {**defaults, "start": "random", **settings}
    drafter = checkpoint.initialise(
        regime,
        resolve(str(folder)),
        DrafterSettings(**settings),
        token_counts=token_counts,
        seed=seed,
        like=like,
    )
    if carried is not None:
        drafter.add_carried_context(carried)
    return drafter


def carryover_drafter(folder, regime="dflash", **settings):
    """A drafter with carried context whose marker is not zero."""
    drafter = make_drafter(folder, regime, carried=CarriedSettings(), **settings)
    with torch.no_grad():
        drafter.carryover_marker.normal_(generator=torch.Generator().manual_seed(7))
    return drafter


def random_batch(documents, *, hidden_size=64, num_layer_ids=2, vocab_size=320, seed=0):
    """Documents as (prompt length, response length), with random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + response for prompt, response in documents]
    total = sum(lengths)
    return Batch(
        input_ids_T=torch.randint(5, vocab_size, (total,), generator=generator),
        position_ids_T=torch.cat([torch.arange(length) for length in lengths]),
        document_ids_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        response_mask_T=torch.cat([torch.arange(p + r) >= p for p, r in documents]),
        hidden_TC=torch.randn(total, num_layer_ids * hidden_size, generator=generator),
        last_hidden_TD=torch.randn(total, hidden_size, generator=generator),
    )


def read_batch(model, documents, *, layer_ids=LAYER_IDS, seed=0, input_ids=None):
    """Like `random_batch`, with the states that the target really has."""
    batch = random_batch(documents, seed=seed, hidden_size=model.config.hidden_size)
    ids = batch.input_ids_T if input_ids is None else input_ids
    states, prefix = read_target(
        model, input_ids_T=ids, position_ids_T=batch.position_ids_T, layer_ids=layer_ids
    )
    return Batch(
        input_ids_T=ids,
        position_ids_T=batch.position_ids_T,
        document_ids_T=batch.document_ids_T,
        response_mask_T=batch.response_mask_T,
        hidden_TC=states.hidden_NC,
        last_hidden_TD=states.last_hidden_ND,
        prefix=prefix,
    )


def block_hidden(drafter, batch, blocks):
    """The slots' hidden states, [A, S, D]."""
    return drafter(batch.context, blocks, lambda _, hidden: hidden)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)
