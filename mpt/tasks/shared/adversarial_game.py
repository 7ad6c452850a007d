"""Which objectives and critics go together, how the figures of a game show that it is lost, and remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpt.config.schema import Collapse
from mpt.errors import ConfigError

ENERGY_OBJECTIVES = ("energy", "balanced")
BOUNDED_OBJECTIVES = ("nonsaturating", "least_squares", "hinge")
"""Those whose discriminator's loss is near 0 when it has won."""


def check_critic(objective: str, critic: str) -> None:
    """Raise ConfigError for an objective on energies with a critic that gives logits, or the reverse."""
    if (objective in ENERGY_OBJECTIVES) == (critic == "autoencoder"):
        return
    if critic == "autoencoder":
        raise ConfigError(
            f"task.objective: {objective} wants high scores for real images, and this model's critic gives energies, "
            f"low for real ones; use {' or '.join(ENERGY_OBJECTIVES)}, or set model.critic=scorer"
        )
    raise ConfigError(
        f"task.objective: {objective} wants the energies of a critic that is an autoencoder, and this model's gives "
        "logits; use model.name began or ebgan, or another objective"
    )


def failures(
    figures: Mapping[str, float], limits: Collapse, objective: str, remedy: str
) -> dict[str, str]:
    """Return kind -> a fault that a log line or an evaluation shows, and remedies (`remedy` among them)."""
    found = {}
    if (
        objective in BOUNDED_OBJECTIVES
        and "disc/real" in figures
        and figures["disc/real"] + figures.get("disc/fake", math.inf) < limits.won
    ):
        found["won"] = (
            "the discriminator's loss is nearly 0: it has won, and the generator's gradients vanish. Try a lower "
            f"optimizer.phases.disc.lr, {remedy}, or more data"
        )
    if figures.get("diversity", math.inf) < limits.diversity:
        found["collapsed"] = (
            f"the samples vary {figures['diversity']:.2f} times as much as the data: the generator may have "
            f"collapsed. Try {remedy}, a lower optimizer.lr, or a larger train.batch_size"
        )
    return found


def remedy(objective: str, pull_away: float, gradient_penalty: float, critic_steps: int) -> str:
    """Return the setting to try first that a game has and does not use yet."""
    if objective == "balanced":
        return "a task.balance nearer to 1"
    if objective == "energy":
        return "a larger task.pull_away" if pull_away else "task.pull_away=0.1"
    if objective != "wasserstein":
        return "task.objective=wasserstein with task.gradient_penalty=10 and task.critic_steps=5"
    if not gradient_penalty:
        return "task.gradient_penalty=10 with task.weight_clip=0"
    return f"task.critic_steps={2 * critic_steps}"
