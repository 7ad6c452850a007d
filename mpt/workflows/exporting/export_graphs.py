"""An exported ONNX file in float32, float16 or 8 bits that has proved itself before it gets its name.

`finish` takes the float32 file that torch's exporter wrote: it runs it in the network's place on real samples, writes
it in fewer bits if that is wanted, measures the task's metric, and writes the result into the file and on a page.
Without the run's data no metric is measured, and ranges are those of the samples that the network was exported with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mpt.config.schema import Config
from mpt.errors import ConfigError, DataError, GateError
from mpt.inference.graphs.eight_bits import candidates, prepared, to_eight_bits
from mpt.inference.graphs.files import open_graph, save_graph
from mpt.inference.graphs.mixed import beyond_half, is_float32, named_nodes, of_modules, to_half
from mpt.inference.graphs.watched import Feeds, magnitudes
from mpt.report.comparing.statistics import Margin
from mpt.report.run_page.exported_page import write_page
from mpt.workflows.exporting.export_gate import (
    Judged,
    Place,
    Recording,
    loss_of,
    search,
    tested,
)

WATCHED = 64
"""Samples whose ranges are measured."""


@dataclass(frozen=True)
class Wishes:
    """How a file is to be."""

    kind: str
    """float32, float16 or int8."""
    gate: Margin
    samples: int
    """Test samples of the metric, and training samples that calibrate."""


def finish(
    partial: Path,
    path: Path,
    place: Place,
    wishes: Wishes,
    inputs: tuple[Any, ...],
    prove: Callable[[Path], str],
) -> str:
    """Rewrite, prove and judge the file; return a sentence.

    `prove` compares its outputs with the run's, not those of 8 bits. Raises GateError beyond the gate, after the page
    is written, DataError without data.
    """
    import onnx

    written = onnx.load(str(partial))
    texts = {one.key: one.value for one in written.metadata_props}
    model = named_nodes(written)
    if not place.has_data:
        if wishes.kind == "int8":
            raise DataError(
                "--int8 needs the run's data set, to calibrate and to measure; it is not here"
            )
        kept: dict[str, str] = {}
        if wishes.kind == "float16":
            kept = misfits(model, [example_feeds(model, inputs)], place.trained.config)
            save_graph(to_half(model, kept), {**texts, **kept_text(kept)}, partial)
        kept_note = f"; {len(kept)} nodes compute in float32: {', '.join(kept)}" if kept else ""
        return f"{prove(partial)}; it was measured by no metric: the run's data are not here{kept_note}"
    recording = Recording(open_graph(model.SerializeToString()), WATCHED)
    before = place.measure(None)
    if place.task.metric not in before.figures:
        raise ConfigError(
            f"the task's metric {place.task.metric} cannot be computed here; nothing was written"
        )
    plain = place.measure(recording)
    lost = loss_of(
        place.task, wishes.gate, before.figures[place.task.metric], plain.figures[place.task.metric]
    )
    made = model
    if wishes.kind == "float32":
        count, total = tested(place), len(model.graph.node)
        judged = Judged(
            place.task.metric, before.figures, plain.figures, wishes.gate, lost, count, total
        )
    elif wishes.kind == "float16":
        kept = misfits(model, recording.feeds, place.trained.config)
        nodes = [node.name for node in model.graph.node if not is_float32(node)]
        write: Callable[[Mapping[str, str]], Any] = lambda names: to_half(model, names)  # noqa: E731
        made, judged = search(
            place, model, write, kept, nodes, recording.feeds[:1], before, wishes.gate
        )
    else:
        made, judged = quantised(model, place, wishes, recording.feeds, before)
    figures = {
        name: repr(float(one[judged.metric]))
        for name, one in (("run", before.figures), ("file", judged.after))
    }
    found = {
        "mpt_measured": json.dumps({"metric": judged.metric, "samples": judged.samples, **figures})
    }
    ranges = {"mpt_input_ranges": json.dumps(input_ranges(recording.feeds))}
    save_graph(
        made,
        {**texts, **found, **ranges, **kept_text(judged.kept), "mpt_dtype": wishes.kind},
        partial,
    )
    said = "" if wishes.kind == "int8" else f"{prove(partial)}; it "
    page = path.with_name(f"{path.name}.html")
    write_page(
        page, path.name, wishes.kind, place.trained.directory.name, judged, partial.stat().st_size
    )
    if not judged.within:
        raise GateError(
            f"the file {judged.sentence()}: outside of the gate, and not kept; page {page}"
        )
    return f"{said}{judged.sentence()}; page {page}"


def misfits(model: Any, feeds: list[Feeds], config: Config) -> dict[str, str]:
    """Return the nodes that do not fit float16, by their ranges and by the run's list of modules in float32."""
    names = tuple(config.precision.settings.keep_fp32)
    return {**of_modules(model.graph, names), **beyond_half(model.graph, magnitudes(model, feeds))}


def quantised(
    model: Any, place: Place, wishes: Wishes, feeds: list[Feeds], before: Any
) -> tuple[Any, Judged]:
    """Return the graph in 8 bits, calibrated on training data, and its figures."""
    ready = prepared(model)
    calibration = Recording(open_graph(model.SerializeToString()), wishes.samples)
    place.measure(calibration, place.trained.train_data)

    def write(names: Mapping[str, str]) -> Any:
        return to_eight_bits(ready, names, calibration.feeds)

    if not candidates(ready.graph):
        raise ConfigError(
            "--int8: this graph has no convolutions or matrix products; nothing was written"
        )
    return search(place, ready, write, {}, candidates(ready.graph), feeds[:1], before, wishes.gate)


def example_feeds(model: Any, inputs: tuple[Any, ...]) -> Feeds:
    """Return the inputs that a network was exported with as a graph takes them."""
    values = [value for value in inputs if isinstance(value, Tensor)]
    return {
        slot.name: value.detach().cpu().numpy()
        for slot, value in zip(model.graph.input, values, strict=True)
    }


def input_ranges(feeds: list[Feeds]) -> dict[str, list[float]]:
    """Return the least and the largest value of each input that was seen."""
    found: dict[str, list[float]] = {}
    for call in feeds:
        for name, value in call.items():
            least, most = found.get(name, [float("inf"), float("-inf")])
            found[name] = [min(least, float(value.min())), max(most, float(value.max()))]
    return found


def kept_text(kept: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata on nodes in float32."""
    return {"mpt_kept_float32": json.dumps(dict(kept))} if kept else {}
