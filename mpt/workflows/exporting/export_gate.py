"""The gate of an exported graph: the task's own metric, computed with the graph in the network's place.

The same samples are evaluated with the run's network in float32 and with the graph in ONNX Runtime. A graph in fewer
bits keeps those nodes in float32 that do not fit; if the metric is still worse than the gate allows, the nodes that
add most error are kept too, twice as many each time, until it is within. A graph of which more than half would be kept
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpt.config.checking.precision_names import FLOAT32
from mpt.data.loading.absent import AbsentDataset
from mpt.inference.evaluating import Measured, measure
from mpt.inference.exported import attach
from mpt.inference.graphs.files import open_graph
from mpt.inference.graphs.watched import Feeds, added_errors, errors
from mpt.inference.half import rebuild
from mpt.inference.trained import Trained
from mpt.report.comparing.statistics import Margin
from mpt.report.units import show_figure
from mpt.seams import Batch, Dataset, Samples, Task

MOST_KEPT = 0.5
"""Share of the nodes beyond which a graph in fewer bits is none."""
SHOWN, MOST_LISTED = 8, 100


class FirstSamples(Dataset):
    """Samples spread evenly over a data set."""

    def __init__(self, data: Dataset, count: int) -> None:
        from dataclasses import replace

        self.data, self.count = data, min(count, len(data))
        self.spec = replace(data.spec, size=self.count)

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return samples of the whole set."""
        return self.data.fetch([self.place(index) for index in indices], epoch)

    def is_left_out(self, index: int) -> bool:
        """Return whether the whole set's sample was found to be bad."""
        return self.data.is_left_out(self.place(index))

    def place(self, index: int) -> int:
        """Return the number of a sample in the whole set."""
        return index * len(self.data) // self.count


class Recording:
    """A session that remembers its inputs, up to a number of samples."""

    def __init__(self, inner: Any, samples: int) -> None:
        self.inner, self.room = inner, samples
        self.feeds: list[Feeds] = []

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the session has."""
        return getattr(self.inner, name)

    def run(self, names: Any, feeds: Feeds) -> Any:
        """Run the session."""
        if self.room > 0:
            self.feeds.append(feeds)
            self.room -= len(next(iter(feeds.values())))
        return self.inner.run(names, feeds)


@dataclass(frozen=True)
class Place:
    """The place of a graph: the network's names in the task, and whether pre- and postprocessing are inside."""

    trained: Trained
    names: tuple[str, ...]
    whole: bool
    samples: int
    batch_size: int

    @property
    def has_data(self) -> bool:
        """Whether the run's data are here."""
        return not isinstance(self.trained.test_data, AbsentDataset)

    def measure(self, opened: Any | None, data: Dataset | None = None) -> Measured:
        """Return the task's figures, with a session in the network's place, or with the run's own network."""
        run = rebuild(self.trained, FLOAT32)
        if isinstance(run.task, Samples):
            run.task.evaluation_samples = min(run.task.evaluation_samples, self.samples)
        if opened is not None:
            attach(run.task, self.names, self.whole, opened)
        chosen = FirstSamples(self.trained.test_data if data is None else data, self.samples)
        return measure(run, chosen, self.batch_size, "float32")

    @property
    def task(self) -> Task:
        """The task whose metric decides."""
        return self.trained.run.task


@dataclass
class Judged:
    """The metrics of an exported graph."""

    metric: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    gate: Margin
    lost: float
    """By how much the metric is worse, in the gate's unit."""
    samples: int
    nodes: int
    kept: dict[str, str] = field(default_factory=dict)
    """Node -> why it computes in float32."""
    worst: dict[str, float] = field(default_factory=dict)
    """Node -> the error that it adds, as a share of its size, of a graph that was not within the gate."""

    @property
    def within(self) -> bool:
        """Whether the metric is within the gate."""
        return self.lost <= self.gate.size

    def sentence(self) -> str:
        """Return the figures as a sentence."""
        before, after = (show_figure(one[self.metric]) for one in (self.before, self.after))
        kept = (
            f"; {len(self.kept)} of {self.nodes} nodes compute in float32: {listed(self.kept)}"
            if self.kept
            else ""
        )
        worst = f"; the nodes that add most error: {shown(self.worst)}" if self.worst else ""
        return (
            f"reaches {self.metric} {after}, and the run in float32 {before}, on {self.samples} test samples "
            f"(gate {self.gate}){kept}{worst}"
        )


def listed(kept: Mapping[str, str]) -> str:
    """Return the first few nodes with their reasons."""
    shown = [f"{name} ({why})" for name, why in list(kept.items())[:SHOWN]]
    return ", ".join(shown) + (f" and {len(kept) - SHOWN} more" if len(kept) > SHOWN else "")


def loss_of(task: Task, gate: Margin, before: float, after: float) -> float:
    """Return by how much a figure is worse, as a share of the first one if the gate is a share."""
    worse = before - after if task.higher_is_better else after - before
    if worse != worse:
        return float("inf")
    return worse / max(abs(before), 1e-12) if gate.relative else worse


def tested(place: Place) -> int:
    """Return the number of test samples that were measured on, those of bad files not counted."""
    data = FirstSamples(place.trained.test_data, place.samples)
    return sum(not data.is_left_out(index) for index in range(len(data)))


def judge(
    place: Place, model: Any, before: Measured, gate: Margin, kept: Mapping[str, str], nodes: int
) -> Judged:
    """Measure a graph on the test samples."""
    after = place.measure(open_graph(model.SerializeToString()))
    metric = place.task.metric
    lost = loss_of(place.task, gate, before.figures[metric], after.figures[metric])
    samples = tested(place)
    return Judged(metric, before.figures, after.figures, gate, lost, samples, nodes, dict(kept))


def search(
    place: Place,
    reference: Any,
    make: Callable[[Mapping[str, str]], Any],
    kept: Mapping[str, str],
    candidates: Sequence[str],
    feeds: Sequence[Feeds],
    before: Measured,
    gate: Margin,
) -> tuple[Any, Judged]:
    """Return the graph in fewer bits and its figures, which are within the gate unless too many nodes would be kept.

    `make` writes it with some nodes in float32.
    """
    model = make(kept)
    judged = judge(place, model, before, gate, kept, len(candidates))
    ranked: dict[str, float] = {}
    more = 1
    while not judged.within:
        if not ranked:
            ranked = added_errors(reference.graph, errors(reference, model, feeds))
        worst = [name for name in ranked if name in set(candidates) and name not in kept][:more]
        chosen = {
            **kept,
            **{name: f"it adds an error of {ranked[name]:.2g} of its size" for name in worst},
        }
        if not worst or len(chosen) > MOST_KEPT * len(candidates):
            judged.worst = dict(list(ranked.items())[:MOST_LISTED])
            return model, judged
        model = make(chosen)
        judged = judge(place, model, before, gate, chosen, len(candidates))
        more *= 2
    return model, judged


def shown(ranked: Mapping[str, float]) -> str:
    """Return the nodes that add most error."""
    return (
        ", ".join(f"{name} ({size:.2g})" for name, size in list(ranked.items())[:SHOWN]) or "none"
    )
