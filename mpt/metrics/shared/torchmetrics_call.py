"""Metrics of classifiers by torchmetrics, an extra that only their files need."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from mpt.errors import ConfigError
from mpt.metrics.shared.accuracy import labelled
from mpt.vision_ops import import_torchvision


def of_torchmetrics(name: str) -> Callable[[Tensor, Tensor], float]:
    """Return a function of torchmetrics as a mean over the classes that the labels have.

    Raises ConfigError if the package is not installed: when a run begins, not at its first evaluation.
    """
    import_torchvision()  # which torchmetrics imports, with a torch of another build too
    try:
        found: Any = getattr(import_module("torchmetrics.functional.classification"), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "task.metrics: f1, precision, recall and roc_auc need torchmetrics: `pip install 'mpt-trainer[metrics]'`"
        ) from error

    def measure(scores_nc: Tensor, labels_n: Tensor) -> float:
        scores_nc, labels_n = labelled(scores_nc, labels_n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of classes without samples, which are left out here
            of_classes = found(scores_nc, labels_n, num_classes=scores_nc.shape[1], average="none")
        return float(of_classes[sorted(set(labels_n.tolist()))].mean())

    return measure
