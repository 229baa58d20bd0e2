"""Stores on S3, Google Cloud Storage and Azure by obstore, whose client fills buffers at line rate.

It never retries: a reply that was lost must not turn into "exists already" unseen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ConfigError, IntegrityError, NotFound
from deltackpt.remote import (
    CONNECT_S,
    PART,
    REQUESTS,
    TIMEOUT_S,
    Body,
    Connection,
    Place,
    answer_of,
    connection,
    failure,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "azure")
_PIECE = 1 << 20
"""Copied into the caller's buffer while it is in the cache."""
_PARTS_IN_FLIGHT = 4
_TTL_S = 300
"""For so long credentials are used before they are asked for again; who gives them renews them in time."""


class ObstoreStore:
    """A store in a bucket. options: endpoint, region, path_style, profile, anonymous, or a setting of obstore."""

    def __init__(self, place: Place, options: Mapping[str, str] | None = None) -> None:
        self._place, self._options = place, dict(options or {})
        self.url, self.requests = place.url, REQUESTS
        self.place = f"{connection(self._options).endpoint} {place.scheme}://{place.bucket}"
        self._lock = threading.Lock()
        self._client: ObjectStore | None = None
        self._seen = False

    def _open(self) -> ObjectStore:
        with self._lock:
            if self._client is None:
                self._client = _client(self._place, self._options)
            return self._client

    def _renew(self, client: ObjectStore) -> None:
        """Forget a client whose credentials have expired; the next request reads new ones."""
        with self._lock:
            if self._client is client:
                self._client = None

    def _run(self, what: str, key: str, work: Callable[[ObjectStore, str], T]) -> T:
        from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, PreconditionError

        client = self._open()
        try:
            return work(client, self._place.root + key)
        except InvalidPathError as exc:
            raise ConfigError(f"{self.url}: obstore cannot name it; use fsspec+{self.url}") from exc
        except (AlreadyExistsError, PreconditionError) as exc:
            raise AlreadyExists(f"{key} exists already") from exc
        except (BaseError, FileNotFoundError) as exc:
            answer = answer_of(str(exc).partition("\n\nDebug source")[0])
            if answer.status is None:
                # What went wrong below HTTP, in the client's own words.
                answer = answer._replace(message=str(exc).partition("\n")[0].rpartition(" - ")[2])
                if isinstance(exc, FileNotFoundError):
                    answer = answer._replace(status=404)
            if answer.expired:
                self._renew(client)
            raise failure(answer, f"{what} {key} in {self.url}", key, self.url) from exc

    # ------------------------------------------------------------ Store

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """See Store.put. An object over SINGLE is exclusive only against those that were there before."""
        import obstore

        body = Body(parts)
        if body.single:
            whole, mode = body.whole(), "create" if if_absent else "overwrite"
            self._run(
                "writing", key, lambda c, path: obstore.put(c, path, whole, mode=mode, use_multipart=False)  # type: ignore[arg-type]  # one of the two
            )  # fmt: skip
            self._seen = True
            return
        if if_absent:
            self._require_absent(key)
        with body.own_errors():
            self._run(
                "writing", key,
                lambda c, path: obstore.put(
                    c, path, iter(body), use_multipart=True, chunk_size=PART, max_concurrency=_PARTS_IN_FLIGHT
                ),
            )  # fmt: skip

    def _require_absent(self, key: str) -> None:
        try:
            self.size(key)
        except NotFound:
            return
        raise AlreadyExists(f"{key} exists already")

    def read_into(self, key: str, out: memoryview, *, offset: int = 0) -> None:
        """See Store.read_into."""
        if not len(out):
            return
        done, nbytes = self._run("reading", key, lambda c, path: _fill(c, path, out, offset))
        if done < len(out):
            end = offset + done if nbytes else self.size(key)
            raise IntegrityError(f"{key}: it ends at byte {end}, {offset + len(out)} were expected")

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        if not len(out):
            return self.size(key)
        done, nbytes = self._run("reading", key, lambda c, path: _fill(c, path, out, 0))
        if done < min(len(out), nbytes):
            raise IntegrityError(f"{key}: it ends at byte {done}, {nbytes} were expected")
        self._seen = True
        return nbytes

    def _head(self, key: str) -> Any:  # a dict of obstore's
        import obstore

        try:
            found = self._run("reading", key, lambda c, path: obstore.head(c, path))
        except NotFound:
            # Without a body, a bucket that is not there looks the same.
            if not self._seen:
                self._look(key)
            raise
        self._seen = True
        return found

    def _look(self, key: str) -> None:
        """Raise StoreError unless the bucket is there."""
        import obstore

        try:
            self._run("reading", key, lambda c, path: obstore.get(c, path))
        except NotFound:
            self._seen = True

    def size(self, key: str) -> int:
        """See Store.size."""
        return int(self._head(key)["size"])

    def modified(self, key: str) -> float:
        """See Store.modified."""
        when: datetime = self._head(key)["last_modified"]
        return when.timestamp()

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See Store.keys."""
        root = self._place.root
        pages = self._run("listing", prefix, lambda c, _: _pages(c, root + prefix, root + after if after else None))
        while page := self._run("listing", prefix, lambda _c, _p: next(pages, None)):
            for found in page:
                key = found["path"][len(root) :]
                if key > after:
                    yield key
        self._seen = True

    def delete(self, key: str) -> None:
        """See Store.delete."""
        import obstore

        try:
            self._run("deleting", key, lambda c, path: obstore.delete(c, path))
        except NotFound:
            return


def _fill(client: ObjectStore, path: str, out: memoryview, offset: int) -> tuple[int, int]:
    """Fill `out` from `offset` on; returns the bytes that came and those of the object, 0 where it ends before."""
    import obstore
    from obstore.exceptions import BaseError

    done, skip = 0, 0
    try:
        try:
            found = obstore.get(client, path, options={"range": (offset, offset + len(out))})
        except BaseError as exc:
            if "non-partial response" not in str(exc):
                raise
            # It sent all of the object, as a server may.
            found, skip = obstore.get(client, path), offset
        for piece in found.stream(min_chunk_size=_PIECE):
            view = memoryview(piece)[skip:]
            skip -= len(piece) - len(view)
            view = view[: len(out) - done]
            out[done : done + len(view)] = view
            done += len(view)
            if done == len(out):
                break
    except BaseError as exc:
        if answer_of(str(exc)).status != 416:
            raise
        return 0, 0
    return done, int(found.meta["size"])


def _pages(client: ObjectStore, prefix: str, offset: str | None) -> Iterator[Any]:
    import obstore

    return iter(obstore.list(client, prefix=prefix.rstrip("/"), offset=offset, chunk_size=1000))


# ---------------------------------------------------------------- the client


def _client(place: Place, options: Mapping[str, str]) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    client_options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=TIMEOUT_S),
        "user_agent": "deltackpt",
    }
    once: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=TIMEOUT_S)}
    try:
        if place.scheme not in ("s3", "s3a"):
            url = f"{place.scheme}://{place.bucket}"
            return from_url(url, config=dict(options), client_options=client_options, retry_config=once)  # type: ignore[call-overload,no-any-return]  # by name
        return _s3(place, connection(options), client_options, once)
    except (BaseError, ValueError, TypeError) as exc:
        why = str(exc).partition("\n")[0]
        raise ConfigError(f"{place.url}: {why}; check --storage-option and the environment") from exc


def _s3(place: Place, how: Connection, client_options: dict[str, Any], once: Any) -> ObjectStore:
    from obstore.store import S3Store

    config: dict[str, Any] = {"virtual_hosted_style_request": not how.path_style, **how.rest}
    if how.endpoint:
        config["endpoint"] = how.endpoint
        if how.endpoint.startswith("http://"):
            client_options["allow_http"] = True
    if how.region:
        config["region"] = how.region
    if how.anonymous:
        config["skip_signature"] = True
    provider = None if how.anonymous or "access_key_id" in how.rest else _provider(how.profile)
    made: Any = S3Store  # settings by name
    client: ObjectStore = made(
        place.bucket, client_options=client_options, retry_config=once, credential_provider=provider, **config
    )
    return client


def _provider(profile: str) -> Callable[[], Any] | None:
    """Return who gives credentials, as the AWS tools find them; None: the environment, or what obstore finds itself."""
    import os

    if os.environ.get("AWS_ACCESS_KEY_ID") and not profile:
        return None
    try:
        from botocore.session import Session
    except ImportError:
        if profile:
            raise ConfigError(f"profile {profile} needs botocore; pip install 'deltackpt[s3]'") from None
        return None
    try:
        found = Session(profile=profile or None).get_credentials()
    except Exception as exc:
        raise ConfigError(f"no credentials: {exc}") from exc
    if found is None:
        return None

    def give() -> dict[str, object]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=_TTL_S),
        }  # fmt: skip

    return give
