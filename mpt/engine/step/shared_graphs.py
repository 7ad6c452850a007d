"""Losses that are yielded one by one and yet share a forward: found before training, without a backward.

The backward of the first would release tensors that the second needs. A node of the graph that two losses share is
harmless only if it keeps no tensor for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpt.engine.step.built_parts import shared_graph
from mpt.errors import ConfigError
from mpt.memory.recomputing.dry_run import on_fake_tensors
from mpt.seams import Loss, Phase, Run
from mpt.seams.phase_losses import draw_batch, losses_of


def check_graphs(run: Run) -> str | None:
    """Raise ConfigError for a phase whose losses share a forward and are not yielded together.

    Returns the reason if it could not be found out since the losses do not run without values.
    """
    for phase in run.phases:
        try:
            with on_fake_tensors(run):
                found = find_shared(run, phase)
        except ConfigError:
            raise
        except Exception as error:
            return (
                f"{phase.name}: its losses could not be tried without data: {type(error).__name__}"
            )
        if found is not None:
            raise ConfigError(found)
    return None


def find_shared(run: Run, phase: Phase) -> str | None:
    """Return the message for losses that share a graph and are not yielded together; None if there are none."""
    batch = draw_batch(run, phase, run.data.zeros(run.config.train.batch_size, run.device))
    owners: dict[Any, list[str]] = {}
    for together in losses_of(run, phase, batch):
        names = [loss.name for loss in together]
        own = nodes_of(together)
        for node in own:
            if node in owners and keeps_tensors(node):
                return shared_graph(names, owners[node], phase)
        owners.update(dict.fromkeys(own, names))
    return None


def nodes_of(together: Iterable[Loss]) -> set[Any]:
    """Return all nodes of the graphs of some losses."""
    found: set[Any] = set()
    pending: list[Any] = [loss.value.grad_fn for loss in together]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending.extend(following for following, _ in node.next_functions)
    return found


def keeps_tensors(node: Any) -> bool:
    """Return whether a node's backward needs tensors that its first backward releases."""
    return any(name.startswith("_raw_saved") for name in dir(node))
