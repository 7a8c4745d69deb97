"""Checkpoints to give away: weights in 16 bits, the target by its name, and a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from carryover.drafters import checkpoint
from carryover.drafters.shipped import pack
from carryover.durable import write_whole
from carryover.errors import CheckpointError, ConfigError

CARD = "README.md"
# What tells a reader how a drafter came about; the rest of a run's record is about the machine.
_KEPT = ("training", "run", "step", "num_steps", "evaluation", "config", "python", "packages")
# Settings of a run that say where it ran and what it kept, not how the drafter was trained.
_OF_THE_MACHINE = (
    "data", "hidden_states", "resources", "checkpoints", "runs_folder", "experiment",
    "verify_first",
)  # fmt: skip
_PAPERS = {"dflash": "DFlash (arXiv 2602.06036)", "markov": "DFlash's backbone with a Markov head"}


def export(
    folder: str | Path,
    out: str | Path,
    *,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    license_id: str = "apache-2.0",
    data: str = "",
    figures: str = "",
    limits: str = "",
    packed: bool = False,
    base: str | None = None,
) -> Path:
    """Write a checkpoint for others: the same drafter, rounded to `dtype`, with a model card.

    Args:
        folder: a checkpoint.
        out: a folder that is not there yet or holds an earlier export.
        dtype: of the floating-point weights.
        license_id: SPDX identifier for the card.
        data: what it was trained on, a paragraph of Markdown.
        figures: what was measured, Markdown.
        limits: what it should not be used for, a paragraph of Markdown.
        packed: leave out the LM head, as `shipped.py` describes.
        base: with `packed`, a shipped drafter whose weights are left out where they are the same.

    Returns:
        `out`.

    Raises:
        CheckpointError: not a checkpoint, or weights that `dtype` cannot hold.
        ConfigError: `out` holds something else.
    """
    folder, out = Path(folder), Path(out)
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / CARD).exists())):
        raise ConfigError(f"{out} is there and is no exported drafter; name another folder")
    described = checkpoint.describe(folder)
    drafter = checkpoint.load(folder).to(getattr(torch, dtype))
    for name, tensor in drafter.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{name} does not fit into {dtype}; export it in bfloat16")
    # Not a path of this machine: whoever gets the drafter finds the target by its name.
    name = described["target"]["name"]
    drafter.config.speculators_config.verifier.name_or_path = name
    drafter.target_identity = {**drafter.target_identity, "name": name}
    record = {key: value for key, value in described["provenance"].items() if key in _KEPT}
    if "config" in record:
        record["config"] = {
            key: value for key, value in record["config"].items() if key not in _OF_THE_MACHINE
        }
    checkpoint.save(drafter, out, record)
    if packed:
        pack(out, base)
    described = {**checkpoint.describe(out), "license": license_id}
    write_whole(
        out / CARD, model_card(described, record, data=data, figures=figures, limits=limits)
    )
    return out


def model_card(
    described: Mapping[str, Any],
    record: Mapping[str, Any],
    *,
    data: str = "",
    figures: str = "",
    limits: str = "",
) -> str:
    """The card of an exported drafter, Markdown with the metadata that model hubs read.

    Args:
        described: `checkpoint.describe` of it, and its `license`.
        record: what is kept of its provenance.
        data: see `export`, as are `figures` and `limits`.
    """
    target, regime, kind = described["target"]["name"], described["regime"], described["kind"]
    head = {
        "license": described["license"],
        "base_model": target,
        "library_name": "vllm",
        "tags": ["speculative-decoding", regime, *(["carryover"] if kind == "carryover" else [])],
    }
    name = record.get("run") or Path(described["folder"]).name
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {name}: {kind} {regime} drafter for {target}\n",
        _what(described),
        "## How it was trained\n\n" + _training(record),
    ]
    for title, text in (("Data", data), ("Figures", figures), ("Limits", limits)):
        if text:
            parts.append(f"## {title}\n\n{text.strip()}\n")
    if "config" in record:
        recipe = yaml.safe_dump(record["config"], sort_keys=False)
        parts.append(f"## Recipe\n\n```yaml\n{recipe}```\n")
    return "\n".join(parts)


def _what(described: Mapping[str, Any]) -> str:
    vocabulary = f"{described['draft_vocab_size']:,}"
    if described["draft_vocab_size"] != described["target_vocab_size"]:
        vocabulary += f" of the target's {described['target_vocab_size']:,}"
    rows = {
        "regime": _PAPERS[described["regime"]],
        "proposal length": described["proposal_length"],
        "layers": described["layers"],
        "hidden size": f"{described['hidden_size']:,}",
        "parameters": f"{described['parameters'] / 1e6:.1f} M ({', '.join(described['dtypes'])})",
        "vocabulary": f"{vocabulary} tokens",
        "reads target layers": ", ".join(map(str, described["target_layer_ids"])),
    }
    if described["kind"] == "carryover":
        rows["carried context"] = (
            "rejected states of the last round, as in Carryover Drafting (arXiv 2609.14717); "
            "served by vLLM with this package installed"
        )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"| | |\n| --- | --- |\n{table}\n"


def _training(record: Mapping[str, Any]) -> str:
    if "training" not in record:
        return "The checkpoint does not say.\n"
    text = f"{record['training'].capitalize()} training, step {record.get('step', 0):,}"
    if record.get("num_steps"):
        text += f" of {record['num_steps']:,}"
    evaluation = record.get("evaluation") or {}
    if "acceptance_length" in evaluation:
        text += (
            f"; acceptance length {evaluation['acceptance_length']:.3f} over "
            f"{evaluation['rounds']:,.0f} rounds of responses that were held out of training"
        )
    versions = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    return f"{text}.\n\nMade with {versions}.\n"
