"""The smaller tricks: each exact where it says so, and each proved by what it saves."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from mpt.config.finding.registry import Registry
from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.state import capture, restore
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.memory import compile as compile_networks
from mpt.memory import empty_cache_every, low_bit_optimizer, offload_activations, park_optimizer
from mpt.memory.cpu_optimizer import HostOptimizer
from mpt.memory.travelling.host_blocks import HostBlocks
from mpt.optim.shared.schedules import set_learning_rates
from mpt.run.checkpoints.state import pack, unpack
from mpt.seams import Run
from mpt.seams.phase_losses import entered
from tests.engine import parts
from tests.memory import mechanism

EXACT: list[dict[str, Any]] = [
    {"optimizer_in_backward": True},
    {"release_grads_after": ["*"]},
    {"expandable_segments": True},
    {"empty_cache_every": 2},
    {"set_to_none": True},
    {"set_to_none": False},
    {"offload_activations": 0.0},
    {"recompute": "sqrt"},
    {"stream_weights": {"min_kibibytes": 0}},
    {"park_optimizer": True},
    {"cpu_optimizer": True},  # exact on a CPU, where it uses the same kernels
]
EVERY: list[dict[str, Any]] = [
    *EXACT,
    {"channels_last": True},
    {"micro_batch": 2},
    {"prune": 0.5},
    {"cuda_graphs": True},
    {"compile": {"backend": "aot_eager"}},
]
PLANNED = [*EVERY, {"low_bit_optimizer": True}, {"low_bit_optimizer": {"bits": 4}}]
MAKERS = {"classifier": parts.classifier, "gan": parts.gan}


@pytest.fixture(autouse=True)
def _offload_from_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device to leave, so that the hooks are exercised without a GPU."""
    monkeypatch.setattr(offload_activations, "POINTLESS_ON", {})


def gradients(run: Run, batch: Any) -> dict[str, Tensor]:
    """Return the gradients at the moment of each phase's step."""
    found: dict[str, Tensor] = {}
    step = run.precision.step

    def spy(phase: Any, clip_norm: Any) -> Any:
        for name, parameter in phase.module.named_parameters():
            if parameter.grad is not None:
                found[f"{phase.name}.{name}"] = parameter.grad.clone()
        return step(phase, clip_norm)

    run.precision.step = spy  # type: ignore[method-assign]
    mechanism.train(run, [batch])
    return found


