"""`mpt convert RUN --half --to pt|safetensors|onnx`: the small file of what inference needs.

The default is float16, whatever this machine computes in: the file is for others. Normalisations and the modules in
`precision.keep_fp32` stay float32, as in `mpt infer --half`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mpt.commands.arguments import ConvertArguments
from mpt.config.precision_names import FLOAT32
from mpt.data.loader import to_device
from mpt.errors import ConfigError
from mpt.inference.export import write_onnx, write_weights
from mpt.inference.exported import description
from mpt.inference.half import networks, rebuild, rebuild_half, watch_calls
from mpt.inference.inputs import Inputs, infer_one, needs_inputs, read_inputs
from mpt.inference.measurement import stored_bytes
from mpt.inference.trained import Trained, open_trained
from mpt.precision.choice import DTYPES
from mpt.report.units import show_bytes
from mpt.run.files import failures_explained
from mpt.seams import Run

FORMATS = ("pt", "safetensors", "onnx")


def run(arguments: ConvertArguments) -> None:
    """Write the networks that a run's inference calls as one file (ONNX: one per network).

    Raises ConfigError for formats and dtypes that are none, CheckpointError for runs without weights.
    """
    wanted = choose_format(arguments)
    if arguments.dtype is not None and not (arguments.half and arguments.dtype in DTYPES):
        raise ConfigError(
            f"--dtype: found {arguments.dtype!r}; allowed are {' and '.join(DTYPES)}, together with --half."
        )
    if arguments.inside and wanted != "onnx":
        raise ConfigError("--inside: only --to onnx holds what is computed around the network.")
    trained = open_trained(arguments.run, Path(arguments.runs), "cpu", allow=arguments.allow)
    path = output_path(arguments, wanted, trained)
    full = rebuild(trained, FLOAT32)
    trained.run = full
    with watch_calls(full.task.modules) as called:
        if not needs_inputs(full.task):
            infer_one(trained, next(iter(read_inputs(trained, [], 2))))
        if full.task.inputs:  # an encoder is called for inputs alone
            infer_one(trained, drawn_inputs(full))
    if arguments.inside and full.task.whole(nn.Identity()) is None:
        raise ConfigError(f"--inside: task {trained.config.task.name} puts nothing around its networks; leave it out.")
    dtype = arguments.dtype or "float16"
    chosen = rebuild_half(trained, dtype) if arguments.half else full
    modules = {name: module for name, module in networks(chosen.task.modules) if name in called}
    with failures_explained(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    whole = stored_bytes({name: module for name, (module, _, _) in called.items()})
    about = description(trained, chosen.task, list(modules), dtype if arguments.half else "float32")
    if wanted == "onnx":
        for name, module in modules.items():
            file = path if len(modules) == 1 else path.with_name(f"{path.stem}-{name}.onnx")
            terms, own = chosen.task.export_terms(), {**about, "mpt_networks": name}
            if arguments.inside:
                whole_network = chosen.task.whole(module)
                assert whole_network is not None
                module, terms, own = whole_network, (terms[0], ("probabilities",)), {**own, "mpt_inside": "true"}
            kind = DTYPES[dtype] if arguments.half else torch.float32
            over = " over the file that was there" * file.exists()
            said = write_onnx(file, module, called[name][1], kind, terms, own)
            print(f"wrote {file}{over}: {show_bytes(file.stat().st_size)}; {said}")
        return
    over = " over the file that was there" * path.exists()
    write_weights(path, modules, about)
    print(
        f"wrote {path}{over}: {show_bytes(path.stat().st_size)}, against {show_bytes(whole)} in float32 "
        f"({', '.join(modules)}, step {trained.loaded.step}); it reads back as it was written"
    )


def drawn_inputs(run: Run) -> Inputs:
    """Return two random samples of the data's layout: which networks are called does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    batch = run.data.zeros(2, "cpu")
    for value in batch.values():
        if value.is_floating_point():
            value.uniform_(generator=generator)
    return to_device(batch, run.device, run.data), 2


def choose_format(arguments: ConvertArguments) -> str:
    """Return `--to`, else what --output's suffix says, else safetensors. Raises ConfigError for another word."""
    if arguments.to is None:
        suffix = Path(arguments.output or "").suffix.removeprefix(".")
        return suffix if suffix in FORMATS else "safetensors"
    if arguments.to not in FORMATS:
        raise ConfigError(f"--to: found {arguments.to!r}; allowed are {', '.join(FORMATS)}.")
    return arguments.to


def output_path(arguments: ConvertArguments, wanted: str, trained: Trained) -> Path:
    """Return where to write: the given file, or one named after the run in its folder."""
    suffix = f".{wanted}"
    if arguments.output is None:
        half = "-half" if arguments.half else ""
        return trained.directory.path / f"{trained.directory.name}{half}{suffix}"
    path = Path(arguments.output)
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; name a file ending in {suffix}.")
    if path.suffix != suffix:
        raise ConfigError(f"--output: {path} does not end in {suffix}, which --to {wanted} writes.")
    return path
