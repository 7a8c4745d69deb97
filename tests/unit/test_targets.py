"""Targets: found by folder or name, refused when not whole, identified by shape and tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from carryover import targets
from carryover.errors import TargetError
from carryover.testing import tiny_target


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def damaged(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_a_folder_resolves_to_a_loadable_frozen_model(whole):
    target = targets.resolve(str(whole))
    model = target.load_model()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert target.load_config().hidden_size == target.identity()["hidden_size"] == 64


def test_identity_depends_on_shape_and_tokenizer_not_on_place(whole, damaged, tmp_path):
    here = targets.resolve(str(whole)).identity()
    there = targets.resolve(str(damaged)).identity()
    other = targets.resolve(str(tiny_target(tmp_path / "o", vocab_size=330))).identity()
    assert targets.identity_differences(here, there) == []
    assert {line.split(":")[0] for line in targets.identity_differences(here, other)} == {
        "vocab_size",
        "tokenizer_sha256",
    }


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_half_written_model_is_refused(damaged, cut):
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-cut])
    with pytest.raises(TargetError, match="cut short"):
        targets.resolve(str(damaged))


def test_a_header_alone_is_refused(damaged):
    (damaged / "model.safetensors").write_bytes(b"\x01\x02")
    with pytest.raises(TargetError, match="cut short"):
        targets.resolve(str(damaged))


def test_missing_parts_are_named(damaged):
    (damaged / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(TargetError, match=r"lacks model-2\.safetensors"):
        targets.resolve(str(damaged))
    (damaged / "model.safetensors.index.json").unlink()
    (damaged / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"no \.safetensors weights"):
        targets.resolve(str(damaged))
    (damaged / "config.json").unlink()
    with pytest.raises(TargetError, match=r"no config\.json"):
        targets.resolve(str(damaged))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", "plainword"])
def test_a_name_that_is_neither_folder_nor_hub_name_is_refused(name):
    with pytest.raises(TargetError, match="embedded"):
        targets.resolve(name)


def test_a_hub_name_is_taken_as_it_is():
    assert targets.resolve("Qwen/Qwen3-4B").path == "Qwen/Qwen3-4B"


def test_an_unreachable_hub_name_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TargetError, match="cannot read the configuration"):
        targets.resolve("nobody/nothing-here").load_config()


def test_a_damaged_download_of_the_embedded_target_leaves_nothing(monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not a model")
    monkeypatch.setenv("CARRYOVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "_find_gguf", lambda scratch: wrong)
    with pytest.raises(TargetError, match="damaged"):
        targets.resolve("embedded")
    left = [p for p in (tmp_path / "cache" / "targets").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_an_unfinished_embedded_target_is_made_again(monkeypatch, tmp_path):
    made = []

    def convert(gguf, folder):
        made.append(folder)
        tiny_target(folder)

    source = tmp_path / "source.gguf"
    source.write_bytes(b"model")
    monkeypatch.setenv("CARRYOVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(targets, "_find_gguf", lambda scratch: source)
    monkeypatch.setattr(targets, "EMBEDDED_GGUF_SHA256", targets.file_sha256(source))
    monkeypatch.setattr(targets, "_convert", convert)
    folder = Path(targets.resolve("embedded").path)
    assert targets.resolve("embedded").path == str(folder)
    assert len(made) == 1
    (folder / "model.safetensors").write_bytes(b"half")
    targets.resolve("embedded")
    assert len(made) == 2
