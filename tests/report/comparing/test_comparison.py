"""Comparisons pair what belongs together, refuse what does not, and write the same truth in four forms."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from mpt.errors import ConfigError, InputOutputError
from mpt.report.comparing.comparison import compare_groups
from mpt.report.comparing.groups import Group, group_runs
from mpt.report.comparing.statistics import Margin
from mpt.report.comparison_pages.comparison_page import say_spread, write_comparison
from mpt.report.comparison_pages.comparison_plots import (
    draw_panels,
    draw_png,
    paint_intervals,
    paint_metric,
)
from mpt.report.reading.read_run import read_run

MARGIN = Margin(0.01, relative=True)
FINALS = {"fp32": (0.950, 0.953, 0.948), "amp": (0.951, 0.952, 0.948), "O2": (0.91, 0.90, 0.92)}


def make_groups(make_run, modes=FINALS, **changes):
    records = [
        read_run(
            make_run(f"{mode}-{seed}", mode=mode, seed=seed, final=final, **changes.get(mode, {}))
        )
        for mode, finals in modes.items()
        for seed, final in enumerate(finals)
    ]
    return group_runs(records)


def test_verdicts_and_ratios_are_to_fp32_wherever_it_was_named(make_run):
    groups = make_groups(
        make_run,
        {mode: FINALS[mode] for mode in ("amp", "fp32", "O2")},
        amp={"peak_bytes": 25 << 20},
        O2={"step_seconds": 0.02},
    )
    comparison = compare_groups(groups, MARGIN)
    assert [row.group.label for row in comparison.rows] == ["fp32", "amp", "O2"]
    fp32, amp, master = comparison.rows
    assert fp32.verdict is None
    assert (amp.verdict.outcome, master.verdict.outcome) == ("within", "outside")
    assert amp.peak_ratio == pytest.approx(0.5)
    assert master.step_ratio == pytest.approx(2)
    assert not comparison.passes


def test_ratios_are_taken_per_seed_so_that_a_slow_hour_falls_out(make_run):
    seconds = {0: 0.01, 1: 0.05, 2: 0.02}  # the machine was busy during seed 1, for both modes
    records = [
        read_run(
            make_run(f"{mode}-{seed}", mode=mode, seed=seed, step_seconds=seconds[seed] * share)
        )
        for seed in seconds
        for mode, share in (("fp32", 1.0), ("amp", 0.5))
    ]
    assert compare_groups(group_runs(records), MARGIN).rows[1].step_ratio == pytest.approx(0.5)


def test_times_are_those_of_runs_that_were_alone_and_the_note_says_which(make_run):
    def groups(alone):
        for mode, slower in (("fp32", 1), ("amp", 2)):
            for seed, final in enumerate(FINALS[mode]):
                crowd = 1 if (mode, seed) in alone else 7 * slower
                name = f"{mode}-{seed}-of-{len(alone)}"
                path = make_run(
                    name, mode=mode, seed=seed, final=final, step_seconds=0.01 * slower * crowd
                )
                started = {"variables": {} if (mode, seed) in alone else {"MPT_SIDE_BY_SIDE": "4"}}
                (path / "env.json").write_text(
                    json.dumps({"variables": {}, "resumes": [None, started]})
                )
                yield read_run(path)

    comparison = compare_groups(group_runs(list(groups({("fp32", 0), ("amp", 0)}))), MARGIN)
    fp32, amp = comparison.rows
    assert (fp32.step_seconds, amp.step_ratio, amp.throughput_ratio) == pytest.approx(
        (0.01, 2.0, 0.5)
    )
    assert comparison.notes[-1] == (
        "Step times and throughput are those of seed 0, whose runs were alone; the others were trained 4 at a time."
    )
    assert amp.verdict.seeds == 3, "the metric is the same whatever runs beside"
    crowded = compare_groups(group_runs(list(groups({("fp32", 0)}))), MARGIN)
    assert (
        crowded.notes[-1]
        == "Up to 4 runs at a time: the step times of amp were measured side by side."
    )


def test_with_two_seeds_the_ratios_of_time_and_throughput_say_the_same(make_run):
    # slower and slower
    seconds = {("fp32", 0): 0.05, ("amp", 0): 0.09, ("amp", 1): 0.10, ("fp32", 1): 0.15}
    records = [
        read_run(make_run(f"{mode}-{seed}", mode=mode, seed=seed, step_seconds=each))
        for (mode, seed), each in seconds.items()
    ]
    amp = compare_groups(group_runs(records), MARGIN).rows[1]
    # their arithmetic mean would be 1.23
    assert amp.step_ratio == pytest.approx((1.8 * 0.10 / 0.15) ** 0.5)
    assert amp.throughput_ratio == pytest.approx(1 / amp.step_ratio)


def test_a_ratio_is_that_of_the_figures_that_are_shown(make_run):
    seconds = {("fp32", 0): 0.05, ("fp32", 1): 0.06, ("fp32", 2): 0.09}
    seconds |= {("amp", 0): 0.09, ("amp", 1): 0.05, ("amp", 2): 0.10}
    records = [
        read_run(make_run(f"{mode}-{seed}", mode=mode, seed=seed, step_seconds=each))
        for (mode, seed), each in seconds.items()
    ]
    fp32, amp = compare_groups(group_runs(records), MARGIN).rows
    assert (fp32.step_seconds, amp.step_seconds) == pytest.approx((0.06, 0.09))
    assert amp.step_ratio == pytest.approx(1.5)  # the median of the seeds' own ratios would be 1.11


def test_a_diverged_run_is_outside_and_noted(make_run):
    fp32, amp = make_groups(make_run, {mode: FINALS[mode] for mode in ("fp32", "amp")})
    comparison = compare_groups(
        [fp32, Group("amp", amp.runs, {1: "NaN in the generator at step 7"})], MARGIN
    )
    assert comparison.rows[1].verdict.outcome == "outside"
    assert any("NaN in the generator" in note for note in comparison.notes)


@pytest.mark.parametrize(
    ("change", "word"), [({"model": "vae"}, "model"), ({"metric": "fid"}, "metric")]
)
def test_runs_of_different_kinds_are_refused(make_run, change, word):
    records = [read_run(make_run("a", mode="fp32")), read_run(make_run("b", mode="amp", **change))]
    with pytest.raises(ConfigError, match=f"their {word} differs"):
        compare_groups(group_runs(records), MARGIN)


def test_finished_runs_of_different_models_are_grouped_by_model_and_mode(make_run):
    records = [
        read_run(make_run(f"{model}{mode}{seed}", model=model, mode=mode, seed=seed))
        for model, mode in (("vae", "fp32"), ("dcgan", "amp"))
        for seed in (0, 1)
    ]
    groups = group_runs(records)
    assert [(one.label, list(one.runs)) for one in groups] == [
        ("vae fp32", [0, 1]),
        ("dcgan amp", [0, 1]),
    ]
    alike = group_runs([record for record in records if record.seed == 0 or record.model == "vae"])
    assert [len(one.runs) for one in alike] == [2, 1]
    found = compare_groups(groups, MARGIN, models_differ=True)
    assert found.rows[1].verdict is not None


def test_the_same_run_or_two_of_a_kind_are_refused(make_run):
    first, second = read_run(make_run("a", mode="fp32")), read_run(make_run("b", mode="fp32"))
    other = read_run(make_run("c", mode="amp"))
    with pytest.raises(ConfigError, match="given twice"):
        group_runs([first, first])
    with pytest.raises(ConfigError, match="one run per mode and seed"):
        group_runs([first, second, other])
    with pytest.raises(ConfigError, match="two modes"):
        compare_groups(group_runs([first]), MARGIN)


def test_runs_of_one_name_in_two_folders_are_told_apart(make_run):
    first, second = (read_run(make_run(f"{folder}/a", mode="fp32")) for folder in ("x", "y"))
    assert [group.label for group in group_runs([first, second])] == ["x/a", "y/a"]


def test_a_run_without_a_configuration_is_compared_by_its_name(make_run):
    early = make_run("early", finished=False)
    (early / "config.yaml").unlink()
    (early / "metrics.jsonl").write_text("")
    late = make_run("late", mode="amp")
    comparison = compare_groups(group_runs([read_run(early), read_run(late)]), MARGIN)
    assert [row.group.label for row in comparison.rows] == ["early", "late"]
    assert not [note for note in comparison.notes if "last evaluation counts" in note]


def test_settings_that_differ_are_in_the_order_of_the_runs(make_run):
    paths = [make_run("a", mode="fp32"), make_run("b", mode="fp32")]
    for path, size in zip(paths, (4, 1000), strict=True):
        text = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(text.replace("batch_size: 32", f"batch_size: {size}"))
    comparison = compare_groups(group_runs([read_run(path) for path in paths]), MARGIN)
    assert "The configs also differ in train.batch_size: 4, 1000." in comparison.notes


def test_runs_of_one_mode_are_compared_by_name_and_their_difference_is_said(make_run):
    path = make_run("b", mode="fp32")
    (path / "config.yaml").write_text(
        (path / "config.yaml").read_text().replace("batch_size: 32", "batch_size: 64")
    )
    comparison = compare_groups(
        group_runs([read_run(make_run("a", mode="fp32")), read_run(path)]), MARGIN
    )
    assert [row.group.label for row in comparison.rows] == ["a", "b"]
    assert any("train.batch_size: 32, 64" in note for note in comparison.notes)


def test_a_baseline_that_was_never_evaluated_does_not_hide_the_metric(make_run):
    early = make_run("early", mode="fp32", finished=False)
    (early / "metrics.jsonl").write_text("")
    comparison = compare_groups(group_runs([read_run(early), read_run(make_run("late"))]), MARGIN)
    assert comparison.metric == "accuracy"
    assert comparison.rows[1].verdict.outcome == "undecided"


def cut(path, step):
    """Make a run one that was killed after its evaluation of a step, or before any."""
    (path / "summary.json").unlink()
    lines = (path / "metrics.jsonl").read_text().splitlines()
    kept = [
        line
        for line in lines
        if json.loads(line)["step"] <= step or (step < 0 and '"evaluate"' not in line)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))


@pytest.mark.parametrize("mode", ["fp32", "amp"])
def test_a_run_that_was_killed_decides_nothing_by_an_earlier_evaluation(make_run, mode):
    groups = make_groups(make_run, dict.fromkeys(("fp32", "amp"), (0.95, 0.953, 0.948)))
    cut(next(group for group in groups if group.label == mode).runs[1].path, 50)
    groups = group_runs(
        [read_run(record.path) for group in groups for record in group.runs.values()]
    )
    comparison = compare_groups(groups, Margin(0.9, relative=True))
    assert comparison.rows[1].verdict.headline == "not decidable"
    assert comparison.rows[1].verdict.reason == (
        f"{mode}-1 has not come to its end: its last evaluation is of step 50, and that of "
        f"{'amp' if mode == 'fp32' else 'fp32'}-1 of step 100."
    )
    assert not comparison.passes


def test_a_run_that_was_killed_before_its_first_evaluation_is_not_one_that_diverged(make_run):
    groups = make_groups(make_run, {name: FINALS[name] for name in ("fp32", "amp")})
    cut(groups[1].runs[2].path, -1)
    records = [read_run(record.path) for group in groups for record in group.runs.values()]
    verdict = compare_groups(group_runs(records), MARGIN).rows[1].verdict
    assert verdict.headline == "not decidable"
    assert verdict.reason == "amp-2 has not come to its end, and has no evaluation."


def test_killed_runs_are_judged_if_their_evaluations_are_of_the_same_step(make_run):
    groups = make_groups(make_run, dict.fromkeys(("fp32", "amp"), (0.95, 0.953, 0.948)))
    for group in groups:
        for record in group.runs.values():
            (record.path / "summary.json").unlink()
    records = [read_run(record.path) for group in groups for record in group.runs.values()]
    assert compare_groups(group_runs(records), MARGIN).rows[1].verdict.outcome == "within"


def test_a_finished_run_that_was_stopped_by_nan_counts_against_its_mode(make_run):
    groups = make_groups(make_run, {name: FINALS[name] for name in ("fp32", "amp")})
    path = groups[1].runs[1].path
    cut(path, 50)
    event = {"step": 60, "kind": "stopped", "message": "loss NaN; first at net.layer"}
    (path / "events.jsonl").write_text(json.dumps(event) + "\n")
    records = [read_run(record.path) for group in groups for record in group.runs.values()]
    comparison = compare_groups(group_runs(records), Margin(0.9, relative=True))
    assert comparison.rows[1].verdict.outcome == "outside"
    assert comparison.notes[0] == "amp, seed 1: loss NaN; first at net.layer"


def test_a_run_without_config_is_one_note_and_changed_settings_are_another(make_run):
    bare, changed = make_run("bare", mode="fp32"), make_run("changed")
    (bare / "config.yaml").unlink()
    event = {"step": 5, "kind": "settings", "message": "changed: optimizer.lr 0.1 -> 0.2"}
    (changed / "events.jsonl").write_text(json.dumps(event) + "\n")
    comparison = compare_groups(group_runs([read_run(bare), read_run(changed)]), MARGIN)
    assert comparison.notes[:2] == [
        "Without a config that can be read, so how they were trained is not known: bare.",
        "changed: a resume at step 5 changed: optimizer.lr 0.1 -> 0.2.",
    ]
    assert not [note for note in comparison.notes if "also differ" in note]


def test_where_every_run_diverged_nothing_is_told_or_drawn_of_their_metric(make_run):
    groups = [
        Group(
            mode,
            {seed: read_run(make_run(f"{mode}-{seed}", mode=mode, seed=seed)) for seed in (0, 1)},
            {0: "", 1: ""},
        )
        for mode in ("fp32", "amp")
    ]
    comparison = compare_groups(groups, MARGIN)
    assert (
        say_spread(comparison)
        == "fp32 has no finite accuracy for every seed, so its own spread is not known."
    )
    assert "accuracy per seed" not in draw_panels(comparison)


def test_a_difference_is_within_the_plot_where_its_interval_has_no_end(make_run):
    finals = {"fp32": (0.95,), "O2": (0.80,)}
    comparison = compare_groups(make_groups(make_run, finals), MARGIN)
    axes = Figure().add_subplot()
    paint_intervals(axes, comparison)
    low, high = axes.get_xlim()
    (point,) = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]
    assert point == pytest.approx(100 * (0.80 / 0.95 - 1))
    assert low < point < high


def test_a_run_with_one_evaluation_is_drawn_as_a_point(make_run):
    groups = make_groups(make_run)
    axes = Figure().add_subplot()
    paint_metric(axes, compare_groups(groups, MARGIN))
    assert {line.get_marker() for line in axes.lines} == {"o"}


def test_memory_measured_in_two_ways_has_no_ratio(make_run):
    path = make_run("b", mode="amp")
    (path / "summary.json").write_text(
        (path / "summary.json").read_text().replace("tracked", "cuda")
    )
    comparison = compare_groups(
        group_runs([read_run(make_run("a", mode="fp32")), read_run(path)]), MARGIN
    )
    assert math.isnan(comparison.rows[1].peak_ratio)
    assert any("different ways" in note for note in comparison.notes)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_on_a_gpu_the_steps_are_compared_and_not_the_evaluation(make_run, kind):
    records = []
    for mode, steps_peak in (("fp32", 40), ("amp", 10)):
        path = make_run(mode, mode=mode)
        summary = json.loads((path / "summary.json").read_text())
        summary["peak_memory"] = {"kind": kind, "peak_bytes": 100, "steps_peak_bytes": steps_peak}
        (path / "summary.json").write_text(json.dumps(summary))
        records.append(read_run(path))
    rows = compare_groups(group_runs(records), MARGIN).rows
    assert [(row.peak_bytes, row.peak_ratio) for row in rows] == [(40, 1), (10, 0.25)]


def test_all_four_files_say_the_same(make_run, tmp_path):
    comparison = compare_groups(make_groups(make_run), MARGIN)
    folder = tmp_path / "made" / "here"
    write_comparison(folder, comparison)
    content = json.loads((folder / "comparison.json").read_text())
    assert [mode["mode"] for mode in content["modes"]] == ["fp32", "amp", "O2"]
    assert content["modes"][1]["verdict"]["outcome"] == "within"
    markdown, page = (
        (folder / "comparison.md").read_text(),
        (folder / "comparison.html").read_text(),
    )
    assert "amp against fp32, accuracy, 3 paired seeds: within the margin" in markdown
    assert "O2 against fp32, accuracy, 3 paired seeds: outside the margin (worse)" in markdown
    assert "fp32's own spread over 3 seeds" in markdown
    assert page.count("<svg") == 9
    assert "Loss gen/fool by step" in page
    assert "within the margin" in page
    assert re.findall(r'alt="samples: (\w+), step-(\d+)"', page) == [
        (mode, step)
        for mode in ("fp32", "amp", "O2")
        for step in ("00000000", "00000040", "00000090")
    ]
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_markup_in_names_is_escaped_in_the_comparison(make_run, tmp_path):
    records = [read_run(make_run(name, mode="fp32")) for name in ("<script>x", "plain")]
    write_comparison(tmp_path / "<i>out", compare_groups(group_runs(records), MARGIN))
    page = (tmp_path / "<i>out" / "comparison.html").read_text()
    assert "<script>x" not in page
    assert page.count("<script") == 1
    assert "<i>" not in page


def test_panels_of_broken_runs_can_still_be_drawn(make_run):
    groups = make_groups(make_run, {"fp32": (math.nan,), "amp": (math.nan,)})
    for svg in draw_panels(compare_groups(groups, MARGIN)).values():
        ElementTree.fromstring(svg)


def test_a_folder_that_cannot_be_made_says_so(make_run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputOutputError, match="file"):
        write_comparison(tmp_path / "file" / "below", compare_groups(make_groups(make_run), MARGIN))


@pytest.mark.filterwarnings("error")
def test_long_labels_leave_room_for_the_plots(make_run):
    long = "optimizer.name=schedule_free optimizer.lr=1e-2 optimizer.schedule=constant train.batch_size=32 number "
    groups = [
        Group(f"{long}{n}", {0: read_run(make_run(f"run-{n}", mode="fp32"))}, {}) for n in range(6)
    ]
    comparison = compare_groups(groups, MARGIN)
    for svg in draw_panels(comparison).values():
        ElementTree.fromstring(svg)
    assert draw_png(comparison).startswith(b"\x89PNG")


def test_settings_of_another_optimizer_are_told_in_one_note(make_run):
    for mode in ("fp32", "amp"):
        path = make_run(mode, mode=mode)
        more = "".join(f"  key{n}: {mode}\n" for n in range(4))
        (path / "config.yaml").write_text(
            (path / "config.yaml").read_text() + f"optimizer:\n  name: {mode}\n{more}"
        )
    notes = compare_groups(
        group_runs([read_run(path.parent / m) for m in ("fp32", "amp")]), MARGIN
    ).notes
    assert notes == [
        "The configs also differ in optimizer.name: fp32, amp, and in 4 other settings of optimizer: key0, key1, key2, "
        "key3."
    ]
