"""A run that was imported from torchvision's reference training takes the steps that torch's own classes take there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mpt.config.load import load_config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import update
from mpt.importers.shared.recognising import translate_command
from mpt.vision_ops import import_torchvision

STEPS = 3
COMMAND = (
    "train.py --model mobilenet_v3_small --data-path d --train-crop-size 32 --batch-size 8 --opt sgd_nesterov "
    "--lr 0.01 --wd 0.1 --norm-weight-decay 0 --label-smoothing 0.1 --clip-grad-norm 1 --lr-scheduler cosineannealinglr"
)


def test_losses_and_weights_are_those_of_its_own_steps(tmp_path: Path) -> None:
    torchvision = import_torchvision()
    into, program = translate_command(COMMAND)
    (tmp_path / "t.yaml").write_text(into.to_yaml(program, "a test"))
    others = ("dataset=null", "dataset.name=digits", "dataset.channels=3", "train.epochs=null")
    config = load_config(
        tmp_path / "t.yaml", [*others, f"train.steps={STEPS}", "optimizer.schedule=constant"]
    )
    data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), data.spec)
    net = run.task.trainable["net"]
    theirs = torchvision.models.mobilenet_v3_small(num_classes=10)
    theirs.load_state_dict(net.state_dict())
    norms, others_than_norms = torchvision.ops._utils.split_normalization_params(theirs)
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others_than_norms}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    mean, deviation = (
        torch.tensor(value).view(1, -1, 1, 1)
        for value in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    )
    for stored, _ in zip(Loader(data, 8, 0).batches(), range(STEPS), strict=False):
        batch = data.spec.as_floats(stored)
        numbers = torch.get_rng_state()  # for dropout
        loss = loss_of(theirs((batch["image"] - mean) / deviation), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        torch.set_rng_state(numbers)
        done = update(run, run.phases[0], batch)
        assert sum(map(float, done.losses.values())) == pytest.approx(loss.item(), rel=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, atol=1e-5, rtol=1e-4)
