"""Speculative decoding never changes the output: token for token, and in distribution."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carryover.decoding import reference
from carryover.decoding.reference import decode
from carryover.drafters import checkpoint
from carryover.drafters.carried import CarriedSettings
from carryover.drafters.drafting import draft
from carryover.drafters.settings import DrafterSettings
from carryover.targets import resolve
from carryover.testing import tiny_config, tiny_target

# Upper 1e-4 quantiles of chi-square by degrees of freedom, tabulated.
CHI_SQUARE_LIMIT = {63: 114.7}


@functools.cache
def pair(folder, architecture, seed, regime, carried, mark):
    """A random target with a random drafter."""
    made = folder / f"{architecture}-{seed}"
    if not made.exists():
        tiny_target(made, architecture=architecture, num_layers=3, scale=4.0, seed=seed)
    target = resolve(str(made))
    drafter = checkpoint.initialise(
        regime,
        target,
        DrafterSettings(num_layers=1, target_layer_ids=(1, 2), proposal_length=4, markov_rank=8),
        seed=seed,
    )
    if carried != "nothing":
        drafter.add_carried_context(CarriedSettings(carried=carried, mark=mark))
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if name.startswith("carryover_"):
                    parameter.normal_(std=0.3)
    return target.load_model(), drafter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


@torch.no_grad()
def greedy(model, prompt, count, stop):
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        if text[-1] in stop:
            break
    return text[len(prompt) :]


@settings(max_examples=60, deadline=None)
@given(
    architecture=st.sampled_from(["llama", "qwen3", "gemma3"]),
    seed=st.integers(0, 2),
    regime=st.sampled_from(["dflash", "markov"]),
    carried=st.sampled_from(["hidden_states", "target_tokens", "draft_tokens", "nothing"]),
    mark=st.sampled_from(["embedding", "none", "projector"]),
    prompts=st.lists(
        st.lists(st.integers(5, 319), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    hits=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    count=st.integers(1, 18),
    stop_at=st.none() | st.integers(0, 17),
)
def test_greedy_output_is_the_targets(
    folder, architecture, seed, regime, carried, mark, prompts, hits, count, stop_at
):
    """Drafts are the drafter's own, made right for the first `hits` tokens of each round."""
    model, drafter = pair(folder, architecture, seed, regime, carried, mark)
    longest = [greedy(model, prompt, count + 8, ()) for prompt in prompts]
    stop = () if stop_at is None else (longest[0][min(stop_at, len(longest[0]) - 1)],)
    expected = [greedy(model, prompt, count, stop) for prompt in prompts]
    rounds = iter(hits * 20)

    def partly_right(drafter, context, blocks):
        tokens = draft(drafter, context, blocks)
        correct = next(rounds)
        for index, (anchor, at) in enumerate(
            zip(blocks.tokens_A.tolist(), blocks.positions_A.tolist(), strict=True)
        ):
            for prompt, text in zip(prompts, longest, strict=True):
                done = at - len(prompt)
                if 0 <= done < len(text) and text[done] == anchor:
                    right = torch.tensor(text[done + 1 : done + 1 + correct], dtype=torch.long)
                    tokens[index, : len(right)] = right
                    break
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "draft", partly_right)
        found = decode(model, drafter, prompts, max_new_tokens=count, stop_token_ids=stop)
    assert [out.tokens for out in found] == expected
    for out, text in zip(found, expected, strict=True):
        stopped = bool(text) and text[-1] in stop
        assert out.finish == ("stop" if stopped else "length")
        for one in out.rounds:
            assert len(one.carried_positions) <= 4 - one.accepted


@pytest.fixture(scope="module")
def tiny_vocabulary():
    """A target over 4 tokens, small enough to enumerate what it says."""
    import transformers

    config = tiny_config(
        "llama", vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.5)
        model.lm_head.weight.data[4:] = 0
    head = torch.nn.Linear(16, 8)
    head.weight.data.copy_(model.lm_head.weight)
    head.bias.data.zero_()
    head.bias.data[4:] = -1e9
    model.lm_head = head
    return model.eval().requires_grad_(False)


@torch.no_grad()
def exact_distribution(model, prompt, temperature, length):
    """Probability of every continuation over the first 4 tokens, [4] * length."""
    table = torch.ones(())
    for depth in range(length):
        texts = torch.tensor(list(itertools.product(range(4), repeat=depth)), dtype=torch.long)
        texts = texts.view(4**depth, depth)
        texts = torch.cat((torch.tensor(prompt).expand(len(texts), -1), texts), dim=1)
        probs = (model(texts).logits[:, -1] / temperature).softmax(-1)[:, :4]
        table = table[..., None] * probs.view(*[4] * depth, 4)
    return table


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("draft_sampling", ["greedy", "true"])
@pytest.mark.parametrize("regime", ["dflash", "markov"])
def test_sampled_output_has_the_targets_distribution(
    tiny_vocabulary, regime, draft_sampling, carry
):
    """Chi-square over all continuations: several rounds, carried rows between."""
    model, temperature, length = tiny_vocabulary, 3.0, 3
    prompt, trials = [1, 3, 0], 6000
    drafter = tiny_vocabulary_drafter(model, regime)
    table = exact_distribution(model, prompt, temperature, length)
    found = decode(
        model, drafter, [prompt] * trials, max_new_tokens=length, temperature=temperature,
        draft_sampling=draft_sampling, carry=carry, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    counts = torch.zeros_like(table)
    for out in found:
        counts[tuple(out.tokens)] += 1
    expected = table * trials
    assert expected.min() > 5
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < CHI_SQUARE_LIMIT[63]
    assert any(len(out.rounds) > 1 for out in found)
    assert carry == any(one.carried_positions for out in found for one in out.rounds)


def tiny_vocabulary_drafter(model, regime):
    """A random drafter for the 4-token target; it may propose the 4 tokens only."""
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkSpeculatorConfig
    from transformers import Qwen3Config

    from carryover.drafters.models import DRAFTERS

    layer = Qwen3Config(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=None,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    values = {
        "transformer_layer_config": layer, "draft_vocab_size": 4, "block_size": 3,
        "aux_hidden_state_layer_ids": [0, 1], "mask_token_id": 7, "sample_from_anchor": False,
    }  # fmt: skip
    if regime == "markov":
        config = DSparkSpeculatorConfig(
            **values, markov_rank=4, enable_confidence_head=False, confidence_head_with_markov=False
        )
    else:
        config = DFlashSpeculatorConfig(**values)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = DRAFTERS[regime](config)
        drafter.load_vocab_mappings(torch.arange(8) < 4, torch.zeros(4, dtype=torch.long))
        drafter.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
        drafter.lm_head.weight.data.normal_(std=0.3)
        drafter.add_carried_context(CarriedSettings())
        drafter.carryover_marker.data.normal_()
    return drafter.eval()
