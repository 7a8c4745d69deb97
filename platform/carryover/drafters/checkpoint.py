"""Drafter checkpoints: folders in speculators' format, safetensors only, written at once.

A folder holds `model.safetensors`, `config.json` and `provenance.json`. A Carryover checkpoint
also has the marker tensor and a `carryover` section in its config; without both it is a valid
baseline checkpoint. No code lies in the folder, and none is ever executed from it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from speculators.config import SpeculatorModelConfig

from carryover.drafters.carried import config_section, read_section
from carryover.drafters.initial import initialise
from carryover.drafters.models import DRAFTERS, BlockDrafter
from carryover.drafters.target_weights import borrow_target_weights
from carryover.durable import sync
from carryover.errors import CheckpointError, TargetError
from carryover.targets import Target, identity_differences, resolve

__all__ = ["describe", "initialise", "load", "save"]

WEIGHTS, CONFIG, PROVENANCE = "model.safetensors", "config.json", "provenance.json"
REGIMES = {"dflash": "dflash", "dspark": "markov"}
_BORROWED = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.")

logger = logging.getLogger(__name__)


def save(
    drafter: BlockDrafter,
    folder: str | Path,
    provenance: Mapping[str, Any],
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a checkpoint: whole, or not at all. An existing one is replaced.

    Args:
        drafter: what to write.
        folder: the checkpoint's folder.
        provenance: JSON-able; the target's identity is added.
        weights: the state dict, where the drafter's own parameters are sharded.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    state = drafter.state_dict() if weights is None else weights
    tensors = {
        name: tensor.detach().to("cpu").contiguous()
        for name, tensor in state.items()
        if name in saved_names(drafter)
    }
    record = {**provenance, "target": drafter.target_identity}
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        write_weights(tensors, scratch)
        _write_json(scratch / CONFIG, _config_values(drafter))
        _write_json(scratch / PROVENANCE, record)
        for path in scratch.iterdir():
            sync(path)
        scratch.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
            os.replace(folder, old / folder.name)
            os.replace(scratch, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(scratch, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return folder


def write_weights(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a checkpoint's tensors, for whoever may enter its folder: safetensors alone would
    leave them to their owner.
    """
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)


def load(folder: str | Path, target: Target | None = None) -> BlockDrafter:
    """Read a checkpoint, in float32 on CPU, with the target's frozen weights in place.

    Checkpoints that speculators wrote load too; a confidence head is left out.

    Args:
        folder: the checkpoint's folder.
        target: the target that it must belong to; default: the one that its config names.

    Raises:
        CheckpointError: not a checkpoint; of an unsupported kind; made for another target;
            tensors missing, surplus, of the wrong shape, or not finite.
        TargetError: the target cannot be found or lacks a weight.
    """
    folder = Path(folder)
    values = read_config(folder)
    section = values.pop("carryover", None)
    if target is None:
        target = _named_target(folder, values)
    identity = _check_target(folder, values, section, target)
    try:
        config = SpeculatorModelConfig.from_dict(
            {**values, "enable_confidence_head": False, "confidence_head_with_markov": False}
            if values["speculators_model_type"] == "dspark"
            else values
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} is not valid: {error}") from None
    config.transformer_layer_config._attn_implementation = "eager"
    config.sliding_window_non_causal = True
    config.speculators_config.verifier.name_or_path = target.path
    drafter = DRAFTERS[REGIMES[values["speculators_model_type"]]](config)
    if section is not None:
        drafter.add_carried_context(read_section(section))
    _load_weights(drafter, folder)
    borrow_target_weights(drafter, target, lm_head=False)
    drafter.target_identity = identity
    return drafter


def describe(folder: str | Path) -> dict[str, Any]:
    """What a checkpoint is, without loading it: JSON-able, in the words of METHOD.

    Raises:
        CheckpointError: not a checkpoint, or of an unsupported kind.
    """
    folder = Path(folder)
    values = read_config(folder)
    layers = values["transformer_layer_config"]
    parameters, dtypes = 0, set()
    with _open_weights(folder) as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if name not in ("t2d", "d2t"):
                parameters += torch.Size(part.get_shape()).numel()
                dtypes.add(part.get_dtype())
    provenance = _read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {}
    return {
        "folder": str(folder),
        "kind": "carryover" if "carryover" in values else "baseline",
        "regime": REGIMES[values["speculators_model_type"]],
        "proposal_length": values["block_size"] - 1,
        "layers": layers["num_hidden_layers"],
        "hidden_size": layers["hidden_size"],
        "target_layer_ids": values["aux_hidden_state_layer_ids"],
        "draft_vocab_size": values["draft_vocab_size"],
        "target_vocab_size": layers["vocab_size"],
        "mask_token_id": values["mask_token_id"],
        "parameters": parameters,
        "dtypes": sorted(dtypes),
        "weights_bytes": (folder / WEIGHTS).stat().st_size,
        "target": _recorded_target(values.get("carryover"), provenance)
        or {"name": values["speculators_config"]["verifier"]["name_or_path"]},
        "carryover": values.get("carryover"),
        "provenance": provenance,
    }


