"""manifest.json: what a checkpoint is of, what must match when resuming, and the SHA-256 of each file."""

import hashlib
import json
from pathlib import Path

from ..console import stop

FORMAT = 2


def manifest_bytes(manifest: dict) -> bytes:
    """The content of manifest.json: `manifest`, and its checksum."""
    return json.dumps({**manifest, "checksum": checksum(manifest)}, indent=1).encode()


def checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict:
    """The manifest of the checkpoint in the folder `path`.

    Raises:
        ValueError: if it is damaged.
        OSError: if it cannot be read.
        SystemExit: if it is whole, and of another version.
    """
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest.pop("checksum", None) != checksum(manifest):
        raise ValueError("its checksum differs")
    if manifest["format"] != FORMAT:
        stop(
            f"{path} was written by another version of this code (format {manifest['format']}, this one reads "
            f"{FORMAT}): end that run with its own version, or start anew with another --output_dir"
        )
    return manifest


def differences(saved: dict, current: dict) -> list[str]:
    """Sentences such as "optimizer.lr was 0.1 and is 0.2", one for each value that differs.

    Classes come first: other differences follow from them.
    """
    saved, current = flat(saved), flat(current)
    names = sorted(saved.keys() | current.keys(), key=lambda name: (not name.endswith(".class"), name))
    return [
        f"{name.replace('.groups', '')} was {saved.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]


def flat(values, path: str = "") -> dict:
    """Nested dicts and lists as one dict with names such as optimizer.lr."""
    if isinstance(values, list) and len(values) == 1:
        return flat(values[0], path)
    if isinstance(values, (dict, list)):
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        result = {}
        for name, value in pairs:
            result |= flat(value, f"{path}.{name}" if path else str(name))
        return result
    return {path: values}
