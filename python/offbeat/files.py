"""Files that others read while we write: they see the old one or the new one, never a part."""

import contextlib
import gzip
import os
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Writes a file in one go; compressed if its name ends in .gz."""
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=5, mtime=0)
    # beside it, because a file can be renamed only within its file system; hidden, so that no pattern finds it
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def for_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """The path with the number of the rank in place of {rank}."""
    return Path(os.fspath(path).replace("{rank}", str(rank)))
