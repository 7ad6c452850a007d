"""Packed frozen weights: what they compute, what they hold, with which tricks and modes, and what is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from mpt.engine.building.build import build_run
from mpt.engine.building.initial_weights import load_initial_weights
from mpt.engine.state.state import capture, restore
from mpt.errors import CheckpointError, ConfigError
from mpt.memory.adapters.layers import fold_all, put_adapter
from mpt.memory.low_bit import packed_linear
from mpt.memory.low_bit.formats import FORMATS
from mpt.memory.low_bit.packed_linear import PackedLinear, PackedProduct, pack
from mpt.memory.low_bit_base import Settings, build
from mpt.memory.travelling.weight_traffic import Traffic
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.trace import live_peak
from mpt.run.checkpoints.state import pack as pack_state
from mpt.run.checkpoints.state import unpack as unpack_state
from mpt.seams import Run
from mpt.seams.trick_kinds import fold
from tests.engine import parts
from tests.memory import mechanism
from tests.memory.test_stream_weights import VIT, vit
from tests.planner.configs import DIGITS, make
from tests.planner.cpu_truth import trace_real

FEW = {"lora": {"rank": 2}}
STREAM = {"stream_weights": {"min_kibibytes": 0}}


def packed(name: str = "nf4", precision: Any = "bf16", **memory: Any) -> Run:
    return vit(precision, {**FEW, "low_bit_base": name, **memory})


def trained(run: Run, steps: int = 2) -> dict[str, Tensor]:
    """Train from adapters that are not zero, so that what flows through them matters; return the weights."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in run.task.modules["net"].named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(torch.randn(parameter.shape) / 8)
    mechanism.train(run, [parts.batch(seed) for seed in range(steps)])
    return mechanism.state(run)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_computes_with_its_unpacked_weight_and_keeps_only_the_packed_one(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 24)
    pack(layer, name)
    assert isinstance(layer, PackedLinear)
    entry = torch.randn(2, 5, 48, requires_grad=True)
    plain = functional.linear(entry, layer.weight, layer.bias)
    expected = torch.autograd.grad(plain.square().sum(), entry)[0]
    found = layer(entry)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), entry)[0], expected)
    kept = mechanism.saved_bytes(lambda: layer(entry), list(layer.parameters()))
    assert kept == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(entry).dtype == torch.bfloat16


def test_gradients_of_gradients_pass_through_a_packed_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).double()
    pack(layer, "int8")
    entry = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda x: layer(x).tanh(), entry)


@pytest.mark.parametrize("name", FORMATS)
def test_only_adapters_and_head_move_and_a_resume_is_exact(name: str) -> None:
    through, first, second = (packed(name) for _ in range(3))
    before = mechanism.state(first)
    batches = [parts.batch(seed) for seed in range(4)]
    mechanism.train(through, batches[:2])
    mechanism.train(first, batches[:2])
    restore(second, unpack_state(*pack_state(capture(first))))
    mechanism.train(through, batches[2:])
    mechanism.train(second, batches[2:])
    after = mechanism.state(second)
    assert mechanism.same(mechanism.state(through), after)
    moved = {key for key in after if not torch.equal(before[key], after[key])}
    assert moved
    assert all("lora_" in key or ".head." in key for key in moved)
    assert any(key.endswith("weight_codes") for key in after)


@pytest.mark.parametrize(
    "beside", [STREAM, {"recompute": "all"}, {**STREAM, "recompute": "all"}], ids=str
)
@pytest.mark.parametrize("name", ["fp8", "nf4"])
def test_streamed_and_recomputed_packed_weights_train_to_the_same_bits(
    name: str, beside: dict[str, Any]
) -> None:
    assert mechanism.same(trained(packed(name)), trained(packed(name, **beside)))


@pytest.mark.parametrize(
    "order", [("stream_weights", "low_bit_base"), ("low_bit_base", "stream_weights")]
)
def test_what_travels_is_the_packed_weight_in_any_order(order: tuple[str, ...]) -> None:
    values = {**STREAM, "low_bit_base": "nf4"}
    run = vit("bf16", {**FEW, **{name: values[name] for name in order}})
    names = {
        name
        for layer in run.task.modules["net"].modules()
        for name in getattr(layer, "travelling_names", ())
    }
    assert {"weight_codes", "weight_scales"} <= names


