"""MLflow: to `MLFLOW_TRACKING_URI`, or without it to a database `mlflow.db` in the run's folder.

A resume continues in the same MLflow run, whose number is kept in the run's folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpt.boards.feed import Board
from mpt.config.differences import flatten
from mpt.errors import ConfigError
from mpt.foreign.files import read_text
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory

MOST_LETTERS = 500
"""Of a parameter's value, as servers take it."""


class Mlflow(Board):
    """One MLflow run in the experiment `MLFLOW_EXPERIMENT_NAME`, by default `mpt`."""

    def __init__(self, run: RunDirectory, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        server, folder = os.environ.get("MLFLOW_TRACKING_URI"), run.path.absolute()
        try:
            self.client: Any = MlflowClient(
                tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}"
            )
        except Exception as error:
            if server is None and find_spec("sqlalchemy") is None:
                raise ConfigError(
                    "mlflow-skinny has no database of its own: pip install sqlalchemy alembic, or set "
                    "MLFLOW_TRACKING_URI"
                ) from error
            raise
        # by default below the working directory
        pictures = None if server else (folder / "mlruns").as_uri()
        self.metric: Any = Metric
        known = run.path / "mlflow-id.txt"
        if not known.is_file():
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mpt")
            experiment = self.client.get_experiment_by_name(name)
            number = (
                experiment.experiment_id
                if experiment is not None
                else self.client.create_experiment(name, pictures)
            )
            made = self.client.create_run(number, run_name=run.name).info.run_id
            parameters = [
                Param(key, str(value)[:MOST_LETTERS]) for key, value in flatten(settings).items()
            ]
            for start in range(0, len(parameters), 100):  # as many as a call may have
                self.client.log_batch(made, params=parameters[start : start + 100])
            write_atomically(known, made + "\n")
        self.number = read_text(known, 1 << 10).strip()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(
            self.number, [self.metric(name, value, now, step) for name, value in numbers.items()]
        )

    def picture(self, step: int, path: Path, name: str = "preview") -> None:
        folder = "samples" if name == "preview" else f"{name.partition('/')[0]}/step-{step:08d}"
        self.client.log_artifact(self.number, str(path), folder)

    def close(self) -> None:
        self.client.set_terminated(self.number)


open_board = Mlflow
