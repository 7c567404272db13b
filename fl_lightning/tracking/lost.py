"""What a store did not take by the end of a run, written down beside it: a JSON file, and a folder for files."""

import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.tracking.outbox import Item, Lane, write_files
from fl_lightning.tracking.store import one_line

log = logging.getLogger("fl_lightning.tracking")


def keep_lost(folder: Path, facts: dict[str, Any], failure: str | None, lanes: Sequence[Lane]) -> Path | None:
    """Writes `tracking-lost-<run_id>.json`, and the files held in memory into a folder of that name, if there are any.

    Args:
        folder: where; the system's folder for temporary files where this one cannot be written.
        facts: of the run: `run_id`, `uri`, `status`.
        failure: why the final status was not taken; None if it was.
        lanes: with what they could not send and what was refused.

    Returns:
        The JSON file; None, with a warning, if no place can be written.
    """
    name = f"tracking-lost-{facts['run_id']}"
    content = {
        **facts,
        "status_written": failure is None,
        "cause": failure or next((lane.cause for lane in lanes if lane.cause), None),
        "not_sent": [_entry(item, name) for lane in lanes for item in lane.pending],
        "refused": [{**_entry(item, name), "cause": cause} for lane in lanes for item, cause in lane.refused],
    }
    text = json.dumps(content, indent=1, default=str)
    items = [*(item for lane in lanes for item in lane.pending), *(item for lane in lanes for item, _ in lane.refused)]
    for place in (folder, Path(tempfile.gettempdir())):
        try:
            (place / f"{name}.json").write_text(text)
            for item in items:
                write_files(place / name, item.kept())
        except OSError as error:
            log.warning("tracking: %s cannot be written (%s)", place / f"{name}.json", one_line(error))
        else:
            log.warning(
                "tracking: run %s is incomplete in the store; the rest is in %s",
                facts["run_id"],
                place / f"{name}.json",
            )
            return place / f"{name}.json"
    return None


def _entry(item: Item, folder: str) -> dict[str, Any]:
    files = sorted(item.kept())
    return {**item.record(), **({"kept": [f"{folder}/{file}" for file in files]} if files else {})}
