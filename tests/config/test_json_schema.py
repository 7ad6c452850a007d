"""The schema for editors says what loading says: each accepts the shipped configs, and refuses the same slips."""

import json
import re

import pytest

from mpt.config.finding.shipped import shipped_configs
from mpt.config.json_schema import config_schema
from mpt.config.load import load_config
from mpt.config.text.yaml_text import read_text
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


CONFIGS = [*shipped_configs().values()]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def accepts(schema, value, root):
    """Check a value against the part of JSON Schema that config_schema uses; an unknown keyword is an error."""
    if schema is True:
        return True
    known = {"title", "description", "default", "$defs", "$schema"}
    for keyword, wanted in schema.items():
        if keyword in known or keyword in ("additionalProperties", "items"):
            continue
        if not KEYWORDS[keyword](wanted, value, root):
            return False
    if isinstance(value, dict):
        extra = schema.get("additionalProperties", True)
        rest = [item for key, item in value.items() if key not in schema.get("properties", {})]
        return all(extra is not False and accepts(extra, item, root) for item in rest)
    if isinstance(value, list) and "items" in schema:
        return all(
            accepts(schema["items"], item, root)
            for item in value[len(schema.get("prefixItems", [])) :]
        )
    return True


def has_type(wanted, value, root):
    if wanted == "null" or value is None:
        return value is None and wanted == "null"
    return isinstance(value, TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


KEYWORDS = {
    "type": has_type,
    "const": lambda wanted, value, root: value == wanted and type(value) is type(wanted),
    "enum": lambda wanted, value, root: any(
        value == item and type(value) is type(item) for item in wanted
    ),
    "anyOf": lambda wanted, value, root: any(accepts(part, value, root) for part in wanted),
    "allOf": lambda wanted, value, root: all(accepts(part, value, root) for part in wanted),
    "not": lambda wanted, value, root: not accepts(wanted, value, root),
    "oneOf": lambda wanted, value, root: sum(accepts(part, value, root) for part in wanted) == 1,
    "$ref": lambda wanted, value, root: accepts(
        root["$defs"][wanted.removeprefix("#/$defs/")], value, root
    ),
    "required": lambda wanted, value, root: (
        not isinstance(value, dict) or set(wanted) <= set(value)
    ),
    "properties": lambda wanted, value, root: (
        not isinstance(value, dict)
        or all(accepts(wanted[key], value[key], root) for key in wanted if key in value)
    ),
    "prefixItems": lambda wanted, value, root: (
        not isinstance(value, list)
        or all(accepts(part, item, root) for part, item in zip(wanted, value, strict=False))
    ),
    "propertyNames": lambda wanted, value, root: (
        not isinstance(value, dict) or all(accepts(wanted, key, root) for key in value)
    ),
    "pattern": lambda wanted, value, root: (
        not isinstance(value, str) or bool(re.search(wanted, value))
    ),
    "minimum": lambda wanted, value, root: not is_number(value) or value >= wanted,
    "maximum": lambda wanted, value, root: not is_number(value) or value <= wanted,
    "exclusiveMinimum": lambda wanted, value, root: not is_number(value) or value > wanted,
    "exclusiveMaximum": lambda wanted, value, root: not is_number(value) or value < wanted,
    "multipleOf": lambda wanted, value, root: not is_number(value) or value % wanted == 0,
    "minItems": lambda wanted, value, root: not isinstance(value, list) or len(value) >= wanted,
    "maxItems": lambda wanted, value, root: not isinstance(value, list) or len(value) <= wanted,
    "minLength": lambda wanted, value, root: not isinstance(value, str) or len(value) >= wanted,
    "maxLength": lambda wanted, value, root: not isinstance(value, str) or len(value) <= wanted,
}


@pytest.fixture(scope="module")
def schema():
    return config_schema()


def test_the_schema_is_json_and_names_its_draft(schema):
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.tier("full")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_is_accepted_as_written_and_as_resolved(schema, path):
    assert accepts(schema, read_text(path.read_text("utf-8"), path.name)[0].plain(), schema)
    assert accepts(schema, json.loads(json.dumps(load_config(path).to_data())), schema)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("model: net\n", True),
        (
            "model: net\nprecision: 16-mixed\nmemory: {micro_batch: 4, recompute: true, offload: false}",
            True,
        ),
        ("model: net\nprecision: {loss_scale: 512}\nmemory:\n", True),
        ("model: {name: 'torchvision:resnet18', options: {a: 1}}\n", True),
        ("model: net\nmemory: {micro_batch: {count: 4, order: x}, on_oom: adapt}", True),
        ("model: net\nmodle: net", False),
        ("task: sort\n", False),
        ("model: {name: net, widht: 4}\n", False),
        ("model: {name: net, width: '4'}\n", False),
        ("model: {name: net, width: 0}\n", False),
        ("model: net\nprecision: pf32", False),
        ("model: net\nprecision: {mode: amp, dtype: float8}", False),
        ("model: net\nmemory: {micro_bach: 4}", False),
        ("model: net\noptimizer: {betas: [0.5]}", None),
        ("model: net\ntrain: {steps: 0}", False),
        ("model: net\ntrain: {steps: 5, batchsize: 3}", False),
    ],
)
def test_the_schema_and_the_loader_agree(registry, text, valid):
    schema = config_schema(registry)
    accepted = accepts(schema, read_text(text, "x")[0].plain(), schema)
    try:
        load_config(text, registry=registry)
        loads = True
    except ConfigError:
        loads = False
    if valid is None:  # the alternative without a name checks keys, not values
        assert not loads
        return
    assert accepted == valid
    assert loads == valid


@pytest.mark.parametrize(
    ("memory", "valid"),
    [
        ("{recompute: all, compile: true}", False),
        ("{recompute: {every: 2}, compile: true}", False),
        ("{recompute: false, compile: true}", True),
        ("{recompute: all, compile: null}", True),
        ("{recompute: all}", True),
    ],
)
def test_tricks_that_clash_are_refused_by_the_schema_as_by_the_loader(schema, memory, valid):
    text = f"model: vae\nmemory: {memory}\n"
    assert accepts(schema, read_text(text, "x")[0].plain(), schema) == valid
    if valid:
        load_config(text)
    else:
        with pytest.raises(ConfigError, match="cannot be combined with"):
            load_config(text)


def test_notes_and_descriptions_reach_the_editor(registry):
    schema = config_schema(registry)
    net = next(
        part
        for part in schema["properties"]["model"]["anyOf"]
        if part.get("description") == "A small network."
    )
    assert net["properties"]["width"]["description"] == "How wide it is."
    assert net["properties"]["name"] == {"description": "The choice.", "enum": ["net"]}


def test_settings_in_nested_mappings_are_described_too():
    definitions = config_schema()["$defs"]
    groups = {name: one for name, one in definitions.items() if name.endswith(".ParameterGroup")}
    assert groups
    for name, definition in definitions.items():
        bare = [
            key
            for key, field in definition.get("properties", {}).items()
            if not field.get("description")
        ]
        assert not bare, f"{name}: {bare}"
