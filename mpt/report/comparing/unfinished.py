"""Runs of a comparison that have not come to their end: killed, or ended by NaN.

One that NaN ended is a failure of its mode, whatever its last evaluation was. One that was killed says nothing about
its mode: it can be judged only if its pair was evaluated at the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mpt.report.reading.run_record import RunRecord

NOT_FINITE = ("stopped", "poisoned")
"""Kinds of events by which a training ends that is not finite."""


def diverged(runs: Mapping[int, RunRecord]) -> dict[int, str]:
    """Return seed -> message of the runs that ended because they were not finite."""
    return {
        seed: record.failure
        for seed, record in runs.items()
        if record.failure and not record.is_finished and record.events[-1]["kind"] in NOT_FINITE
    }


def cut_short(
    baseline: Mapping[int, RunRecord],
    other: Mapping[int, RunRecord],
    failed: Collection[int],
    failed_other: Collection[int],
) -> str:
    """Return which run was killed at another step than its pair was evaluated at; "" if none was.

    Seeds that diverged are left out: in `other` they decide alone, so that it is "" too.
    """
    seeds = sorted(baseline.keys() & other.keys() - set(failed))
    if not set(failed_other).isdisjoint(seeds):
        return ""
    for seed in seeds:
        pair = baseline[seed], other[seed]
        for record, paired in (pair, pair[::-1]):
            step = record.final_step
            if record.is_finished or step == paired.final_step >= 0:
                continue
            if step < 0:
                return f"{record.name} has not come to its end, and has no evaluation."
            return (
                f"{record.name} has not come to its end: its last evaluation is of step {step}, and that of "
                f"{paired.name} of step {paired.final_step}."
            )
    return ""
