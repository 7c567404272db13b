"""From `path/to/file.py:function` to the function, with every fault in one line.

A file is run when a configuration that names it is validated, and again after it has changed. Its folder is put at the
end of the import path, as Python does for a script, so that the file may import its neighbours.
"""

import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_lightning.errors import ConfigError, FLError

FORM = "FILE.py:FUNCTION"
"""How a user's own function is named."""

_PREFIX = "fl_lightning_plugin_"
_loaded: dict[Path, tuple[tuple[int, int], ModuleType]] = {}


class PluginError(ValueError):
    """Why a reference cannot be used; whoever knows the key it stands at puts that before it."""


def is_reference(value: Any) -> bool:
    """Whether a value means a function in a file; `mine.py` without a function does too, and is then refused."""
    return isinstance(value, str) and (value.endswith(".py") or ".py:" in value)


def to_reference(value: str) -> str:
    """The reference with an absolute path: `~` is the home folder, a relative path starts at the current folder.

    Raises:
        PluginError: it is not of the form FILE.py:FUNCTION.
    """
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", value)
    if not match:
        raise PluginError(f"needs the form {FORM}, such as my_fedavg.py:my_fedavg")
    return f"{os.path.abspath(os.path.expanduser(match[1]))}:{match[2]}"


def split(reference: str) -> tuple[Path, str]:
    """(file, function) of an absolute reference."""
    file, _, function = reference.rpartition(":")
    return Path(file), function


def load(reference: str) -> Callable[..., Any]:
    """The function an absolute reference names.

    Raises:
        PluginError: the file is missing or fails when it is run, or holds no such function.
    """
    path, name = split(reference)
    module = _module(path)
    found = getattr(module, name, None)
    if found is None:
        from difflib import get_close_matches

        own = [key for key, item in vars(module).items() if getattr(item, "__module__", None) == module.__name__]
        near = get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'none'}"
        raise PluginError(f"the file has no function {name}; {hint}")
    if not callable(found):
        raise PluginError(f"{name} is of type {type(found).__name__}, it needs to be a function")
    return found


def file_sha256(reference: str) -> str:
    """SHA-256 of the file: what the function computes, wherever the file lies."""
    return hashlib.sha256(split(reference)[0].read_bytes()).hexdigest()


def call(key: str, reference: str, arguments: dict[str, Any]) -> Any:
    """What the function returns.

    Raises:
        ConfigError: it cannot be loaded, or fails; the message names the key, the line and the fault.
    """
    try:
        function = load(reference)
    except PluginError as error:
        raise ConfigError(f"{key}={reference}: {error}") from error
    try:
        return function(**arguments)
    except FLError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}={reference}: fails{fault_of(error, split(reference)[0])}") from error


def fault_of(error: BaseException, path: Path) -> str:
    """` in line 7: ValueError: ...`: where in the user's file, and what."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    line = lines[-1] if lines else line
    return f"{f' in line {line}' if line else ''}: {type(error).__name__}: {error}"


def ship_by_value() -> None:
    """Lets worker processes receive what the loaded files define: they cannot import those files by name."""
    import cloudpickle

    for _, module in _loaded.values():
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)


def _module(path: Path) -> ModuleType:
    try:
        facts = path.stat()
    except OSError as error:
        raise PluginError(f"{path} cannot be read: {error.strerror}; check the path") from error
    if not path.is_file():
        raise PluginError(f"{path} is no file")
    stamp = facts.st_mtime_ns, facts.st_size
    if path in _loaded and _loaded[path][0] == stamp:
        return _loaded[path][1]
    name = _PREFIX + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look their module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise PluginError(f"the file cannot be loaded{fault_of(error, path)}") from error
    _loaded[path] = stamp, module
    return module
