"""What the command line asked for, as plain values: the contract between `mpt.cli` and the commands. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TrainArguments:
    """`mpt train CONFIG [key=value ...]`."""

    config: Path
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    name: str | None = None
    device: str | None = None
    seed: int | None = None
    smoke: int | None = None
    dry_run: bool = False
    print_config: bool = False
    json: bool = False
    quiet: bool = False
    exact: bool = False
    patches: tuple[Path, ...] = ()
    allow: tuple[str, ...] = ()
    runs: str = "runs"


@dataclass(frozen=True)
class InferArguments:
    """`mpt infer [RUN]`."""

    run: str | None = None
    half: bool = False
    dtype: str | None = None
    input: tuple[str, ...] = ()
    output: str | None = None
    batch_size: int | None = None
    truncation: float | None = None
    seed: int | None = None
    device: str | None = None
    runs: str = "runs"
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompareArguments:
    """`mpt compare MODE MODE ... [key=value ...]` or `mpt compare RUN RUN ...`."""

    what: tuple[str, ...] = ()
    """Modes or finished runs, and overrides, in the order they were written."""
    config: Path | None = None
    seeds: int = 3
    margin: str = "1%"
    gate: bool = False
    name: str | None = None
    output: str | None = None
    device: str | None = None
    json: bool = False
    quiet: bool = False
    allow: tuple[str, ...] = ()
    runs: str = "runs"


@dataclass(frozen=True)
class ReportArguments:
    """`mpt report [RUN]`."""

    run: str | None = None
    runs: str = "runs"


@dataclass(frozen=True)
class ConvertArguments:
    """`mpt convert RUN --half --to pt|safetensors|onnx`."""

    run: str | None = None
    half: bool = False
    to: str = "safetensors"
    dtype: str | None = None
    output: str | None = None
    runs: str = "runs"
    allow: tuple[str, ...] = ()


@dataclass(frozen=True)
class LerasArguments:
    """`mpt convert leras-to-torch MODEL_DIR OUT` and `mpt convert torch-to-leras RUN OUT`."""

    direction: Literal["leras-to-torch", "torch-to-leras"]
    source: str
    output: str
    runs: str = "runs"
    allow: tuple[str, ...] = ()
    archi: str | None = None
    """What weights do not tell, such as "df-ud"; by default it is read from DeepFaceLab's summary."""
    config: Path | None = None
    """The configuration the run is to have; its model must be the weights'."""


@dataclass(frozen=True)
class PlanArguments:
    """`mpt plan CONFIG [key=value ...]`."""

    config: Path | None
    overrides: tuple[str, ...] = ()
    vram: str | None = None
    """A budget such as "6GiB"; None plans the configuration as it is."""
    gpu: str | None = None
    patches: tuple[Path, ...] = ()
    output: str | None = None
    calibrate: str | None = None
    """A finished run to learn from; then `config` may be None."""
    json: bool = False
    allow: tuple[str, ...] = ()
    runs: str = "runs"
    desktop: str | None = None
    """What the desktop takes of the card, such as "600MiB"."""
