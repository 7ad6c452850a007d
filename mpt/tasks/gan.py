"""Adversarial training: one task for every model that has a discriminator.

The models differ in data, not code: the objective (`mpt.losses.shared.adversarial`), the inputs that the
discriminator sees (images, codes, or both), and the use of labels. The model's settings bring the defaults and `task`
settings change them, so that a DCGAN may be trained with least squares. All losses are on logits, in float32. Each loss
of the discriminator is back-propagated before the next is computed, so that the activations of one pass are held at a
time.

A step is a step of the discriminator; the generator's phase runs every `critic_steps`-th. The gradient penalty
differentiates twice: it runs in float32, outside autocast and O1 (`Precision.loss`), in every mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import GenerativeOptions, Options, setting_of
from mpt.errors import ConfigError
from mpt.losses.shared import adversarial
from mpt.metrics.distances.feature_space import explain_distance
from mpt.metrics.distances.inception_distance import require_inception
from mpt.nn.generative_mlp import Judgement
from mpt.nn.shared.devices import compute_device
from mpt.seams import (
    Batch,
    DataSpec,
    Evidence,
    Exports,
    Game,
    Inference,
    Legend,
    Loss,
    Phase,
    Precision,
    SecondOrder,
)
from mpt.tasks.shared.adversarial_game import ENERGY_OBJECTIVES, check_critic, failures, remedy
from mpt.tasks.shared.advice import Advice
from mpt.tasks.shared.samples import (
    FromLatents,
    Prior,
    Quality,
    Sampler,
    draw_latents,
    latent_size_of,
    show_reconstructions,
)

MOVED = {"ema": "train.ema.decay"}
TEST_SAMPLES = 2
"""How small the test set may be: the distance between distributions needs a covariance."""


class Settings(GenerativeOptions):
    """How the game is played; null follows the model."""

    objective: (
        Literal["nonsaturating", "least_squares", "wasserstein", "hinge", "energy", "balanced"]
        | None
    ) = None
    """Adversarial loss; energy is EBGAN's and balanced BEGAN's, for critics that are autoencoders."""
    critic_steps: int | None = Field(None, ge=1)
    """Steps of the discriminator for one of the generator."""
    gradient_penalty: float | None = Field(None, ge=0)
    """Weight of the squared departure of the critic's gradient norm from 1; 0 is none."""
    weight_clip: float | None = Field(None, ge=0)
    """Limit of the critic's weights after each step; 0 is none."""
    margin: float = Field(5.0, gt=0)
    """Energy beyond which fakes are left alone (EBGAN)."""
    pull_away: float = Field(0.0, ge=0)
    """Weight of the term that keeps codes of fakes apart (EBGAN)."""
    balance: float = Field(0.5, gt=0)
    """Wanted ratio of the fakes' energy to the reals' (BEGAN's gamma). The smaller the images, the nearer to 1."""
    balance_rate: float = Field(1e-3, gt=0)
    """How fast the fakes' weight in the critic's loss follows that ratio (BEGAN's lambda)."""


