import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.precision.shared.float32_modules import Float32Module, keep_in_float32
from mpt.precision.shared.module_state import module_state
from mpt.seams import Loss, loss_scales
from tests.engine import parts

HALF = {"dtype": "float16", "init_scale": 256.0}
EVERY_MODE: list[Any] = [
    "fp32",
    "tf32",
    "amp",
    "bf16",
    "O0",
    "O1",
    "O2",
    "O3",
    "fp16-pure",
    "bf16-pure",
    "bf16-sr",
    "bf16-kahan",
    "bf16-24bit",
    {"mode": "fp16-24bit", "init_scale": 256.0},
    {"mode": "amp", **HALF},
    {"mode": "O1", **HALF},
    {"mode": "O2", **HALF},
]


def dtype_inside(run: Any, module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's output during one update."""
    seen: list[torch.dtype] = []
    handle = module.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    update(run, run.phases[0], parts.batch())
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
@pytest.mark.parametrize("make", [parts.classifier, parts.gan])
def test_one_step_gives_finite_losses_and_moves_every_network(mode: Any, make: Any) -> None:
    optimizer = (
        {"name": "adam", "lr": 2e-4, "eps": 1e-4}
        if mode == "fp16-pure"
        else {"name": "adam", "lr": 2e-4}
    )
    run = make(mode, optimizer=optimizer)
    before = {
        n: copy.deepcopy(module_state(run.precision, m)) for n, m in run.task.trainable.items()
    }
    for _ in range(2):
        for phase in run.phases:
            done = update(run, phase, parts.batch())
            assert done.finite
            assert all(math.isfinite(float(v)) for v in done.losses.values())
            assert not done.stats.skipped
    for name, module in run.task.trainable.items():
        after = module_state(run.precision, module)
        assert any(
            not torch.equal(after[key], before[name][key]) for key in after if "weight" in key
        )


@pytest.mark.parametrize(
    ("mode", "model"),
    [
        pytest.param(
            mode,
            model,
            marks=() if (row + column) % 2 else pytest.mark.slow,
            id=f"{model}-{mode}",
        )
        for row, model in enumerate(("small_cnn", "dcgan"))
        for column, mode in enumerate(EVERY_MODE)
    ],
)
def test_the_step_runs_on_fake_tensors_in_every_mode(mode: Any, model: str) -> None:
    optimizer = {"name": "adam", "eps": 1e-4}
    model_settings = {"name": model, "features": 4, "image_size": 16}
    config = load_config({"model": model_settings, "precision": mode, "optimizer": optimizer})
    with FakeTensorMode():
        run = build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        for _ in range(2):
            for phase in run.phases:
                done = update(run, phase, parts.DIGITS.zeros(4, "cpu"))
    assert all(value.shape == () for value in done.losses.values())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("fp32", torch.float32),
        ("amp", torch.bfloat16),
        ({"mode": "amp", **HALF}, torch.float16),
        ({"mode": "O1", **HALF}, torch.float16),
        ({"mode": "O2", **HALF}, torch.float16),
        ("bf16-pure", torch.bfloat16),
    ],
    ids=str,
)
def test_convolutions_run_in_the_modes_dtype(mode: Any, expected: torch.dtype) -> None:
    run = parts.classifier(mode)
    assert dtype_inside(run, run.task.modules["net"].stages[0][0]) == expected


def test_o2_keeps_batch_norm_and_masters_in_float32_and_saves_float32() -> None:
    run = parts.classifier({"mode": "O2", **HALF})
    net = run.task.modules["net"]
    assert net.stages[0][0].weight.dtype == torch.float16
    assert net.stages[0][1].weight.dtype == torch.float32
    assert net.stages[0][1].running_mean.dtype == torch.float32
    assert all(
        p.dtype == torch.float32 for g in run.optimizers["net"].param_groups for p in g["params"]
    )
    update(run, run.phases[0], parts.batch())
    state = module_state(run.precision, net)
    assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())
    weight = net.stages[0][0].weight
    assert torch.equal(weight, state["stages.0.0.weight"].half())
    assert not torch.equal(weight.float(), state["stages.0.0.weight"])


