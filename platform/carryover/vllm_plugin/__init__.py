"""The vLLM plugin: stock vLLM serves Carryover checkpoints, DFlash and Markov.

vLLM calls `register` (entry point group `vllm.general_plugins`) in every process it starts. A
checkpoint without a `carryover` section is served by stock code, untouched.
"""


def register() -> None:
    """Hook into vLLM; may be called any number of times, in any process."""
    from carryover.vllm_plugin.install import install

    install()
