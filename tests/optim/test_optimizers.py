from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from mpt.config.finding.registry import INSTALLED

pytestmark = pytest.mark.tier("fast")


PLUGINS = {"adam": "Adam", "adamw": "AdamW", "adamax": "Adamax", "sgd": "SGD", "rmsprop": "RMSprop"}
PLUGINS |= {"adafactor": "Adafactor", "lion": "Lion", "muon": "MuonWithAdam"}


@pytest.fixture(params=sorted(PLUGINS))
def plugin(request):
    """The optimizer of one YAML name: its file's `build`, and its `Settings` with what the name changes in them."""
    found = INSTALLED.find("optim", request.param)
    module = found.load()
    return SimpleNamespace(
        name=request.param,
        build=module.build,
        fields=module.Settings.model_fields,
        Settings=lambda **given: module.Settings(**{**found.defaults, **given}),
    )


def test_defaults_build_the_torch_optimizer_of_that_name_and_lower_a_loss(plugin):
    weight = torch.nn.Parameter(torch.full((4,), 3.0))
    optimizer = plugin.build(plugin.Settings(lr=0.01), [weight])
    assert type(optimizer).__name__ == PLUGINS[plugin.name]
    for _ in range(5):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    assert weight.square().sum().item() < 36.0


def test_every_setting_reaches_the_optimizer(plugin):
    given = {
        "lr": 0.25,
        "weight_decay": 0.125,
        "eps": 1e-5,
        "betas": (0.5, 0.75),
        "alpha": 0.5,
        "momentum": 0.25,
    }
    given |= {"nesterov": True, "centered": True, "amsgrad": True, "foreach": False}
    given = {key: value for key, value in given.items() if key in plugin.fields}
    optimizer = plugin.build(plugin.Settings(**given), [torch.nn.Parameter(torch.zeros(2))])
    assert {key: optimizer.param_groups[0][key] for key in given} == given


def test_groups_keep_their_own_learning_rate(plugin):
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5},
        {"params": [torch.nn.Parameter(torch.ones(1))]},
    ]
    optimizer = plugin.build(plugin.Settings(lr=0.25), groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"weight_decay": -1.0},
        {"wieght_decay": 0.1},
        {"warmup_steps": -1},
    ],
)
def test_values_out_of_range_and_unknown_keys_are_refused(plugin, wrong):
    with pytest.raises(ValidationError):
        plugin.Settings(**wrong)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,)])
def test_betas_outside_their_range_are_refused(betas):
    from mpt.optim import adam

    with pytest.raises(ValidationError):
        adam.Settings(betas=betas)


def test_decoupled_decay_shrinks_a_weight_that_has_no_gradient_by_rate_times_decay():
    module = INSTALLED.find("optim", "adamw").load()
    weight = torch.nn.Parameter(torch.full((2,), 2.0))
    optimizer = module.build(module.Settings(lr=0.5, weight_decay=0.1, decoupled=True), [weight])
    weight.grad = torch.zeros(2)
    optimizer.step()
    assert weight.tolist() == pytest.approx([1.9, 1.9])


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_two_kernels_of_one_update_are_refused(name):
    optimizer = INSTALLED.find("optim", name)
    with pytest.raises(ValidationError, match="fused and foreach are two kernels"):
        optimizer.settings_class(fused=True, foreach=True)


def test_nesterov_without_momentum_is_refused():
    from mpt.optim import sgd

    with pytest.raises(ValidationError, match="nesterov needs momentum"):
        sgd.Settings(nesterov=True, momentum=0.0)
