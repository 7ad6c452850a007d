"""StyleGAN2's game: the GAN task with lazy regularisers, style mixing and adaptive augmentation.

Phases: `gen`, `gen_path` (path length, every 4th step on half a batch), `disc`, `disc_r1` (R1, every 16th). Both
regularisers share their network's optimizer, whose rate and decays are scaled for it (k / (k + 1) for every k-th
step), and have their loss multiplied by k. They are exempt from loss scaling and run in float32 under amp and O1:
with them scaled, training is known to diverge (mmgeneration's experiments on FFHQ). Under `precision.mode: native`
the blocks keep their own dtypes, as in the original.

Source: Karras et al. 2020 (StyleGAN2), section 3 and appendix B; Karras et al. 2020 (ADA), section 3.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.config.options import GenerativeOptions, Options
from mpt.data.pictures.seeds import mix
from mpt.errors import CheckpointError
from mpt.losses.shared import adversarial
from mpt.nn.generative_mlp import Judgement
from mpt.seams import Batch, DataSpec, Evidence, Loss, Phase, Precision, log
from mpt.systems.stylegan2.nn.shared.adaptive_augment import DRAWS, AdaptiveAugment
from mpt.systems.stylegan2.nn.shared.stylegan2_layers import Convolution
from mpt.systems.stylegan2.nn.stylegan2 import Generator
from mpt.tasks import gan

TEST_SAMPLES = gan.TEST_SAMPLES
EMA = {"half_life_kimg": 10.0, "rampup": 0.05}
MOVED = {"ema_kimg": "train.ema.half_life_kimg", "ema_rampup": "train.ema.rampup"}
ADA_INTERVAL = 4
SAMPLE_CHUNK = 32
NOISE = 2
FIXED_NOISE = "mpt_fixed_noise"
"""The metadata's name of the noise of a network that has its own."""
"""Told apart from the seeds of latents and runs."""


class Settings(GenerativeOptions):
    """How the game is played. The defaults are those of the 256-pixel configuration."""

    r1_gamma: float = Field(1.0, ge=0)
    """Weight of R1, 0 is none; a usual first value is 0.0002 * image_size^2 / batch_size."""
    r1_every: int = Field(16, ge=1)
    """Steps from one R1 phase to the next; its loss is multiplied by as much."""
    path_weight: float = Field(2.0, ge=0)
    """Weight of the path length penalty; 0 is none."""
    path_every: int = Field(4, ge=1)
    """Steps from one path length phase to the next; its loss is multiplied by as much."""
    path_decay: float = Field(0.01, gt=0, le=1)
    """Share by which the mean path length moves at each of them."""
    style_mixing: float = Field(0.9, ge=0, le=1)
    """Probability that a sample's later layers get another latent's style."""
    ada_target: float | None = Field(None, gt=0, lt=1)
    """Mean sign of real scores to hold by augmenting; 0.6 is usual for small data sets, null augments nothing."""
    ada_kimg: float = Field(500.0, gt=0)
    """Thousands of images in which the probability may go from 0 to 1."""
    ada_filter: bool = False
    """Move pictures between two low-pass filters at twice the resolution, as NVIDIA's program does: 16 times the
    pictures' memory for a moment, and slower."""
    objective: Literal["nonsaturating", "hinge", "wasserstein"] = "nonsaturating"
    """Adversarial loss."""


