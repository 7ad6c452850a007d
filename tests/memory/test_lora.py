"""Adapters: what they compute, what they leave alone, what they save, and how they leave the network again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.building.initial_weights import load_initial_weights
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import CheckpointError, ConfigError
from mpt.memory.adapters.layers import AdaptedConv2d, AdaptedLinear, put_adapter
from mpt.memory.lora import Lora, Settings
from mpt.run.checkpoints.state import pack, unpack
from mpt.run.checkpoints.state_checks import refuse_split
from mpt.seams import Precision, Run, Task
from tests.engine import parts
from tests.memory import mechanism


class Net(nn.Module):
    """A Linear layer, a 1x1 convolution, a strided one, attention that reads a weight past its layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Conv2d(3, 8, 1)
        self.strided = nn.Conv2d(8, 8, 1, stride=2, bias=False)
        self.wide = nn.Conv2d(8, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
        self.linear = nn.Linear(8, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.wide(self.strided(self.point(image))).flatten(2).transpose(1, 2)
        features = self.encoder(self.attention(features, features, features)[0])
        output: torch.Tensor = self.fc(self.linear(features).mean(1))
        return output


class Plain(Task):
    def __init__(self, net: nn.Module) -> None:
        self.modules = {"net": net, "net_ema": copy.deepcopy(net).requires_grad_(False)}
        self.trainable = {"net": net}


def adapted(**settings: Any) -> tuple[Net, Plain]:
    torch.manual_seed(0)
    net = Net()
    task = Plain(net)
    Lora(Settings(**settings)).apply(task, Precision())
    return net, task


def test_a_fresh_adapter_changes_nothing_and_trains_the_chosen_layers_and_the_head() -> None:
    torch.manual_seed(0)
    plain = Net()
    net, task = adapted(rank=2)
    image = torch.rand(2, 3, 8, 8)
    # convolutions without gradient take other kernels
    torch.testing.assert_close(net(image), plain(image))
    assert {type(module) for module in (net.point, net.strided)} == {AdaptedConv2d}
    assert type(net.linear) is AdaptedLinear
    assert type(net.fc) is nn.Linear, "a head is trained as it is"
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert trained == {f"{n}.lora_{x}" for n in ("point", "strided", "linear") for x in "ab"} | {
        "fc.weight",
        "fc.bias",
    }
    twin = task.modules["net_ema"]
    assert twin.state_dict().keys() == net.state_dict().keys()
    assert torch.equal(twin.get_parameter("linear.lora_a"), net.get_parameter("linear.lora_a"))
    assert not any(parameter.requires_grad for parameter in twin.parameters())


def test_an_adapter_is_the_product_of_two_thin_matrices_and_folds_into_the_weight() -> None:
    net, task = adapted(rank=2, alpha=3)
    with torch.no_grad():
        for layer in (net.point, net.strided, net.linear):
            layer.get_parameter("lora_b").normal_()
    features = torch.rand(4, 8)
    a, b = net.linear.get_parameter("lora_a"), net.linear.get_parameter("lora_b")
    weight = net.linear.weight + 3 / 2 * b @ a
    torch.testing.assert_close(
        net.linear(features), functional.linear(features, weight, net.linear.bias)
    )
    image = torch.rand(2, 3, 8, 8)
    before = net(image)
    Lora(Settings()).fold(task.modules)
    torch.testing.assert_close(net(image), before)
    assert net.state_dict().keys() == Net().state_dict().keys()


@pytest.mark.parametrize(
    "mode", ["fp32", "amp", pytest.param("O2", marks=pytest.mark.slow), "fp16-pure", "bf16-sr"]
)
def test_only_adapters_and_head_move_in_every_kind_of_mode_and_a_resume_is_exact(mode: str) -> None:
    def make() -> Run:
        precision = {"mode": mode, "loss_scale": 8.0} if mode in ("O2", "fp16-pure") else mode
        return parts.classifier(
            precision,
            model={
                "name": "torchvision:resnet18",
                "channels": 3,
                "image_size": 16,
                "small_stem": True,
            },
            dataset={"name": "digits"},
            optimizer={"name": "adam", "lr": 1e-2, "eps": 1e-4},
            memory={"lora": {"rank": 2}},
        )

    def batch(seed: int) -> Any:
        one = parts.batch(seed, 4)
        return {**one, "image": one["image"].expand(-1, 3, -1, -1)}

    run = make()
    before = {name: value.clone() for name, value in run.task.modules["net"].state_dict().items()}
    mechanism.train(run, [batch(0)])
    changed = {
        name
        for name, value in run.task.modules["net"].state_dict().items()
        if not torch.equal(value, before[name])
        and "running_" not in name
        and "num_batches" not in name
    }
    assert changed
    assert all("lora_" in name or name.startswith("fc.") for name in changed)
    # Of all optimizer state, none is of a frozen weight.
    held = sum(len(group["params"]) for group in run.optimizers["net"].param_groups)
    assert (
        held
        == sum(parameter.requires_grad for parameter in run.task.modules["net"].parameters())
        < 20
    )

    resumed = make()
    restore(resumed, copy.deepcopy(unpack(*pack(capture(run)))))
    for one in (run, resumed):
        mechanism.train(one, [batch(1)])
    for name, value in run.task.modules["net"].state_dict().items():
        assert torch.equal(value, resumed.task.modules["net"].state_dict()[name]), name


def test_targets_that_match_nothing_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="no Linear layer or 1x1 convolution matches nothing"):
        adapted(targets=["nothing.*"])


@pytest.mark.parametrize(
    "settings",
    [
        {"targets": ["*", "text_encoder.*"]},
        {"ranks": {"*.text_model.*": 4}},
        {"alphas": {"lora_te*": 1}},
    ],
)
def test_layers_of_a_text_encoder_that_is_not_here_are_refused_by_name(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^memory.lora.{min(settings)}: .* is of a text encoder, and none is"
    ):
        adapted(**settings)
    holder = nn.ModuleDict({"text_encoder": nn.Linear(2, 2)})
    Lora(Settings(targets=["*.text_encoder"], full=[])).apply(Plain(holder), Precision())
    assert type(holder["text_encoder"]) is AdaptedLinear


def test_adapters_beside_weights_that_were_never_trained_are_warned_of(tmp_path: Path) -> None:
    run = parts.classifier(memory={"lora": {"rank": 2, "full": []}})
    assert any("were never trained" in note for note in run.notes)
    assert any("parameters are trained, adapters included" in message for message in run.messages)
    assert update(run, run.phases[0], parts.batch()).finite


def test_a_checkpoint_with_adapters_is_no_start_that_leaves_them_out(tmp_path: Path) -> None:
    adapted = parts.classifier(memory={"lora": {"rank": 2, "full": []}})
    file = tmp_path / "adapted.safetensors"
    save_file(capture(adapted)["modules"]["net"], str(file))
    with pytest.raises(CheckpointError, match=r"has adapters .*mpt convert RUN --to safetensors"):
        load_initial_weights(dict(parts.classifier().task.modules), file)
    own = dict(adapted.task.modules)
    assert "all" in load_initial_weights(own, file).message, (
        "a network with such weights of its own"
    )


class Tied(nn.Module):
    """Two layers that share a weight, and one that shares its own with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6)
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(self.second(self.first(self.embedding(tokens)).sin()))
        return output


def test_layers_that_share_a_weight_share_one_adapter_which_is_folded_once() -> None:
    torch.manual_seed(0)
    net = Tied()
    task = Plain(net)
    trick = Lora(Settings(rank=2))
    trick.apply(task, Precision())
    assert net.first.lora_a is net.second.lora_a
    assert net.first.lora_b is net.second.lora_b
    assert type(net.out) is nn.Linear, "the embedding would read the folded weight"
    assert not net.out.weight.requires_grad
    nn.init.normal_(net.first.get_parameter("lora_b"))
    tokens = torch.arange(6)
    before = net(tokens)
    (before**2).sum().backward()  # both layers' calls add up in its gradient
    trick.fold(task.modules)
    torch.testing.assert_close(net(tokens), before)


def test_adapters_begin_otherwise_under_another_seed() -> None:
    def begin(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        net = Tied()
        Lora(Settings(rank=2)).apply(Plain(net), Precision())
        return net.get_parameter("first.lora_a").detach().clone()

    assert torch.equal(begin(1), begin(1))
    assert not torch.equal(begin(1), begin(2))


def test_a_state_with_two_adapters_for_one_weight_is_refused() -> None:
    torch.manual_seed(0)
    net = Tied()
    Lora(Settings(rank=2)).apply(Plain(net), Precision())
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    refuse_split("net", net, saved)
    saved["second.lora_a"] += 1
    with pytest.raises(
        CheckpointError,
        match=r"net.first.lora_a and net.second.lora_a are one weight of this model",
    ):
        refuse_split("net", net, saved)


def test_an_adapter_begins_as_published() -> None:
    """A is uniform within 1 / sqrt(in) and B zero (loralib's `reset_parameters`); alpha is twice the rank."""
    for layer in (nn.Linear(64, 4), nn.Conv2d(64, 4, 1)):
        put_adapter(layer, 16, 1.0, torch.Generator().manual_seed(0), trained=True, dora=False)
        # 1 / sqrt(64)
        assert 0.12 < float(layer.get_parameter("lora_a").detach().abs().max()) <= 0.125
        assert not layer.get_parameter("lora_b").any()
    assert Settings(rank=16).factor_of("net.layer") == 2.0
    assert Settings(rank=16, alpha=4).factor_of("net.layer") == 0.25


def test_a_network_without_a_layer_for_an_adapter_is_named_with_the_setting_that_trains_it() -> (
    None
):
    """DCGAN's generator has transposed convolutions alone; its discriminator has others."""
    data = {
        "model": {"name": "dcgan", "image_size": 16, "features": 8},
        "dataset": "digits",
        "memory": {"lora": {"rank": 2, "targets": ["convolutions"]}},
        "train": {"batch_size": 4, "steps": 1},
    }
    with pytest.raises(ConfigError, match=r"nothing of network gen would be trained"):
        build_run(load_config(data), torch.device("cpu"), parts.DIGITS)
    data["memory"] = {"lora": {"rank": 2, "targets": ["convolutions"], "full": ["gen.*"]}}
    build_run(load_config(data), torch.device("cpu"), parts.DIGITS)
