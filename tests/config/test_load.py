"""A configuration is what its sources say, or an error that says where, what, what is allowed and what was meant."""

import dataclasses
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpt.config.checking.layers import write_override
from mpt.config.finding.registry import INSTALLED
from mpt.config.load import change_precision, load_config
from mpt.config.options import Options
from mpt.config.schema import GeneralOptions, MemoryOptions, Train
from mpt.config.text.messages import distance, nearest
from mpt.config.text.plain_values import plain_tree
from mpt.config.text.yaml_text import write_text
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


FULL = """\
model: {name: net, width: 4}
task: sort
dataset: {workers: 2}
precision: {mode: amp, keep_fp32: [gen.*]}
memory: {micro_batch: 4, recompute: true, offload: false}
optimizer: {lr: 1e-4, betas: [0, 0.9], phases: {disc: {lr: 4e-4}}}
train: {epochs: 2.5}
seed: 3
name: my-run.1
"""


def load(registry, text, *overrides, **options):
    return load_config(text, overrides, registry=registry, **options)


def complaints(registry, text, *overrides, **options):
    with pytest.raises(ConfigError) as caught:
        load(registry, text, *overrides, **options)
    return str(caught.value).split("\n")


def test_a_configuration_holds_what_was_written_and_the_defaults(registry):
    config = load(registry, FULL)
    assert (config.model.name, config.model.settings.width, config.model.settings.kind) == (
        "net",
        4,
        "round",
    )
    assert (config.task.name, config.dataset.name, config.optimizer.name) == (
        "sort",
        "digits",
        "adam",
    )
    assert (config.precision.mode, config.precision.settings.keep_fp32) == ("amp", ["gen.*"])
    assert {name: trick.model_dump() for name, trick in config.memory.tricks.items()} == {
        "micro_batch": {"count": 4, "order": "as_read"},
        "recompute": {},
    }
    assert config.memory.on_oom == "stop"
    assert (config.optimizer.settings.lr, config.optimizer.settings.betas) == (1e-4, (0.0, 0.9))
    assert (config.train.epochs, config.train.steps, config.seed, config.run_name) == (
        2.5,
        None,
        3,
        "my-run.1",
    )


def test_a_task_of_other_models_is_refused_with_its_models_and_the_way_out():
    for word in ("task=gan", "task.name=gan"):
        (line,) = complaints(INSTALLED, "model: vae\n", word)
        assert "task.name: gan does not train vae, whose task is vae; leave task.name out" in line
        assert "model.name to one of aae, acgan, " in line
    assert load(INSTALLED, "model: dcgan\ntask: gan\n").task.name == "gan"


def test_a_task_that_is_no_models_own_trains_any(registry):
    path = registry.packages[0].folder / "tasks" / "shuffle.py"
    path.write_text((registry.packages[0].folder / "tasks" / "sort.py").read_text())
    try:
        assert load(registry, "model: net\ntask: shuffle\n").task.name == "shuffle"
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("", "does not name the task that trains it; write a line as TASK = "),
        ('TASK = "sorted"\n', "TASK, the task that trains it: found 'sorted'; allowed: one of "),
    ],
)
def test_a_model_whose_file_names_no_task_is_refused_with_what_to_write(registry, declared, said):
    path = registry.packages[0].folder / "nn" / "taskless.py"
    path.write_text((path.parent / "net.py").read_text().replace('TASK = "sort"\n', declared))
    shuffle = path.parents[1] / "tasks" / "shuffle.py"
    shuffle.write_text((shuffle.parent / "sort.py").read_text())
    try:
        for written in ("", "task: sort\n"):
            (line,) = complaints(registry, f"model: taskless\n{written}")
            assert line.startswith(f"configuration:1:8: model.name: {path}")
            assert said in line
        (line,) = complaints(registry, "model: taskless\ntask: sorted\n")
        assert "task.name: found 'sorted'" in line
        assert load(registry, "model: taskless\ntask: shuffle\n").task.name == "shuffle"
    finally:
        path.unlink()
        shuffle.unlink()


