"""What of a tracking store lies on a machine's own disks, which other machines may not see."""

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fl_lightning.tracking.location import artifact_root, sqlite_path
from fl_lightning.tracking.store import connect, explained

DEFAULT_EXPERIMENT = "Default"
"""MLflow's own, which every server has; it tells where new ones keep their files."""


def artifact_folder(uri: str, experiment: str) -> Path | None:
    """The folder of this machine in which an experiment keeps its files; None: they lie on a server.

    Nothing is created. An experiment that does not exist yet will keep them where a new one does.

    Args:
        uri: a resolved address.
        experiment: `tracking.experiment`.

    Raises:
        TrackingError: the store cannot be used.
    """
    database = sqlite_path(uri)
    location = artifact_root(uri)
    if database is None or database.exists():
        client = connect(uri)
        with explained(uri):
            found = client.get_experiment_by_name(experiment)
            if found is None and location is None:
                found = client.get_experiment_by_name(DEFAULT_EXPERIMENT)
        location = found.artifact_location if found is not None else location
    if not location:
        return None
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Path(url2pathname(parts.path))
    return Path(location) if parts.scheme == "" or len(parts.scheme) == 1 else None