@functools.cache
def trained(make: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the weights and the optimizers' states of a run without tricks after two batches."""
    plain = MAKERS[make]()
    mechanism.train(plain, [parts.batch(seed) for seed in range(2)])
    return mechanism.state(plain), {
        name: optimizer.state_dict() for name, optimizer in plain.optimizers.items()
    }


@pytest.mark.parametrize("trick", EXACT, ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_exact_tricks_train_bit_equally(make: str, trick: dict[str, Any]) -> None:
    weights, optimizers = trained(make)
    run = MAKERS[make](memory=trick)
    mechanism.train(run, [parts.batch(seed) for seed in range(2)])
    assert mechanism.same(weights, mechanism.state(run))
    for name, ours in optimizers.items():
        theirs = run.optimizers[name].state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()


@functools.cache
def names_of_plain_gan() -> dict[str, list[str]]:
    """Return the names of all tensors of each network without tricks."""
    return {name: list(module.state_dict()) for name, module in parts.gan().task.modules.items()}


@pytest.mark.parametrize("trick", EVERY, ids=str)
def test_every_trick_keeps_names_and_copies_and_says_whether_it_is_exact(
    trick: dict[str, Any],
) -> None:
    plain, run = names_of_plain_gan(), parts.gan(memory=trick)
    assert isinstance(run.tricks[0].exact, bool)
    assert run.tricks[0].name == next(iter(trick))
    for name, keys in plain.items():
        assert keys == list(run.task.modules[name].state_dict())
    twin = copy.deepcopy(run.task.modules["gen"])
    assert list(twin.state_dict()) == plain["gen"]


@pytest.mark.parametrize(
    ("mode", "trick"),
    [
        pytest.param(
            mode, trick, marks=() if (row + column) % 2 else pytest.mark.slow, id=f"{trick}-{mode}"
        )
        for row, mode in enumerate(("fp32", "amp"))
        for column, trick in enumerate(PLANNED)
        if "compile" not in trick
    ],
)
def test_every_trick_can_be_planned(mode: str, trick: dict[str, Any]) -> None:
    config = load_config(
        {
            "model": {"name": "dcgan", "features": 4, "image_size": 16},
            "precision": mode,
            "memory": trick,
        }
    )
    with FakeTensorMode():
        run = build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        for _ in range(2):
            for phase in run.phases:
                update(run, phase, parts.DIGITS.zeros(4, "cpu"))


def test_every_file_with_settings_is_a_trick_by_its_name() -> None:
    names = set(Registry().names("memory"))
    needs_linear = {"lora", "low_bit_base"}  # tests/memory/test_lora.py, test_low_bit_base.py
    assert names == {next(iter(trick)) for trick in PLANNED} | needs_linear


def test_conflicts_are_refused_with_reason_and_way_out() -> None:
    pairs = [
        ("optimizer_in_backward", "micro_batch", "use recompute"),
        ("compile", "recompute", "leave one of the two"),
    ]
    pairs += [("cpu_optimizer", "low_bit_optimizer", "use one of the two")]
    for one, other, way_out in pairs:
        with pytest.raises(ConfigError, match=f"cannot be combined with {other}: .*{way_out}"):
            parts.classifier(memory={one: True, other: True})


# offload_activations


def test_offloading_leaves_only_small_tensors_and_weights_behind() -> None:
    run = parts.classifier(memory={"offload_activations": 0.0})
    trick = run.tricks[0]
    phase, batch = run.phases[0], parts.batch()
    left: list[Tensor] = []
    pack = trick.pack  # type: ignore[attr-defined]

    def spy(tensor: Tensor) -> Any:
        packed = pack(tensor)
        if isinstance(packed, Tensor):
            left.append(packed)
        return packed

    trick.pack = spy  # type: ignore[attr-defined]
    with entered(trick.forward() for trick in run.tricks):
        loss = next(iter(phase.losses(batch)))
    weights = {p.untyped_storage()._cdata for p in run.task.net.parameters()}
    assert sum(t.nbytes for t in left if t.untyped_storage()._cdata not in weights) == 0
    assert len(trick.saved) > 5  # type: ignore[attr-defined]
    loss.value.backward()


def test_small_tensors_stay_and_shared_ones_are_copied_once() -> None:
    trick = offload_activations.build(offload_activations.Settings(min_mebibytes=0.001))
    x = torch.rand(512, requires_grad=True)
    with trick.forward():
        y = x.exp()  # saves its result
        z = y * y.detach()  # saves it again, as the same storage
        small = x[:4].exp()
    assert len(trick.saved) == 1
    (z.sum() + small.sum()).backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[4:], (y.detach() ** 2)[4:])


def test_a_forward_holds_two_tensors_whose_copies_may_be_under_way_and_a_backward_none() -> None:
    trick = offload_activations.build(offload_activations.Settings(min_mebibytes=0.001))
    x = torch.rand(600, requires_grad=True)
    with trick.forward():
        y = x
        for _ in range(5):
            y = y.exp()
    assert [tensor.nbytes for tensor, _ in trick.leaving] == [2400, 2400]
    assert trick.host_bytes == 5 * 4096  # blocks are powers of two
    y.sum().backward()
    assert not trick.leaving
    with trick.forward():
        x.exp().exp()
    assert trick.host_bytes == 5 * 4096  # from those that were given back


def test_pinned_blocks_are_powers_of_two_and_stay() -> None:
    blocks = HostBlocks()
    for size in (0, 1, 1025, 2048):
        blocks.take(size)
    assert blocks.bytes == 0 + 1 + 2 * 2048
    blocks.give_back(1025)
    blocks.take(2000)
    assert blocks.bytes == 1 + 2 * 2048
    blocks.take(5000)
    assert blocks.bytes == 1 + 2 * 2048 + 8192


def test_on_a_cpu_offloading_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    run = parts.classifier(memory={"offload_activations": 0.0})
    with entered(trick.forward() for trick in run.tricks):
        next(iter(run.phases[0].losses(parts.batch())))
    assert run.tricks[0].saved == []  # type: ignore[attr-defined]


# optimizer_in_backward


def live_gradients(run: Run, batch: Any) -> int:
    """Return the largest number of gradients alive in the last phase after one more has arrived and been used."""
    parameters = list(run.phases[-1].module.parameters())
    most = 0

    def count(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad is not None for p in parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    for phase in run.phases:
        update(run, phase, batch)
    return most


def test_stepping_in_backward_leaves_no_gradient_for_the_next_to_stand_beside() -> None:
    assert live_gradients(parts.classifier(), parts.batch()) == 11
    assert (
        live_gradients(parts.classifier(memory={"optimizer_in_backward": True}), parts.batch()) == 0
    )
    assert live_gradients(parts.gan(memory={"optimizer_in_backward": True}), parts.batch()) == 0


def test_parameters_step_in_backward_in_every_update_and_not_in_the_first_alone() -> None:
    run = parts.gan(memory={"optimizer_in_backward": True})
    assert [live_gradients(run, parts.batch(seed)) for seed in range(3)] == [0, 0, 0]


def test_after_a_second_loss_that_failed_the_phases_losses_are_counted_anew() -> None:
    """Counted on, the next update's first loss would be taken for the last, and parameters step without the second."""
    plain, run = parts.gan(), parts.gan(memory={"optimizer_in_backward": True})
    phase = run.phases[0]
    assert run.tricks[0].losses == {"disc": 2, "gen": 1}  # type: ignore[attr-defined]

    def fail_in_second(batch: Any) -> Iterator[Any]:
        yield next(iter(phase.losses(batch)))
        raise torch.OutOfMemoryError("no room for the second")

    with pytest.raises(torch.OutOfMemoryError):
        update(run, replace(phase, losses=fail_in_second), parts.batch())
    run.buffers.restore()
    for trick in run.tricks:
        trick.abandon(phase)
    for one in plain, run:
        mechanism.train(one, [parts.batch(seed) for seed in range(2)])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))