def test_a_model_is_enough(registry):
    config = load(registry, "model: net\n")
    assert (config.train.steps, config.precision.mode, config.run_name) == (1000, "amp", "net-amp")


def test_what_is_written_out_reads_back_equal(registry):
    for text in (
        FULL,
        "model: net\n",
        "model: net\nmemory: {offload: {pin: false}}\nprecision: bf16",
    ):
        config = load(registry, text)
        assert load(registry, config.to_yaml()) == config
        assert load_config(config.to_data(), registry=registry) == config


def test_a_configuration_does_not_change(registry):
    config = load(registry, FULL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(ValueError, match="frozen"):
        config.train.batch_size = 1


def test_the_data_set_takes_its_size_from_the_model(registry):
    config = load(registry, "model: {name: net, image_size: 64}\ndataset: {channels: 3}")
    assert config.dataset.settings.image_size is None
    assert (config.sized_dataset.settings.image_size, config.sized_dataset.settings.channels) == (
        64,
        3,
    )


def test_a_path_a_text_and_a_patch_are_read(registry, tmp_path):
    path, patch = tmp_path / "a.yaml", tmp_path / "plan.yaml"
    path.write_text(FULL)
    patch.write_text("memory:\n  micro_batch: 8\ntrain:\n  batch_size: 16\n")
    config = load(registry, str(path), "train.batch_size=32", patches=[patch])
    assert config.memory.tricks["micro_batch"].count == 8
    assert config.train.batch_size == 32
    assert config.train.epochs == 2.5
    patch.write_text("memory:\n  micro_bach: 8\n")
    assert complaints(registry, path, patches=[patch])[0].startswith(
        f"{patch}:2:3: memory.micro_bach: unknown key"
    )


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer.lr=3e-4", lambda config: config.optimizer.settings.lr == 3e-4),
        (
            "optimizer.betas=[0.5, 0.9]",
            lambda config: config.optimizer.settings.betas == (0.5, 0.9),
        ),
        (
            "precision=bf16",
            lambda config: config.precision.mode == "bf16" and config.precision.settings.keep_fp32,
        ),
        ("precision.mode=bf16", lambda config: config.precision.settings.dtype == "bfloat16"),
        (
            "precision=16-mixed",
            lambda config: (
                (config.precision.mode, config.precision.settings.dtype) == ("amp", "float16")
            ),
        ),
        ("precision.mode=o1", lambda config: config.precision.mode == "O1"),
        ("memory.micro_batch=16", lambda config: config.memory.tricks["micro_batch"].count == 16),
        ("memory.micro_batch=false", lambda config: list(config.memory.tricks) == ["recompute"]),
        ("memory.micro_batch=null", lambda config: list(config.memory.tricks) == ["recompute"]),
        ("memory.zeroing=false", lambda config: not config.memory.tricks["zeroing"].enabled),
        ("memory.on_oom=adapt", lambda config: config.memory.on_oom == "adapt"),
        ("memory=null", lambda config: config.memory.tricks == {}),
        (
            "optimizer.phases.gen.lr=1",
            lambda config: config.optimizer.settings.phases["gen"] == {"lr": 1.0},
        ),
        ('name="1e5"', lambda config: config.name == "1e5"),
        ("dataset.path='a = b'", lambda config: config.dataset.settings.path == "a = b"),
        ("dataset.path=no", lambda config: config.dataset.settings.path == "no"),
    ],
)
def test_an_override_changes_its_key_alone(registry, override, read):
    assert read(load(registry, FULL, override))


