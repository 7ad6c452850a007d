"""Actions at the end of a training, successful or not (`train.on_end`): a command of the user's, or a message to an
address.

A command gets the record as JSON on its standard input, and the run and its status as MPT_RUN and MPT_STATUS; an
address gets it by POST, with a `text` that chat services show. A failure is a warning: the run is over and safe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpt.errors import Interrupted
from mpt.run.records.ending import read_json_object
from mpt.run.records.layout import THROWN_AWAY

if TYPE_CHECKING:
    from mpt.engine.loop.training import Training

ADDRESS = re.compile(r"https?://")
COMMAND_SECONDS = 300
ADDRESS_SECONDS = 15


@contextlib.contextmanager
def end_told(training: Training) -> Iterator[None]:
    """Perform `train.on_end` once the block has ended, whichever way."""
    try:
        yield
    except BaseException as error:
        tell_end(training, error)
        raise
    tell_end(training)


def tell_end(training: Training, error: BaseException | None = None) -> None:
    """Perform `train.on_end`, on the first of several processes. `error` is the error that cut the training short."""
    wanted = training.train.on_end
    directory = training.directory
    if (
        wanted is None
        or not training.run.world.is_first
        or directory.path.parent.name.startswith(THROWN_AWAY)
    ):
        return
    record = describe_end(training, error)
    try:
        if ADDRESS.match(wanted):
            post(wanted, record)
        else:
            run_command(wanted, record)
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        training.journal.console.warning(f"train.on_end: {failure}")


def describe_end(training: Training, error: BaseException | None) -> dict[str, Any]:
    """Return the run, how it ended, a line for people, and its summary."""
    status = (
        "finished"
        if error is None
        else "interrupted"
        if isinstance(error, Interrupted)
        else "failed"
    )
    progress = training.progress
    figures = "".join(f", {name} {value:.4g}" for name, value in progress.last_metrics.items())
    said = f": {error}" if error is not None else ""
    return {
        "run": str(training.directory.path),
        "status": status,
        "text": f"{training.directory.name} {status} at step {progress.step} of {training.total_steps}{figures}{said}",
        "summary": dict(read_json_object(training.directory.summary_path)),
    }


def post(address: str, record: Mapping[str, Any]) -> None:
    """Send the record. Raises OSError if nobody answers, or with an error."""
    request = urllib.request.Request(
        address, json.dumps(record).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=ADDRESS_SECONDS):
        pass


def run_command(command: str, record: Mapping[str, Any]) -> None:
    """Run the command in a shell. Raises SubprocessError for an exit code that is not 0."""
    variables = {**os.environ, "MPT_RUN": str(record["run"]), "MPT_STATUS": str(record["status"])}
    subprocess.run(
        command,
        shell=True,
        input=json.dumps(record),
        text=True,
        env=variables,
        timeout=COMMAND_SECONDS,
        check=True,
    )
