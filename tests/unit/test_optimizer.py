"""The learning-rate schedule and the optimizer's groups."""

import math

import pytest
import torch
from torch import nn

from carryover.training.optimizer import (
    OptimizerSettings,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)


def test_the_rate_rises_to_the_peak_and_falls_along_a_cosine():
    settings = OptimizerSettings(lr=2.0, warmup_ratio=0.1, final_lr_ratio=0.25)
    rates = [learning_rate(step, num_steps=100, settings=settings) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0 and max(rates) == 2.0
    assert rates[55] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert rates[100] == pytest.approx(0.5)
    quarter = 0.5 + 0.5 * math.cos(math.pi / 4)
    assert rates[32] == pytest.approx(2.0 * (0.25 + 0.75 * quarter), rel=0.01)
    assert learning_rate(0, num_steps=1, settings=OptimizerSettings(lr=1.0, warmup_ratio=0)) == 1.0


def test_matrices_decay_vectors_do_not_and_frozen_weights_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSettings(lr=0.1, weight_decay=0.5)
    )
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays[id(model[0].weight)] == 0.5
    assert {decays[id(p)] for p in (model[0].bias, *model[1].parameters())} == {0.0}
    assert len(decays) == 4
    before = model[0].weight.detach().clone()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model[0].weight, before * (1 - 0.1 * 0.5))


def test_the_marker_learns_as_much_faster_as_it_must_grow():
    model = nn.Linear(2, 2)
    model.carryover_marker = nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSettings(lr=0.1, marker_lr_scale=40.0)
    )
    set_learning_rate(optimizer, 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(model.carryover_marker, torch.full((2,), -0.4))
    assert torch.allclose(model.weight, before - 0.01, atol=1e-4)


def test_at_first_the_marker_may_learn_alone_and_what_has_none_learns_on():
    def step(model, *, marker_only):
        optimizer = build_optimizer(
            model.named_parameters(), OptimizerSettings(weight_decay=0.5, marker_lr_scale=40)
        )
        set_learning_rate(optimizer, 0.01, marker_only=marker_only)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}

    model = nn.Linear(2, 2)
    assert step(model, marker_only=True) == {"weight", "bias"}
    model.carryover_marker = nn.Parameter(torch.zeros(2))
    assert step(model, marker_only=True) == {"carryover_marker"}
    assert torch.allclose(model.carryover_marker, torch.full((2,), -1.6)), "a 25th of its scale"
    assert step(model, marker_only=False) == {"weight", "bias", "carryover_marker"}
