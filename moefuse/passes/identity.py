"""What identifies a pass to a cache of compiled graphs.

In: the options. Out: a text that differs wherever the pass may do something else.
"""

import functools
import hashlib
from pathlib import Path

import moefuse
from moefuse.options import Options


def uuid(options: Options) -> str:
    """Of this version's sources and of the options."""
    return f"moefuse-{_sources()}-{options}"


@functools.cache
def _sources() -> str:
    """A hash of the package's own files, the policy's tables among them."""
    digest = hashlib.sha256()
    root = Path(moefuse.__file__).parent
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.toml"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