def regime_of(drafter: BlockDrafter) -> str:
    """A key of `DRAFTERS`."""
    return "dflash" if drafter.markov_head is None else "markov"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read and check a checkpoint's `config.json`.

    Raises:
        CheckpointError: no checkpoint there, or of a kind that is not supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder at {folder}")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} is not a drafter checkpoint: it holds no {name}; "
                "give the folder that a training run or speculators' save_pretrained wrote"
            )
    values = _read_json(folder / CONFIG)
    kind = values.get("speculators_model_type")
    if kind not in REGIMES:
        raise CheckpointError(
            f"{folder} holds a drafter of type {kind!r}; supported are "
            f"{', '.join(map(repr, REGIMES))} in speculators' format "
            "(other formats can be converted with `speculators convert`)"
        )
    required = (
        "transformer_layer_config", "draft_vocab_size", "block_size", "mask_token_id",
        "aux_hidden_state_layer_ids", "speculators_config",
    )  # fmt: skip
    missing = [name for name in required if values.get(name) is None]
    if missing:
        raise CheckpointError(f"{folder / CONFIG} lacks {', '.join(missing)}")
    if values.get("sample_from_anchor", kind == "dspark"):
        raise CheckpointError(
            f"{folder} samples from the anchor slot (sample_from_anchor), a block layout that is "
            "not supported; train a drafter with sample_from_anchor=false"
        )
    if kind == "dspark" and values.get("markov_head_type", "vanilla") != "vanilla":
        raise CheckpointError(
            f"{folder} has a Markov head of type {values['markov_head_type']!r}; "
            "only 'vanilla' is supported"
        )
    return values


def saved_names(drafter: BlockDrafter) -> set[str]:
    """Names of the tensors that a checkpoint of this drafter holds."""
    shared_head = () if drafter.use_draft_vocab else ("lm_head.",)
    return {
        name for name in drafter.state_dict() if not name.startswith((*_BORROWED, *shared_head))
    }


def _config_values(drafter: BlockDrafter) -> dict[str, Any]:
    values = drafter.config.to_dict()
    values["architectures"] = [f"{'DSpark' if drafter.markov_head else 'DFlash'}DraftModel"]
    values.pop("auto_map", None)
    values.pop("carryover", None)
    if drafter.carried_settings is not None:
        values["carryover"] = config_section(drafter.carried_settings, drafter.target_identity)
    values["dtype"] = str(next(drafter.layers.parameters()).dtype).removeprefix("torch.")
    return values


def _load_weights(drafter: BlockDrafter, folder: Path) -> None:
    expected = saved_names(drafter)
    with _open_weights(folder) as file:
        names = {
            name
            for name in file.keys()  # noqa: SIM118
            # speculators may save frozen copies of the target's weights; they are borrowed anew.
            if not name.startswith((*_BORROWED, "confidence_head."))
            and (name in expected or name != "lm_head.weight")
        }
        if names != expected:
            problems = [f"missing {name}" for name in sorted(expected - names)]
            problems += [f"unknown {name}" for name in sorted(names - expected)]
            raise CheckpointError(
                f"{folder / WEIGHTS} does not fit its {CONFIG}: {', '.join(problems[:8])}"
                + (f" and {len(problems) - 8} more" if len(problems) > 8 else "")
            )
        tensors = {name: file.get_tensor(name) for name in expected}
    own = drafter.state_dict()
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} has shape {list(tensor.shape)}; "
                f"{CONFIG} asks for {list(own[name].shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(
                f"{folder / WEIGHTS}: {name} holds NaN or infinite values; "
                "go back to an earlier checkpoint of the run"
            )
    drafter.load_state_dict(tensors, strict=False)


def _named_target(folder: Path, values: Mapping[str, Any]) -> Target:
    name = values["speculators_config"]["verifier"]["name_or_path"]
    try:
        return resolve(name)
    except TargetError as error:
        raise CheckpointError(
            f"{folder} was made for the target {name!r}, which cannot be found here: {error}\n"
            "name the target explicitly"
        ) from None


def _recorded_target(
    section: Mapping[str, Any] | None, provenance: Mapping[str, Any]
) -> dict[str, Any] | None:
    return (section or {}).get("target") or provenance.get("target")


def _check_target(
    folder: Path, values: Mapping[str, Any], section: Mapping[str, Any] | None, target: Target
) -> dict[str, Any]:
    """The target's identity, if the checkpoint was made for it or, unrecorded, fits its shape."""
    identity = target.identity()
    provenance = _read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {}
    recorded = _recorded_target(section, provenance)
    if recorded is None:
        layers = values["transformer_layer_config"]
        recorded = {key: layers.get(key) for key in ("hidden_size", "vocab_size")}
    differences = identity_differences(recorded, identity)
    highest = max(values["aux_hidden_state_layer_ids"])
    if highest >= identity["num_hidden_layers"]:
        differences.append(
            f"num_hidden_layers: expected more than layer id {highest}, "
            f"got {identity['num_hidden_layers']}"
        )
    if differences:
        raise CheckpointError(
            f"{folder} was not made for the target {target.name!r}:\n  " + "\n  ".join(differences)
        )
    return identity


def _open_weights(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
