"""Seeded requests on the CPU build: generators of discarded samples end as they began."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from carryover.vllm_plugin.cpu_seeds import hiding, restoring


def runner(discarded: list[bool]) -> SimpleNamespace:
    generators = {row: torch.Generator().manual_seed(row) for row in range(len(discarded))}
    return SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators, num_reqs=len(discarded)),
        discard_request_mask=SimpleNamespace(np=np.array([*discarded, True])),
    )


def sample(self, logits, spec_decode_metadata) -> list[float]:
    return [float(torch.rand(1, generator=g)) for g in self.input_batch.generators.values()]


def test_a_discarded_sample_costs_no_randomness() -> None:
    one = runner([True, False])
    first = restoring(sample)(one, None, None)
    second = restoring(sample)(one, None, None)
    assert first[0] == second[0], "the discarded row must draw the same numbers again"
    assert first[1] != second[1], "the kept row must go on"


def test_bookkeeping_never_winds_back_and_generators_stay() -> None:
    one = runner([True, False])
    before = dict(one.input_batch.generators)
    seen = []

    def bookkeeping(self, *args):
        seen.append(set(self.input_batch.generators))
        raise RuntimeError("as a failing step would")

    with pytest.raises(RuntimeError, match="failing step"):
        hiding(bookkeeping)(one)
    assert seen == [{1}]
    assert one.input_batch.generators == before


def test_rows_past_the_batch_are_not_looked_at() -> None:
    one = runner([False])
    assert restoring(sample)(one, None, None)
    assert set(one.input_batch.generators) == {0}
