import math
from typing import Any

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import evaluate, infer, preview
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.report.run_page.evaluation_section import show_section
from mpt.seams import Run
from mpt.systems.dain.data import procedural_triplets
from mpt.systems.dain.losses.shared.charbonnier import charbonnier, photometric
from mpt.systems.dain.tasks.interpolate import Interpolate


def make_run(**changes: Any) -> tuple[Run, Any, Any]:
    """Return a run on four drawn triplets of 36 x 36, which no network's multiple divides, and both data sets."""
    torch.manual_seed(0)
    data = {
        "name": "procedural_triplets",
        "count": 4,
        "test_count": 3,
        "image_size": 36,
        "times": [0.25, 0.5],
    }
    whole = {
        "model": {"name": "dain", "size": "small"},
        "dataset": data,
        "task": {"flow_steps": 2, "ema": 0.9, "preview_count": 2},
        "optimizer": {"name": "adamax", "lr": 1e-3},
        "train": {"steps": 4, "batch_size": 4},
    }
    config = load_config({**whole, **changes})
    sets = [
        procedural_triplets.build(config.dataset.settings, split, 0) for split in ("train", "test")
    ]
    return build_run(config, torch.device("cpu"), sets[0].spec), *sets


def batch_of(data: Any) -> dict[str, torch.Tensor]:
    return data.spec.as_floats(data.fetch([0, 1, 2, 3], 0))


def test_the_flow_is_trained_first_and_alone():
    run, data, _ = make_run()
    flow, joint = run.phases
    assert [[phase.name for phase in run.phases if phase.is_due(step)] for step in range(4)] == [
        ["flow"],
        ["flow"],
        ["net"],
        ["net"],
    ]
    net = run.task.modules["net"]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    update(run, flow, batch_of(data))
    assert {
        n.split(".")[0] for n, p in net.named_parameters() if not torch.equal(p, before[n])
    } == {"flownets"}
    update(run, joint, batch_of(data))
    changed = {n.split(".")[0] for n, p in net.named_parameters() if not torch.equal(p, before[n])}
    assert {"flownets", "rectifyNet"} <= changed


def test_rife_learns_its_flow_first_and_then_everything():
    run, data, _ = make_run(model={"name": "rife", "size": "small", "start": "cost_volume"})
    net = run.task.modules["net"]
    for phase, wanted in zip(
        run.phases, ({"flownets"}, {"flownets", "blocks", "refinement"}), strict=True
    ):
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        update(run, phase, batch_of(data))
        assert {
            n.split(".")[0] for n, p in net.named_parameters() if not torch.equal(p, before[n])
        } >= wanted
        if phase.name == "flow":
            assert all(
                torch.equal(p, before[n])
                for n, p in net.named_parameters()
                if not n.startswith("flownets")
            )


def test_micro_batches_give_the_gradient_of_the_whole_batch():
    found = []
    for size in (None, 2):
        memory = {"micro_batch": size} if size else {}
        # Plain SGD: Adamax's first step is the gradient's sign, which rounding can turn where it is nearly zero.
        run, data, _ = make_run(
            model={"name": "flow_warp"}, memory=memory, optimizer={"name": "sgd", "lr": 0.1}
        )
        update(run, run.phases[1], batch_of(data))
        found.append([p.detach().clone() for p in run.task.modules["net"].parameters()])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True))


def test_evaluation_previews_and_inference_have_the_frames_size():
    run, _, test = make_run(model={"name": "rife", "size": "small", "start": "cost_volume"})
    figures = evaluate(run, test, 2)
    assert set(figures) == {"psnr", "ssim", "ie", "average_psnr"}
    assert figures["psnr"] > 15
    batch = test.spec.as_floats(test.fetch([0, 1, 2], 0))
    tiles = preview(run, batch)
    assert tiles is not None
    assert tiles.shape == (2 * 5, 3, 36, 36)
    found = infer(run, {name: batch[name] for name in ("first", "last")}, 3)
    assert found.outputs is not None
    assert found.outputs.shape == (3, 3, 36, 36)
    assert (found.columns, len(found.figures)) == (3, 3)


