"""Nine small adversarial models that are one pair of networks: they differ in the loss and in the use of labels.

The generator maps a latent vector, and a condition if there is one, to an image in [0, 1]. The discriminator is
either a scorer or an autoencoder whose reconstruction error is the score (BEGAN, EBGAN). Scores are logits: no
network here ends in a sigmoid that a loss would have to undo. `objective` and its numbers are the defaults that
`mpt.tasks.gan` takes up.

Source of the sizes and of each model's numbers: github.com/wiseodd/generative-models (flat MNIST, one hidden layer of
128).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import ModelOptions
from mpt.nn.shared.generative_bodies import (
    ImageToVector,
    VectorToImage,
    check_image,
    class_count,
    join,
    one_hot,
)
from mpt.seams import DataSpec

TASK = "gan"
NAMES = {
    "vanilla_gan": {"latent_size": 100},
    "lsgan": {"objective": "least_squares", "critic_steps": 3},
    "wgan": {"objective": "wasserstein", "critic_steps": 5, "weight_clip": 0.01},
    "wgan_gp": {
        "objective": "wasserstein",
        "critic_steps": 5,
        "gradient_penalty": 10.0,
        "prior": "uniform",
    },
    "cgan": {"latent_size": 100, "labels": "condition"},
    "acgan": {"latent_size": 16, "labels": "classify", "activation": "prelu"},
    "infogan": {"latent_size": 16, "labels": "code"},
    "began": {"objective": "balanced", "critic": "autoencoder"},
    "ebgan": {"objective": "energy", "critic": "autoencoder"},
}
ABOUT = {
    "vanilla_gan": "The first GAN: logistic losses (Goodfellow et al., 2014).",
    "lsgan": "Least-squares GAN, three discriminator steps for each of the generator (Mao et al., 2017).",
    "wgan": "Wasserstein GAN with clipped weights, five critic steps (Arjovsky et al., 2017).",
    "wgan_gp": "Wasserstein GAN with a gradient penalty in place of clipping (Gulrajani et al., 2017).",
    "cgan": "Conditional GAN: generator and discriminator see the label (Mirza and Osindero, 2014).",
    "acgan": "Auxiliary classifier GAN: the discriminator names the class too (Odena et al., 2017).",
    "infogan": "InfoGAN: a code without labels that the discriminator reads back (Chen et al., 2016).",
    "began": "Boundary equilibrium GAN: an autoencoder as discriminator, held in balance (Berthelot et al., 2017).",
    "ebgan": "Energy-based GAN: an autoencoder's error is the energy (Zhao et al., 2017).",
}


class Settings(ModelOptions):
    image_size: int = Field(28, ge=1, le=1024)
    channels: int = Field(1, ge=1, le=4)
    body: Literal["mlp", "conv"] = "mlp"
    """Type of the networks: fully connected (mlp) or convolutional (conv)."""
    hidden: int = Field(128, ge=8)
    """Width of the hidden layer; for `conv`, of the features."""
    latent_size: int = Field(10, ge=1)
    """Length of the latent vector."""
    prior: Literal["normal", "uniform"] = "normal"
    """Distribution of the latent vector."""
    activation: Literal["relu", "leaky_relu", "prelu"] = "relu"
    """Activation function of the hidden layers."""
    critic: Literal["scorer", "autoencoder"] = "scorer"
    """Discriminator: one logit per image, or an autoencoder whose reconstruction error is the score."""
    labels: Literal["ignore", "condition", "classify", "code"] = "ignore"
    """Ignore them, give them to both networks, have the discriminator name them too, or replace them by a code."""
    codes: int = Field(10, ge=2)
    """Number of categories of the code, with `labels: code`."""
    objective: Literal[
        "nonsaturating", "least_squares", "wasserstein", "hinge", "energy", "balanced"
    ] = "nonsaturating"
    """Adversarial loss."""
    critic_steps: int = Field(1, ge=1)
    """Discriminator updates per generator update."""
    gradient_penalty: float = Field(0.0, ge=0)
    """Weight of the gradient penalty of the discriminator; 0 is none."""
    weight_clip: float = Field(0.0, ge=0)
    """Clip the discriminator's weights to plus or minus this after each update; 0 is none."""


class Judgement(NamedTuple):
    """The outputs of a discriminator: a score (b,), and if it has them class logits (b, classes) or a code (b,
    d)."""

    score: Tensor
    classes: Tensor | None = None
    code: Tensor | None = None


