"""Whether a server or a database server answers at all, asked before MLflow is: it would try again for minutes."""

import time

from fl_lightning.tracking.location import sqlite_path

CONNECT_SECONDS = 5
ANSWER_SECONDS = 15
TRUSTED_SECONDS = 60.0
"""How long an answer stands for the next ones."""

_TIMED = ("psycopg", "psycopg2", "pymysql", "mysqldb")
"""Database drivers that take `connect_timeout`."""

_answered: dict[str, float] = {}


def check_answers(uri: str) -> None:
    """Contacts what is not a SQLite file, unless it has answered within the last minute.

    Raises:
        OSError: a server does not answer within `CONNECT_SECONDS` and `ANSWER_SECONDS`.
        SQLAlchemyError: a database server does not, or it refuses us.
        ImportError: the database's driver is not installed.
    """
    if sqlite_path(uri) is not None or time.monotonic() - _answered.get(uri, -TRUSTED_SECONDS) < TRUSTED_SECONDS:
        return
    scheme = uri.partition(":")[0].lower()
    if scheme in ("http", "https"):
        _server(uri)
    elif scheme.partition("+")[0] in ("postgresql", "mysql"):
        _database(uri)
    _answered[uri] = time.monotonic()


def _server(uri: str) -> None:
    """Any answer will do: what it says to `/health` is MLflow's affair, and so are certificates."""
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=(CONNECT_SECONDS, ANSWER_SECONDS))
    except requests.Timeout:
        raise TimeoutError(f"no answer within {CONNECT_SECONDS} s to connect and {ANSWER_SECONDS} s to reply") from None
    except requests.exceptions.SSLError:
        return
    except requests.ConnectionError as error:
        raise ConnectionError(f"nothing listens there ({_cause(error)})") from None


def _database(uri: str) -> None:
    import sqlalchemy

    driver = sqlalchemy.make_url(uri).get_dialect().driver
    timed = {"connect_timeout": CONNECT_SECONDS} if driver in _TIMED else {}
    engine = sqlalchemy.create_engine(uri, connect_args=timed, poolclass=sqlalchemy.pool.NullPool)
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _cause(error: BaseException) -> str:
    """The innermost reason, without the library's own nesting."""
    while (inner := error.__context__ or error.__cause__) is not None:
        error = inner
    return str(error) or type(error).__name__