def test_stepping_in_backward_works_with_a_static_scale() -> None:
    mode = {"mode": "amp", "dtype": "float16", "loss_scale": 128.0}
    plain, run = (
        parts.classifier(mode),
        parts.classifier(mode, memory={"optimizer_in_backward": True}),
    )
    mechanism.train(plain, [parts.batch()])
    mechanism.train(run, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {"precision": {"mode": "amp", "dtype": "float16"}},
            "scales its losses dynamically.*precision=bf16",
        ),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "clip_grad_norm": 1.0}}, "norm of all gradients"),
        ({"precision": {"mode": "O2", "dtype": "bfloat16"}}, "float32 masters"),
    ],
)
def test_stepping_in_backward_refuses_what_needs_all_gradients(
    sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        parts.classifier(**{"memory": {"optimizer_in_backward": True}, **sections})


# release_grads_after, set_to_none


def test_released_gradients_do_not_stand_beside_the_next_phase() -> None:
    for memory, alive in (
        ({}, True),
        ({"release_grads_after": ["disc"]}, False),
        ({"release_grads_after": ["gen"]}, True),
    ):
        run = parts.gan(memory=memory)
        update(run, run.phases[0], parts.batch())
        assert any(p.grad is not None for p in run.task.modules["disc"].parameters()) is alive
    with pytest.raises(ConfigError, match="no network is named 'nope'; trained are disc, gen"):
        parts.gan(memory={"release_grads_after": ["nope"]})


def test_gradients_outlive_clearing_only_where_set_to_none_is_off() -> None:
    for setting, alive in ((True, False), (False, True)):
        run = parts.classifier(memory={"set_to_none": setting})
        mechanism.train(run, [parts.batch()])
        run.phases[0].optimizer.zero_grad(set_to_none=True)
        run.phases[0].module.zero_grad(set_to_none=True)
        assert all((p.grad is not None) is alive for p in run.task.net.parameters())
        assert not alive or all(not p.grad.any() for p in run.task.net.parameters())  # type: ignore[union-attr]


# micro_batch


def test_micro_batches_keep_fewer_activations_and_the_same_gradients() -> None:
    batch = parts.batch(size=7)  # a smaller last part: 3, 3, 1
    model = {"name": "dcgan", "features": 4, "image_size": 16}
    plain, run = parts.gan(model=model), parts.gan(model=model, memory={"micro_batch": 3})
    for module in (*plain.task.modules.values(), *run.task.modules.values()):
        module.eval()  # BatchNorm on its running statistics: else it sees smaller batches
    expected, found = gradients(plain, batch), gradients(run, batch)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        # The same sum in another order: equal up to rounding.
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_micro_batches_warn_of_batchnorm() -> None:
    run = parts.classifier(memory={"micro_batch": 2})
    assert "BatchNorm sees 2 samples at a time instead of 8" in run.notes[0]


# cpu_optimizer, low_bit_optimizer


def test_the_host_optimizer_follows_changes_made_on_the_device_and_resumes_plain_state() -> None:
    run, plain = parts.classifier(memory={"cpu_optimizer": True}), parts.classifier()
    assert isinstance(run.phases[0].optimizer, HostOptimizer)
    for one in (run, plain):
        mechanism.train(one, [parts.batch()])
        with torch.no_grad():
            for parameter in one.task.net.parameters():
                parameter.clamp_(-0.01, 0.01)
        one.optimizers["net"].load_state_dict(copy.deepcopy(one.optimizers["net"].state_dict()))
        one.optimizers["net"].param_groups[0]["lr"] = 0.5
        mechanism.train(one, [parts.batch(1)])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))


