"""Configuration of an application: one target, engine settings, and the arms that share them.

An arm adds a drafter. Any other difference between arms must be named in `allowed_differences`,
so that a comparison never compares more than it says.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from carryover.config import Config
from carryover.drafters.shipped import DrafterFolder, drafter_folder
from carryover.engine import EngineConfig
from carryover.errors import ConfigError
from carryover.runtime import has_gpu
from carryover.serving.admission import IngressConfig
from carryover.serving.keys import SecurityConfig
from carryover.serving.traffic import TrafficConfig
from carryover.targets import EMBEDDED, Target, identity_differences

_NAME = re.compile(r"[a-z0-9]+([_-][a-z0-9]+)*")


def _check_name(name: str) -> str:
    # Ray Serve reads `--` in a model id as `/`, and `:` as the start of an adapter's name.
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a name holds lower-case letters and digits, joined by single '-' or '_'; "
            "for example 'dflash-7'"
        )
    return name


def _check_model_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name) or "--" in name:
        raise ValueError("a model name holds letters, digits, '.', '_', '/' and single '-'")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
ModelName = Annotated[str, AfterValidator(_check_model_name)]


class Arm(Config):
    """One deployment of the target: autoregressive, or with a drafter."""

    name: Name = Field(description="Unique; also the arm's model id.")
    drafter: DrafterFolder | None = Field(
        default=None,
        description="Drafter checkpoint folder, or a shipped one (embedded:dflash); null decodes "
        "autoregressively.",
    )
    num_speculative_tokens: int | None = Field(
        default=None, ge=1,
        description="Proposal length; null takes the checkpoint's own.",
    )  # fmt: skip
    engine: dict[str, Any] = Field(
        default={},
        description="Engine settings of this arm alone; each must be in allowed_differences.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.drafter is None and self.num_speculative_tokens is not None:
            raise ValueError(
                "num_speculative_tokens without a drafter; give the arm a drafter or drop it"
            )
        return self


# What the platform sets itself, for each arm.
_OWNED = {
    "model", "served_model_name", "speculative_config", "distributed_executor_backend",
    "per_request_spec_decode_metrics", "enable_per_request_metrics", "disable_log_stats",
}  # fmt: skip


class Http(Config):
    """Where the endpoint listens."""

    host: str = Field(default="127.0.0.1", description="Loopback unless told otherwise.")
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes a free one.")
    stream_interval_ms: float = Field(
        default=0.0, ge=0,
        description="Chunks are held back and sent together this often; 0 sends each at once.",
    )  # fmt: skip

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


class Resources(Config):
    """What one replica of an arm reserves in Ray."""

    device: Literal["cpu", "gpu"] = Field(default_factory=lambda: "gpu" if has_gpu() else "cpu")
    replicas: int = Field(default=1, ge=1, description="Replicas of each arm.")
    cpus_per_replica: float = Field(
        default=0.5, gt=0, description="A reservation, not a limit: CPU arms share the cores."
    )
    gpus_per_worker: float = Field(
        default=1.0, gt=0, description="GPUs per engine worker; below 1, arms share a GPU."
    )
    accelerator_type: str | None = Field(
        default=None, description="Ray's name of the GPU model, such as H200; null takes any."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device == "cpu" and self.accelerator_type is not None:
            raise ValueError("accelerator_type is for device gpu; set it to null")
        return self


class ServeConfig(Config):
    """An application: the arms of one target behind one OpenAI-compatible endpoint."""

    name: Name = Field(default="carryover", description="Of the application in Ray Serve.")
    model: ModelName = Field(
        default="carryover", description="Model name that clients ask for, whatever the arm."
    )
    target: str = Field(default=EMBEDDED, description="'embedded', a folder, or a hub name.")
    engine: EngineConfig = Field(default=EngineConfig(), description="The same for every arm.")
    arms: list[Arm] = Field(min_length=1, description="The first is the control arm.")
    allowed_differences: list[str] = Field(
        default=[],
        description="Engine settings in which arms may differ besides the drafter, such as "
        "max_num_seqs or extra.enable_prefix_caching.",
    )
    http: Http = Http()
    ingress: IngressConfig = IngressConfig()
    resources: Resources = Field(default_factory=Resources)
    security: SecurityConfig = SecurityConfig()
    traffic: TrafficConfig = Field(default_factory=TrafficConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [arm.name for arm in self.arms]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"arm names must differ; {', '.join(repeated)} appears twice")
        if self.model in names:
            raise ValueError(f"model {self.model!r} is also an arm's name; rename one of them")
        engines = [self.engine_of(arm) for arm in self.arms]
        owned = sorted(_OWNED & {name for engine in engines for name in engine.extra})
        if owned:
            raise ValueError(
                f"engine.extra may not hold {', '.join(owned)}: the platform sets it for each arm"
            )
        for arm, engine in zip(self.arms, engines, strict=True):
            different = engine_differences(self.engine, engine)
            refused = sorted(different - set(self.allowed_differences))
            if refused:
                raise ValueError(
                    f"arm {arm.name!r} differs from the others in {', '.join(refused)}, so that a "
                    "comparison would not be of the drafter alone; remove it from the arm's "
                    "engine, or name it in allowed_differences"
                )
        # Raises ConfigError, whose message is what the user needs.
        try:
            self.traffic.resolve(arms=names, application=self.name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.resources.device == "cpu" and self.engine.tensor_parallel_size > 1:
            raise ValueError("engine.tensor_parallel_size above 1 needs device gpu")
        if self.resources.gpus_per_worker < 1 and self.engine.tensor_parallel_size > 1:
            raise ValueError(
                "gpus_per_worker below 1 does not go with tensor_parallel_size above 1"
            )
        share = self.resources.gpus_per_worker
        if (
            self.resources.device == "gpu"
            and share < self.engine.gpu_memory_utilization
            and share < 1
        ):
            raise ValueError(
                f"engine.gpu_memory_utilization {self.engine.gpu_memory_utilization} exceeds "
                f"resources.gpus_per_worker {share}, so engines on one GPU would not fit; "
                f"set it to {share} or less"
            )
        return self

    def engine_of(self, arm: Arm) -> EngineConfig:
        """Engine settings of one arm: those of all, with its own on top.

        Raises:
            ValueError: the arm names a setting that does not exist, or a wrong value.
        """
        if not arm.engine:
            return self.engine
        values = self.engine.model_dump()
        extra = {**values["extra"], **(arm.engine.get("extra") or {})}
        try:
            return EngineConfig.parse(
                {**values, **arm.engine, "extra": extra}, source=f"arm {arm.name!r}: engine"
            )
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @property
    def control(self) -> Arm:
        """The arm that others are compared with, and that takes unassigned requests."""
        return self.arms[0]


def engine_differences(one: EngineConfig, other: EngineConfig) -> set[str]:
    """Names of the settings in which two engines differ, those of `extra` as `extra.NAME`."""
    left, right = one.model_dump(), other.model_dump()
    extras = left.pop("extra"), right.pop("extra")
    found = {name for name in left if left[name] != right[name]}
    for name in extras[0].keys() | extras[1].keys():
        if name not in extras[0] or name not in extras[1] or extras[0][name] != extras[1][name]:
            found.add(f"extra.{name}")
    return found


def engine_setting(engine: EngineConfig, name: str) -> Any:
    """A setting by a name that `engine_differences` gives; None if `extra` does not hold it."""
    section, _, key = name.rpartition(".")
    return engine.extra.get(key) if section else getattr(engine, key)


def check_drafters(config: ServeConfig) -> ServeConfig:
    """Check every arm's checkpoint, and return the configuration with folder and length settled.

    Raises:
        ConfigError: a folder is missing or no drafter, or a proposal length exceeds it.
    """
    arms = []
    for arm in config.arms:
        if arm.drafter is not None:
            found = arm.model_copy(update={"drafter": drafter_folder(arm.drafter)})
            length = _proposal_length(found)
            arm = found.model_copy(update={"num_speculative_tokens": length})
        arms.append(arm)
    return config.model_copy(update={"arms": arms})


def check_target(config: ServeConfig, target: Target) -> None:
    """Check that every drafter was made for this target.

    Raises:
        ConfigError: names the arm, the difference, and what to do.
        TargetError: the target's configuration cannot be read.
    """
    for arm in config.arms:
        if arm.drafter is None:
            continue
        values = _read_drafter(arm)
        layers = values.get("transformer_layer_config") or {}
        recorded = _recorded_target(arm, values) or {
            "hidden_size": layers.get("hidden_size"),
            "vocab_size": layers.get("vocab_size"),
        }
        found = target.identity()
        differences = identity_differences(recorded, found)
        highest = max(values.get("aux_hidden_state_layer_ids") or [0])
        if highest >= found["num_hidden_layers"]:
            differences.append(
                f"num_hidden_layers: expected more than layer id {highest}, "
                f"got {found['num_hidden_layers']}"
            )
        if differences:
            raise ConfigError(
                f"arm {arm.name!r}: the drafter in {arm.drafter} was not made for the target "
                f"{target.name!r}: {'; '.join(differences)}; give a drafter trained for it"
            )


def _proposal_length(arm: Arm) -> int:
    values = _read_drafter(arm)
    block, kind = values.get("block_size"), values["speculators_model_type"]
    if not isinstance(block, int) or block < 2:
        raise ConfigError(
            f"arm {arm.name!r}: {arm.drafter}/config.json gives no block_size; "
            "give the folder of a DFlash or DSpark checkpoint in speculators' format"
        )
    if values.get("sample_from_anchor", kind == "dspark"):
        raise ConfigError(
            f"arm {arm.name!r}: {arm.drafter} samples from the anchor slot (sample_from_anchor), "
            "a block layout that is not served; train a drafter with sample_from_anchor=false"
        )
    longest = block - 1
    if arm.num_speculative_tokens is not None and arm.num_speculative_tokens > longest:
        raise ConfigError(
            f"arm {arm.name!r}: num_speculative_tokens {arm.num_speculative_tokens} exceeds the "
            f"checkpoint's {longest}; set it to {longest} or less, or retrain with longer blocks"
        )
    return arm.num_speculative_tokens or longest


def _recorded_target(arm: Arm, values: dict[str, Any]) -> dict[str, Any] | None:
    """The target that a checkpoint of ours says it was made for; None if it says nothing."""
    section = values.get("carryover") or {}
    if "target" in section:
        return section["target"]
    try:
        provenance = arm.drafter / "provenance.json"
        return json.loads(provenance.read_text(encoding="utf-8")).get("target")
    except (OSError, ValueError, AttributeError):
        return None


def _read_drafter(arm: Arm) -> dict[str, Any]:
    folder = arm.drafter
    if not folder.is_dir():
        raise ConfigError(
            f"arm {arm.name!r}: no drafter folder at {folder}; train one with "
            "`platform train baseline`, or correct the arm's `drafter`"
        )
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"arm {arm.name!r}: {folder} holds no config.json, so it is no drafter checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"arm {arm.name!r}: cannot read {file}: {error}") from None
    if not isinstance(values, dict) or "speculators_model_type" not in values:
        raise ConfigError(
            f"arm {arm.name!r}: {file} is not a speculators configuration "
            "(no speculators_model_type); a target's folder is not a drafter's"
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"arm {arm.name!r}: {folder} holds no .safetensors weights")
    return values
