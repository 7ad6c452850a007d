"""What computes in float32 whatever the mode, and why."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.seams.phase_losses import draw_batch, losses_of
from mpt.systems.dain.data import procedural_triplets
from mpt.systems.dain.nn.operators import filter_interpolation, projection, regions, warping
from mpt.systems.dain.nn.operators.warping import warp

MODES = ["fp32", "amp", "bf16", "O1", "O2", "O3", "bf16-pure"]
OTHER_MODES = ["amp", "O1", "bf16-pure"]
"""Autocast, patched functions and half weights: one of each kind where the regions are the same."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[torch.dtype]]:
    """Record the dtypes of all flows that become positions, of inverse depth and of correlated features."""
    found: dict[str, set[torch.dtype]] = {}

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            for argument in arguments:
                if isinstance(argument, Tensor):
                    found.setdefault(name, set()).add(argument.dtype)
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, watched)

    for module in (warping, projection, filter_interpolation):
        watch(module, "landing")
    watch(regions, "project_flow")
    watch(regions, "correlate")
    return found


SIZES = {
    "dain": {"name": "dain", "size": "tiny"},
    "rife": {"name": "rife", "size": "small", "start": "cost_volume"},
    "published rife": {"name": "rife", "version": "hd3"},
    "flow_warp": {"name": "flow_warp"},
}


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *(("dain", mode) for mode in MODES),
        *((model, mode) for model in SIZES if model != "dain" for mode in OTHER_MODES),
    ],
)
def test_positions_and_sums_are_float32_in_every_mode(seen, mode, model):
    dtype = {} if mode == "fp32" else {"dtype": "bfloat16"}
    data = {"name": "procedural_triplets", "count": 2, "test_count": 2, "image_size": 32}
    config = load_config(
        {
            "model": SIZES[model],
            "dataset": data,
            "precision": {"mode": mode, **dtype},
            "train": {"steps": 1},
        }
    )
    triplets = procedural_triplets.build(config.dataset.settings, "train", 0)
    run = build_run(config, torch.device("cpu"), triplets.spec)
    batch = triplets.spec.as_floats(triplets.fetch([0, 1], 0))
    for phase in run.phases:
        for (loss,) in losses_of(run, phase, draw_batch(run, phase, batch)):
            assert loss.value.dtype == torch.float32
            loss.value.backward()
    assert seen
    assert all(dtypes == {torch.float32} for dtypes in seen.values()), (mode, seen)
    assert all(
        p.grad is None or p.grad.isfinite().all() for p in run.task.modules["net"].parameters()
    )


def test_half_coordinates_would_lose_a_third_of_a_pixel_beyond_column_1024():
    width = 1100
    columns = torch.arange(width, dtype=torch.float32).expand(1, 1, 2, width)
    flow = torch.zeros(1, 2, 2, width)
    flow[:, 0] = 0.3
    wanted = columns[..., :-1] + 0.3
    moved = regions.WarpRegion(masked=False)(columns, flow.half())[..., :-1]
    assert (moved - wanted).abs().max() < 1e-3  # the flow itself may be half
    for dtype, lost in ((torch.float16, 0.3), (torch.bfloat16, 1.3)):
        half_position = columns.to(dtype) + flow[:, :1].to(dtype)
        naive = warp(
            columns,
            torch.cat((half_position.float() - columns, torch.zeros(1, 1, 2, width)), dim=1),
        )
        beyond = (naive[..., :-1] - wanted)[..., 1025:].abs()
        assert beyond.max() >= lost - 1e-3


def test_the_regions_have_no_weights_that_a_mode_could_convert():
    for kind in regions.FLOAT32_REGIONS:
        module = kind(20.0, 4) if kind is regions.FlowScalingRegion else kind()
        assert not [*module.parameters(), *module.buffers()]