def test_the_host_optimizer_keeps_its_state_in_host_memory() -> None:
    run = parts.gan(memory={"cpu_optimizer": True})
    mechanism.train(run, [parts.batch()])
    own = set(run.task.modules["disc"].parameters())
    optimizer = run.optimizers["disc"]
    assert not own & set(optimizer.state)
    assert all(
        tensor.device.type == "cpu"
        for state in optimizer.state.values()
        for tensor in state.values()
    )


def test_a_missing_low_bit_backend_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit_optimizer, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"needs bitsandbytes or torchao.*pip install bitsandbytes"
    ):
        parts.gan(memory={"low_bit_optimizer": True})
    with pytest.raises(ConfigError, match="torchao is not installed"):
        parts.gan(memory={"low_bit_optimizer": "torchao"})
    with pytest.raises(ConfigError, match="there is no 8-bit SGD"):
        parts.classifier(memory={"low_bit_optimizer": True})


def test_low_bit_optimizers_take_over_groups_and_hyperparameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Adam8bit(torch.optim.Adam):
        """Stands in for a backend's optimizer, with the arguments that both share."""

        def __init__(self, params: Any, lr: float, betas: Any, eps: float) -> None:
            super().__init__(params, lr=lr, betas=betas, eps=eps)

    backend = ModuleType("torchao.optim")
    backend.Adam8bit = Adam8bit  # type: ignore[attr-defined]
    monkeypatch.setattr(
        low_bit_optimizer, "find_spec", lambda name: name if name == "torchao" else None
    )
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", backend)
    run, plain = (
        parts.gan(memory={"release_grads_after": True, "low_bit_optimizer": True}),
        parts.gan(),
    )
    assert {type(phase.optimizer) for phase in run.phases} == {Adam8bit}
    assert run.optimizers["gen"] is run.phases[1].optimizer
    mechanism.train(run, [parts.batch()])
    mechanism.train(plain, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))
    # The trick that stands before it in the configuration is on the new optimizers, not on those that went.
    assert all(
        parameter.grad is None
        for network in run.task.trainable.values()
        for parameter in network.parameters()
    )


def test_a_backend_that_wants_rates_as_tensors_gets_them_from_a_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchao's optimizers begin with tensors and refuse a number, which a schedule sets at every step."""
    seen: dict[torch.optim.Optimizer, list[float]] = {}

    class Adam8bit(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, betas: Any, eps: float) -> None:
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                group["lr"] = torch.tensor(lr)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert all(isinstance(group["lr"], Tensor) for group in self.param_groups)
            seen.setdefault(self, []).append(float(self.param_groups[0]["lr"]))

    backend = ModuleType("torchao.optim")
    backend.Adam8bit = Adam8bit  # type: ignore[attr-defined]
    monkeypatch.setattr(
        low_bit_optimizer, "find_spec", lambda name: name if name == "torchao" else None
    )
    monkeypatch.setitem(sys.modules, "torchao.optim", backend)
    run = parts.gan(memory={"low_bit_optimizer": True})
    optimizer = run.optimizers["gen"]
    for step in (0, 50):
        set_learning_rates(run.optimizers, run.optimizer_settings, step, 100, 0.5 if step else 1.0)
        mechanism.train(run, [parts.batch()])
        assert type(optimizer.param_groups[0]["lr"]) is float  # for logs and checkpoints
    first, last = seen[optimizer]
    assert last == pytest.approx(0.5 * first)


