"""The recipe of YOLO's SGD against real trainings of the published program."""

from fractions import Fraction

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.recovery.standstill import Standstill
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.memory.cpu_optimizer import HostOptimizer
from mpt.optim.shared.schedules import learning_rate
from mpt.seams import DataSpec, FieldSpec
from mpt.systems.yolofuse.nn.yolofuse import Settings as NetSettings
from mpt.systems.yolofuse.nn.yolofuse import YoloFuse
from mpt.systems.yolofuse.optim.sgd_warmup import Settings, WarmupSGD, build, share_of_batch
from tests.systems.yolofuse.published import read_json
from tests.systems.yolofuse.tasks.small import build as build_small

RUNS = read_json("recipe.json.gz")["runs"]


def grouped(settings: Settings) -> WarmupSGD:
    weight, bias = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [
        {"params": [weight], "param_names": ["net.a.weight"]},
        {"params": [bias], "param_names": ["net.a.bias"], "weight_decay": 0.0},
    ]
    optimizer = build(settings, groups)
    assert isinstance(optimizer, WarmupSGD)
    return optimizer


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_rates_and_momentum_are_the_published_ones(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS[number]
    given, columns = run["settings"], run["columns"]
    is_cosine = given.get("cos_lr", False)
    warmup = max(round(3 * given["batches_per_epoch"]), 100)
    settings = Settings(schedule="cosine" if is_cosine else "linear", warmup=warmup)
    optimizer = grouped(settings)
    seen: list[tuple[float, float, float]] = []
    # What the optimizer's arithmetic gets is what counts; the rates outside are put back.
    monkeypatch.setattr(
        torch.optim.SGD,
        "step",
        lambda self, closure=None: seen.append(
            (
                self.param_groups[0]["lr"],
                self.param_groups[1]["lr"],
                self.param_groups[0]["momentum"],
            )
        ),
    )
    for row in run["rows"]:
        values = dict(zip(columns, row, strict=True))
        rate = learning_rate(
            settings, values["epoch"], given["epochs"], settings.lr
        )  # the published count is in epochs
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        rates = (values["lr_group1"], values["lr_group0"], values["momentum_group0"])
        assert seen[-1] == pytest.approx(rates, rel=1e-6, abs=1e-12)
        assert all(group["lr"] == rate for group in optimizer.param_groups)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_accumulation_grows_as_published_and_rates_are_those_of_the_step_s_last_batch(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RUNS[number]
    given, rows = (
        run["settings"],
        [dict(zip(run["columns"], row, strict=True)) for row in run["rows"]],
    )
    warmup = max(round(3 * given["batches_per_epoch"]), 100)
    optimizer = grouped(
        Settings(
            schedule="constant",
            warmup=warmup,
            accumulation=given["nbs"] / given["batch"],
            last_lr=1,
        )
    )
    momenta: list[float] = []
    monkeypatch.setattr(
        torch.optim.SGD,
        "step",
        lambda self, closure=None: momenta.append(self.param_groups[0]["momentum"]),
    )
    before = 0
    for row in rows:
        if row["optimizer_steps_so_far"] > before:  # published: a step after this batch
            before = row["optimizer_steps_so_far"]
            optimizer.step()
            assert optimizer.param_groups[0]["steps"] == row["iteration"] + 1
            assert momenta[-1] == pytest.approx(row["momentum_group0"], rel=1e-6)
    whole = round(given["nbs"] / given["batch"])
    assert share_of_batch(optimizer) == 1
    assert share_of_batch(grouped(Settings(warmup=warmup, accumulation=whole))) == Fraction(
        1, whole
    )


def test_a_first_step_at_a_rate_of_zero_raises_no_alarm() -> None:
    for bias, looked in ((0.0, 0), (0.1, 1)):
        run, batch = build_small(
            optimizer={"name": "sgd_warmup", "warmup": 4, "warmup_bias_lr": bias}
        )
        watch, phase = Standstill(run, 1), run.phases[0]
        before = watch.before(phase, 0)
        assert before is not None
        watch.after(phase, 0, before, update(run, phase, batch))
        assert len(watch.pending) == looked
        assert watch.take() == []


def test_steps_are_counted_on_by_an_optimizer_in_host_memory_after_a_resume() -> None:
    first = HostOptimizer(grouped(Settings(warmup=10, accumulation=2)))
    first.step()
    resumed = HostOptimizer(grouped(Settings(warmup=10, accumulation=2)))
    resumed.load_state_dict(first.state_dict())
    for count in (2, 3, 4, 5, 7):
        resumed.step()
        assert [group["steps"] for group in resumed.param_groups] == [count, count]
    assert share_of_batch(resumed) == 1


def test_groups_are_the_published_ones() -> None:
    fields = {
        "rgb": FieldSpec((3, 64, 64), torch.float32),
        "boxes": FieldSpec((4, 4), torch.float32),
        "classes": FieldSpec((4,), torch.int64),
        "box_mask": FieldSpec((4,), torch.bool),
    }
    data = DataSpec(fields, 4, ("a",))
    config = load_config(
        {
            "model": {"name": "yolofuse", "fusion": "rgb", "image_size": 64},
            "dataset": {"name": "rgb_ir_scenes", "cameras": "rgb"},
            "optimizer": "sgd_warmup",
            "train": {"steps": 1, "batch_size": 4},
        }
    )
    optimizer = build_run(config, torch.device("cpu"), data).optimizers["net"]
    found = sorted(
        (
            len(group["params"]),
            sum(p.numel() for p in group["params"]),
            group["weight_decay"],
            group["is_bias"],
        )
        for group in optimizer.param_groups
    )
    # The published count has the fixed kernel of the distribution (one tensor of 16) among the weights.
    assert found == [
        (57, 5200, 0.0, False),
        (63, 5395, 0.0, True),
        (63, 3_000_448 - 16, 5e-4, False),
    ]


def test_the_count_of_steps_is_saved_with_the_optimizer() -> None:
    optimizer, other = grouped(Settings()), grouped(Settings())
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert [group["steps"] for group in other.param_groups] == [1, 1]


def test_a_second_warm_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set optimizer\.warmup instead"):
        build(Settings(warmup_steps=3), list(YoloFuse(NetSettings(fusion="rgb"), 1).parameters()))
