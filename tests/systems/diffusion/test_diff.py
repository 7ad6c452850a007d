"""`mpt diff` of this package's task against a step written with diffusers, as its example scripts have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpt.commands import diff
from mpt.config.text.yaml_text import write_text
from mpt.errors import GateError
from tests.systems.diffusion.library import diffusers
from tests.systems.diffusion.test_ranks import folder_of_data

SCRIPT = '''"""The step of diffusers' train_text_to_image.py: its scheduler adds noise, and the loss is on {target}."""

import torch
from diffusers import DDPMScheduler
from torch.nn import functional

from mpt.config.options import Options
from mpt.seams import Loss
from mpt.systems.diffusion.tasks import diffusion

TEST_SAMPLES = 2


class Settings(Options):
    objective: str = "epsilon"
    condition_dropout: float = 0.0
    beta_schedule: str = "scaled_linear"
    beta_start: float = 0.00085
    beta_end: float = 0.012


class Script(diffusion.Diffusion):
    def draw(self, batch, phase):
        latents = batch["latent"]
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 1000, (latents.shape[0],), device=latents.device)
        return {{**batch, "noise": noise, "timesteps": timesteps, "captions": torch.rand(len(latents))}}

    def losses(self, batch):
        scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
        latents, noise, timesteps = batch["latent"], batch["noise"], batch["timesteps"]
        noisy_latents = scheduler.add_noise(latents, noise, timesteps)
        model_pred = self.net.inner(noisy_latents, timesteps, batch["text"], return_dict=False)[0]
        loss = functional.mse_loss(model_pred.float(), {target}.float(), reduction="mean")
        return (Loss("loss", loss),)


def build(settings, model_settings, modules, data, precision):
    known = diffusion.Settings(**{{name: getattr(settings, name) for name in Settings.model_fields}})
    return Script(known, modules["net"], data, precision)
'''


def compare(target: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare over three steps. Raises an error if the two part by more than rounding."""
    settings: dict[str, Any] = folder_of_data(folder)
    settings["task"] |= {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    for split in ("train", "test"):
        forget_weights(folder / f"{split}.safetensors")
    (folder / "parts" / "tasks").mkdir(parents=True)
    (folder / "parts" / "tasks" / "script_step.py").write_text(SCRIPT.format(target=target))
    monkeypatch.setenv("MPT_PARTS", str(folder / "parts"))
    names = ("diffusion", "script_step")
    for name in names:
        settings["task"]["name"] = name
        (folder / f"{name}.yaml").write_text(write_text(settings))
    first, second = (str(folder / f"{name}.yaml") for name in names)
    diff.run(diff.Command((first, second), steps=3, device="cpu", json=True))


def forget_weights(path: Path) -> None:
    """Leave out the samples' weights, which the script does not have."""
    from safetensors.torch import load_file, save_file

    save_file({name: value for name, value in load_file(path).items() if name != "weight"}, path)


def test_a_step_written_with_diffusers_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diffusers()
    compare("noise", tmp_path, monkeypatch)
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] in ("same", "rounding")
    assert len(told["replay"]["rows"]) == 3


@pytest.mark.slow
def test_another_target_is_found_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers()
    with pytest.raises(GateError):
        compare("latents", tmp_path, monkeypatch)