def test_named_test_sequences_have_a_table_on_the_page():
    run, _, _ = make_run(model={"name": "flow_warp"})
    task = run.task
    assert isinstance(task, Interpolate)
    evidence = [
        {
            "psnr": torch.tensor([30.0, 20.0]),
            "ssim": torch.tensor([0.9, 0.5]),
            "ie": torch.tensor([3.0, 9.0]),
        },
        {"psnr": torch.tensor([25.0]), "ssim": torch.tensor([0.7]), "ie": torch.tensor([6.0])},
    ]
    evidence = [{**part, "average_psnr": part["psnr"] - 5} for part in evidence]
    assert set(task.conclude(evidence)) == {"psnr", "ssim", "ie", "average_psnr"}
    assert task.details is None
    task.test_names = ["Beanbags", "Walking", "Urban3"]
    figures = task.conclude(evidence)
    assert (figures["psnr"], figures["psnr/Walking"], figures["ie/Urban3"]) == (25, 20, 6)
    assert task.details is not None
    shown = show_section(task.details["section"], 1)
    assert shown["rows"][1] == ["Walking", "20.00", "15.00", "0.5000", "9.00"]
    assert shown["rows"][3] == ["mean", "25.00", "20.00", "0.7000", "6.00"]
    assert len(shown["head"]) == 5


def test_rates_fall_once_evaluations_stop_improving_and_the_rule_survives_a_resume():
    run, _, _ = make_run(task={"plateau_patience": 1, "plateau_factor": 0.5})
    task = run.task
    assert isinstance(task, Interpolate)
    factors = []
    for figure in (20.0, 21.0, 21.0, 20.5, 21.0005, 22.0):
        task.after_evaluation({"psnr": figure})
        factors.append(task.rate_factor)
        state = task.state_dict()
        task.load_state_dict(state)
    assert factors == [1, 1, 1, 0.5, 0.5, 0.5]


def test_the_charbonnier_loss_is_the_mean_of_smoothed_absolute_values():
    difference = torch.tensor([[3.0, -4.0], [0.0, 1.0]])
    assert charbonnier(difference).item() == pytest.approx(2.0, abs=1e-6)


def test_the_photometric_loss_is_least_at_the_true_flow():
    settings = procedural_triplets.Settings(
        count=4, shapes=0, image_size=48, flip=False, temporal_swap=False
    )
    data = procedural_triplets.build(settings, "train", 0)
    batch = batch_of(data)
    at = {
        scale: photometric(scale * batch["flow"], batch["first"], batch["last"]).item()
        for scale in (0.5, 1.0, 1.5)
    }
    assert at[1.0] < min(at[0.5], at[1.5])


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ConfigError, match="no flow to pretrain"):
        make_run(model={"name": "rife", "size": "small"})
    with pytest.raises(ConfigError, match=r"task\.alpha"):
        make_run(task={"alpha": [0.0, 0.0]})


def test_the_charbonnier_edge_is_the_articles() -> None:
    """Bao et al. 2019, equation 11: epsilon is 1e-6."""
    assert charbonnier(torch.zeros(4, dtype=torch.float64)).item() == pytest.approx(1e-6)


def test_flows_are_smooth_away_from_edges() -> None:
    """A step of a pixel in the flow, where the frames have a step of 0.1 or of nothing: e^(-10 * 0.1) against 1."""
    flow = torch.zeros(1, 4, 2, 2, dtype=torch.float64)
    flow[..., 1] = 1.0
    flat = torch.full((1, 3, 2, 2), 0.5, dtype=torch.float64)
    edge = flat.clone()
    edge[..., 1] = 0.6
    roughness = [
        photometric(flow, frame, frame, smoothness=1.0).item()
        - photometric(flow, frame, frame, smoothness=0.0).item()
        for frame in (flat, edge)
    ]
    step, still = (1 + 1e-6) ** 0.5, 1e-3
    across = {1.0: step, math.exp(-1.0): math.exp(-1.0) * step}
    assert roughness == pytest.approx(
        [across[1.0] + still, across[math.exp(-1.0)] + still], rel=1e-6
    )
