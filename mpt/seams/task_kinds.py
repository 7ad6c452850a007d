"""Further things that some tasks do, one class each: a task derives from those that it implements.

`class Mine(Game, Exports)` is a game between two networks, which makes samples, and says more of its exports. The
engine asks `isinstance`: a task that derives from none of them has nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mpt.config.schema import Collapse
from mpt.seams.task import Evidence, Task


class Samples(Task):
    """A task that makes samples from noise."""

    optional_inputs: bool = True
    """Whether it makes samples when inference is given no input; with no `inputs` it always does."""
    evaluation_samples: int = 0
    """Samples of which `evaluate_samples` is asked at each evaluation."""

    def evaluate_samples(self, first: int, count: int) -> Evidence:
        """Return the outputs for `conclude` of samples `first` to `first + count` of the `evaluation_samples`."""
        return {}

    def samples(
        self, total: int, first: int, count: int, seed: int, truncation: float = 1.0
    ) -> Tensor:
        """Return samples `first` to `first + count` of the `total` that a seed gives, in [0, 1], NCHW."""
        raise NotImplementedError(f"{type(self).__name__} has no samples by number")

    def walk(self, seeds: Sequence[int], frames: int) -> Tensor:
        """Return images in [0, 1] on the way from each seed's sample to the next's, `frames` for each two."""
        raise NotImplementedError(f"{type(self).__name__} has no walk between samples")


class Game(Samples):
    """A discriminator and a generator that play against each other, which are watched for a collapse."""

    opponents: tuple[str, str]
    """The phases of the discriminator and of the generator."""
    bounded_losses: bool = False
    """Whether both sides' losses can never be negative."""
    limits: Collapse = Collapse.model_validate({})
    """From when on `advise` and `collapse` speak of a collapse. The engine sets it (`train.collapse`)."""

    def collapse(self, figures: Mapping[str, float]) -> str | None:
        """Return how the training has collapsed by logged losses or figures of an evaluation; None if it has not."""
        return None


class SecondOrder(Task):
    """A task with a loss that holds a gradient (a gradient penalty), so that a backward needs the weights twice."""

    differentiates_twice: bool = True
    """Whether it has one as it is set."""


class Exports(Task):
    """A task that says more of an exported network than its weights."""

    training_figures: tuple[str, ...] = ()
    """Figures of `conclude` that are of the training's state, which an exported file does not hold."""

    def export_terms(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the tensors into and out of an exported network."""
        return default_terms(self)

    def export_texts(self) -> dict[str, str]:
        """Return extra metadata for the exported file."""
        return {}

    def graph_texts(self, network: nn.Module) -> dict[str, str]:
        """Return metadata for a file of a network's graph: what the task makes the graph's inputs of."""
        return {}

    def take_graph_texts(self, texts: Mapping[str, str]) -> None:
        """Restore that from the metadata of such a file."""

    def whole(self, network: nn.Module) -> nn.Module | None:
        """Return an exported network with pre- and postprocessing inside: images in [0, 1] in, probabilities out.

        None if the task has nothing to put around it.
        """
        return None

    def from_whole(self, inputs: tuple[Any, ...], network: Callable[..., Any]) -> Any:
        """Call a network of `whole` with the inputs and return the bare network's outputs."""
        raise NotImplementedError(f"{type(self).__name__} has no whole network")


class Tiles(Task):
    """A task whose inputs can be cut into tiles for inference."""

    def tiles_of(self, height: int, width: int) -> Iterator[tuple[int, int]]:
        """Yield the heights and widths of the tiles that a frame can be cut into, largest first."""
        raise NotImplementedError(f"{type(self).__name__} has no tiles")


class Plateau(Task):
    """A task that lowers learning rates by its evaluations."""

    @property
    def rate_factor(self) -> float:
        """Return the factor of the learning rates."""
        return 1.0

    def after_evaluation(self, figures: Mapping[str, float]) -> None:
        """Follow an evaluation on the whole test set."""


class Legend(Task):
    """A task that explains its figures and pictures."""

    metric_note: str | None = None
    """One sentence on the metric's feature space, printed when a run begins."""
    inputs_note: str | None = None
    """One sentence on the interpretation of inputs, printed by `mpt infer` when it was given some.
    "RUN" in it is the run's folder."""
    preview_columns: int | None = None
    """Columns of the preview's grid, as square as can be if None."""


def infers(task: Task) -> bool:
    """Return whether a task has an `infer` of its own."""
    return type(task).infer is not Task.infer


def default_terms(task: Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the tensors into and out of an exported network of any task."""
    if not infers(task):
        return ("inputs",), ("outputs",)
    return (("images",), ("outputs",)) if task.inputs else (("latents",), ("images",))


def evaluation_samples(task: Task) -> int:
    """Return the number of samples that an evaluation makes; 0 for a task that makes none."""
    return task.evaluation_samples if isinstance(task, Samples) else 0


def rate_factor(task: Task) -> float:
    """Return the task's factor of the learning rates."""
    return task.rate_factor if isinstance(task, Plateau) else 1.0


def differentiates_twice(task: Task) -> bool:
    """Return whether a loss of the task holds a gradient."""
    return isinstance(task, SecondOrder) and task.differentiates_twice
