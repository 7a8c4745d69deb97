"""New drafters: shape from the target, a real unused mask token, the right teacher."""

import pytest
import torch
import transformers
from training_cases import make_drafter, random_batch

from carryover.drafters.drafting import draft
from carryover.drafters.mask_token import find_mask_token
from carryover.drafters.settings import DrafterSettings, resolve_layer_ids
from carryover.errors import ConfigError, TargetError
from carryover.targets import resolve
from carryover.testing import tiny_config, tiny_tokenizer
from carryover.training.anchors import anchored_blocks
from carryover.training.verification import read_target

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gemma4")


def test_default_layer_ids():
    def default(layers, target_layers):
        return resolve_layer_ids(DrafterSettings(num_layers=layers), target_layers)

    assert default(3, 30) == [2, 15, 28]
    assert default(5, 36) == [2, 10, 18, 26, 34]
    assert default(3, 4) == [2]
    assert default(2, 1) == [0]


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1, 2], [1, 4]])
def test_bad_layer_ids(ids):
    with pytest.raises(ConfigError, match=r"within 0\.\.3 for a target with 4 layers"):
        resolve_layer_ids(DrafterSettings(target_layer_ids=ids), 4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_teacher_is_the_target(tiny, architecture):
    """Embedding, LM head, final norm (in the target's own convention) and soft cap."""
    folder = tiny(architecture)
    model = resolve(str(folder)).load_model()
    drafter = make_drafter(folder)
    assert_teacher_is(drafter, model)
    assert torch.equal(drafter.embed_tokens.weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma4"])
def test_nested_multimodal_targets(tmp_path, architecture):
    """Gemma checkpoints keep the text model below the multimodal one, with other names."""
    settings = {"final_logit_softcapping": 2.0} if architecture == "gemma4" else {}
    text = tiny_config(
        architecture, vocab_size=320, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, pad_token_id=0,
        **settings,
    ).to_dict()  # fmt: skip
    if architecture == "gemma3":
        vision = {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        }  # fmt: skip
        config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    else:
        config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)  # logits that the soft cap bends
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    drafter = make_drafter(tmp_path)
    assert drafter.teacher_softcap == settings.get("final_logit_softcapping")
    assert_teacher_is(drafter, resolve(str(tmp_path)).load_model())


@torch.no_grad()
def assert_teacher_is(drafter, model):
    batch = random_batch([(0, 30)])
    states, _ = read_target(
        model, input_ids_T=batch.input_ids_T, position_ids_T=batch.position_ids_T, layer_ids=[1]
    )
    teacher = drafter.teacher(states.last_hidden_ND, torch.arange(30))
    logits = teacher.hidden_PD @ teacher.weight_VD.T
    if teacher.softcap is not None:
        logits = teacher.softcap * torch.tanh(logits / teacher.softcap)
    expected = model(input_ids=batch.input_ids_T[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_layer_ids_are_those_of_transformers_hidden_states(tiny):
    for architecture in ARCHITECTURES:
        model = resolve(str(tiny(architecture))).load_model()
        ids = random_batch([(0, 20)]).input_ids_T
        states, _ = read_target(
            model, input_ids_T=ids, position_ids_T=torch.arange(20), layer_ids=[0, 1, 2, 3]
        )
        with torch.no_grad():
            hidden = model(ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[index][0] for index in range(4)], dim=-1)
        torch.testing.assert_close(states.hidden_NC, expected, rtol=1e-5, atol=1e-5)


def test_same_seed_same_drafter(tiny_llama):
    one, two, other = (make_drafter(tiny_llama, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_starts_from_the_targets_last_layers(tiny, architecture):
    """Copied layers project a committed state as the target's own layer does its input."""
    folder = tiny(architecture)
    model = resolve(str(folder)).load_model()
    drafter = make_drafter(folder, start="target")
    state = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    states_TC = torch.cat((torch.randn(5, 64), state), dim=-1)
    with torch.no_grad():
        fused = drafter.hidden_norm(drafter.fc(states_TC))
        for own, theirs in zip(drafter.layers, model.model.layers[-2:], strict=True):
            normed = theirs.input_layernorm(state)
            for name in ("k_proj", "v_proj"):
                expected = getattr(theirs.self_attn, name)(normed)
                found = getattr(own.self_attn, name)(fused)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            x = torch.randn(3, 64)
            torch.testing.assert_close(
                own.mlp(own.post_attention_layernorm(x)),
                theirs.mlp(theirs.post_attention_layernorm(x)),
                rtol=1e-4,
                atol=1e-5,
            )
            if architecture == "qwen3":
                gains = own.self_attn.q_norm.weight, theirs.self_attn.q_norm.weight
                assert torch.equal(*gains)


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("gemma3", {}, "differ in kind"),
        ("llama", {"intermediate_size": 96}, "intermediate_size differ"),
        ("llama", {"num_layers": 5}, "more layers than the target"),
    ],
)
def test_starts_at_random_where_layers_do_not_fit(tiny, caplog, architecture, settings, reason):
    folder = tiny(architecture)
    with caplog.at_level("INFO", logger="carryover"):
        drafter = make_drafter(folder, start="target", **settings)
    assert reason in caplog.text
    random = make_drafter(folder, start="random", **settings)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, dict(random.named_parameters())[name]), name


def test_reduced_vocabulary_takes_the_most_frequent_tokens(tiny_llama):
    counts = {10: 5, 20: 9, 30: 1, 40: 7}
    drafter = make_drafter(tiny_llama, draft_vocab_size=3, token_counts=counts)
    assert drafter.draft_to_target.tolist() == [10, 20, 40]
    rows = drafter.embed_tokens.weight[[10, 20, 40]]
    assert torch.equal(drafter.lm_head.weight, rows)
    assert torch.equal(drafter.verifier_lm_head.weight, rows)


@pytest.mark.parametrize(
    ("settings", "counts", "message"),
    [
        ({"draft_vocab_size": 999}, {1: 1}, "exceeds the target's 320"),
        ({"draft_vocab_size": 100}, None, "needs the token counts"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, None, "multiple of"),
        ({"mask_token_id": 320}, None, r"within 0\.\.319"),
        ({"mask_token_id": 2}, None, r"'<\|im_end\|>'"),
        ({"mask_token_id": 50}, {50: 3}, "occurs 3 times"),
    ],
)
def test_settings_that_do_not_fit(tiny_llama, settings, counts, message):
    with pytest.raises(ConfigError, match=message):
        make_drafter(tiny_llama, token_counts=counts, **settings)


def test_unknown_regime(tiny_llama):
    with pytest.raises(ConfigError, match="known: dflash, markov"):
        make_drafter(tiny_llama, "eagle")


def test_targets_with_unknown_logit_factors_are_refused(tiny_llama, tmp_path, monkeypatch):
    target = resolve(str(tiny_llama))
    config = target.load_config()
    config.logit_scale = 0.5
    monkeypatch.setattr(type(target), "load_config", lambda self: config)
    with pytest.raises(TargetError, match=r"logit_scale=0\.5"):
        make_drafter(tiny_llama)


class TestMaskToken:
    """A real, unused row; never the padding or the end of text."""

    def config(self, vocab_size=320, **values):
        return transformers.LlamaConfig(vocab_size=vocab_size, **values)

    def test_the_tokenizers_own(self):
        tokenizer = tiny_tokenizer()
        tokenizer.mask_token = "<|reserved_1|>"
        assert find_mask_token(tokenizer, self.config()) == 4

    def test_a_row_behind_the_tokenizer(self):
        assert find_mask_token(tiny_tokenizer(), self.config(330)) == 320

    def test_a_reserved_token(self):
        assert find_mask_token(tiny_tokenizer(), self.config()) == 3

    def test_none_is_an_error_and_never_padding_or_end(self):
        tokenizer = tiny_tokenizer(300)
        for index, token in list(tokenizer.added_tokens_decoder.items()):
            if "reserved" in token.content or "unused" in token.content:
                tokenizer.chat_template += f"{{# {token.content} {index} #}}"
        with pytest.raises(ConfigError, match="no unused embedding row"):
            find_mask_token(tokenizer, self.config(300))

    def test_a_mask_token_that_is_the_padding_does_not_count(self):
        tokenizer = tiny_tokenizer()
        tokenizer.mask_token = tokenizer.pad_token
        assert find_mask_token(tokenizer, self.config()) == 3


@pytest.mark.parametrize("vocabulary", [None, 3])
def test_a_drafter_of_the_other_regime_takes_over_and_drafts_the_same(tiny_llama, vocabulary):
    """A Markov head that was just added biases nothing; taken off again, nothing is lost."""
    counts = {10: 5, 20: 9, 30: 1, 40: 7}
    shape = {"draft_vocab_size": vocabulary, "token_counts": counts if vocabulary else None}
    first = make_drafter(tiny_llama, seed=1, **shape)
    shape["token_counts"] = {50: 3, 60: 2, 70: 1}  # other responses: the vocabulary stays
    markov = make_drafter(tiny_llama, "markov", seed=2, like=first, **shape)
    batch = random_batch([(4, 20)])
    blocks = anchored_blocks(batch, torch.tensor([5, 9]))
    for drafter in (markov, make_drafter(tiny_llama, seed=3, like=markov, **shape)):
        with torch.no_grad():
            expected = draft(first, batch.context, blocks)
            assert torch.equal(draft(drafter, batch.context, blocks), expected)
    markov.fc.weight.data.add_(1.0)
    assert not torch.equal(markov.fc.weight, first.fc.weight)


@pytest.mark.parametrize(("before", "after"), [(3, 5), (None, 3), (3, None)])
def test_with_another_vocabulary_tokens_that_both_propose_have_the_same_scores(
    tiny_llama, before, after
):
    """The vocabulary is chosen anew; for the other tokens the Markov head biases nothing."""
    counts = {10: 5, 20: 9, 30: 1, 40: 7, 50: 8}
    first = make_drafter(tiny_llama, "markov", draft_vocab_size=before, token_counts=counts, seed=1)
    torch.nn.init.normal_(first.markov_head.markov_w2.weight)
    second = make_drafter(
        tiny_llama, "markov", draft_vocab_size=after, token_counts=counts, seed=2, like=first,
        markov_rank=99,  # it keeps its rank
    )  # fmt: skip
    tokens_before = list(range(320)) if before is None else first.draft_to_target.tolist()
    tokens_after = list(range(320)) if after is None else second.draft_to_target.tolist()
    common = sorted(set(tokens_before) & set(tokens_after))
    assert len(common) == 3
    columns = [tokens_after.index(token) for token in common]
    hidden_ND, previous_N = torch.randn(7, first.fc.out_features), torch.arange(7)
    with torch.no_grad():
        expected, found = (drafter.logits(hidden_ND, previous_N) for drafter in (first, second))
    torch.testing.assert_close(
        found[:, columns], expected[:, [tokens_before.index(token) for token in common]]
    )
    for name, value in second.layers.state_dict().items():
        assert torch.equal(value, first.layers.state_dict()[name])
    biases = second.markov_head.markov_w2.weight
    new = [index for index, token in enumerate(tokens_after) if token not in tokens_before]
    assert not biases[new].any() and biases[columns].all()


def test_a_drafter_of_another_shape_cannot_be_taken_over(tiny_llama):
    wide = make_drafter(tiny_llama, intermediate_size=96)
    with pytest.raises(ConfigError, match="another shape: layers"):
        make_drafter(tiny_llama, "markov", like=wide, intermediate_size=64)
