"""What the plugin registers with vLLM, and the versions of vLLM it was tried with."""

from __future__ import annotations

from carryover.errors import EnvironmentProblem

TRIED_VERSIONS = ("0.32.0",)


class UntriedVersion(EnvironmentProblem, RuntimeError):
    """The installed vLLM is not one that the plugin was tried with."""


def install() -> None:
    """Register readers and model classes, and apply the patches; harmless when repeated.

    With a vLLM that was never tried, only the readers are registered. They refuse Carryover
    checkpoints, so an engine that serves something else starts as if the plugin were absent.
    """
    from carryover.vllm_plugin import reading

    reading.register_readers()
    if not version_is_tried():
        return

    from vllm import ModelRegistry

    from carryover.vllm_plugin import patches

    known = ModelRegistry.get_supported_archs()
    for architecture, location in reading.MODEL_CLASSES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, location)
    patches.apply_all()


def installed_version() -> str:
    """Release of the installed vLLM, without a local build label such as `+cpu`."""
    import vllm

    return vllm.__version__.partition("+")[0]


def version_is_tried() -> bool:
    """Whether the installed vLLM is one of `TRIED_VERSIONS`."""
    return installed_version() in TRIED_VERSIONS


def refuse_untried_version() -> None:
    """Raise unless the installed vLLM is one that the plugin was tried with.

    Raises:
        UntriedVersion: names the versions tried.
    """
    if not version_is_tried():
        raise UntriedVersion(
            f"Carryover checkpoints need vLLM {' or '.join(TRIED_VERSIONS)}, got "
            f"{installed_version()}; install that version, or serve a baseline checkpoint"
        )