class Reused(Traffic):
    """Copies weights into three buffers in turn, as trainers with own buffers do (two would hide it)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffers: dict[tuple[torch.Size, torch.dtype, int], Tensor] = {}
        self.turn = 0

    def send(self, parameters: list[nn.Parameter]) -> tuple[dict[nn.Parameter, Tensor], Any]:
        self.turn = (self.turn + 1) % 3
        copies = {}
        for number, one in enumerate(parameters):
            key = (one.shape, one.dtype, 3 * number + self.turn)
            buffer = self.buffers.setdefault(key, torch.empty_like(one, requires_grad=False))
            copies[one] = buffer.copy_(one.detach()).view_as(buffer)
        return copies, None


class OnTheContext(torch.autograd.Function):
    """The defect: the packed weight as an attribute of the context, past `save_for_backward`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, name: str, rows: int, columns: int, is_turned: bool, *own: Tensor
    ) -> Tensor:
        ctx.packed, ctx.terms = own, (name, rows, columns)
        return input @ FORMATS[name].unpack(own, rows, columns, input.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight = FORMATS[ctx.terms[0]].unpack(ctx.packed, *ctx.terms[1:], gradient.dtype)
        return gradient @ weight, *[None] * (4 + len(ctx.packed))


@contextlib.contextmanager
def reused_buffers(product: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("mpt.memory.stream_weights.Traffic", Reused)
        patch.setattr(packed_linear, "product", product)
        yield


def losses_and_gradients(run: Run) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    for parameter in run.task.modules["net"].parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.data.normal_(std=0.1)
    phase = run.phases[0]
    with run.precision.forward():
        (loss,) = [loss.value for loss in phase.losses(run.task.draw(parts.batch(), phase))]
    loss.backward()
    weights = [parameter for parameter in phase.module.parameters() if parameter.requires_grad]
    return loss.detach(), [parameter.grad for parameter in weights if parameter.grad is not None]


def test_a_packed_weight_on_the_context_is_caught_by_comparing_streamed_and_resident_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss, gradients = losses_and_gradients(packed())
    for product, is_right in ((PackedProduct.apply, True), (OnTheContext.apply, False)):
        with reused_buffers(product, monkeypatch):
            own_loss, own = losses_and_gradients(packed(**STREAM))
        assert torch.equal(own_loss, loss), "the forward is right in both"
        assert (
            all(torch.equal(one, other) for one, other in zip(own, gradients, strict=True))
            is is_right
        )


def test_the_defect_hides_where_nothing_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, gradients = losses_and_gradients(packed())
    with reused_buffers(OnTheContext.apply, monkeypatch):
        own_loss, own = losses_and_gradients(packed())
    assert torch.equal(own_loss, loss)
    assert all(torch.equal(one, other) for one, other in zip(own, gradients, strict=True))


@pytest.mark.parametrize(
    "precision", ["fp32", "bf16", "bf16-pure", {"mode": "O2", "dtype": "bfloat16"}], ids=str
)
def test_modes_leave_codes_and_scales_alone(precision: Any) -> None:
    run = packed("nf4", precision)
    state = run.task.modules["net"].state_dict()
    found = {
        key.rpartition(".")[2]: value.dtype for key, value in state.items() if ".weight_" in key
    }
    assert found == {
        "weight_codes": torch.uint8,
        "weight_scales": torch.int32,
        "weight_table": torch.int32,
    }
    before = mechanism.state(run)
    after = trained(run, 1)
    assert any(not torch.equal(before[key], after[key]) for key in after)


@pytest.mark.parametrize("beside", [{}, STREAM, {"recompute": "all"}], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_plan_holds_the_bytes_of_real_steps(name: str, beside: dict[str, Any]) -> None:
    config = make(VIT, "bf16", 8, **FEW, low_bit_base=name, **beside)
    planned = trace_config(config, DIGITS, 8, find_gpu("rtx3060"), None, torch.device("cpu")).trace
    assert live_peak(planned) == live_peak(trace_real(config, DIGITS, 8))


def test_averages_share_the_packed_weights_and_follow_the_adapters() -> None:
    run = vit("bf16", {**FEW, "low_bit_base": "nf4"}, task={"ema": 0.5})
    net, twin = run.task.modules["net"], run.task.modules["net_ema"]
    codes = next(key for key, _ in net.named_parameters() if key.endswith("weight_codes"))
    assert net.get_parameter(codes) is twin.get_parameter(codes)
    before = copy.deepcopy(twin.state_dict())
    trained(run)
    run.task.after_step(0, 8)
    assert torch.equal(before[codes], twin.state_dict()[codes])


def test_folding_gives_plain_layers_that_compute_the_same_in_any_order() -> None:
    for order in (("lora", "low_bit_base"), ("low_bit_base", "lora")):
        values: dict[str, Any] = {**FEW, "low_bit_base": "nf4"}
        run = vit("fp32", {**STREAM, **{name: values[name] for name in order}})
        trained(run, 1)
        net, image = run.task.modules["net"].eval(), parts.batch()["image"]
        expected = net(image)
        for trick in run.tricks:
            trick.fold(run.task.modules)
        torch.testing.assert_close(net(image), expected)
        assert net.state_dict().keys() == vit().task.modules["net"].state_dict().keys()
        assert not any(isinstance(module, PackedLinear) for module in net.modules())


@pytest.mark.parametrize("name", FORMATS)
def test_a_folded_average_has_its_own_adapters_and_not_the_networks(name: str) -> None:
    run = vit("fp32", {**FEW, "low_bit_base": name}, task={"ema": 0.9})
    trained(run)
    modules = run.task.modules
    with torch.no_grad():
        for key, parameter in modules["net_ema"].named_parameters():
            if key.endswith("lora_b"):
                parameter.mul_(-1)
    entry = {one: parts.batch(9)["image"] for one in ("net", "net_ema")}
    before = {one: modules[one].eval()(image) for one, image in entry.items()}
    fold(run.tricks, modules)
    for one, image in entry.items():
        torch.testing.assert_close(modules[one](image), before[one], atol=1e-4, rtol=1e-4)


def test_a_weight_that_two_networks_share_is_one_again_unless_their_adapters_differ() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    networks = {"gen": nn.Sequential(first), "disc": nn.Sequential(second)}
    trick = build(Settings())
    trick.pack_weights(networks)
    own = copy.deepcopy(networks), copy.deepcopy(networks)
    trick.fold(own[0])
    assert own[0]["gen"][0].weight is own[0]["disc"][0].weight
    layers = [own[1][name][0] for name in ("gen", "disc")]
    for layer in layers:
        put_adapter(layer, 2, 1.0, torch.Generator().manual_seed(0), trained=True, dora=False)
        nn.init.ones_(layer.lora_b)
    layers[1].lora_b.data.neg_()
    expected = [layer(torch.ones(1, 64)) for layer in layers]
    fold_all(own[1])
    for layer, output in zip(layers, expected, strict=True):
        torch.testing.assert_close(layer(torch.ones(1, 64)), output)


def test_what_cannot_be_packed_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"low_bit_base: no Linear layer matches nothing\.\*"):
        packed(low_bit_base={"layers": ["nothing.*"]})
    with pytest.raises(
        ConfigError, match=r"low_bit_base: net\.blocks\.0\.\S+ is trained, .*memory.lora,"
    ):
        vit("bf16", {"low_bit_base": "nf4"})
    with pytest.raises(ConfigError, match=r"net\.head is trained, and a packed weight cannot be"):
        packed(low_bit_base={"keep": []})
    with pytest.raises(ConfigError, match="O1 casts call by call"):
        packed(precision="O1")


def test_frozen_blocks_are_packed_without_adapters_and_tied_weights_once() -> None:
    frozen = {
        "train": {"freeze": ["net.blocks.*"]},
        "memory": {"low_bit_base": {"layers": ["net.blocks.*"]}},
    }
    run = vit("bf16", **frozen)
    assert "Linear layers in nf4" in " ".join(run.messages)
    assert isinstance(run.task.modules["net"], nn.Module)
    first, second, other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    tied = pack(first, "fp8")
    pack(second, "fp8", tied)
    pack(other, "fp8")
    assert first.weight_codes is second.weight_codes is not other.weight_codes


def test_a_packed_checkpoint_is_no_start_for_plain_weights(tmp_path: Path) -> None:
    run = packed()
    file = tmp_path / "packed.safetensors"
    save_file(
        {name: value.clone() for name, value in run.task.modules["net"].state_dict().items()},
        str(file),
    )
    with pytest.raises(
        CheckpointError, match=r"frozen weights of .* are packed .*mpt convert RUN --to safetensors"
    ):
        load_initial_weights(dict(vit().task.modules), file)


def test_a_plan_needs_no_values() -> None:
    config = make(VIT, "bf16", 8, **FEW, low_bit_base="nf4")
    assert build_run(config, torch.device("cpu"), DIGITS).tricks
