"""Changes that a training made to itself after it was rolled back, so that the next try need not end as the last one
did.

Saved with every checkpoint: a resume continues with it. Each remedy is an event, and there are as many as there are
rollbacks at most (`train.max_rollbacks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpt.config.schema import Config, Train
from mpt.engine.recovery.smallest_list import SmallestList
from mpt.nn.shared.named_modules import named_modules
from mpt.seams import Run


@dataclass
class Remedies:
    """The changes in force."""

    skipped_batches: set[int] = field(default_factory=set)
    """Steps whose batch is passed over."""
    rate: float = 1.0
    """Factor of learning rates before step `rate_until`."""
    rate_until: int = 0
    float32: list[str] = field(default_factory=list)
    """Modules that are kept in float32 in addition to those of the configuration."""
    float32_times: int = 0
    """How often modules were added to them."""

    def rate_at(self, step: int) -> float:
        return self.rate if step < self.rate_until else 1.0

    def to_record(self) -> dict[str, Any]:
        return {
            "skipped_batches": sorted(self.skipped_batches),
            "rate": self.rate,
            "rate_until": self.rate_until,
            "float32": list(self.float32),
            "float32_times": self.float32_times,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Remedies:
        """Read the record of `to_record`; older checkpoints have an empty one."""
        return cls(
            set(record.get("skipped_batches", ())),
            record.get("rate", 1.0),
            record.get("rate_until", 0),
            list(record.get("float32", ())),
            record.get("float32_times", len(record.get("float32", ()))),
        )

    def keep_in_float32(self, run: Run, found: SmallestList) -> str:
        """Keep modules in float32 from now on; return it in words."""
        modules = dict(named_modules(run.task.modules))
        for name in found.modules:
            if run.precision.keep_float32(modules[name]):
                self.float32.append(name)
        self.float32_times += 1
        verb = "is" if len(found.modules) == 1 else "are"
        return f"{', '.join(found.modules)} {verb} kept in float32 from now on ({found.describe()})"

    def apply_again(self, run: Run) -> None:
        """Repeat on a newly built run the changes of the saved one."""
        modules = dict(named_modules(run.task.modules))
        for name in self.float32:
            if name in modules:
                run.precision.keep_float32(modules[name])

    def may_keep_more(self, config: Config) -> bool:
        """Return whether modules may be kept in float32 once more."""
        is_left = self.float32_times < config.train.max_rollbacks
        return config.precision.settings.auto_keep_fp32 and is_left

    def choose(self, train: Train, step: int, rollbacks: int) -> str:
        """Apply the remedy for a failure at a step, after that many rollbacks; describe it in words."""
        action = train.after_rollback[min(rollbacks, len(train.after_rollback)) - 1]
        if action == "skip_batch":
            self.skipped_batches.add(step)
            return f"the batch of step {step} is passed over"
        return self.halve_rates(train, step) if action == "halve_lr" else ""

    def halve_rates(self, train: Train, step: int) -> str:
        """Halve learning rates for a while beyond a step; return it in words."""
        self.rate = 0.5 * self.rate_at(step)
        self.rate_until = step + train.halved_steps
        return f"learning rates are multiplied by {self.rate:g} until step {self.rate_until}"
