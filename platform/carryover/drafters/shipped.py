"""Drafters for the embedded target that come with this package.

They lie in `shipped/NAME` as 16-bit checkpoints without the LM head, whose rows are the target's
own, and, where `packed.json` names another shipped drafter as `base`, without the weights that they
have in common with it. `unpack` puts those back, once, into the user's cache. Wherever a drafter's
folder is asked for, `embedded:NAME` stands for one of these.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from carryover.durable import write_whole
from carryover.errors import CheckpointError
from carryover.targets import EMBEDDED, cache_folder, file_sha256, resolve

PREFIX = f"{EMBEDDED}:"
FOLDER = Path(__file__).parent / "shipped"
_WEIGHTS, _HEAD, _PACKED = "model.safetensors", "lm_head.weight", "packed.json"


def shipped_names() -> list[str]:
    """Names of the shipped drafters, with `PREFIX`."""
    return sorted(PREFIX + path.parent.name for path in FOLDER.glob(f"*/{_WEIGHTS}"))


def drafter_folder(name: str | Path) -> Path:
    """The checkpoint folder that a user's words stand for.

    Args:
        name: a folder, which need not exist, or a shipped drafter as `shipped_names` calls it.

    Raises:
        CheckpointError: no shipped drafter is called so.
        TargetError: the embedded target, whose LM head it needs, cannot be made.
    """
    if str(name).startswith(PREFIX):
        return unpack(_packed(str(name)))
    return Path(name).expanduser()


def _packed(name: str) -> Path:
    """Where a shipped drafter lies.

    Raises:
        CheckpointError: none is called so.
    """
    if name not in shipped_names():
        known = ", ".join(shipped_names()) or "none in this build"
        raise CheckpointError(f"no shipped drafter is called {name!r}; there are: {known}")
    return FOLDER / name.removeprefix(PREFIX)


def _known(folder: Path) -> Path:
    if str(folder).startswith(PREFIX):
        _packed(str(folder))
    return folder


DrafterFolder = Annotated[Path, AfterValidator(_known)]
"""In a configuration: what `drafter_folder` takes, which whoever uses it must call."""


def pack(folder: Path, base: str | None = None) -> None:
    """Take the LM head out of a checkpoint of the embedded target, in place.

    Args:
        folder: the checkpoint.
        base: a shipped drafter that has some of its weights, such as the one that it was continued
            from with `continuation.trained: attention`; those are taken out too.

    Raises:
        CheckpointError: the head is not the target's, so that it could not be put back; or there is
            no such base, or it is based on another one itself.
    """
    from safetensors.torch import load_file

    from carryover.drafters.checkpoint import write_weights

    tensors = load_file(folder / _WEIGHTS)
    head = tensors.pop(_HEAD, None)
    if head is not None and not head.equal(_head(tensors).to(head.dtype)):
        raise CheckpointError(f"{folder}: its LM head is not the embedded target's; ship it whole")
    if base is not None:
        packed = _packed(base)
        if _base(packed) is not None:
            raise CheckpointError(f"{base} is based on {_base(packed)}: take that for the base")
        common = load_file(packed / _WEIGHTS)
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in common or not tensor.equal(common[name])
        }
        write_whole(folder / _PACKED, json.dumps({"base": base}) + "\n")
    write_weights(tensors, folder)


def _base(packed: Path) -> str | None:
    """The shipped drafter whose weights are left out."""
    told = packed / _PACKED
    return json.loads(told.read_text(encoding="utf-8"))["base"] if told.exists() else None


def unpack(packed: Path) -> Path:
    """Put a packed checkpoint together in the user's cache, unless it is there.

    Returns:
        The folder of the whole checkpoint.
    """
    from filelock import FileLock

    weights = [packed / _WEIGHTS]
    base = _base(packed)
    if base is not None:
        weights.append(_packed(base) / _WEIGHTS)
    version = "-".join(file_sha256(path)[:12] for path in weights)
    folder = cache_folder() / "drafters" / f"{packed.name}-{version}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _put_together(weights, folder)
    return folder


def _put_together(weights: Sequence[Path], folder: Path) -> None:
    """Make a whole checkpoint of packed weights, of which the first count before their base's."""
    from safetensors.torch import load_file

    from carryover.drafters.checkpoint import write_weights

    tensors = {}
    for path in reversed(weights):
        tensors |= load_file(path)
    if "t2d" in tensors:
        tensors[_HEAD] = _head(tensors)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "whole"
        left_out = shutil.ignore_patterns(_WEIGHTS, _PACKED)
        shutil.copytree(weights[0].parent, made, ignore=left_out)
        write_weights(tensors, made)
        os.replace(made, folder)


def _head(tensors: dict) -> object:
    """The rows of the target's LM head that a reduced vocabulary keeps, [V, D] in float32."""
    from carryover.drafters.target_weights import read_tensors

    # The embedded target's embedding and LM head are one matrix.
    name = "embed_tokens.weight"
    return read_tensors([name], resolve(EMBEDDED))[name].float()[tensors["t2d"].bool()].contiguous()
