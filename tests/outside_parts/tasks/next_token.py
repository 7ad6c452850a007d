"""Predict each token from those before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.seams import Batch, DataSpec, Evidence, Loss, Phase, Precision, Task, gather


class Settings(Options):
    """Nothing to set."""


class NextToken(Task):
    """Train `net`, which maps ids (b t) to logits (b t v)."""

    metric, higher_is_better = "nats", False

    def __init__(self, net: nn.Module, precision: Precision) -> None:
        self.modules, self.trainable = {"net": net}, {"net": net}
        self.error = precision.loss(functional.cross_entropy)

    def phases(self, optimizers: Mapping[str, Optimizer]) -> Sequence[Phase]:
        return [Phase("net", self.modules["net"], optimizers["net"], self.losses)]

    def losses(self, batch: Batch) -> Iterator[Loss]:
        yield Loss("loss", self.errors(batch["tokens"]).mean())

    def errors(self, tokens_bt: Tensor) -> Tensor:
        """Return the cross-entropy of each token but the first, (b t-1)."""
        logits_btv = self.modules["net"](tokens_bt[:, :-1])
        found: Tensor = self.error(
            logits_btv.flatten(0, 1), tokens_bt[:, 1:].flatten(), reduction="none"
        )
        return found.unflatten(0, tokens_bt[:, 1:].shape)

    def evaluate_batch(self, batch: Batch) -> Evidence:
        return {"nats": self.errors(batch["tokens"]).mean(1)}

    def conclude(self, evidence: Sequence[Evidence]) -> dict[str, float]:
        return {"nats": float(gather(evidence, "nats").mean())}


def build(
    settings: Settings,
    model_settings: Options,
    modules: Mapping[str, nn.Module],
    data: DataSpec,
    precision: Precision,
) -> NextToken:
    """Build the task around `net`."""
    data.require("tokens", "task next_token")
    return NextToken(modules["net"], precision)