def test_o2_keeps_updates_that_half_weights_would_lose() -> None:
    run = parts.classifier({"mode": "O2", **HALF}, optimizer={"name": "sgd", "lr": 1e-7})
    pure = parts.classifier("fp16-pure", optimizer={"name": "sgd", "lr": 1e-7})
    key = "stages.1.0.weight"
    for each, changes in ((run, True), (pure, False)):
        net = each.task.modules["net"]
        before = module_state(each.precision, net)[key].clone()
        update(each, each.phases[0], parts.batch())
        assert torch.equal(before, module_state(each.precision, net)[key]) is not changes


@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
def test_an_overflow_skips_its_own_phase_alone_and_equals_a_run_without_that_step(
    mode: str,
) -> None:
    def train(poisoned: bool) -> tuple[Any, dict[str, Tensor]]:
        run = parts.gan({"mode": mode, **HALF})
        disc, gen = run.phases
        torch.manual_seed(1)
        for step in range(3):
            state = torch.get_rng_state()
            if step == 1 and poisoned:
                infinite = {**parts.batch(step), "image": torch.full((8, 1, 16, 16), math.inf)}
                done = update(run, disc, infinite)
                assert done.stats.skipped
            elif step == 1:
                # The lower scale after an overflow rounds half gradients differently, so both runs go on with it.
                run.precision.scalers["disc"].update(True)
            else:
                assert not update(run, disc, parts.batch(step)).stats.skipped
            torch.set_rng_state(state)
            assert not update(run, gen, parts.batch(step)).stats.skipped
        return run, {n: m.state_dict() for n, m in run.task.modules.items()}

    poisoned, state = train(True)
    clean, expected = train(False)
    for name in ("gen", "disc"):
        assert all(torch.equal(state[name][key], expected[name][key]) for key in expected[name])
    assert loss_scales(poisoned.precision) == {"disc": 128.0, "gen": 256.0}
    assert loss_scales(clean.precision) == loss_scales(poisoned.precision)


def test_static_scale_is_honoured_and_never_moves() -> None:
    run = parts.classifier({"mode": "amp", **HALF, "loss_scale": 128.0})
    assert update(run, run.phases[0], parts.batch()).stats.scale == 128.0


def test_float32_says_what_it_has_no_use_for() -> None:
    run = parts.classifier({"mode": "fp32", "dtype": "float16", "loss_scale": 128.0})
    assert (
        "precision.dtype=float16 and precision.loss_scale=128.0 changes nothing here"
        in run.precision.numerics.reason
    )
    assert parts.classifier({"mode": "bf16"}).precision.numerics.reason.startswith(
        "bfloat16, as the mode says"
    )
    assert parts.classifier({"mode": "amp", "dtype": "bfloat16"}).precision.numerics.reason == (
        "bfloat16, as precision.dtype asks"
    )
    assert "changes nothing" not in parts.classifier({"mode": "fp32"}).precision.numerics.reason


def test_a_loss_that_is_nan_is_noticed_under_a_static_scale_too() -> None:
    run = parts.classifier({"mode": "amp", **HALF, "loss_scale": 128.0})
    before = {key: value.clone() for key, value in run.task.modules["net"].state_dict().items()}
    batch = parts.batch()
    done = update(run, run.phases[0], {**batch, "image": torch.full_like(batch["image"], math.nan)})
    assert not done.finite
    after = run.task.modules["net"].state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_bfloat16_needs_no_scaler_unless_asked() -> None:
    assert loss_scales(parts.classifier("bf16").precision) == {}
    assert loss_scales(parts.classifier({"mode": "bf16", "loss_scale": "dynamic"}).precision) == {
        "net": 2.0**16
    }


