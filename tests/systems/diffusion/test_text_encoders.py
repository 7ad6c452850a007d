"""Text encoders that are trained along: from a folder of pictures to files that diffusers loads, with equal outputs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpt.commands import convert
from mpt.commands.convert import Command as Convert
from mpt.commands.train import Command as Train
from mpt.commands.train import run as train
from mpt.errors import ConfigError
from mpt.inference.trained import open_trained
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.systems.diffusion.commands import prepare
from mpt.systems.diffusion.commands.shared.pipelines import Pipeline
from mpt.systems.diffusion.nn.shared.text_encoders import read_pipeline
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.pipelines import make_pictures, make_pipeline

KINDS = {
    "StableDiffusionPipeline": {"lora_te"},
    "StableDiffusionXLPipeline": {"lora_te1", "lora_te2"},
    "StableDiffusion3Pipeline": {"lora_te1", "lora_te2"},
    "FluxPipeline": {"lora_te1"},
}
"""Family -> the prefixes of its text encoders in kohya's files."""


@pytest.fixture
def quiet() -> Any:
    """Leave out what the libraries warn of in their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def prepared(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write a pipeline and the tokens of some captions; return the pipeline's folder and the data's."""
    pipeline, data = make_pipeline(kind, folder / "pipeline"), folder / "data"
    pictures = make_pictures(folder / "pictures")
    wish = prepare.Command(
        pipeline=pipeline, pictures=pictures, output=data, size="16", device="cpu"
    )
    prepare.run(prepare.Command(**{**vars(wish), "text_encoders": True}))
    return pipeline, data


@torch.no_grad()
def answers(net: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the embeddings that a trained network makes of a caption's tokens."""
    made = net.embed(*(given[name][None] for name in net.conditions))
    return [one[0] for one in made[:2]]


def newest(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(open_run(run)).state["modules"]["net"]
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_text_encoders_go_into_the_pipeline_and_resume_to_the_bit(
    kind: str, tmp_path: Path
) -> None:
    folder, data = prepared(kind, tmp_path)
    runs = tmp_path / "runs"
    words = ("precision=fp32", "optimizer.lr=0.02", "train.batch_size=2", "memory.lora.rank=3")

    def trained(name: str, steps: int, *more: str, resume: str | None = None) -> Path:
        overrides = (*words, f"train.steps={steps}", f"name={name}", *more)
        train(
            Train(
                config=data / "train.yaml",
                overrides=overrides,
                runs=runs,
                device="cpu",
                resume=resume,
            )
        )
        return runs / name

    through = trained("through", 2)
    trained("lora", 1)
    run = trained("lora", 2, resume="auto")
    left, right = newest(through), newest(run)
    assert all(torch.equal(left[name], right[name]) for name in left)
    encoders = ["text_encoder", "text_encoder_2"][: len(KINDS[kind])]
    for encoder in encoders:
        assert any(
            name.startswith(f"{encoder}.") and "lora_b" in name and one.any()
            for name, one in right.items()
        )

    for wanted in ("diffusers", "kohya"):
        convert.run(Convert(run=str(run), runs=str(runs), to=wanted))
    keys = load_file(run / "lora-kohya.safetensors")
    assert {key.partition("_text_model")[0] for key in keys if "_text_model" in key} == KINDS[kind]

    library, caption = getattr(diffusers(), kind), "a picture of ccc"
    before = Pipeline(folder, kind, library.from_pretrained(str(folder)))
    given = {**before.tokens(caption), "sizes": torch.zeros(6)}
    net: Any = open_trained(str(run), runs, "cpu").run.task.modules["net"].eval()
    # of others it reads published sizes alone
    is_unet = kind.startswith(("StableDiffusionP", "StableDiffusionX"))
    for wanted in ("diffusers", "kohya") if is_unet else ("diffusers",):
        after = Pipeline(folder, kind, library.from_pretrained(str(folder)))
        after.parts.load_lora_weights(str(run), weight_name=f"lora-{wanted}.safetensors")
        found, plain = (
            list(after.encode_caption(caption).values()),
            list(before.encode_caption(caption).values()),
        )
        for one, other in zip(answers(net, given), found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert float((found[-1] - plain[-1]).abs().max()) > 1e-3

    file = f"memory.lora.weights={run / 'lora-kohya.safetensors'}"
    begun = newest(trained("again", 1, file, "optimizer.lr=1e-12"))
    for name, value in begun.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quiet")
def test_no_bar_of_transformers_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_pipeline("StableDiffusionPipeline", tmp_path / "pipeline")
    capfd.readouterr()
    assert any(name.startswith("text_encoder.") for name in read_pipeline(folder))
    assert capfd.readouterr() == ("", "")


def test_a_network_without_text_has_no_text_encoders(tmp_path: Path) -> None:
    from tests.systems.diffusion.nn.test_diffusers import FAMILIES, build

    with pytest.raises(ConfigError, match=r"model.text_encoders: a UNet2DModel reads no text"):
        build(tmp_path, FAMILIES["unet"], model={"text_encoders": True})