def test_a_planned_low_bit_step_calls_its_closure() -> None:
    weight = torch.ones(8, requires_grad=True)
    planned = low_bit_optimizer.AllocatedAdam([{"params": [weight]}])

    def closure() -> Tensor:
        loss = weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert planned.step(closure) == 8
    assert weight in planned.state


@pytest.mark.slow
def test_the_planned_low_bit_state_is_as_large_as_the_real_one() -> None:
    pytest.importorskip(
        "bitsandbytes", reason="the extra bitsandbytes is not installed", exc_type=ImportError
    )
    model = {"name": "dcgan", "features": 16, "image_size": 16}
    run = parts.gan(model=model, memory={"low_bit_optimizer": "bitsandbytes"})
    planned = low_bit_optimizer.AllocatedAdam(run.optimizers["gen"].param_groups)
    for parameter in run.task.modules["gen"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    planned.step()
    run.optimizers["gen"].step()
    sizes = []
    for optimizer in (planned, run.optimizers["gen"]):
        own = (
            value
            for state in optimizer.state.values()
            for name, value in state.items()
            if "qmap" not in name
        )
        sizes.append(sum(value.nbytes for value in own if isinstance(value, Tensor)))
    assert sizes[0] == sizes[1]


@pytest.mark.slow  # torchao compiles its step
@pytest.mark.parametrize("backend", ["bitsandbytes", "torchao"])
def test_installed_low_bit_backends_train_and_resume_bit_for_bit(backend: str) -> None:
    pytest.importorskip(
        backend, reason=f"the extra {backend} is not installed", exc_type=ImportError
    )
    model = {"name": "dcgan", "features": 16, "image_size": 16}
    make = lambda: parts.gan(model=model, memory={"low_bit_optimizer": backend})  # noqa: E731
    run, resumed = make(), make()
    mechanism.train(run, [parts.batch(), parts.batch(1)])
    structure, tensors = pack(capture(run))
    states = [value for state in run.optimizers["gen"].state.values() for value in state.values()]
    assert any(
        getattr(value, "codes", value).dtype == torch.uint8
        for value in states
        if isinstance(value, Tensor)
    )
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors.values())
    restore(resumed, unpack(structure, {name: tensor.clone() for name, tensor in tensors.items()}))
    mechanism.train(run, [parts.batch(2)])
    mechanism.train(resumed, [parts.batch(2)])
    assert mechanism.same(mechanism.state(run), mechanism.state(resumed))


# channels_last, compile, the CUDA allocator


def test_channels_last_reorders_weights_and_activations_and_changes_only_rounding() -> None:
    plain, run = parts.classifier(), parts.classifier(memory={"channels_last": True})
    seen: dict[str, bool] = {}
    for name, one in (("plain", plain), ("run", run)):
        convolution = one.task.net.stages[1][0]
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last) is (
            name == "run"
        )
        convolution.register_forward_hook(
            lambda _m, _a, out, name=name: seen.update(
                {name: out.is_contiguous(memory_format=torch.channels_last)}
            )
        )
    expected, found = gradients(plain, parts.batch()), gradients(run, parts.batch())
    assert seen == {"plain": False, "run": True}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        # other kernels, another order of sums
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_compiled_networks_train_as_before_up_to_rounding() -> None:
    plain, run = parts.classifier(), parts.classifier(memory={"compile": {"backend": "aot_eager"}})
    expected, found = gradients(plain, parts.batch()), gradients(run, parts.batch())
    assert run.task.net._compiled_call_impl is not None
    for name, gradient in expected.items():
        # decomposed operators round anew
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match="use precision=amp"):
        parts.classifier("O1", memory={"compile": True})


@pytest.mark.parametrize(
    ("mode", "said"), [("default", "taken as fused"), ("reduce-overhead", "CUDA graphs")]
)
def test_a_plan_says_what_it_leaves_out_of_a_compiled_run(
    mode: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda *_, **__: None)  # as the planner replaces it
    run = parts.classifier()
    with FakeTensorMode():
        compile_networks.build(compile_networks.Settings.model_validate({"mode": mode})).attach(run)
    assert said in run.notes[-1]