def test_an_epsilon_that_is_zero_in_half_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.eps=1e-4"):
        parts.gan("fp16-pure")


@pytest.mark.parametrize(("mode", "allowed"), [("fp32", False), ("O0", False), ("tf32", True)])
def test_tf32_is_allowed_by_its_mode_alone_and_torch_can_still_read_the_switch(
    mode: str, allowed: bool
) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        parts.classifier(mode)
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("mode", ["amp", "bf16"])
def test_a_forward_within_a_forward_leaves_the_casts_as_they_were(mode: str) -> None:
    run = parts.classifier({"mode": mode, "dtype": "bfloat16"})

    def state() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    torch.set_autocast_dtype("cpu", torch.float16)
    before = state()
    try:
        for _ in range(2):
            with run.precision.forward():
                assert state() == (True, torch.bfloat16)
                with torch.autocast("cpu", enabled=False), run.precision.forward():
                    assert state() == (True, torch.bfloat16)
                assert state() == (True, torch.bfloat16)
            assert state() == before
            with pytest.raises(ZeroDivisionError), run.precision.forward():
                _ = 1 / 0
            assert state() == before
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def test_bf16_refuses_to_be_float16() -> None:
    with pytest.raises(ConfigError, match="use precision=amp"):
        parts.classifier({"mode": "bf16", "dtype": "float16"})


def test_gradients_are_clipped_after_unscaling() -> None:
    optimizer = {"name": "sgd", "lr": 1e-12, "clip_grad_norm": 0.01}
    run = parts.classifier({"mode": "amp", **HALF}, optimizer=optimizer)
    reference = parts.classifier("fp32", optimizer=optimizer)
    ours = update(run, run.phases[0], parts.batch()).stats.grad_norm
    theirs = update(reference, reference.phases[0], parts.batch()).stats.grad_norm
    assert ours is not None
    assert theirs is not None
    assert float(ours) == pytest.approx(float(theirs), rel=0.05)
    clipped = torch.cat([p.grad.flatten() for p in run.task.modules["net"].parameters()]).norm()
    assert float(clipped) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
def test_a_float32_module_stays_in_float32_and_its_neighbours_do_not(mode: str) -> None:
    run = parts.classifier({"mode": mode, **HALF, "keep_fp32": ["net.stages.1"]})
    stages = run.task.modules["net"].stages
    assert dtype_inside(run, stages[1][0]) == torch.float32
    assert dtype_inside(run, stages[0][0]) == torch.float16
    assert dtype_inside(run, stages[2][0]) == torch.float16
    assert stages[1][0].weight.dtype == torch.float32


