"""One MLflow run, written round by round as an observer of the training."""

import json
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning.tracking.facts import NOTE, RUN_NAME, automatic_tags, note_of, process_tags, run_name
from fl_lightning.tracking.interrupted import find, reopen
from fl_lightning.tracking.lifetime import held_back
from fl_lightning.tracking.location import shown, sqlite_path
from fl_lightning.tracking.lost import keep_lost
from fl_lightning.tracking.orphans import mark_orphans
from fl_lightning.tracking.outbox import FINAL_PAUSES, HANG_SECONDS, File, Item, Text, requests
from fl_lightning.tracking.sender import LaneName, Sender
from fl_lightning.tracking.store import connect, ensure_experiment, error_text, explained, one_line
from fl_lightning.tracking.system import SystemMonitor
from fl_lightning.tracking.values import PARAMS_FILE, params_of, plain, store_name, tags_of

if TYPE_CHECKING:
    from fl_lightning.records import RoundRecord, RunResult

LARGE_FILE_SECONDS = 60.0
"""How long training waits for a file that is too large to be held in memory."""


class RunTracker:
    """Writes one run to MLflow. Use it inside `tracked`, which closes it whatever happens.

    After `start` no fault of the store raises or holds training up: a thread sends, what fails waits in memory and is
    sent again, and what cannot be sent by the end is written to `tracking-lost-<run_id>.json`.

    NaN is stored as NaN, so a run that diverged shows it. MLflow's databases store an infinity as the largest float;
    `children` reads it back as an infinity. A metric that is None was not measured and is not sent.

    Attributes:
        uri: the resolved address.
        run_id: MLflow's id, or None before `start`.
        experiment_id: MLflow's id of the experiment, or None before `start`.
    """

    def __init__(
        self, uri: str, *, lost_folder: str | Path | None = None, checkpoints: str | Path | None = None
    ) -> None:
        """Contacts nobody yet.

        Args:
            uri: an address from `resolve_uri`.
            checkpoints: gets a folder of checkpoints for the run; None: see `checkpoints` below.
            lost_folder: where a `tracking-lost-*.json` would be written; the current folder when None.
        """
        self.uri = uri
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._lost_folder = Path(lost_folder or Path.cwd()).absolute()
        self._checkpoints = Path(checkpoints).absolute() if checkpoints is not None else None
        self._client: Any = None
        self._sender: Sender | None = None
        self._renamed: dict[str, str] = {}
        self._closed = False
        self._sent_rounds = 0
        self._began: float | None = None  # seconds since the epoch, of a run that is gone on with
        self._monitor: SystemMonitor | None = None
        self.on_each_round: Callable[[], None] = lambda: None  # `tracked` ends a run here that was asked to end

    def start(
        self,
        config: Mapping[str, Any],
        *,
        experiment: str,
        parent_run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> str:
        """Creates the run and writes the configuration: parameters, `config.yaml`, tags.

        Args:
            config: the whole validated configuration, nested.
            experiment: the experiment's name, created if need be.
            parent_run_id: the sweep's run; the run is then tagged `kind=trial`. Without one, runs of this host whose
                process is gone are closed first.
            tags: more tags, which win over the automatic ones.

        Returns:
            The run id.

        Raises:
            TrackingError: the store cannot be used. Nothing has been trained yet.
        """
        config = plain(config)
        flat = params_of(config).whole
        self.experiment_id = ensure_experiment(self.uri, experiment)
        self._client = connect(self.uri)
        all_tags = {**automatic_tags(config, flat, parent_run_id), **tags_of(tags or {})}
        with explained(self.uri):
            if parent_run_id is None:
                mark_orphans(self._client, self.experiment_id)
            with held_back():  # whatever the store has opened will be closed
                name = all_tags.pop(RUN_NAME, None) or run_name(config, flat)
                run = self._client.create_run(self.experiment_id, tags=all_tags, run_name=name)
                self.run_id = str(run.info.run_id)
                self._sender = Sender(self._client, self.run_id)
        self._write_config(config)
        return self.run_id

    def _write_config(self, config: Mapping[str, Any], there: Collection[str] = ()) -> None:
        """`there`: parameters that the store has already; it takes no other value for one."""
        assert self._sender is not None
        params = params_of(config)
        self._sender.put("values", *requests("params", [item for item in params.sent.items() if item[0] not in there]))
        self.set_tags({"checkpoints": str(self.checkpoints), "params_file": PARAMS_FILE if params.cut else None})
        self.log_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "config.yaml")
        if params.cut:
            self.log_text(params.to_json(), PARAMS_FILE)

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints: beside a local database, else under mlruns in the start folder."""
        database = sqlite_path(self.uri)
        root = database.parent if database is not None else Path("mlruns").absolute()
        return (self._checkpoints or root / "checkpoints") / str(self.run_id)

    def reopen(self, run_id: str) -> Path:
        """Finds a run that was interrupted; returns the folder of its checkpoints. Errors as `interrupted.find`."""
        self._client, found = find(self.uri, run_id)
        self.run_id, self.experiment_id = run_id, found.info.experiment_id
        self._began = found.info.start_time / 1000
        place = Path(found.data.tags.get("checkpoints", str(self.checkpoints)))
        self._checkpoints = place.parent  # where it goes on to write them, wherever this process was started
        return place

    def restart(self, config: Mapping[str, Any]) -> None:
        """Goes on writing a run that `reopen` has found; rounds that are in the store already are not sent again.

        The configuration is written once more: the process may have been killed before it was sent.

        Raises:
            TrackingError: the store cannot be used.
        """
        assert self.run_id is not None, "reopen comes first"
        with held_back():
            self._sender = Sender(self._client, self.run_id)
            self._sent_rounds, there = reopen(self._client, self.uri, self.run_id)
        self._write_config(plain(config), there)
        self.set_tags({**process_tags(), "resumed": "true"})

    def send_again(self, records: "Sequence[RoundRecord]") -> None:
        """Writes those rounds of a checkpoint that the process was killed before it could send."""
        for record in records:
            self.on_round(record)

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Adds what is known once data and model exist, each as a tag: partition hash, badge, size of the model.

        With `tracking.system_metrics` it begins to watch the machine.
        """
        known = ("partition_sha256", "badge", "num_parameters")
        self.set_tags({key: info[key] for key in known if info.get(key) is not None})
        if info.get("config", {}).get("tracking", {}).get("system_metrics") and self._monitor is None:
            self._monitor = SystemMonitor(self._began)

    def on_round(self, record: "RoundRecord") -> None:
        """Writes a round's metrics with step = round. The training loss is seen by a simulator only: `oracle/`.

        `seconds` comes last, so a store that has it has all of the round; see `reopen`.
        """
        if record.round <= self._sent_rounds:
            return self.on_each_round()
        measured = {
            "test_accuracy": record.test_accuracy,
            "test_loss": record.test_loss,
            "validation_accuracy": record.validation_accuracy,
            "validation_loss": record.validation_loss,
            "oracle/train_loss": record.train_loss,
            "epsilon": record.epsilon,
            **record.metrics,
            "seconds": record.seconds,
        }
        self.log_metrics({key: value for key, value in measured.items() if value is not None}, step=record.round)
        self.on_each_round()

    def on_end(self, result: "RunResult") -> None:
        """Writes the result's tags and `result.json`; the run itself is closed by `tracked`."""
        tags = {"badge": result.badge, "partition_sha256": result.partition_sha256}
        stopped = result.final.get("stopped")
        tags |= {"stopped": json.dumps(stopped)} if stopped else {}
        self.set_tags({**tags, "weights_sha256": result.final.get("weights_sha256"), NOTE: note_of(result)})
        self.log_text(json.dumps(result.to_dict(), indent=1, default=str), "result.json")
        if result.final.get("privacy"):
            self.log_text(json.dumps(result.final["privacy"], indent=1, default=str), "privacy.json")

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Any number of metrics of one step; a name the store would refuse is changed and listed in `names.json`."""
        now = int(time.time() * 1000)
        self._renamed.update({store_name(name): name for name in metrics if store_name(name) != name})
        entries = [(store_name(name), float(value), now, step) for name, value in metrics.items()]
        entries += self._monitor.take() if self._monitor is not None else []
        self._to("values", *requests("metrics", entries))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Tags of the run; one that is None is left out."""
        self._to("values", *requests("tags", list(tags_of(tags).items())))

    def log_text(self, text: str, path: str) -> None:
        """Stores a text as the artifact `path`."""
        self._to("files", Text(text, path))

    def log_artifact_file(self, path: str | Path, folder: str | None = None) -> None:
        """Stores a file or a folder among the artifacts, under `folder`; the path may be gone afterwards.

        One that is too large to wait in memory (`HOLD_LIMIT`) is waited for.
        """
        file = File(Path(path).absolute(), folder)
        self._to("files", file)
        if file.content is None and self._sender is not None:
            self._sender.drain(LARGE_FILE_SECONDS)

    def log_item(self, item: Item) -> None:
        """Stores what else belongs to the run, such as a `FinalModel` or a `DataInput`."""
        self._to("files", item)

    def send_now(self) -> None:
        """Lets what was written be sent without waiting for more, as beside a checkpoint; returns at once."""
        if self._sender is not None:
            self._sender.now()

    def flush(self, seconds: float = 30.0) -> bool:
        """Waits until an attempt was made to send all that was written; False if that takes longer."""
        return self._sender is None or self._sender.drain(seconds)

    def finish(self, status: str = "FINISHED", error: BaseException | None = None) -> None:
        """Sends what is left and closes the run. The first call counts; before `start` it does nothing.

        Args:
            status: FINISHED, FAILED or KILLED.
            error: what ended the run: its type and message become the tag `error`, and the traceback of a FAILED run
                the artifact `error.txt`.
        """
        if self.run_id is None or self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._monitor.stop()
            self.log_metrics({}, step=0)
        if self._renamed:
            self.log_text(json.dumps(self._renamed, indent=1), "names.json")
        if error is not None:
            self.set_tags({"error": error_text(error)})
            if status == "FAILED":
                self.log_text("".join(traceback.format_exception(error)), "error.txt")
        assert self._sender is not None
        answers = self._sender.stop()
        values, files = self._sender.lanes["values"], self._sender.lanes["files"]
        if answers:
            values.finish()
            files.put()  # a sweep takes the result from a finished run
        failure = self._close(status, patient=answers and not values.pending)
        if answers:
            files.finish()
        if failure or any(lane.pending or lane.refused for lane in (values, files)):
            facts = {"run_id": self.run_id, "uri": shown(self.uri), "status": status}
            keep_lost(self._lost_folder, facts, failure, [values, files])
        elif status == "FINISHED":
            shutil.rmtree(self.checkpoints, ignore_errors=True)  # nothing is left to resume

    def _to(self, lane: LaneName, *items: Item) -> None:
        if self._sender is None:
            raise RuntimeError("RunTracker.start comes first")
        self._sender.put(lane, *items)

    def _close(self, status: str, *, patient: bool) -> str | None:
        """Sets the final status; the cause if the store would not take it, in several attempts or only one."""
        cause: list[str] = []
        for pause in (0.0, *FINAL_PAUSES) if patient else (0.0,):
            time.sleep(pause)
            cause = ["the store does not answer"]
            attempt = threading.Thread(target=self._set_status, args=(status, cause), daemon=True)
            attempt.start()
            attempt.join(HANG_SECONDS)
            if not cause or attempt.is_alive():
                break
        return cause[0] if cause else None

    def _set_status(self, status: str, cause: list[str]) -> None:
        try:
            self._client.set_terminated(self.run_id, status)
            cause.clear()
        except Exception as error:  # a fault of the store: reported by the caller
            cause[:] = [one_line(error)]
