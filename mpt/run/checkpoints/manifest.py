"""A checkpoint's manifest: sizes and hashes of its files, and the manifest's own hash.

The manifest is small, strict JSON. It carries the SHA-256 of itself without that entry, so that a flipped bit in a
step number or a metric is noticed as surely as one in a weight.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.run.process.files import open_regular
from mpt.run.process.operating_system import Folder, opened

FORMAT, SHARDED_FORMAT = 1, 2
"""The second has shards alongside `state.safetensors`; to a reader that knows the first alone it is refused by
number."""
TENSORS, STRUCTURE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
LARGEST_MANIFEST_BYTES = 1 << 20


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own hash."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises OSError or ValueError if it is missing or damaged."""
    with opened(path) as directory:
        text = read_small(MANIFEST, directory)
    try:
        manifest = json.loads(text)
        whole = manifest["sha256"] == hash_manifest(manifest)
        number = manifest["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole, number = False, None
    if not whole:
        raise ValueError(f"{MANIFEST} is damaged")
    if number not in (FORMAT, SHARDED_FORMAT):
        raise ValueError(
            f"it has format {number}, and this version of mpt reads formats {FORMAT} and {SHARDED_FORMAT}"
        )
    return dict(manifest)


def read_small(name: str, directory: Folder) -> bytes:
    """Return the content of a file that has to be small."""
    with os.fdopen(open_regular(name, directory), "rb") as file:
        text = file.read(LARGEST_MANIFEST_BYTES + 1)
    if len(text) > LARGEST_MANIFEST_BYTES:
        raise ValueError(f"{name} is larger than {LARGEST_MANIFEST_BYTES} bytes")
    return text