def test_a_copy_of_a_float32_module_owns_itself() -> None:
    module = nn.Linear(2, 2)
    keep_in_float32(module, "cpu", casts_back=False)
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert isinstance(twin, Float32Module)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(twin(torch.ones(1, 2)), torch.zeros(1, 2))
        assert twin(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert list(module.state_dict()) == ["weight", "bias"]


def test_a_glob_without_a_match_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no module matches 'net\.stagez'"):
        parts.classifier({"mode": "amp", "keep_fp32": ["net.stagez"]})


@pytest.mark.parametrize("mode", ["amp", "O1", "bf16"])
def test_losses_run_in_float32_unless_they_inherit(mode: str) -> None:
    for setting, expected in (("float32", torch.float32), ("inherit", torch.bfloat16)):
        run = parts.classifier({"mode": mode, "losses": setting})
        seen: list[torch.dtype] = []

        def spy(logits: Tensor, seen: list[torch.dtype] = seen) -> Tensor:
            seen.append(logits.dtype)
            return logits.float().sum()

        with run.precision.forward():
            run.precision.loss(spy)(torch.zeros(2, dtype=torch.bfloat16))
        assert seen == [expected]


@pytest.mark.parametrize("mode", ["amp", "O1"])
def test_falling_back_goes_on_in_bfloat16_without_a_scale(mode: str) -> None:
    run = parts.classifier({"mode": mode, **HALF})
    assert run.precision.fall_back(run.task)
    assert dtype_inside(run, run.task.modules["net"].stages[0][0]) == torch.bfloat16
    assert loss_scales(run.precision) == {}


@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
def test_every_mode_says_why(mode: Any) -> None:
    assert len(parts.classifier(mode).precision.numerics.reason) > 10


def test_o2_sums_the_gradients_of_micro_batches_in_float32() -> None:
    run = parts.classifier({"mode": "O2", "dtype": "bfloat16"}, memory={"micro_batch": 1})
    phase, weight = run.phases[0], run.task.modules["net"].stages[1][0].weight
    master = run.precision.masters[weight]
    single: list[Tensor] = []

    def note(loss: Tensor, *_: Any) -> None:
        before = 0.0 if weight.grad is None else weight.grad.clone()
        type(run.precision).backward(run.precision, loss, phase)
        assert weight.grad is not None
        single.append(weight.grad - before)

    run.precision.backward = note  # type: ignore[method-assign]
    update(run, phase, parts.batch())
    assert len(single) == 8
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    # A sum of bfloat16 numbers that has more than bfloat16's 8 bits was not made in bfloat16.
    assert not torch.equal(master.grad, master.grad.bfloat16().float())
    assert torch.allclose(master.grad, torch.stack(single).sum(0), rtol=1e-6)


def test_a_phase_whose_losses_reach_no_parameter_is_refused_in_words() -> None:
    run = parts.classifier({"mode": "amp", **HALF})
    phase = dataclasses.replace(
        run.phases[0], losses=lambda batch: iter([Loss("loss", batch["image"].sum())])
    )
    batch = parts.batch()
    batch["image"].requires_grad_()
    with pytest.raises(ConfigError, match="phase net: no parameter received a gradient"):
        update(run, phase, batch)
    assert run.precision.scalers["net"].clean_steps == 0


@pytest.mark.parametrize("wrong", [None, torch.ones(())], ids=["None", "a tensor"])
def test_a_phase_that_yields_no_loss_is_refused_in_words(wrong: Any) -> None:
    run = parts.classifier("fp32")
    losses = run.phases[0].losses

    def mistaken(batch: Any) -> Any:
        yield from losses(batch)
        yield wrong

    phase = dataclasses.replace(run.phases[0], losses=mistaken)
    with pytest.raises(
        ConfigError, match=f"phase net: its losses yielded {type(wrong).__name__}, not a Loss"
    ):
        update(run, phase, parts.batch())


@pytest.fixture
def switches() -> Any:
    """Give back what products may use, after the test."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_fp16_accumulation
    yield
    matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_fp16_accumulation = before


@pytest.mark.usefixtures("switches")
def test_sums_in_float16_are_off_unless_asked_for_and_come_with_a_warning() -> None:
    run = parts.classifier({"mode": "amp", **HALF, "fp16_accumulation": True})
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is True
    assert [note for note in run.notes if "add up in float16" in note and "mpt compare" in note]
    run = parts.classifier({"mode": "bf16", "fp16_accumulation": True})
    assert [note for note in run.notes if "changes nothing here" in note]
    assert parts.classifier("amp").notes == []
    assert torch.backends.cuda.matmul.allow_fp16_accumulation is False


@pytest.mark.usefixtures("switches")
def test_products_of_float32_use_what_the_settings_say() -> None:
    parts.classifier({"mode": "amp", "matmul": "tf32"})
    assert torch.backends.cuda.matmul.allow_tf32 is True
    parts.classifier("amp")
    assert torch.backends.cuda.matmul.allow_tf32 is False
    with pytest.raises(ConfigError, match="tf32 contradicts fp32"):
        parts.classifier({"mode": "fp32", "matmul": "tf32"})
    with pytest.raises(ConfigError, match="has no bf16x3; use tf32"):
        parts.classifier({"mode": "fp32", "matmul": "bf16x3"})