class Generator(nn.Module):
    """Map a latent (b, d) and a condition (b, e) to an image (b, c, h, w) in [0, 1]."""

    image_range = (0.0, 1.0)

    def __init__(self, settings: Settings, condition: int) -> None:
        super().__init__()
        self.latent_size, self.prior, self.condition = (
            settings.latent_size,
            settings.prior,
            condition,
        )
        self.decode = VectorToImage(
            settings.latent_size + condition,
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
            settings.activation,
        )

    def forward(self, latent_bd: Tensor, condition_be: Tensor | None = None) -> Tensor:
        image_bchw: Tensor = self.decode(join(latent_bd, condition_be)).sigmoid()
        return image_bchw


class Scorer(nn.Module):
    """Judge an image by one logit, given its label if `condition` is set, and name its class if `classes` is."""

    def __init__(self, settings: Settings, condition: int = 0, classes: int = 0) -> None:
        super().__init__()
        self.features = ImageToVector(
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
            settings.activation,
            condition,
        )
        self.score = nn.Linear(settings.hidden, 1)
        self.classify = nn.Linear(settings.hidden, classes) if classes else None

    def forward(self, image_bchw: Tensor, condition_be: Tensor | None = None) -> Judgement:
        features_bd = self.features(image_bchw, condition_be)
        classes = self.classify(features_bd) if self.classify is not None else None
        return Judgement(self.score(features_bd).flatten(), classes)


class AutoencoderCritic(nn.Module):
    """Judge an image by how badly it is reconstructed: the error summed over pixels, in float32.

    A sum over a 256-pixel colour image exceeds float16's range, hence the cast before it.
    """

    def __init__(self, settings: Settings, power: int) -> None:
        super().__init__()
        shape = (settings.image_size, settings.channels, settings.hidden, settings.body)
        self.encode = ImageToVector(*shape, settings.activation)
        self.decode = VectorToImage(
            settings.hidden,
            settings.image_size,
            settings.channels,
            settings.hidden,
            settings.body,
            settings.activation,
        )
        self.power = power

    def forward(self, image_bchw: Tensor, condition_be: Tensor | None = None) -> Judgement:
        code_bd = self.encode(image_bchw)
        error = self.decode(code_bd).sigmoid().float() - image_bchw.float()
        error = error.abs() if self.power == 1 else error.square()
        return Judgement(error.flatten(1).sum(dim=1), code=code_bd)


class Recogniser(nn.Module):
    """Guess, as logits (b, codes), the code that an image was made from."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.features = ImageToVector(
            settings.image_size, settings.channels, settings.hidden, settings.body
        )
        self.guess = nn.Linear(settings.hidden, settings.codes)

    def forward(self, image_bchw: Tensor) -> Tensor:
        logits: Tensor = self.guess(self.features(image_bchw))
        return logits


class OneHot(nn.Module):
    """Turn labels or codes (b,) into the vectors that networks are conditioned on; it has no parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, label_b: Tensor) -> Tensor:
        return one_hot(label_b, self.size)


def build(settings: Settings, data: DataSpec) -> dict[str, nn.Module]:
    """Return "gen" and "disc", with a code "recognition", and if labels or codes go in their encoder "condition"."""
    check_image(data, settings.image_size, settings.channels, "of the GAN family")
    conditional = settings.labels in ("condition", "classify")
    classes = class_count(data, "cgan or acgan (model.labels)") if conditional else 0
    width = settings.codes if settings.labels == "code" else classes
    modules: dict[str, nn.Module] = {"gen": Generator(settings, width)}
    if settings.critic == "autoencoder":
        modules["disc"] = AutoencoderCritic(
            settings, power=1 if settings.objective == "balanced" else 2
        )
    else:
        modules["disc"] = Scorer(
            settings,
            condition=classes if settings.labels == "condition" else 0,
            classes=classes if settings.labels == "classify" else 0,
        )
    if settings.labels == "code":
        modules["recognition"] = Recogniser(settings)
    if width:
        modules["condition"] = OneHot(width)
    for module in modules.values():
        module.apply(_initialize)
    return modules


def _initialize(module: nn.Module) -> None:
    """Draw weights with variance 2 / inputs, biases zero: called Xavier by the source, derived by He et al. 2015."""
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
