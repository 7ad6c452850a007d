"""A run that was imported from timm's train.py takes the steps that timm's own classes take."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.step.step import update
from mpt.importers.shared.recognising import translate_command
from mpt.vision_ops import import_torchvision

STEPS = 3
COMMAND = (
    "train.py --model vit_tiny_patch16_224 --img-size 32 --opt adamw --lr 0.003 --weight-decay 0.5 --batch-size 4 "
    "--grad-accum-steps 2 --sched none --clip-grad 1.0 --model-ema --model-ema-decay 0.9"
)


def test_losses_weights_and_average_are_those_of_timms_own_classes(tmp_path: Path) -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2, optimizer_kwargs
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    into, program = translate_command(COMMAND)
    (tmp_path / "t.yaml").write_text(into.to_yaml(program, "a test"))
    digits = (
        "dataset.name=digits",
        "dataset.channels=3",
        "train.epochs=null",
        "model.options={depth: 2}",
    )
    config = load_config(tmp_path / "t.yaml", [*digits, f"train.steps={STEPS}"])
    data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), data.spec)
    net = run.task.trainable["net"]
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=2)
    theirs.load_state_dict(net.state_dict())
    wanted = Namespace(opt="adamw", lr=0.003, weight_decay=0.5, momentum=0.9)
    optimizer = create_optimizer_v2(theirs, **optimizer_kwargs(cfg=wanted))
    average, loss_of = ModelEmaV3(theirs, decay=0.9), LabelSmoothingCrossEntropy(0.1)
    mean, deviation = (
        torch.tensor(value).view(1, -1, 1, 1)
        for value in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    for step, stored in zip(range(STEPS), Loader(data, 8, 0).batches(), strict=False):
        batch = data.spec.as_floats(stored)
        pixels, total = (batch["image"] - mean) / deviation, 0.0
        for part, label in zip(pixels.chunk(2), batch["label"].chunk(2), strict=True):
            loss = loss_of(theirs(part), label) / 2
            loss.backward()
            total += loss.item()
        dispatch_clip_grad(theirs.parameters(), value=1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(theirs)
        done = update(run, run.phases[0], batch)
        follow_step(run, step)
        assert sum(map(float, done.losses.values())) == pytest.approx(total, rel=1e-5)
    twin = run.task.modules["net_ema"].state_dict()
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(twin[name], value, atol=2e-4, rtol=1e-4)
    spared = {
        name
        for group in run.optimizers["net"].param_groups
        if not group["weight_decay"]
        for name in group["param_names"]
    }
    assert {"net.pos_embed", "net.cls_token"} <= spared