def test_the_allocator_settings_say_that_a_cpu_has_none() -> None:
    run = parts.classifier(memory={"expandable_segments": True, "empty_cache_every": 3})
    assert ["nothing" in note for note in run.notes] == [True, True]


def test_the_cache_is_emptied_every_so_many_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))
    trick = empty_cache_every.build(empty_cache_every.Settings(updates=3))
    # which lets its optimizer step in pieces
    run = parts.classifier("bf16-sr", optimizer={"name": "lion"})
    run.tricks.append(trick)
    trick.has_cache = True
    mechanism.train(run, [parts.batch(seed) for seed in range(7)])
    assert len(emptied) == 2


@pytest.mark.parametrize("mode", ["bf16-sr", "bf16-kahan", "bf16-24bit"])
def test_gradients_are_released_only_when_all_pieces_have_stepped(mode: str) -> None:
    plain, run = (
        parts.classifier(mode),
        parts.classifier(mode, memory={"release_grads_after": True}),
    )
    before = mechanism.state(run)
    mechanism.train(plain, [parts.batch()])
    mechanism.train(run, [parts.batch()])
    after = mechanism.state(run)
    assert all(
        not torch.equal(before[f"net.{name}"], after[f"net.{name}"])
        for name, _ in plain.task.net.named_parameters()
    )
    assert mechanism.same(mechanism.state(plain), after)
    assert all(parameter.grad is None for parameter in run.task.net.parameters())


def test_tricks_combine() -> None:
    memory = {"recompute": "all", "offload_activations": 0.0, "release_grads_after": ["*"]}
    plain, run = parts.gan(), parts.gan(memory=memory)
    mechanism.train(plain, [parts.batch()])
    mechanism.train(run, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))
    memory = {"recompute": "sqrt", "optimizer_in_backward": True}
    run = parts.gan(memory=memory)
    mechanism.train(run, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))


@pytest.mark.parametrize(
    "memory", [{"offload_activations": 0.01}, {"recompute": "selective"}, {"recompute": "all"}]
)
def test_a_forward_that_is_given_up_is_freed(memory: dict[str, Any]) -> None:
    run = parts.classifier(memory=memory)
    alive: list[weakref.ref[Tensor]] = []
    for stage in run.task.net.stages:
        stage.register_forward_hook(lambda _m, _a, out: alive.append(weakref.ref(out)))
    with entered(trick.forward() for trick in run.tricks):
        loss = next(iter(run.phases[0].losses(parts.batch())))
    assert len(alive) == 3
    del loss
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


def test_nothing_is_left_on_the_hooks_after_a_step() -> None:
    run = parts.classifier(memory={"offload_activations": 0.0, "recompute": "all"})
    mechanism.train(run, [parts.batch()])
    seen: list[Tensor] = []
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        nn.Linear(2, 2)(torch.rand(1, 2)).sum()
    assert seen


# park_optimizer


def test_state_that_is_parked_comes_back_where_the_host_has_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[tuple[str, str]] = []

    def copy(state: dict[str, Any], name: str, device: torch.device) -> torch.device:
        copied.append((name, device.type))
        if len(copied) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.device("meta")

    monkeypatch.setattr(park_optimizer, "copy_into", copy)
    trick = park_optimizer.build(park_optimizer.Settings())
    state = {name: torch.empty(2, device="meta") for name in ("exp_avg", "exp_avg_sq")}
    optimizer = SimpleNamespace(state={0: state | {"step": torch.empty((), device="meta")}})
    trick.run = cast(
        Any, SimpleNamespace(device=torch.device("meta"), optimizers={"net": optimizer})
    )
    with pytest.raises(RuntimeError, match="can't allocate"), trick.beside_steps():
        raise AssertionError("nothing runs in the block")
    assert copied == [("exp_avg", "cpu"), ("exp_avg_sq", "cpu"), ("exp_avg", "meta")]


def test_a_limit_of_offloading_is_of_each_forward() -> None:
    limit = 3 * 4096 / 2**30
    trick = offload_activations.build(
        offload_activations.Settings(min_mebibytes=0, at_most_gib=limit)
    )
    for _ in range(2):
        with trick.forward():
            packed = [trick.pack(torch.ones(1024)) for _ in range(5)]
        assert [isinstance(one, tuple) for one in packed] == [True, True, True, False, False]
