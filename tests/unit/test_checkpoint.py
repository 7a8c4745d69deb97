"""Drafter checkpoints: speculators reads ours, we read theirs, and bad ones are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from training_cases import carryover_drafter, make_drafter

from carryover.drafters import checkpoint
from carryover.drafters.carried import CarriedSettings
from carryover.errors import CheckpointError
from carryover.targets import resolve

COUNTS = {index: 999 - index for index in range(5, 320)}
REGIMES = ("dflash", "markov")


@pytest.fixture
def saved(tiny_llama, tmp_path):
    """A baseline checkpoint and its target."""
    checkpoint.save(make_drafter(tiny_llama), tmp_path / "drafter", {"run": "r1"})
    return tmp_path / "drafter", resolve(str(tiny_llama))


def assert_same(one, other):
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("vocab", [None, 200])
@pytest.mark.parametrize("regime", REGIMES)
def test_round_trip(tiny_qwen3, tmp_path, regime, vocab):
    drafter = make_drafter(tiny_qwen3, regime, draft_vocab_size=vocab, token_counts=COUNTS)
    checkpoint.save(drafter, tmp_path / "d", {})
    loaded = checkpoint.load(tmp_path / "d")
    assert type(loaded) is type(drafter)
    assert_same(loaded, drafter)
    assert loaded.target_identity == drafter.target_identity
    borrowed = [p for n, p in loaded.named_parameters() if n.startswith(("embed", "verifier"))]
    assert not any(p.requires_grad for p in [*borrowed, loaded.lm_head.weight])


@pytest.mark.parametrize("mark", ["embedding", "none", "projector"])
@pytest.mark.parametrize("carried", ["hidden_states", "target_tokens"])
def test_carryover_round_trip(tiny_llama, tmp_path, carried, mark):
    settings = CarriedSettings(carried=carried, mark=mark)
    drafter = make_drafter(tiny_llama, carried=settings)
    for name, parameter in drafter.named_parameters():
        if name.startswith("carryover_"):
            torch.nn.init.normal_(parameter)
    checkpoint.save(drafter, tmp_path / "d", {})
    loaded = checkpoint.load(tmp_path / "d")
    assert_same(loaded, drafter)
    assert loaded.carried_settings == drafter.carried_settings


def test_carryover_section_and_marker(tiny_llama, tmp_path):
    drafter = carryover_drafter(tiny_llama)
    checkpoint.save(drafter, tmp_path / "d", {})
    section = json.loads((tmp_path / "d" / "config.json").read_text())["carryover"]
    assert section == {
        "format_version": 1,
        "carried": "hidden_states",
        "mark": "embedding",
        "target": resolve(str(tiny_llama)).identity(),
    }
    marker = load_file(tmp_path / "d" / "model.safetensors")["carryover_marker"]
    assert marker.shape == (64,) and torch.equal(marker, drafter.carryover_marker)


def test_without_its_marker_a_carryover_checkpoint_is_a_baseline_one(tiny_llama, tmp_path):
    drafter = carryover_drafter(tiny_llama)
    folder = checkpoint.save(drafter, tmp_path / "d", {})
    values = json.loads((folder / "config.json").read_text())
    values.pop("carryover")
    (folder / "config.json").write_text(json.dumps(values))
    edit_weights(folder, lambda tensors: tensors.pop("carryover_marker"))
    baseline = checkpoint.load(folder)
    assert baseline.carried_settings is None
    assert torch.equal(baseline.fc.weight, drafter.fc.weight)


def test_the_folder_holds_weights_config_and_provenance_only(saved):
    folder, target = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.safetensors", "provenance.json"
    ]  # fmt: skip
    names = set(load_file(folder / "model.safetensors"))
    assert not any(name.startswith(("embed_tokens", "lm_head", "verifier")) for name in names)
    record = json.loads((folder / "provenance.json").read_text())
    assert record == {"run": "r1", "target": target.identity()}


@pytest.mark.parametrize("vocab", [None, 200])
@pytest.mark.parametrize("regime", REGIMES)
def test_speculators_reads_ours(tiny_llama, tmp_path, regime, vocab):
    drafter = make_drafter(tiny_llama, regime, draft_vocab_size=vocab, token_counts=COUNTS)
    folder = checkpoint.save(drafter, tmp_path / "d", {})
    stock = SpeculatorModel.from_pretrained(folder)
    assert type(stock) is (DSparkDraftModel if regime == "markov" else DFlashDraftModel)
    assert_same(stock, drafter)


@pytest.mark.parametrize("regime", REGIMES)
def test_we_read_what_speculators_writes(tiny_llama, tmp_path, regime):
    """A confidence head, which stock DSpark has, is left out."""
    config = make_drafter(tiny_llama, regime).config
    stock_class = DFlashDraftModel
    if regime == "markov":
        stock_class = DSparkDraftModel
        config.enable_confidence_head = config.confidence_head_with_markov = True
    stock = stock_class(config)
    stock.load_verifier_weights()
    stock.save_pretrained(tmp_path / "stock")
    loaded = checkpoint.load(tmp_path / "stock", resolve(str(tiny_llama)))
    state = stock.state_dict()
    assert state.keys() - loaded.state_dict().keys() <= {
        "confidence_head.proj.weight", "confidence_head.proj.bias"
    }  # fmt: skip
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_code_in_the_folder_is_never_executed(saved):
    folder, target = saved
    (folder / "config.py").write_text("raise SystemExit('executed')")
    (folder / "modeling.py").write_text("raise SystemExit('executed')")
    edit_config(folder, auto_map={"AutoModel": "modeling.Model", "AutoConfig": "config.Config"})
    checkpoint.load(folder, target)
    checkpoint.describe(folder)


def test_saving_replaces_the_whole_or_nothing(tiny_llama, tmp_path, monkeypatch):
    folder = tmp_path / "d"
    first = make_drafter(tiny_llama)
    checkpoint.save(first, folder, {"step": 1})
    (folder / "stray").write_text("from an older version")
    second = make_drafter(tiny_llama, seed=1)
    monkeypatch.setattr(checkpoint, "save_file", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save(second, folder, {"step": 2})
    assert_same(checkpoint.load(folder), first)
    monkeypatch.undo()
    checkpoint.save(second, folder, {"step": 2})
    assert_same(checkpoint.load(folder), second)
    assert not (folder / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_shared_weights_are_one_tensor(tiny_llama, tiny_qwen3):
    tied, untied = make_drafter(tiny_llama), make_drafter(tiny_qwen3)
    assert tied.embed_tokens.weight is tied.lm_head.weight is tied.verifier_lm_head.weight
    assert untied.lm_head.weight is untied.verifier_lm_head.weight
    assert not torch.equal(untied.lm_head.weight, untied.embed_tokens.weight)
    for drafter, folder in ((tied, tiny_llama), (untied, tiny_qwen3)):
        model = resolve(str(folder)).load_model()
        assert torch.equal(drafter.embed_tokens.weight, model.get_input_embeddings().weight)
        assert torch.equal(drafter.lm_head.weight, model.get_output_embeddings().weight)


def test_describe(tiny_llama, tmp_path):
    drafter = carryover_drafter(tiny_llama, "markov", proposal_length=5)
    folder = checkpoint.save(drafter, tmp_path / "d", {"git": "abc"})
    found = checkpoint.describe(folder)
    json.dumps(found)
    expected = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    assert found["kind"] == "carryover" and found["regime"] == "markov"
    assert found["proposal_length"] == 5 and found["target_layer_ids"] == [1, 3]
    assert found["parameters"] == expected
    assert found["target"] == drafter.target_identity
    assert found["provenance"]["git"] == "abc"


def test_not_a_checkpoint(saved, tmp_path):
    folder, target = saved
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        checkpoint.load(tmp_path / "nowhere", target)
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        checkpoint.load(tmp_path, target)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors"):
        checkpoint.describe(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"speculators_model_type": "dflash"}'])
def test_malformed_config(saved, text):
    folder, target = saved
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint.load(folder, target)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "type 'eagle3'"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"block_size": "many"}, r"config\.json is not valid"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"carryover": {"format_version": 9}}, "format_version is 9"),
        ({"carryover": {"format_version": 1, "mark": "stamp"}}, "section is not valid"),
    ],
)
def test_unsupported_config(saved, values, message):
    folder, target = saved
    edit_config(folder, **values)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"norm\.weight has shape \[3\]"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "norm.weight holds NaN"),
        (lambda t: t["fc.weight"][0].fill_(float("inf")), "fc.weight holds NaN or inf"),
    ],
)
def test_bad_weights(saved, change, message):
    folder, target = saved
    edit_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, target)


def test_cut_weights(saved):
    folder, target = saved
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(folder, target)


def test_wrong_target(saved, tiny):
    folder, _ = saved
    wider = resolve(str(tiny("llama", hidden_size=128)))
    with pytest.raises(CheckpointError, match="hidden_size: expected 64, got 128"):
        checkpoint.load(folder, wider)
    other_tokens = resolve(str(tiny("llama", vocab_size=330)))
    with pytest.raises(CheckpointError, match="tokenizer_sha256"):
        checkpoint.load(folder, other_tokens)
    # Without a record, what the config says about shapes still counts.
    (folder / "provenance.json").unlink()
    with pytest.raises(CheckpointError, match="vocab_size: expected 320, got 330"):
        checkpoint.load(folder, other_tokens)
    shallow = resolve(str(tiny("llama", num_layers=3)))
    with pytest.raises(CheckpointError, match="more than layer id 3, got 3"):
        checkpoint.load(folder, shallow)


def test_target_that_moved_away(tiny_llama, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(tiny_llama, target)
    folder = checkpoint.save(make_drafter(target), tmp_path / "d", {})
    target.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="name the target explicitly"):
        checkpoint.load(folder)
    assert checkpoint.load(folder, resolve(str(tmp_path / "elsewhere")))