class StyleGan2(gan.Gan):
    """Train a StyleGAN2 `gen` against `disc`."""

    training_figures = ("path_length", "augment_probability")
    gen: Generator

    def __init__(
        self,
        settings: Settings,
        model_settings: Options,
        modules: Mapping[str, nn.Module],
        data: DataSpec,
        precision: Precision,
    ) -> None:
        shared = {name: getattr(settings, name) for name in GenerativeOptions.model_fields}
        game = gan.Settings(objective=settings.objective, **shared)
        super().__init__(game, model_settings, modules, data, precision)
        self.style = settings
        device = self.balance.device
        self.augment: AdaptiveAugment | None = None
        if settings.ada_target is not None:
            self.augment = AdaptiveAugment(settings.ada_filter).to(device)
            self.modules["augment"] = self.augment
        self.path_mean = torch.zeros((), device=device)
        self.signs = torch.zeros(2, device=device)  # sum and number of the signs of real scores
        # sum and number of a step's path lengths; ranks average both
        self.lengths = torch.zeros(2, device=device)
        self.batch_size = 0
        self.varies_noise = False
        """Does every sample have noise of its own, though the network has fixed noise?"""
        self.differentiates_twice = self.style.r1_gamma > 0 or self.style.path_weight > 0
        self.r1 = precision.loss(adversarial.real_gradient_penalty)
        self.measure_paths = precision.loss(self._measure_paths)

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return up to four phases, and scale each optimizer for the regulariser that it also serves."""
        style = self.style
        phases = [Phase("gen", self.gen, optimizers["gen"], self.gen_losses)]
        if style.path_weight:
            make_lazy(optimizers["gen"], style.path_every)
            path = Phase(
                "gen_path",
                self.gen,
                optimizers["gen"],
                self.path_losses,
                style.path_every,
                scaled=False,
            )
            phases.append(path)
        phases.append(Phase("disc", self.disc, optimizers["disc"], self.disc_losses))
        if style.r1_gamma:
            make_lazy(optimizers["disc"], style.r1_every)
            phases.append(
                Phase(
                    "disc_r1",
                    self.disc,
                    optimizers["disc"],
                    self.r1_losses,
                    style.r1_every,
                    scaled=False,
                )
            )
        return phases

    @property
    def _classes(self) -> int:
        return self.gen.classes

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Add latents, style mixing, noise and augmentation draws; the path phase gets half a batch and no images.

        Samples have the labels of the batch, whose frequencies are those of the data.
        """
        drawn = self._draw(batch, phase)
        if self._classes:
            drawn["label"] = batch["label"][: len(next(iter(drawn.values())))]
        if "latent" in drawn:
            self.gen.mapping.track(drawn["latent"], drawn.get("label"))
        return drawn

    def _draw(self, batch: Batch, phase: Phase) -> Batch:
        image = batch["image"]
        self.batch_size = len(image)
        for module in (*self.gen.modules(), *self.disc.modules()):
            if isinstance(module, Convolution):
                module.is_differentiated_twice = phase.name in ("gen_path", "disc_r1")
        drawn: Batch = {}
        if phase.name == "gen_path":
            self.lengths = torch.zeros_like(self.lengths)
            drawn = self._draw_styles(max(1, len(image) // 2), image.device)
            return {
                **drawn,
                "projection": torch.randn(
                    len(drawn["latent"]), *image.shape[1:], device=image.device
                ),
            }
        if phase.name in ("disc", "disc_r1"):
            drawn["image"] = image
        if phase.name in ("gen", "disc"):
            drawn |= self._draw_styles(len(image), image.device)
        if self.augment is not None:
            for kind in ("real", "fake"):
                drawn[f"augment_{kind}"] = torch.rand(len(image), DRAWS, device=image.device)
        return drawn

    @property
    def draws_by_shape(self) -> bool:
        """Every update's random inputs depend on the number and the size of the images alone."""
        return True

    def _draw_styles(self, count: int, device: torch.device) -> Batch:
        synthesis = self.gen.synthesis
        layers = synthesis.style_count
        crossover = torch.randint(1, layers, (count,), device=device)
        mixes = torch.rand(count, device=device) < self.style.style_mixing
        return {
            "latent": torch.randn(count, self.latent_size, device=device),
            "other": torch.randn(count, self.latent_size, device=device),
            "crossover": torch.where(mixes, crossover, torch.full_like(crossover, layers)),
            "noise": torch.randn(count, synthesis.noise_size, device=device),
        }

    def fake_side(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return generated images in [-1, 1]."""
        mixed = (batch["latent"], batch["noise"], batch["other"], batch["crossover"])
        return (self.gen(*mixed, label_b=batch.get("label")),)

    def judge(self, side: tuple[Tensor, ...], batch: Batch, real: bool) -> Judgement:
        """Return the scores of images, augmented if that is on."""
        (image,) = side
        if self.augment is not None:
            image = self.augment(image, batch["augment_real" if real else "augment_fake"])
        return Judgement(self.disc(image, batch["label"]) if self._classes else self.disc(image))

    def _disc_losses(
        self, side: tuple[Tensor, ...], batch: Batch, kind: Literal["real", "fake"]
    ) -> list[Loss]:
        verdict = self.judge(side, batch, real=kind == "real")
        log(f"score_{kind}", verdict.score)
        if kind == "fake":
            return [Loss("fake", self.parts.fake(verdict.score))]
        if self.augment is not None:
            signs = verdict.score.detach().sign().float()
            log("sign_real", signs)
            log("augment", self.augment.probability)
            self.signs = self.signs + torch.stack(
                [signs.sum(), torch.full_like(signs[0], len(signs))]
            )
        return [Loss("real", self.parts.real(verdict.score))]

    def path_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield the path length penalty, weighted for how seldom it comes.

        The mean is that before this batch, so that no micro-batch or rank needs the lengths of another.
        """
        lengths = self.measure_paths(batch)
        log("length", lengths)
        found = lengths.detach()
        self.lengths = self.lengths + torch.stack([found.sum(), torch.ones_like(found).sum()])
        penalty = adversarial.path_length_penalty(lengths, self.path_mean)
        yield Loss("loss", self.style.path_weight * self.style.path_every * penalty)

    def _measure_paths(self, batch: Batch) -> Tensor:
        styles = self.gen.styles(
            batch["latent"], batch["other"], batch["crossover"], batch.get("label")
        )
        image = self.gen.synthesis(styles, batch["noise"])
        return adversarial.path_lengths(image, styles, batch["projection"])

    def r1_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield R1 at real images, weighted for how seldom it comes."""
        image = self.to_network(batch["image"])
        penalty = self.r1(lambda x: self.judge((x,), batch, real=True).score, image)
        log("penalty", penalty)
        yield Loss("loss", 0.5 * self.style.r1_gamma * self.style.r1_every * penalty)

    @torch.no_grad()
    def after_step(self, step: int, samples_seen: int) -> None:
        """Move the mean path length, and the augmentation's probability."""
        style = self.style
        self.advice.steps_done = step
        # NaN, which changes nothing, in a step without the path phase
        mean = self.lengths[0] / self.lengths[1]
        self.path_mean = adversarial.keep_finite(
            self.path_mean.lerp(mean, style.path_decay), self.path_mean
        )
        self.lengths = torch.zeros_like(self.lengths)
        if (
            self.augment is not None
            and style.ada_target is not None
            and (step + 1) % ADA_INTERVAL == 0
        ):
            change = ADA_INTERVAL * self.batch_size / (style.ada_kimg * 1000)
            self.augment.steer(self.signs[0] / self.signs[1].clamp_min(1), style.ada_target, change)
            self.signs = torch.zeros_like(self.signs)

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the figures of quality, the mean path length and the probability of augmentation."""
        figures = super().conclude(evidence)
        if self.style.path_weight:
            figures["path_length"] = float(self.path_mean)
        if self.augment is not None:
            figures["augment_probability"] = float(self.augment.probability)
        return figures

    def remedy(self) -> str:
        """Return the setting to try first that this game has and does not use yet."""
        if self.augment is None:
            return "task.ada_target=0.6"
        return f"task.r1_gamma={10 * self.style.r1_gamma or 1:g}"

    def generate(self, latent_bz: Tensor, first: int = 0, truncation: float = 1.0) -> Tensor:
        """Return images in [0, 1]; sample i has class (first + i) mod classes.

        Their noise depends on the sample's number, or is the network's fixed noise if it has that.
        """
        gen = self.gen
        with self.precision.float32():
            mean = gen.mean_style() if truncation < 1 else None
        images = []
        for start in range(0, len(latent_bz), SAMPLE_CHUNK):
            chunk = latent_bz[start : start + SAMPLE_CHUNK]
            numbers = range(first + start, first + start + len(chunk))
            label = (
                torch.tensor(numbers, device=chunk.device) % self._classes
                if self._classes
                else None
            )
            noise = self._noise(numbers, chunk.device)
            # By position, so that an exported file can compute in the generator's place.
            image = gen(chunk, noise, None, None, mean, truncation, label)
            images.append(self.to_image(image))
        return torch.cat(images)

    def evaluate_samples(self, first: int, count: int) -> Evidence:
        """Return the features of samples, each with noise of its own: NVIDIA's program measures so, whatever noise it
        draws pictures with.
        """
        self.varies_noise = True
        try:
            return super().evaluate_samples(first, count)
        finally:
            self.varies_noise = False

    def graph_texts(self, network: nn.Module) -> dict[str, str]:
        """Return a generator's fixed noise, float32 in base64: a graph takes noise as an input."""
        noise = network.synthesis.fixed_noise if isinstance(network, Generator) else None
        if noise is None:
            return {}
        return {FIXED_NOISE: b64encode(noise.cpu().float().numpy().tobytes()).decode()}

    def take_graph_texts(self, texts: Mapping[str, str]) -> None:
        """Take the fixed noise of a graph, into the average too: it is what samples are drawn from."""
        for network in self.modules.values():
            noise = network.synthesis.fixed_noise if isinstance(network, Generator) else None
            if noise is None:
                continue
            try:
                kept = bytearray(b64decode(texts[FIXED_NOISE]))
                noise.copy_(torch.frombuffer(kept, dtype=torch.float32))
            except (KeyError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"the graph's metadata lack its fixed noise ({FIXED_NOISE}), or it is of another size; write the "
                    "file anew with mpt convert"
                ) from error

    def _noise(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        synthesis = self.gen.synthesis
        if synthesis.fixed_noise is not None and not self.varies_noise:
            return synthesis.fixed_noise.expand(len(numbers), -1)
        return torch.stack([draw_noise(synthesis.noise_size, number) for number in numbers]).to(
            device
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the mean path length, a step's lengths and the signs counted since the last change of the probability.

        Ranks agree on the means of all three before they are used.
        """
        return {"path_mean": self.path_mean, "lengths": self.lengths, "signs": self.signs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        device = self.path_mean.device
        self.path_mean, self.signs = state["path_mean"].to(device), state["signs"].to(device)
        self.lengths = state.get("lengths", self.lengths).to(device)


def draw_noise(size: int, seed: int) -> Tensor:
    """Return (size,) normal numbers that depend on the seed alone."""
    return torch.randn(size, generator=torch.Generator().manual_seed(mix(NOISE, seed)))


def make_lazy(optimizer: Optimizer, every: int) -> None:
    """Scale rate and decays for an optimizer that takes one more step in `every`; the loop applies "lr_scale"."""
    ratio = every / (every + 1)
    for group in optimizer.param_groups:
        group["lr_scale"] = ratio * group.get("lr_scale", 1.0)
        group["lr"] = group["lr"] * ratio
        if "betas" in group:
            group["betas"] = tuple(beta**ratio for beta in group["betas"])


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> StyleGan2:
    """Build the task around StyleGAN2's `gen` and `disc`."""
    return StyleGan2(settings, model_settings, modules, data, precision)
