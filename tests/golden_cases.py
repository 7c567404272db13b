"""Reference numbers, kept with their source and tolerance in tests/golden/."""

import json
import math
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def cases(file: str, *groups: str) -> list[dict[str, Any]]:
    """The cases of the given groups in golden/`file`."""
    found = [case for case in json.loads((FOLDER / file).read_text()) if case["group"] in groups]
    assert found, f"no golden case of {groups} in {file}"
    return found


def assert_close(got: Any, expected: Any, tol: dict[str, float]) -> None:
    """Compares numbers or (nested) lists within {'rel': r} or {'abs': a}."""
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for left, right in zip(got, expected, strict=True):
            assert_close(left, right, tol)
    else:
        # A relative tolerance on an expected zero is read against 1.
        assert math.isclose(float(got), float(expected), rel_tol=tol.get("rel", 0.0), abs_tol=tol.get("abs", 1e-15))