def test_later_overrides_win(registry):
    assert load(registry, FULL, "seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    "value", ["a b", "é", "x: y", "# no", "1e-4", "a\nb", 'q"q', "\\", "", "😀", None, True, 5, 1.5]
)
def test_a_value_written_as_an_override_is_read_as_that_value(registry, value):
    if isinstance(value, str | None):
        assert (
            load(registry, FULL, write_override("dataset.path", value)).dataset.settings.path
            == value
        )
    else:
        key = {True: "memory.offload", 5: "seed", 1.5: "train.epochs"}[value]
        changes = ["memory.recompute=false"] if value is True else []
        assert load(registry, FULL, *changes, write_override(key, value))


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        (
            "modle: net\nmodel: net",
            "",
            "configuration:1:1: modle: unknown key 'modle'; allowed: model, .*; did you mean 'model'?",
        ),
        (
            "model: nte",
            "",
            "configuration:1:8: model.name: found 'nte'; allowed: one of net; did you mean 'net'?",
        ),
        ("seed: 1", "", "configuration:1:1: model.name: missing; allowed: one of net"),
        (
            "# nothing yet\n\n",
            "",
            "model.name: missing; .*; `mpt init` writes a configuration to start from",
        ),
        (
            "model: net",
            "seed=",
            "override 'seed=': seed: the value is missing; write null to mean none",
        ),
        ("model: net", "seed= ", "seed: the value is missing"),
        (
            "model: net\ntrain.steps: 3",
            "",
            "unknown key 'train.steps'; .*; in a file it is written 'train: {steps: ...}'",
        ),
        ("model: {name: net, width: '4'}", "", "model.width: found '4'; allowed: a whole number"),
        ("model: {name: net, width: true}", "", "model.width: found true; allowed: a whole number"),
        ("model: {name: net, width: 4.0}", "", "model.width: found 4.0; allowed: a whole number"),
        ("model: {name: net, width: 0}", "", "model.width: found 0; allowed: a number not below 1"),
        (
            "model: {name: net, kind: rond}",
            "",
            "model.kind: found 'rond'; allowed: 'round' or 'square'; did you mean 'round'?",
        ),
        ("model: 5", "", "model.name: found 5; allowed: a name"),
        ("model: [net]", "", "model: found a list; allowed: a mapping"),
        (
            "- model",
            "",
            "configuration:1:1: found a list; allowed: a mapping with the keys model, ",
        ),
        (
            "model: net\nbatch_size: 4",
            "",
            "configuration:2:1: batch_size: unknown key .* did you mean 'train.batch_size'?",
        ),
        (
            "model: net\noptimizer: {lr: .nan}",
            "",
            "configuration:2:17: optimizer.lr: found nan; allowed: a finite number",
        ),
        (
            "model: net\noptimizer: {lr: 1e300}",
            "",
            "optimizer.lr: a number up to 1e\\+30; found 1e\\+300",
        ),
        (
            "model: net\noptimizer: {lr: .inf}",
            "",
            "optimizer.lr: found inf; allowed: a finite number",
        ),
        (
            "model: net\noptimizer: {lr: 1e999}",
            "",
            "optimizer.lr: found inf; allowed: a finite number",
        ),
        ("model: net\noptimizer: {betas: [0.5]}", "", "optimizer.betas.1: missing"),
        (
            "model: net\nprecision: {loss_scale: dynamik}",
            "",
            "allowed: 'auto' or 'dynamic' or a number; did you mean 'dynamic'?",
        ),
        ("model: net\nprecision: {loss_scale: 0}", "", "'auto' or 'dynamic' or a number above 0$"),
        (
            "model: net\nprecision: {loss_scale: -1}",
            "",
            "found -1; allowed: 'auto' or 'dynamic' or a number above 0$",
        ),
        (
            "model: net\nprecision: {mode: 16-mixed, dtype: bfloat16}",
            "",
            "but the mode 16-mixed means dtype float16",
        ),
        (
            "model: net\nprecision: pf32",
            "",
            "precision.mode: found 'pf32'; allowed: one of .*did you mean 'fp32'?",
        ),
        (
            "model: net\nmemory: {recompute: true, offload: true}",
            "",
            "cannot be combined with offload: both would keep",
        ),
        (
            "model: net\nmemory: {recompute: 3}",
            "",
            "memory.recompute: found 3; allowed: true, false or a mapping",
        ),
        (
            "model: net\nmemory: {recompute: }",
            "",
            "memory.recompute: found nothing; allowed: true, false or a mapping",
        ),
        (
            "model: net\nmemory: {ceiling: lots}",
            "",
            "memory.ceiling: 'lots' is not an amount of memory; .*, auto or null",
        ),
        (
            "model: net\nmemory: {micro_bach: 3}",
            "",
            "unknown key 'micro_bach'; .*did you mean 'micro_batch'?",
        ),
        (
            "model: net\ntrain: {steps: 5, epochs: 1}",
            "",
            "train.epochs: steps and epochs are both given",
        ),
        (
            "model: net\ntrain: {device: gpu}",
            "",
            "train.device: a device is auto, cpu, cuda, .*found 'gpu'",
        ),
        ("model: net\ntrain: 5", "", "train: found 5; allowed: a mapping"),
        ("model: net\nseed: 1.5", "", "seed: found 1.5; allowed: a whole number"),
        ("model: net\nseed: -1", "", "seed: found -1; allowed: a number not below 0"),
        ("model: net\ntarget: os.system", "", "target: unknown key"),
        ("model: {name: net, target: os.system}", "", "model.target: unknown key"),
        ("model: os.system", "", "model.name: found 'os.system'"),
        (
            "model: os:system",
            "",
            "would run code of the package os, which is not granted; if you trust it, add --allow os",
        ),
        ("model: 'a b:c'", "", "allowed for a model of another package: torchvision:NAME"),
        ("model: ':x'", "", "allowed for a model of another package"),
        (
            "model: net",
            "optimizer.rl=3",
            "override 'optimizer.rl=3': optimizer.rl: unknown key .*did you mean 'lr'?",
        ),
        (
            "model: net",
            "optimizer.lr=yes",
            "override 'optimizer.lr=yes': optimizer.lr: found 'yes'; allowed: a number",
        ),
        ("model: net", "seed", "override 'seed': an override is written key.path=value"),
        ("model: net", ".seed=1", "an override is written key.path=value"),
        (
            "model: net",
            "seed=&a 1",
            "override 'seed=&a 1': seed.*: the anchor &a is not allowed|the anchor &a is not allowed",
        ),
        (
            "model: net",
            "seed=!!python/name:os.system",
            "the tag !!python/name:os.system is not allowed",
        ),
        ("model: net", "name=a #b", "a # begins a comment"),
        ("model: net", "optimizer.lr=[", "not YAML"),
        ("model: net", "seed=99999999999999999999999", "does not fit in 64 bits"),
        ("model: net", "model.name=99999999999999999999999", "does not fit in 64 bits"),
        ("model: net", "model=99999999999999999999999", "does not fit in 64 bits"),
        ("model: 99999999999999999999999", None, "does not fit in 64 bits"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_what_and_what_instead(
    registry, text, override, expected
):
    lines = complaints(
        registry, text if "\n" in text else text + "\n", *([override] if override else [])
    )
    assert len(lines) == 1
    assert re.search(expected.replace("[", r"\[").replace("?", r"\?"), lines[0]), lines[0]
    assert lines[0].isprintable()


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(registry):
    text = """\
model: {name: net, widht: 4}
precision: {mode: amp, dtype: float8}
precision2: 1
train:
  steps: many
  batch_size: 0
  steps: 3
seed: no
"""
    lines = complaints(registry, text, "optimizer.lr=x")
    assert [line.split(": ")[0] for line in lines[:-1]] == [
        "configuration:1:20",
        "configuration:2:31",
        "configuration:3:1",
        "configuration:6:15",
        "configuration:7:3",
        "configuration:8:7",
    ]
    assert lines[-1].startswith("override 'optimizer.lr=x': optimizer.lr: ")
    assert "the key is repeated here" in lines[4]


def test_changes_of_a_phase_are_checked_as_the_settings_that_they_change(registry):
    text = """\
model: {name: net, width: 4}
optimizer:
  phases:
    disc: {rl: 1e-4, clip_grad_norm: -1}
"""
    lines = complaints(registry, text, "optimizer.phases.gen.lr=-3")
    assert lines[0].startswith("configuration:4:12: optimizer.phases.disc.rl: unknown key 'rl'; ")
    assert lines[0].endswith("did you mean 'lr'?")
    assert lines[1:] == [
        "configuration:4:38: optimizer.phases.disc.clip_grad_norm: found -1; allowed: a number above 0",
        "override 'optimizer.phases.gen.lr=-3': optimizer.phases.gen.lr: found -3; allowed: a number above 0",
    ]


def test_changes_of_a_phase_are_checked_alongside_the_settings_that_they_change(registry):
    text = (
        "model: {name: net, width: 4}\noptimizer:\n  lr: -1\n  phases: {disc: {rl: 1e-4}, gen: 3}\n"
    )
    lines = complaints(registry, text)
    assert [line.split(";")[0] for line in lines] == [
        "configuration:3:7: optimizer.lr: found -1",
        "configuration:4:19: optimizer.phases.disc.rl: unknown key 'rl'",
        "configuration:4:35: optimizer.phases.gen: found 3",
    ]


BAD_NAMES = [
    "../x",
    "/etc/x",
    "a/b",
    "a\\b",
    ".",
    "..",
    ".hidden",
    "x" * 101,
    "x" * 300,
    "a\0b",
    "",
    "a ",
    " a",
    "a\n",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_run_name_that_is_more_than_one_folder_is_refused(registry, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = complaints(registry, "model: net\n", write_override("name", name))
    assert len(lines) == 1
    assert "a run's name has 1 to 100 letters" in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["a", "dcgan-2", "_x", "A.b_c-1", "x" * 100, "Müllers erster Lauf", "é"]
)
def test_a_plain_run_name_is_taken(registry, name):
    assert load(registry, "model: net\n", write_override("name", name)).run_name == name


def test_a_model_of_another_package_is_named_only_when_it_is_granted(registry):
    assert load(registry, "model: 'torchvision:resnet50'\n").model.name == "torchvision:resnet50"
    assert (
        load(registry, "model: {name: 'timm:vit_base.augreg'}\n").run_name
        == "timm-vit_base.augreg-amp"
    )
    granted = load(registry, "model: 'mine.nets:Net'\n", allow=["mine"])
    assert granted.task.name == "sort"
    assert load(registry, "model: 'mine.nets:Net'\n", allow=["mine.nets"]) == granted
    for allow in (["min"], ["mine.nets.deeper"], ["minex"], []):
        assert "not granted" in complaints(registry, "model: 'mine.nets:Net'\n", allow=allow)[0]


def test_hostile_yaml_imports_and_runs_nothing(registry, tmp_path, monkeypatch):
    canary = tmp_path / "canary"
    (tmp_path / "trap_module.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for text in (
        f"model: !!python/object/apply:os.system ['touch {canary}']",
        "model: !!python/name:trap_module.x",
        "model: !!python/module:trap_module",
        "model: !!python/object/new:trap_module.X {}",
        "model: {name: net, target: os.system}",
        "model: 'trap_module:Net'",
        "model: {name: net, _target_: trap_module.Net}",
        "model: &a !!python/name:os.system\ntask: *a",
    ):
        assert complaints(registry, text + "\n")
    assert not canary.exists()
    assert "trap_module" not in sys.modules


def test_a_mode_can_be_exchanged_without_its_own_settings_sticking(registry):
    config = load(registry, "model: net\nprecision: {mode: 16-mixed, keep_fp32: [gen]}")
    other = change_precision(config, "bf16", registry=registry)
    assert (other.precision.mode, other.precision.settings.dtype) == ("bf16", "bfloat16")
    assert other.precision.settings.keep_fp32 == ["gen"]
    assert dataclasses.replace(other, precision=config.precision) == config


def test_a_hint_is_given_for_a_slip_and_not_for_another_word():
    assert (
        distance("lr", "rl"),
        distance("abc", "abc"),
        distance("", "ab"),
        distance("kitten", "sitting"),
    ) == (
        1,
        0,
        2,
        3,
    )
    assert nearest("optimiser", ["optimizer", "model"]) == "optimizer"
    assert nearest("Micro-Batch", ["micro_batch"]) == "micro_batch"
    assert nearest("banana", ["optimizer", "model"]) is None
    assert nearest("x" * 5000, ["optimizer"]) is None


def test_keys_of_other_trainers_and_keys_in_the_wrong_section_are_answered_with_ours(registry):
    text = "model: net\nseed: 1\ntrain: {save_every: 3, seed: 2}\noptimizer: {max_epochs: 3}"
    found = "\n".join(complaints(registry, text))
    assert "unknown key 'save_every'" in found
    assert "did you mean 'checkpoint_every'?" in found
    assert "'seed' stands at the top level" in found
    assert "did you mean 'train.epochs'?" in found


LETTERS = "abcdefghijklmnopqrstuvwxyz_"
KEYS = [
    (section, key)
    for section, owner in (("train", Train), ("", GeneralOptions))
    for key in owner.model_fields
]
KEYS += [("memory", key) for key in MemoryOptions.model_fields]
KEYS += [("model", key) for key in ("name", "image_size", "channels", "width", "kind")]
KEYS += [
    ("optimizer", key)
    for key in ("name", "lr", "betas", "schedule", "warmup_steps", "clip_grad_norm", "phases")
]
KEYS += [
    ("precision", key)
    for key in ("mode", "loss_scale", "init_scale", "growth_interval", "keep_fp32", "losses")
]
KEYS += [
    ("", key) for key in ("model", "task", "dataset", "precision", "memory", "optimizer", "train")
]


@st.composite
def slips(draw):
    """A known key with one letter added, removed, changed or swapped with the next."""
    section, key = draw(st.sampled_from(KEYS))
    place = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(LETTERS))
    kind = draw(st.sampled_from(["add", "remove", "change", "swap"]))
    slip = {
        "add": key[:place] + letter + key[place:],
        "remove": key[:place] + key[place + 1 :],
        "change": key[:place] + letter + key[place + 1 :],
        "swap": key[:place] + key[place : place + 2][::-1] + key[place + 2 :],
    }[kind]
    return section, key, slip


@pytest.mark.tier("full")
@given(slips())
@settings(max_examples=300, deadline=None)
def test_every_slip_in_a_key_is_refused_with_the_key_that_was_meant(registry, example):
    section, key, slip = example
    siblings = {name for owner, name in KEYS if owner == section}
    if slip in siblings or not slip:
        return
    path = f"{section}.{slip}" if section else slip
    lines = complaints(registry, "model: net\n", f"{path}=1")
    line = next(line for line in lines if "unknown key" in line)
    assert f"unknown key '{slip}'" in line
    near = [name for name in siblings if distance(slip, name) <= 1]
    assert any(f"did you mean '{name}'" in line for name in near) or key not in near, line


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text("ab", max_size=2), st.integers(), max_size=2),
)


