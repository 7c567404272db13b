"""What a node of a cluster has, found out by a small task on it. It must not need this package there."""

from collections.abc import Callable
from typing import Any

PACKAGES = ("fl-lightning", "torch", "lightning", "numpy", "opacus", "mlflow")
"""Those whose version may change a result or what is stored of it."""


def looker() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that looks. It is made here so that Ray sends its code, not the name of a module."""

    def look(request: dict[str, Any]) -> dict[str, Any]:
        """Looks at this node.

        Args:
            request: `tokens`, by setting (folder, name and content of the file that the driver has put there);
                `paths`, by setting the paths that must be there; `uri`, a tracking store to open or None; `packages`.

        Returns:
            `host`; `python`; `versions` by package, None where it is missing; `code`, a hash over this package's files;
            `commit` of the folder they lie in; `unseen` and `unwritable`, settings whose folder is not the driver's;
            `absent`, the paths that are not there, by setting; `tracking`, why the store cannot be opened.
        """
        import hashlib
        import os
        import platform
        import subprocess
        import time
        from importlib.metadata import PackageNotFoundError, version
        from importlib.util import find_spec

        def version_of(name: str) -> str | None:
            try:
                return version(name)
            except PackageNotFoundError:
                return None

        def seen(folder: str, name: str, content: str) -> bool:
            for _ in range(4):  # a network folder may show a new file late
                try:
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        return file.read() == content
                except OSError:
                    time.sleep(0.5)
            return False

        code, commit = None, None
        spec = find_spec("fl_lightning")
        if spec is not None and spec.origin is not None:
            top, digest = os.path.dirname(os.path.dirname(spec.origin)), hashlib.sha256()
            for package in ("fl_lightning", "tune"):
                for folder, folders, names in os.walk(os.path.join(top, package)):
                    folders.sort()
                    for name in sorted(name for name in names if name.endswith(".py")):
                        path = os.path.join(folder, name)
                        digest.update(os.path.relpath(path, top).encode())
                        with open(path, "rb") as source:
                            digest.update(source.read())
            code = digest.hexdigest()
            git = ["git", "-C", top, "ls-files", "--error-unmatch", spec.origin]
            head = ["git", "-C", top, "rev-parse", "HEAD"]
            try:
                if subprocess.run(git, capture_output=True, timeout=10).returncode == 0:
                    commit = subprocess.run(head, capture_output=True, text=True, timeout=10).stdout.strip() or None
            except (OSError, subprocess.TimeoutExpired):
                pass
        tracking = None
        if request["uri"] is not None and code is not None:
            try:
                from fl_lightning.tracking import connect

                connect(request["uri"]).search_experiments(max_results=1)
            except Exception as error:  # it goes into the driver's own message
                tracking = " ".join(str(error).split())[:300]
        tokens = request["tokens"]
        return {
            "host": platform.node(),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "versions": {name: version_of(name) for name in request["packages"]},
            "code": code,
            "commit": commit,
            "unseen": [key for key, token in tokens.items() if not seen(*token)],
            "unwritable": [key for key, (folder, _, _) in tokens.items() if not os.access(folder, os.W_OK)],
            "absent": {
                key: gone
                for key, paths in request["paths"].items()
                if (gone := [path for path in paths if not os.path.exists(path)])
            },
            "tracking": tracking,
        }

    return look
