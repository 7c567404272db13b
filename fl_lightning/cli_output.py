"""`--output FILE.json`: checked before training starts, written whole or not at all."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.errors import ConfigError


def check_output(path: Path | None) -> Path | None:
    """Makes the path absolute and its folder ready.

    Raises:
        ConfigError: the path is a folder, or its folder cannot be made or written to.
    """
    if path is None:
        return None
    if str(path) == "-":
        raise ConfigError("--output=-: needs a file, for standard output carries the progress; give one")
    file = Path(os.path.realpath(path.expanduser()))
    if file.exists() and not file.is_file() and not file.is_dir():
        raise ConfigError(f"--output={path}: is a device or a pipe, which would be replaced; give a file's name")
    if file.is_dir():
        raise ConfigError(f"--output={path}: is a folder; give a file such as {path / 'result.json'}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--output={path}: cannot write to {file.parent}: {error.strerror}; choose another folder"
        ) from None
    return file


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON beside `file` and then moves it there, so that no reader ever sees half of it.

    JSON has no infinity: an infinite setting becomes the text "inf", which `--config` reads as a number again.
    """
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(_finite(content), stream, indent=1, allow_nan=False)
            stream.write("\n")
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