@pytest.mark.tier("full")
@given(st.sampled_from([path for path in KEYS if path[0]]), VALUES)
@example(("model", "name"), ":")
@settings(max_examples=300, deadline=None)
def test_any_value_is_taken_as_it_is_or_refused_at_its_place(registry, path, value):
    section, key = path
    data = {"model": {"name": "net"}}
    data.setdefault(section, {})[key] = value
    config, words = None, ""
    try:
        config = load_config(data, registry=registry)
    except ConfigError as error:
        words = str(error)
    if config is None:
        assert f"{section}.{key}" in words
        assert "; allowed" in words or "; found" in words
        return
    part = getattr(config, section)
    settings_found = part if isinstance(part, Options) or section == "memory" else part.settings
    found = getattr(part if key in ("name", "mode") else settings_found, key)
    if value is not None or key not in ("name", "mode", "steps"):  # null takes the default of these
        # a section within a section, or a number that stands for one (train.ema=0.5)
        if isinstance(found, Options):
            found = found.model_dump(exclude_unset=True)
            if not isinstance(value, dict):
                (found,) = found.values()
        assert (list(found) if isinstance(found, tuple) else found) == value
        assert isinstance(found, bool) == isinstance(value, bool)


def test_a_number_of_an_average_is_its_decay(registry):
    found = load_config(
        {"model": {"name": "net"}, "train": {"ema": 0.5}}, registry=registry
    ).train.ema
    assert found is not None
    assert found.decay == 0.5


