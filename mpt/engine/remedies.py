"""What a training changed about itself after it was rolled back, so that the next try need not end as the last one did.

Saved with every checkpoint: a resume goes on with it. Each remedy is an event, and there are as many as there are
rollbacks at most (`train.max_rollbacks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpt.config.schema import Config
from mpt.engine.diagnosis import Finding
from mpt.seams import Run


@dataclass
class Remedies:
    """What is in force."""

    skipped_batches: set[int] = field(default_factory=set)
    """Steps whose batch is passed over."""
    rate: float = 1.0
    """What learning rates are multiplied by before step `rate_until`."""
    rate_until: int = 0
    float32: list[str] = field(default_factory=list)
    """Modules that are kept in float32 beside those of the configuration."""

    def rate_at(self, step: int) -> float:
        """Return what a step's learning rates are multiplied by."""
        return self.rate if step < self.rate_until else 1.0

    def to_record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "skipped_batches": sorted(self.skipped_batches),
            "rate": self.rate,
            "rate_until": self.rate_until,
            "float32": list(self.float32),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Remedies:
        """Return what `to_record` returned; a checkpoint of before there were any has an empty one."""
        return cls(
            set(record.get("skipped_batches", ())),
            record.get("rate", 1.0),
            record.get("rate_until", 0),
            list(record.get("float32", ())),
        )

    def keep_in_float32(self, run: Run, module: str | None) -> bool:
        """Keep a module in float32 from now on; return False where there is none to keep, or the mode cannot."""
        if module is None or module in self.float32:
            return False
        found = named_module(run, module)
        if found is None or not run.precision.keep_more(found):
            return False
        self.float32.append(module)
        return True

    def apply_again(self, run: Run) -> None:
        """Do to a newly built run what was done to the one that was saved."""
        for name in self.float32:
            module = named_module(run, name)
            if module is not None:
                run.precision.keep_more(module)

    def choose(self, run: Run, config: Config, finding: Finding, step: int, rollbacks: int) -> str:
        """Apply the remedy for what failed at a step, after so many rollbacks; return what it is in words."""
        train = config.train
        if config.precision.settings.auto_keep_fp32 and self.keep_in_float32(run, finding.module):
            return f"{finding.module} is kept in float32 from now on"
        action = train.after_rollback[min(rollbacks, len(train.after_rollback)) - 1]
        if action == "skip_batch":
            self.skipped_batches.add(step)
            return f"the batch of step {step} is passed over"
        if action == "halve_lr":
            self.rate = 0.5 * self.rate_at(step)
            self.rate_until = step + train.halved_steps
            return f"learning rates are multiplied by {self.rate:g} until step {self.rate_until}"
        return ""


def named_module(run: Run, name: str) -> Any:
    """Return a module by the name that instruments give it; None where there is none."""
    key, _, path = name.partition(".")
    root = run.task.modules.get(key)
    return None if root is None else dict(root.named_modules()).get(path)
