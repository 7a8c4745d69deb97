"""Drafters that come with the package: found by name, whole again after unpacking, with cards."""

import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from carryover.drafters import checkpoint, shipped
from carryover.errors import CheckpointError
from carryover.serving.config import ServeConfig, check_drafters

NAMES = shipped.shipped_names()
MEGABYTES = 60


def test_some_are_shipped_and_they_are_small():
    assert "embedded:dflash" in NAMES
    files = [file for file in shipped.FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MEGABYTES * 1e6


@pytest.mark.parametrize("name", NAMES)
def test_its_card_says_how_it_came_about(name):
    folder = shipped.FOLDER / name.removeprefix(shipped.PREFIX)
    card = (folder / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "apache-2.0" and head["base_model"] == "embedded"
    for title in ("## How it was trained", "## Data", "## Figures", "## Limits", "## Recipe"):
        assert title in card
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert "runs_folder" not in recipe and "hidden_states" not in recipe
    tensors = load_file(folder / "model.safetensors").values()
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floating} <= {torch.float16, torch.bfloat16}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_whole_again(name):
    folder = shipped.drafter_folder(name)
    assert shipped.drafter_folder(name) == folder
    drafter = checkpoint.load(folder)
    assert torch.equal(drafter.lm_head.weight, drafter.verifier_lm_head.weight)
    kind = "carryover" if name.endswith("-carryover") else "baseline"
    found = checkpoint.describe(folder)
    assert found["kind"] == kind and name.startswith(shipped.PREFIX + found["regime"])


def test_a_name_serves_as_a_folder():
    arms = [{"name": "plain"}, {"name": "drafted", "drafter": "embedded:dflash"}]
    config = check_drafters(ServeConfig.parse({"target": "embedded", "arms": arms}))
    assert config.arms[1].drafter == shipped.drafter_folder("embedded:dflash")
    assert config.arms[1].num_speculative_tokens > 0


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(CheckpointError, match="embedded:dflash"):
        shipped.drafter_folder("embedded:eagle")
    with pytest.raises(CheckpointError, match="no shipped drafter"):
        ServeConfig.parse({"arms": [{"name": "a", "drafter": "embedded:eagle"}]})


def test_what_a_shipped_drafter_has_already_is_left_out_and_put_back(tmp_path, monkeypatch):
    name, changed = "embedded:dflash", "layers.0.self_attn.q_proj.weight"
    start = shipped.drafter_folder(name)
    more = tmp_path / "shipped" / "more"
    shutil.copytree(shipped.FOLDER / "dflash", tmp_path / "shipped" / "dflash")
    shutil.copytree(start, more)
    tensors = load_file(more / "model.safetensors")
    tensors = {key: tensor.half() if tensor.is_floating_point() else tensor
               for key, tensor in tensors.items()}  # fmt: skip
    tensors[changed] += 1
    save_file(tensors, more / "model.safetensors")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr(shipped, "cache_folder", lambda: tmp_path / "cache")
    shipped.pack(more, name)
    assert load_file(more / "model.safetensors").keys() == {changed}
    whole = shipped.drafter_folder("embedded:more")
    found = load_file(whole / "model.safetensors")
    assert found.keys() == tensors.keys() and not (whole / "packed.json").exists()
    for key, tensor in tensors.items():
        assert torch.equal(found[key].to(tensor.dtype), tensor), key
    with pytest.raises(CheckpointError, match="is based on embedded:dflash"):
        shipped.pack(whole, "embedded:more")
    for unknown in ("embedded:eagle", "dflash"):
        with pytest.raises(CheckpointError, match="no shipped drafter is called"):
            shipped.pack(whole, unknown)


def test_a_head_of_its_own_cannot_be_left_out(tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(shipped.drafter_folder("embedded:dflash"), whole)
    tensors = load_file(whole / "model.safetensors")
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    shipped.pack(whole)
    assert load_file(whole / "model.safetensors").keys() == kept.keys() - {"lm_head.weight"}
    kept["lm_head.weight"][0, 0] += 1
    save_file(kept, whole / "model.safetensors")
    with pytest.raises(CheckpointError, match="ship it whole"):
        shipped.pack(whole)