def test_checking_is_quick(registry):
    load(registry, FULL)
    started = time.process_time()
    for _ in range(10):
        load(registry, FULL)
    assert time.process_time() - started < 1.0


def test_another_plugin_by_override_says_how_to_leave_out_the_settings_of_the_first(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {name: dcgan, latent_size: 8}\n")
    with pytest.raises(ConfigError, match="write model=null model=small_cnn"):
        load_config(path, ["model.name=small_cnn"])
    assert load_config(path, ["model=null", "model=small_cnn"]).model.name == "small_cnn"


def test_a_habit_from_other_programs_is_answered_with_what_works_here():
    with pytest.raises(
        ConfigError, match=r"'pretrained'.*nothing is downloaded: write weights: PATH"
    ):
        load_config({"model": {"name": "timm:resnet18", "pretrained": True}})


def test_an_override_of_one_length_stands_for_the_file_s_other_one(registry):
    config = load(registry, "model: net\ntrain: {epochs: 3}\n", "train.steps=5")
    assert (config.train.steps, config.train.epochs) == (5, None)
    with pytest.raises(ConfigError, match="steps and epochs are both given"):
        load(registry, "model: net\n", "train.steps=5", "train.epochs=1")


def test_a_data_folder_that_lies_beside_the_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "pictures").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "project" / "c.yaml"
    file.write_text("model: small_cnn\ndataset: {name: image_folder, root: pictures}\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(file)
    assert config.dataset.settings.root == str(tmp_path / "project" / "pictures")
    assert "beside the configuration, is taken" in config.notes[0]
    assert load_config(config.to_yaml()) == config
    (tmp_path / "elsewhere" / "pictures").mkdir()  # as before: the working directory comes first
    assert load_config(file).dataset.settings.root == "pictures"


def test_plain_values_are_read_as_their_text_is_and_mistakes_in_them_have_the_lines_of_it() -> None:
    values = load_config(
        {"model": "small_cnn", "optimizer": {"name": "adam", "lr": 1e-4}, "name": "no"}
    ).to_data()
    assert plain_tree(values) is not None  # so it is read without its text
    assert load_config(values) == load_config(write_text(values))
    for odd in (
        {"seed": 2**64},
        {"name": "a\nb"},
        {1: 2},
        {"seed": object()},
        {"train": [[]] * 2000},
    ):
        assert plain_tree(odd) is None  # type: ignore[arg-type]
    values["train"]["batch_sice"] = 4
    with pytest.raises(ConfigError, match=r"configuration:\d+:\d+: .*batch_sice") as refused:
        load_config(values)
    with pytest.raises(ConfigError) as of_text:
        load_config(write_text(values))
    assert str(refused.value) == str(of_text.value)


def test_weights_that_lie_beside_the_file_are_found_from_anywhere_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    weights = tmp_path / "project" / "start.safetensors"
    weights.touch()
    file = tmp_path / "project" / "c.yaml"
    file.write_text("model: {name: small_cnn, weights: start.safetensors}\ndataset: digits\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(file)
    assert config.model.settings.weights == str(weights)
    assert config.notes == (
        "model.weights: there is no start.safetensors in the working directory; "
        f"{weights}, beside the configuration, is taken",
    )
    # as before: the working directory comes first
    (tmp_path / "elsewhere" / "start.safetensors").touch()
    assert load_config(file).model.settings.weights == "start.safetensors"


def test_options_of_a_model_may_be_lists() -> None:
    config = load_config({"model": {"name": "timm:resnet10t", "options": {"layers": [1, 1, 1, 1]}}})
    assert config.model.settings.options == {"layers": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("x" * 300, "longer than a path may be"),
        ("x/" * 3000, "longer than a path may be"),
        ("a\\0b", "holds a NUL character"),
        ("~nobody_of_that_name/x", "a user that is not known here"),
    ],
)
@pytest.mark.parametrize("key", ["model.weights", "dataset.root"])
def test_a_path_that_no_file_can_have_is_a_mistake_of_the_configuration(
    written: str, reason: str, key: str
) -> None:
    model = {"model": {"name": "small_cnn"}, "dataset": {"name": "image_folder", "root": "x"}}
    with pytest.raises(ConfigError, match=f"{key}: found .*{reason}"):
        load_config(model, [f'{key}="{written}"'])
