"""No operator of a training step is given the LM head once for each block, which would copy it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_cases import carryover_drafter, generator, make_drafter, read_batch

from carryover.targets import resolve
from carryover.training.carryover import carryover_step
from carryover.training.losses import LossSettings
from carryover.training.step import StepSettings, baseline_step

ANCHORS = 48


class LargestInput(TorchDispatchMode):
    """The most elements that an operator was given in one tensor, repeated ones counted."""

    def __init__(self):
        super().__init__()
        self.elements, self.shape = 0, ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and value.numel() > self.elements:
                self.elements, self.shape = value.numel(), (str(func), *value.shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("regime", ["dflash", "markov"])
@pytest.mark.parametrize("kind", ["baseline", "control", "carryover"])
def test_a_step_never_repeats_the_head(tiny_llama, regime, kind):
    model = resolve(str(tiny_llama)).load_model()
    make = carryover_drafter if kind == "carryover" else make_drafter
    drafter = make(tiny_llama, regime)
    batch = read_batch(model, [(4, 60), (4, 60)])
    settings = StepSettings(num_anchors=ANCHORS, loss=LossSettings(kl=1.0, ce=1.0, tv=1.0))
    with LargestInput() as largest:
        if kind == "baseline":
            baseline_step(drafter, batch, settings=settings, generator=generator())
        else:
            carryover_step(
                drafter, model, batch, settings=settings, generator=generator(),
                carry=kind == "carryover",
            )  # fmt: skip
    repeated = ANCHORS * drafter.lm_head.weight.numel()
    assert largest.elements < repeated / 4, largest.shape
