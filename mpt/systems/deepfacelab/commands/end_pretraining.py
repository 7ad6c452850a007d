"""Make the run that follows a pretraining: its weights, with the code between encoder and decoders begun anew."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Runs
from mpt.config.options import setting_of
from mpt.precision.shared.module_state import load_module_state

MODULES = {"saehd": "autoencoder", "xseg": "xseg"}
"""Models that can be pretrained, and the network that is kept of each."""


@dataclass(frozen=True)
class Command:
    """Make the run that follows a pretraining.

    As in DeepFaceLab, weights and the optimizers' state are kept, but a saehd's inter begins anew; at iteration 0.

    Examples:
      mpt deepfacelab end-pretraining RUN runs/next
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """The pretrained run or a checkpoint of it."""
    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The new run's folder, which must not be there."""
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", show_default=False)
    ] = None
    """Settings of the new run, such as dataset.src=DIR."""
    runs: Runs = "runs"


def run(command: Command) -> None:
    """Write the new run."""
    import dataclasses

    import torch

    from mpt.config.load import load_config
    from mpt.engine.building.build import build_run
    from mpt.errors import ConfigError
    from mpt.inference.trained import tell_notes
    from mpt.run.checkpoints import checkpoint
    from mpt.run.records.layout import find_run
    from mpt.systems.deepfacelab.commands.shared.begun_run import data_layout, write_run
    from mpt.systems.deepfacelab.commands.shared.model_folder import (
        KEPT,
        keep_for_next,
        kept_folder,
    )

    directory, chosen = find_run(command.run, Path(command.runs))
    before = load_config(directory.config_path)
    if before.model.name not in MODULES or not setting_of(
        before.dataset.settings, "pretrain", False
    ):
        raise ConfigError(
            f"{directory.path}: dataset.pretrain is not on in this run; there is no pretraining to end"
        )
    loaded = checkpoint.load(chosen or directory)
    tell_notes(loaded)
    overrides = [
        "dataset.pretrain=false",
        f"name={command.output.name}",
        *(command.overrides or []),
    ]
    config = load_config(directory.config_path, overrides=overrides)
    # The same seed would begin as the pretraining began.
    other_start = dataclasses.replace(config, seed=config.seed + 1)
    made = build_run(other_start, torch.device("cpu"), data_layout(config))
    trained = MODULES[before.model.name]
    module = made.task.modules[trained]
    fresh = {name: value for name, value in module.state_dict().items() if name.startswith("inter")}
    load_module_state(made.precision, module, {**loaded.state["modules"][trained], **fresh})
    made.optimizers[trained].load_state_dict(loaded.state["optimizers"][trained])
    kept = kept_folder(directory.path / KEPT)
    output = write_run(
        command.output,
        config,
        made,
        0,
        directory.name,
        lambda place: keep_for_next(kept, place) if kept is not None else None,
    )
    anew = ", ".join(sorted({name.split(".")[0] for name in fresh}))
    print(f"wrote {output.path}: {f'{anew} begun anew' if anew else 'all weights kept'}")
    print(f"go on with: mpt train {output.config_path} --resume {output.path}")
