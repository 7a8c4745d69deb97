"""At temperature 1 the engine's answers are distributed as the target's own.

Each engine answers one prompt some thousand times with three tokens out of the four likeliest; the
64 possible answers are counted and compared with the target's probabilities (chi-square).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import plugin_models as models
import pytest
import torch

from carryover.targets import Target

pytestmark = pytest.mark.vllm
PROMPT = models.random_prompts(1)[0]
TOP, LENGTH, ANSWERS = 4, 3, 6000
# Regime, how the drafter picks, and the drafter's shape. A reduced vocabulary leaves tokens that
# can never be proposed.
CASES = {
    "dflash-greedy": ("dflash", "greedy", {}),
    "dflash-probabilistic": ("dflash", "probabilistic", {}),
    "markov-greedy": ("markov", "greedy", {}),
    "markov-probabilistic-reduced": ("markov", "probabilistic", {"draft_vocab_size": 96}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return models.make_target(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture(scope="module")
def probabilities(target: Target) -> dict[tuple[int, ...], float]:
    """Of every answer, by the target alone."""
    model = target.load_model()

    def likeliest(tokens: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        best = logits.topk(TOP)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        answers = {
            (*answer, token): p * q
            for answer, p in answers.items()
            for token, q in likeliest([*PROMPT, *answer]).items()
        }
    assert len(answers) == TOP**LENGTH
    return answers


@pytest.fixture(scope="module", params=CASES)
def llm(
    request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    regime, sampling, shape = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    baseline = models.make_drafter(target, folder / "baseline", regime, **shape)
    checkpoint = models.add_carryover(baseline, folder / "carryover", target)
    with models.engine(
        target, checkpoint, max_num_seqs=64, speculative={"draft_sample_method": sampling}
    ) as engine:
        yield engine


def test_answers_are_distributed_as_the_targets(
    llm: Any, probabilities: dict[tuple[int, ...], float]
) -> None:
    answers = models.generate(
        llm, [PROMPT] * ANSWERS, temperature=1.0, top_k=TOP, max_tokens=LENGTH
    )
    counts = Counter(map(tuple, answers))
    assert not counts.keys() - probabilities.keys(), "an answer that the target cannot give"
    assert p_value(counts, probabilities) > 1e-4
    accepted = models.counter(llm, "spec_decode_num_accepted_tokens_per_pos")
    assert all(accepted[:1]), "nothing was accepted, so nothing was tested"
    assert models.counter(llm, "spec_decode_num_carried_rows") > 0


def test_the_comparison_notices_a_small_bias(probabilities: dict[tuple[int, ...], float]) -> None:
    """Answers from a target 30% warmer must not pass."""
    warmer = {answer: p ** (1 / 1.3) for answer, p in probabilities.items()}
    total = sum(warmer.values())
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([p / total for p in warmer.values()])
    draws = weights.multinomial(ANSWERS, replacement=True, generator=generator).tolist()
    names = list(warmer)
    assert p_value(Counter(names[draw] for draw in draws), probabilities) < 1e-4


def p_value(counts: Counter, probabilities: dict[tuple[int, ...], float]) -> float:
    """Chi-square test; rare answers are put together."""
    total = sum(counts.values())
    rare = {answer for answer, p in probabilities.items() if p * total < 8}
    cells = [(counts[a], p * total) for a, p in probabilities.items() if a not in rare]
    if rare:
        cells.append((sum(counts[a] for a in rare), sum(probabilities[a] for a in rare) * total))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells if expected)
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def test_greedy_text_is_the_targets_own(llm: Any, target: Target) -> None:
    model = target.load_model()
    prompts = models.random_prompts(4)
    expected = [models.greedy(model, prompt, 24) for prompt in prompts]
    mixed = [{"temperature": float(i % 2), "max_tokens": 24} for i in range(8)]
    doubled = list(product(prompts, (0, 1)))
    outputs = models.complete(llm, [prompt for prompt, _ in doubled], mixed)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    assert texts[::2] == expected