class Gan(FromLatents, Game, SecondOrder, Exports, Legend):
    """Train `gen` (with `encoder` or `recognition` alongside it, if the model has one) against `disc`."""

    metric, higher_is_better = "frechet_distance", False
    opponents = ("disc", "gen")
    averaged = ("gen",)
    quality: Quality

    def __init__(
        self,
        settings: Settings,
        model_settings: Options,
        modules: Mapping[str, nn.Module],
        data: DataSpec,
        precision: Precision,
    ) -> None:
        def rule(name: str, default: Any) -> Any:
            own = setting_of(settings, name)
            return setting_of(model_settings, name, default) if own is None else own

        if settings.inception_weights:
            require_inception(settings.inception_weights)
        self.settings, self.precision, self.data = settings, precision, data
        self.metric_note = explain_distance(data)
        self.critic_steps: int = rule("critic_steps", 1)
        self.gradient_penalty: float = rule("gradient_penalty", 0.0)
        self.differentiates_twice = self.gradient_penalty > 0
        self.weight_clip: float = rule("weight_clip", 0.0)
        self.objective_name: str = rule("objective", "nonsaturating")
        self.bounded_losses = self.objective_name in ("nonsaturating", "least_squares")
        check_critic(self.objective_name, rule("critic", "scorer"))
        if settings.pull_away and self.objective_name not in ENERGY_OBJECTIVES:
            raise ConfigError(
                f"task.pull_away: {settings.pull_away:g} keeps the codes of a critic that is an autoencoder apart, and "
                "this model's has none; leave it out, or use model.name ebgan"
            )
        self.labels: str = rule("labels", "ignore")
        self.judges: str = rule("judges", "image")
        self.gen, self.disc = modules["gen"], modules["disc"]
        self.encoder, self.recognition = modules.get("encoder"), modules.get("recognition")
        self.condition = modules.get("condition")
        # Without an encoder, it infers from noise.
        self.inputs = ("image",) if self.encoder is not None else ()
        self.modules: dict[str, nn.Module] = dict(modules)
        self.trainable = {"disc": self.disc, "gen": self._generator_side()}
        self.latent_size = latent_size_of("gen", self.gen)
        self.image_range: tuple[float, float] = getattr(self.gen, "image_range", (-1.0, 1.0))
        device = compute_device(self.gen)
        prior: Prior = getattr(self.gen, "prior", "normal")
        self.sampler = Sampler(
            self.generate, self.latent_size, prior, device, precision, self._classes
        )
        self.quality = Quality(data, device, settings.inception_weights)
        self.evaluation_samples = settings.metric_samples
        self.preview_columns = self.sampler.columns
        self.balance = torch.zeros((), device=device)
        self.energies = torch.zeros(2, 2, device=device)
        """Of real and fake sides, the sum of energies and their number in this step; ranks average them."""
        parts = adversarial.make_objective(self.objective_name, settings.margin)
        self.parts = adversarial.Objective(*(precision.loss(part) for part in parts))
        self.penalty = precision.loss(adversarial.gradient_penalty)
        self.pull_away = precision.loss(adversarial.pull_away)
        self.cross_entropy = precision.loss(functional.cross_entropy)
        self.reconstruction = precision.loss(functional.binary_cross_entropy_with_logits)
        self.advice = Advice()

    def _generator_side(self) -> nn.Module:
        """Return the networks of the generator's optimizer: the generator and those that work with it."""
        helpers = {"encoder": self.encoder, "recognition": self.recognition}
        there = {name: module for name, module in helpers.items() if module is not None}
        return nn.ModuleDict({"gen": self.gen, **there}) if there else self.gen

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The networks; memory tricks find the blocks inside."""
        return [
            module
            for module in (self.gen, self.encoder, self.recognition, self.disc)
            if module is not None
        ]

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        """Return the discriminator's phase, then the generator's; an AAE reconstructs before both."""
        disc = Phase("disc", self.disc, optimizers["disc"], self.disc_losses)
        gen = Phase(
            "gen",
            self.trainable["gen"],
            optimizers["gen"],
            self.gen_losses,
            every=self.critic_steps,
        )
        if self.judges == "code":
            assert self.encoder is not None
            rebuild = Phase(
                "reconstruct", self.trainable["gen"], optimizers["gen"], self.reconstruct_losses
            )
            fool = Phase(
                "gen", self.encoder, optimizers["gen"], self.gen_losses, every=self.critic_steps
            )
            return [rebuild, disc, fool]
        return [disc, gen]

    def draw(self, batch: Batch, phase: Phase) -> Batch:
        """Add fresh latents (b, z), and if used codes (b,) and mixing weights (b,)."""
        image = batch["image"]
        count, device = len(image), image.device
        drawn = {
            **batch,
            "latent": draw_latents(count, self.latent_size, self.sampler.prior, device),
        }
        if self.labels == "code":
            drawn["label"] = torch.randint(0, self._classes, (count,), device=device)
        if self.gradient_penalty and phase.name == "disc":
            drawn["mix"] = torch.rand(count, device=device)
        if phase.name == "disc":
            self.energies = torch.zeros_like(self.energies)
        return drawn

    @property
    def draws_by_shape(self) -> bool:
        """Every update's random inputs depend on the number and the size of the images alone."""
        return True

    @property
    def _classes(self) -> int:
        return int(self.condition.size) if self.condition is not None else 0  # type: ignore[arg-type]

    def real_side(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the discriminator's real inputs."""
        if self.judges == "code":
            return (batch["latent"],)
        image = self.to_network(batch["image"])
        return (image, self.encoder(image)) if self.encoder is not None else (image,)

    def fake_side(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the discriminator's fake inputs."""
        if self.judges == "code":
            assert self.encoder is not None
            return (self.encoder(self.to_network(batch["image"])),)
        if self.condition is not None:
            return (self.gen(batch["latent"], self.condition(batch["label"])),)
        image = self.gen(batch["latent"])
        return (image, batch["latent"]) if self.judges == "pair" else (image,)

    def judge(self, side: tuple[Tensor, ...], batch: Batch, real: bool) -> Judgement:
        """Return the discriminator's verdict, on scores (b,)."""
        if self.labels == "condition":
            assert self.condition is not None
            side = (*side, self.condition(batch["label"]))
        verdict = self.disc(*side)
        return Judgement(verdict) if isinstance(verdict, Tensor) else verdict

    def disc_losses(self, batch: Batch) -> Iterator[Loss | list[Loss]]:
        """Yield the discriminator's losses on the real side, on the fake side, and its gradient penalty."""
        with torch.no_grad():
            real = self.real_side(batch)
        yield self._disc_losses(real, batch, "real")
        with torch.no_grad():
            fake = self.fake_side(batch)
        yield self._disc_losses(fake, batch, "fake")
        if self.gradient_penalty:
            penalty = self.penalty(
                lambda *mixed: self.judge(mixed, batch, real=True).score, real, fake, batch["mix"]
            )
            yield Loss("penalty", self.gradient_penalty * penalty)

    def _disc_losses(
        self, side: tuple[Tensor, ...], batch: Batch, kind: Literal["real", "fake"]
    ) -> list[Loss]:
        verdict = self.judge(side, batch, real=kind == "real")
        value: Tensor = (self.parts.real if kind == "real" else self.parts.fake)(verdict.score)
        if self.objective_name == "balanced":
            energy = verdict.score.detach().float()
            self.energies[0 if kind == "real" else 1] += torch.stack(
                (energy.sum(), torch.ones_like(energy).sum())
            )
            value = value if kind == "real" else -self.balance * value
        losses = [Loss(kind, value)]
        if verdict.classes is not None:
            losses.append(
                Loss(f"{kind}_classes", self.cross_entropy(verdict.classes, batch["label"]))
            )
        return losses

    def gen_losses(self, batch: Batch) -> list[Loss]:
        """Return the generator's losses: its images should pass for real, and show their class or code."""
        side = self.fake_side(batch)
        verdict = self.judge(side, batch, real=False)
        parts: dict[str, Tensor] = {"adversarial": self.parts.generator(verdict.score)}
        if self.judges == "pair":  # the encoder's side should pass for made up
            parts["encoder"] = self.parts.fake(
                self.judge(self.real_side(batch), batch, real=True).score
            )
        if verdict.classes is not None:
            parts["classes"] = self.cross_entropy(verdict.classes, batch["label"])
        if self.settings.pull_away and verdict.code is not None:
            parts["pull_away"] = self.settings.pull_away * self.pull_away(verdict.code)
        if self.recognition is not None:
            parts["code"] = self.cross_entropy(self.recognition(side[0]), batch["label"])
        if len(parts) == 1:
            return [Loss("loss", value) for value in parts.values()]
        return [Loss(name, value) for name, value in parts.items()]

    def reconstruct_losses(self, batch: Batch) -> Iterator[Loss]:
        """Yield the cross-entropy, per pixel, of the image given its own code."""
        assert self.encoder is not None
        image = self.to_network(batch["image"])
        logits = self.gen(self.encoder(image), as_image=False)
        yield Loss("loss", self.reconstruction(logits, image))

    @torch.no_grad()
    def after_step(self, step: int, samples_seen: int) -> None:
        """Clip the critic's weights, move BEGAN's balance."""
        self.advice.steps_done = step
        if self.weight_clip:
            for parameter in {*self.precision.parameters(self.disc), *self.disc.parameters()}:
                parameter.clamp_(-self.weight_clip, self.weight_clip)
        if self.objective_name == "balanced":
            # NaN, which changes nothing, if none were seen
            real, fake = self.energies[:, 0] / self.energies[:, 1]
            wanted, rate = self.settings.balance, self.settings.balance_rate
            self.balance = adversarial.next_balance(self.balance, real, fake, wanted, rate)
            self.energies = torch.zeros_like(self.energies)

    def to_network(self, image_bchw: Tensor) -> Tensor:
        """Map images from [0, 1] to the generator's range."""
        low, high = self.image_range
        return image_bchw if (low, high) == (0.0, 1.0) else image_bchw * (high - low) + low

    def to_image(self, made_bchw: Tensor) -> Tensor:
        """Map the generator's images from its range to [0, 1], float32."""
        low, high = self.image_range
        return ((made_bchw.float() - low) / (high - low)).clamp(0, 1)

    def generate(self, latent_bz: Tensor, first: int = 0, truncation: float = 1.0) -> Tensor:
        """Return images in [0, 1] from the generator; sample i has class (first + i) mod classes.

        Truncation below 1 shortens the latents: less variety, better samples.
        """
        inputs = [latent_bz * truncation]
        if self.condition is not None:
            numbers = torch.arange(first, first + len(latent_bz), device=latent_bz.device)
            inputs.append(self.condition(numbers % self._classes))
        image: Tensor = self.gen(*inputs)
        return self.to_image(image)

    def evaluate_batch(self, batch: Batch) -> Evidence:
        """Return the features of real images."""
        with self.precision.float32():
            return self.quality.features(batch["image"], "real")

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        """Return the Frechet distance and the diversity of samples compared with the real images."""
        return self.quality.figures(evidence)

    def preview(self, batch: Batch) -> Tensor | None:
        """Return samples from fixed latents."""
        return self.sampler.sample(self.settings.preview_count, seed=0)

    def export_texts(self) -> dict[str, str]:
        """Return the range of the generator's images, and the distribution of its latents."""
        sampler = self.sampler
        return {
            "mpt_image_range": json.dumps(self.image_range),
            "mpt_latents": json.dumps({"size": sampler.latent_size, "prior": sampler.prior}),
        }

    def infer(self, batch: Batch | None, count: int, seed: int) -> Inference:
        """Return samples, truncated samples and paths between latents; for inputs, if there is an encoder, their
        reconstructions.
        """
        if batch is None or self.encoder is None:
            return self.sampler.infer(count, seed, self.settings.truncation)
        code = self.encoder(self.to_network(batch["image"]))
        rebuilt = self.gen(code)
        return show_reconstructions(batch["image"], self.to_image(rebuilt), code)

    def advise(self, figures: Mapping[str, float]) -> list[str]:
        """Return warnings, each once, about faults that a log line or an evaluation shows, the start apart."""
        return self.advice.say_once("few", self.quality.doubt) + self.advice.say(
            self.failures(figures), self.limits.after
        )

    def collapse(self, figures: Mapping[str, float]) -> str | None:
        """Return how the game is lost, the start apart: nothing is left to learn from, or samples are all alike."""
        found = self.failures(figures) if self.advice.is_due(self.limits.after) else {}
        return "; ".join(message.split(". Try ")[0] for message in found.values()) or None

    def failures(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Return kind -> a fault that a log line or an evaluation shows, and remedies."""
        return failures(figures, self.limits, self.objective_name, self.remedy())

    def remedy(self) -> str:
        """Return the setting to try first that this game has and does not use yet."""
        return remedy(
            self.objective_name, self.settings.pull_away, self.gradient_penalty, self.critic_steps
        )

    def state_dict(self) -> dict[str, Any]:
        """Return BEGAN's balance and the energies of a step, of which ranks agree on the mean before it follows."""
        return {"balance": self.balance, "energies": self.energies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore BEGAN's balance."""
        self.balance = state["balance"].to(self.balance.device)
        self.energies = state.get("energies", self.energies).to(self.energies.device)


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> Gan:
    """Build the task around `gen` and `disc`."""
    return Gan(settings, model_settings, modules, data, precision)
