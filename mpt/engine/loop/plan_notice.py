"""Log once, during a training, the plan of the process alongside it (`mpt.planner.server.beside` writes the file)."""

from __future__ import annotations

from pathlib import Path

from mpt.config.schema import Config
from mpt.config.sizes import format_bytes
from mpt.run.records.ending import read_json_object


class PlanNotice:
    """Looks for a run's plan at each log line until it is there, if one is made."""

    def __init__(self, config: Config, device: str, path: Path) -> None:
        wanted = config.train.plan_memory
        self.path: Path | None = path if (device == "cuda" if wanted is None else wanted) else None

    def take(self) -> str | None:
        """Return the plan, once; None if nothing is there yet, or nothing will be."""
        if self.path is None or not self.path.is_file():
            return None
        plan, self.path = read_json_object(self.path), None
        peak, reserved, seconds = (
            plan.get(key) for key in ("peak_bytes", "reserved_bytes", "step_seconds")
        )
        if not isinstance(peak, int | float):
            return None
        words = [f"peak {format_bytes(peak)}"]
        if isinstance(reserved, int | float):
            words.append(
                f"{format_bytes(reserved + float(plan.get('context_bytes') or 0))} taken from the card"
            )
        if isinstance(seconds, int | float):
            words.append(f"{1000 * seconds:.3g} ms per step")
        return f"planned for this training: {', '.join(words)}"
