"""The caveats of a comparison: settings, machines and measurements in which its runs differ beyond its subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpt.config.differences import flatten
from mpt.report.comparing.groups import Group
from mpt.report.reading.run_record import RunRecord

MOST_NOTES = 3
"""Settings of a section that differ and are listed one by one."""
EXPECTED_DIFFERENCES = ("name", "seed", "precision")
"""Config sections in which the runs of a comparison differ on purpose."""


def find_notes(groups: Sequence[Group]) -> list[str]:
    """Return the caveats of the table."""
    records = [record for group in groups for record in group.runs.values()]
    failed = [
        f"{group.label}, seed {seed}: {why}"
        for group in groups
        for seed, why in sorted(group.failed.items())
    ]
    changed = [
        f"{one.name}: a resume at step {step} {what}."
        for one in records
        for step, what in one.settings_changes
    ]
    return [
        *failed,
        *note_unknown(records),
        *changed,
        *note_settings(records),
        *note_machines(records),
        *note_times(groups),
        *note_memory(records),
        *note_unfinished(groups),
    ]


def note_unknown(records: Sequence[RunRecord]) -> list[str]:
    """Say which runs have no configuration that can be read."""
    unknown = [record.name for record in records if not record.config]
    if not unknown:
        return []
    return [
        f"Without a config that can be read, so how they were trained is not known: {', '.join(unknown)}."
    ]


def note_settings(records: Sequence[RunRecord]) -> list[str]:
    """Return notes on settings that differ and are not the subject of the comparison."""
    notes = []
    for section, differing in unexpected_differences(records).items():
        # another optimizer or model: its name says more than all its settings
        if len(differing) > MOST_NOTES:
            told = f"{section}.name"
            names = (
                f" {told}: {', '.join(differing.pop(told))}, and in" if told in differing else ""
            )
            keys = ", ".join(key.removeprefix(f"{section}.") for key in differing)
            notes.append(
                f"The configs also differ in{names} {len(differing)} other settings of {section}: {keys}."
            )
        else:
            notes += [
                f"The configs also differ in {key}: {', '.join(vs)}."
                for key, vs in differing.items()
            ]
    return notes


def unexpected_differences(records: Sequence[RunRecord]) -> dict[str, dict[str, list[str]]]:
    """Return by section the settings that runs should have in common and have not, with their values in the order of
    the runs.
    """
    configs = [flatten(record.config) for record in records if record.config]
    sections: dict[str, dict[str, list[str]]] = {}
    for key in sorted({key for config in configs for key in config}):
        values = list(dict.fromkeys(str(config.get(key)) for config in configs))
        section = key.split(".")[0]
        if len(values) > 1 and section not in EXPECTED_DIFFERENCES:
            sections.setdefault(section, {})[key] = values
    return sections


def note_machines(records: Sequence[RunRecord]) -> list[str]:
    """Return a note if the runs come from several machines."""
    machines = {machine(record) for record in records} - {""}
    if len(machines) < 2:
        return []
    return [
        f"The runs come from different machines: {'; '.join(sorted(machines))}. Times are not comparable."
    ]


def note_memory(records: Sequence[RunRecord]) -> list[str]:
    """Return a note if memory was measured in different ways."""
    kinds = {str(record.memory.get("kind")) for record in records if record.memory}
    if len(kinds) < 2:
        return []
    return [
        f"Memory was measured in different ways ({', '.join(sorted(kinds))}), so it has no ratio."
    ]


def note_unfinished(groups: Sequence[Group]) -> list[str]:
    """Say of which unfinished runs an evaluation counts as the final one."""
    unfinished = [
        str(record.path.name)
        for group in groups
        for seed, record in group.runs.items()
        if record.evaluations and not record.is_finished and seed not in group.failed
    ]
    if not unfinished:
        return []
    return [
        f"Not finished, so their last evaluation counts as the final one: {', '.join(unfinished)}."
    ]


def note_times(groups: Sequence[Group]) -> list[str]:
    """Say which runs' times were left out, or count although others ran alongside."""
    most = max(record.at_a_time for group in groups for record in group.runs.values())
    if most == 1:
        return []
    crowded = [
        group.label
        for group in groups
        if any(record.at_a_time > 1 for record in group.timed.values())
    ]
    if crowded:
        return [
            f"Up to {most} runs at a time: the step times of {', '.join(crowded)} were measured side by side."
        ]
    seeds = sorted({seed for group in groups for seed in group.timed})
    return [
        f"Step times and throughput are those of seed {', '.join(map(str, seeds))}, whose runs were alone; the others "
        f"were trained {most} at a time."
    ]


def machine(record: RunRecord) -> str:
    """Return the identity of a run's device, as far as its environment names it."""
    devices = record.environment.get("devices")
    if (
        record.is_on_gpu
        and isinstance(devices, list)
        and devices
        and isinstance(devices[0], Mapping)
    ):
        return str(devices[0].get("name", ""))
    return str(record.environment.get("processor", ""))
