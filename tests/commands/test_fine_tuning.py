"""Fine-tuning from a local file as a user does it: train, go on, infer, export, and start from the export.

The files are made from the libraries' own random initialisation, with heads for 1000 classes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt import vision_ops
from mpt.commands import convert, infer
from mpt.commands.convert import Command as ConvertArguments
from mpt.commands.infer import Command as InferArguments
from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run

COMMON = """
dataset: {{name: shapes, size: 48}}
precision: fp32
optimizer: {{name: adamw, lr: 1e-3}}
train: {{steps: 2, batch_size: 8, log_every: 1, {train}}}
memory: {memory}
name: tuned
"""


def weights_of(library: str, path: Path) -> None:
    vision_ops.import_torchvision()
    if library == "timm":
        import timm

        net = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8)
        torch.save(
            {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}},
            path,
        )
    else:
        import torchvision

        torch.save(torchvision.models.resnet18().state_dict(), path)


CASES = {
    "timm": (
        '{{name: "timm:vit_tiny_patch16_224", image_size: 32, weights: {0}, options: {{img_size: 32, patch_size: 8}}}}',
        "evaluate_every: 0",
        "{lora: 4}",
        "loaded 150 of 152",
        "net.head.weight (the file's is 1000x192, not 3x192)",
    ),
    "torchvision": (
        '{{name: "torchvision:resnet18", image_size: 32, weights: {0}}}',
        'freeze: ["net.conv1.*", "net.bn1.*", "net.layer[123].*"]',
        "{}",
        "loaded 120 of 122",
        "net.fc.weight (the file's is 1000x512, not 3x512)",
    ),
}


@pytest.mark.parametrize("library", CASES)
def test_a_file_with_another_head_is_tuned_resumed_exported_and_started_from(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library, reason="its models are what is tuned")
    model, train, memory, loaded, new = CASES[library]
    weights, config, runs = (
        tmp_path / "weights.pth",
        tmp_path / "config.yaml",
        str(tmp_path / "runs"),
    )
    weights_of(library, weights)
    config.write_text(
        f"model: {model.format(weights)}\n" + COMMON.format(train=train, memory=memory)
    )
    run(TrainArguments(config=config, runs=runs))
    said = "".join(capsys.readouterr())
    assert loaded in said
    assert new in said
    assert ("memory.lora" if library == "timm" else "train.freeze") in said
    weights.unlink()  # what follows needs the run alone
    tuned = tmp_path / "runs" / "tuned"
    run(
        TrainArguments(
            config=config, runs=runs, resume="auto", overrides=("train.steps=3",), quiet=True
        )
    )
    infer.run(InferArguments(run=str(tuned), runs=runs))
    exported = tmp_path / "tuned.safetensors"
    convert.run(ConvertArguments(run=str(tuned), runs=runs, to="safetensors", output=str(exported)))
    text = config.read_text().replace(str(weights), str(exported)).replace("lora: 4", "")
    config.write_text(text.replace("name: tuned", "name: again"))
    capsys.readouterr()
    run(TrainArguments(config=config, runs=runs, overrides=("train.steps=1",)))
    assert f"loaded all {152 if library == 'timm' else 122} tensors" in "".join(capsys.readouterr())


def test_a_damaged_newest_checkpoint_of_the_run_started_from_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older step was taken without a word."""
    runs = str(tmp_path)
    digits = "model: {name: small_cnn, image_size: 8}\ndataset: digits\nprecision: fp32\n"
    (tmp_path / "c.yaml").write_text(
        digits + "train: {steps: 4, checkpoint_every: 2, keep_last: 2}\n"
    )
    run(
        TrainArguments(config=tmp_path / "c.yaml", runs=runs, quiet=True, overrides=("name=first",))
    )
    damaged = tmp_path / "first" / "checkpoints" / "step-00000004" / "state.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    weights = f"model.weights={tmp_path / 'first'}"
    run(
        TrainArguments(
            config=tmp_path / "c.yaml", runs=runs, quiet=True, overrides=("name=second", weights)
        )
    )
    said = "".join(capsys.readouterr())
    assert "warning: model.weights: step-00000004 is refused" in said
    assert "step-00000002 is used instead" in said
