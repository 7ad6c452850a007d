"""Inference is planned as `mpt infer` runs it, and the batch or tile that fits is chosen without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpt.commands import infer
from mpt.commands.infer import Command as InferArguments
from mpt.commands.planning import plan_inference
from mpt.commands.planning.plan_inference import Command as PlanInferArguments
from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import infer as infer_batch
from mpt.errors import ConfigError, MemoryBudgetError, MptError
from mpt.planner.client.session import Session
from mpt.planner.facts.verdict import judge
from mpt.run.process.memory_meter import MemoryMeter
from mpt.workflows.inferring import inference_batch
from tests.commands.conftest import CLASSIFIER, GENERATOR, save_run
from tests.planner.configs import DIGITS, UNET, make
from tests.planner.test_command import Shared

MIB = 2**20


def measured_bytes(config: Config, batch_size: int) -> int:
    """Return the peak of live tensors while a real batch is inferred on the CPU."""
    run = build_run(config, torch.device("cpu"), DIGITS, trains=False)
    weights = [
        one
        for module in run.task.modules.values()
        for one in (*module.parameters(), *module.buffers())
    ]
    batch = (
        {"image": torch.zeros(batch_size, *DIGITS.fields["image"].shape)}
        if run.task.inputs
        else None
    )
    with MemoryMeter(
        lambda: {"parameters": weights, "batch": list((batch or {}).values())}
    ) as meter:
        infer_batch(run, batch, batch_size)
    return int(meter.split.peak_bytes)


def test_the_peak_is_that_of_a_real_batch(session: Session) -> None:
    config = make(UNET, batch_size=64)
    found = session.infer(config, DIGITS.to_record(), batch_size=64).get()
    tensors = found.allocated - found.by_category.get("workspace", 0)
    assert tensors == pytest.approx(measured_bytes(config, 64), rel=0.02)
    assert found.fits is None
    assert found.largest_batch is None


@pytest.mark.parametrize("name", ["rife_demo", "stylegan2_16", "yolofuse_demo"])
def test_inference_of_each_system_is_planned(name: str, session: Session) -> None:
    config = load_config(find_shipped(name))
    found = session.infer(config, batch_size=2, budget_bytes=6 * 2**30).get()
    assert found.allocated > found.weight_bytes > 0
    assert found.largest_batch


def test_the_largest_batch_fits_and_the_next_does_not(session: Session) -> None:
    many = 8192  # where the allocator's coarse segments do not matter
    config, data = make(UNET, batch_size=many), DIGITS.to_record()
    plain = session.infer(config, data, batch_size=many).get()
    budget = plain.context_bytes + 3 * plain.reserved
    found = session.infer(config, data, batch_size=many, budget_bytes=budget).get()
    surely, largest = found.largest_batch, found.largest_at_all
    assert largest > surely > many
    for batch_size, kind in ((surely, "fits"), (surely + largest // 100, "may fit")):
        judged = judge(
            session.infer(config, data, batch_size=batch_size, budget_bytes=budget).get()
        )
        assert judged is not None
        assert judged.kind == kind
    for batch_size, fits in ((largest, True), (largest + 1, False)):
        assert (
            session.infer(config, data, batch_size=batch_size, budget_bytes=budget).get().fits
            is fits
        )
    half = session.infer(config, data, batch_size=many, budget_bytes=budget, half=True).get()
    assert half.largest_batch > 1.2 * surely
    assert half.weight_bytes < 0.8 * plain.weight_bytes
    held = session.infer(
        config, data, batch_size=many, budget_bytes=budget, held_bytes=plain.reserved
    ).get()
    assert held.largest_batch < surely


def test_labels_that_are_read_off_scores_are_planned_as_zeros_and_said(session: Session) -> None:
    config = load_config(CLASSIFIER)
    found = session.infer(config, batch_size=4).get()
    assert "values that are read after the network are taken as 0" in found.notes
    assert session.infer(load_config(GENERATOR), batch_size=4).get().notes == []


@pytest.fixture
def arguments(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:  # yields a function; fixtures of pytest have no type for it
    before = session.gpu, session.calibration, session.allow
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (plan_inference, inference_batch):
        monkeypatch.setattr(module, "Session", Shared(session))

    def make_arguments(
        data: dict[str, Any] | Path, overrides: Sequence[str] = (), **more: Any
    ) -> PlanInferArguments:
        path = data if isinstance(data, Path) else tmp_path / "config.yaml"
        if not isinstance(data, Path):
            path.write_text(json.dumps(data))
        return PlanInferArguments(config=path, overrides=tuple(overrides), **more)

    yield make_arguments
    session.gpu, session.calibration, session.allow = before
    session.placement = {}


def test_mpt_plan_infer_says_what_is_needed_and_how_much_more_fits(arguments, capsys) -> None:  # type: ignore[no-untyped-def]
    plan_inference.run(arguments(CLASSIFIER, vram="550MiB"))
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "classifier (small_cnn), inference (as trained, fp32), batch 32, on rtx3060: fits in 550 MiB"
        in printed
    )
    assert re.search(r"the largest batch that fits is (\d+), and up to (\d+) may", printed)
    assert "modules that hold most" in printed
    plan_inference.run(arguments(CLASSIFIER, vram="490MiB"))
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"may fit in 490 MiB, needs \d+ MiB; the largest batch that fits or may fit is \d+\.",
        printed,
    )
    plan_inference.run(arguments(CLASSIFIER, half=True, json=True))
    told = json.loads(capsys.readouterr().out)["inference"]
    assert (told["mode"], told["fits"]) == ("weights in float16", None)
    with pytest.raises(MemoryBudgetError, match="not even one sample"):
        plan_inference.run(arguments(CLASSIFIER, vram="460MiB"))
    for wrong in ({"frame": "1920"}, {"dtype": "int8"}):
        with pytest.raises(MptError):
            plan_inference.run(arguments(CLASSIFIER, vram="1GiB", **wrong))
    with pytest.raises(MptError, match="does not infer in tiles"):
        plan_inference.run(arguments(CLASSIFIER, vram="1GiB", frame="1920x1080"))


# tests/systems/dain/inference/test_interpolate.py chooses them for a smaller frame
@pytest.mark.slow
def test_tiles_of_a_frame_are_chosen_to_fit(arguments, capsys) -> None:  # type: ignore[no-untyped-def]
    demo = {
        "model": {"name": "dain", "size": "small"},
        "task": "interpolate",
        "dataset": "procedural_triplets",
    }
    sizes = []
    for vram in ("1200MiB", "700MiB"):
        plan_inference.run(
            arguments({**demo, "train": {"steps": 1}}, vram=vram, frame="1920x1080", json=True)
        )
        sizes.append(json.loads(capsys.readouterr().out)["inference"]["tile"])
    (height, width), (lower, narrower) = sizes
    assert lower * narrower < height * width <= 1088 * 1920


def test_mpt_infer_vram_takes_the_planned_batch_and_finds_the_same(
    arguments: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = save_run(
        tmp_path / "runs",
        {**CLASSIFIER, "model": {"name": "small_cnn", "image_size": 64, "features": 8}},
    )
    asked = InferArguments(run=str(run), count=48, device="cpu", output=str(tmp_path / "out"))
    infer.run(asked)
    labels = (tmp_path / "out" / "labels.csv").read_text()
    sizes: list[int] = []
    true_infer = infer.infer_all

    def watch(trained: Any, work: Any, devices: Any) -> Any:
        sizes.append(work.batch_size)
        return true_infer(trained, work, devices)

    monkeypatch.setattr(infer, "infer_all", watch)
    infer.run(replace(asked, vram="486MiB", overwrite=True))
    assert "samples at once fit in 486MiB, as on an rtx3060" in capsys.readouterr().out
    assert (tmp_path / "out" / "labels.csv").read_text() == labels
    assert 1 <= sizes[0] < 48
    with pytest.raises(
        MemoryBudgetError, match=r"not even one sample fits in 460MiB; it needs .* MiB"
    ) as refused:
        infer.run(replace(asked, vram="460MiB", overwrite=True))
    assert "float16" not in str(refused.value)  # the context alone is larger
    with pytest.raises(ConfigError, match="leave out --batch-size"):
        infer.run(replace(asked, vram="4GiB", batch_size=2, overwrite=True))
    assert asdict(asked)["vram"] is None


def test_less_memory_is_advised_where_it_was_planned_to_be_enough() -> None:
    one = SimpleNamespace(with_room=480 * 2**20 - 1)
    for half, fits, advice in (
        (False, True, ": use --dtype float16, or allow more"),
        (
            True,
            True,
            ": leave out --half, which begins in float32, and use --dtype float16, or allow more",
        ),
        (True, False, ""),
    ):
        said = inference_batch.describe_want("470MiB", half, one, SimpleNamespace(fits=fits))  # type: ignore[arg-type]
        assert (
            said
            == f"--vram: not even one sample fits in 470MiB; it needs 480 MiB with the context{advice}"
        )
