"""Stores anywhere that fsspec reaches: s3 by s3fs, gs, az, memory, sftp, hf. Slower than obstore, but it knows more.

Caches are off: a listing that is not fresh is a lie. It never retries: a reply that was lost must not turn into
"exists already" unseen.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ConfigError, DeltaError, IntegrityError, NotFound, StoreError
from deltackpt.remote import CONNECT_S, PART, REQUESTS, TIMEOUT_S, Answer, Body, connection, failure, flag, parse

T = TypeVar("T")

_PARTS_IN_FLIGHT = 4
_PERMANENT = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError", "InvalidRegionError",
    "SSOTokenLoadError", "TokenRetrievalError", "UnauthorizedSSOTokenError", "AuthenticationException",
}  # fmt: skip
"""Errors of clients that no retry helps against; all that are not known may pass."""
_IN_MEMORY = threading.Lock()
"""Makes an exclusive create in memory:// what it says; fsspec looks first and writes then."""


class FsspecStore:
    """A store at an fsspec URL. options: endpoint, region, path_style, profile, anonymous for s3; else fsspec's own."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.scheme = url.partition("://")[0].lower()
        self._options = dict(options or {})
        self._s3 = self.scheme in ("s3", "s3a")
        self._root = ""
        if self._s3:
            place = parse(url)
            self._bucket, self._root, self.url = place.bucket, place.root, place.url
        else:
            self.url = url.rstrip("/")
            if (parts := urlsplit(self.url)).password:
                self.url = self.url.replace(f":{parts.password}@", "@")
        self._address = self.url if self._s3 else url
        self.requests = REQUESTS
        self.place = self.url
        if self._s3:
            self.place = f"{connection(self._options).endpoint} {self.scheme}://{self._bucket}"
        self._lock = threading.Lock()
        self._made: tuple[int, Any, str] | None = None
        self._seen = False

    # ------------------------------------------------------------ the filesystem

    def _fs(self) -> tuple[Any, str]:
        """Return the filesystem and the path of the root in it; a fork gets its own."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                fs, root = _filesystem(self._address, self._options, s3=self._s3)
                self._made = (os.getpid(), fs, root.rstrip("/"))
            return self._made[1], self._made[2]

    def _renew(self) -> None:
        """Forget a client whose credentials have expired; the next request reads new ones."""
        with self._lock:
            self._made = None

    def _run(self, what: str, key: str, work: Callable[[Any, str], T]) -> T:
        fs, root = self._fs()
        path = f"{root}/{key}" if root else key
        try:
            return work(fs, path)
        except DeltaError:
            raise
        except FileExistsError as exc:
            raise AlreadyExists(f"{key} exists already") from exc
        except NotImplementedError as exc:
            raise ConfigError(f"{self.url}: {self.scheme} has no way of {what}; use another store") from exc
        except Exception as exc:  # every filesystem has its own classes
            answer = _answer(exc)
            if answer.expired:
                self._renew()
            if answer.status is None and isinstance(exc, PermissionError):
                raise StoreError(f"{what} {key} in {self.url}: no permission for this user ({exc})") from exc
            raise failure(answer, f"{what} {key} in {self.url}", key, self.url) from exc

    # ------------------------------------------------------------ Store

    def put(self, key: str, parts: Sequence[Bytes], *, if_absent: bool = True) -> None:
        """See Store.put. An object over SINGLE is exclusive only against those that were there before."""
        body = Body(parts)
        if body.single:
            whole = bytes(body.whole())
            self._run("writing", key, lambda fs, path: self._put_single(fs, path, whole, if_absent))
            self._seen = True
            return
        if if_absent:
            self._require_absent(key)
        with body.own_errors():
            self._run("writing", key, lambda fs, path: (_put_s3_parts if self._s3 else _stream)(fs, path, body))

    def _put_single(self, fs: Any, path: str, whole: bytes, if_absent: bool) -> None:
        mode = "create" if if_absent else "overwrite"
        if self._s3:
            bucket, _, key = path.partition("/")
            only = {"IfNoneMatch": "*"} if if_absent else {}
            fs.call_s3("put_object", Bucket=bucket, Key=key, Body=whole, **only)
        elif self.scheme == "memory":
            with _IN_MEMORY:
                fs.pipe_file(path, whole, mode=mode)
        else:
            _make_parent(fs, path)
            fs.pipe_file(path, whole, mode=mode)

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
        end = offset + len(out)
        try:
            found = self._run("reading", key, lambda fs, path: fs.cat_file(path, start=offset, end=end))
        except IntegrityError:
            found = b""
        except NotFound:
            self._look(key)
            raise
        if len(found) != len(out):
            ends = offset + len(found) if found else self.size(key)
            raise IntegrityError(f"{key}: it ends at byte {ends}, {end} were expected")
        out[:] = found

    def get(self, key: str, out: memoryview) -> int:
        """See Store.get."""
        if not len(out):
            return self.size(key)
        try:
            # One byte more, to see whether there is more.
            found = self._run("reading", key, lambda fs, path: fs.cat_file(path, start=0, end=len(out) + 1))
        except IntegrityError:
            return 0  # no first byte: it is empty
        except NotFound:
            self._look(key)
            raise
        self._seen = True
        if len(found) > len(out):
            out[:] = memoryview(found)[: len(out)]
            return self.size(key)
        out[: len(found)] = found
        return len(found)

    def _look(self, key: str) -> None:
        """Raise StoreError unless the bucket is there: without a body, its absence looks like that of a key."""
        if self._seen or not self._s3:
            return

        def work(fs: Any, path: str) -> None:
            bucket, _, _ = path.partition("/")
            fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=self._root, MaxKeys=1)

        try:
            self._run("listing", key, work)
        except NotFound as exc:
            raise self._no_bucket() from exc
        self._seen = True

    def _no_bucket(self) -> StoreError:
        return StoreError(f"{self.url}: the bucket does not exist or cannot be seen; make it, or correct the URL")

    def _head(self, key: str) -> Any:  # a dict of the filesystem's
        def work(fs: Any, path: str) -> Any:
            if self._s3:
                bucket, _, name = path.partition("/")
                found = fs.call_s3("head_object", Bucket=bucket, Key=name)
                return {"size": found["ContentLength"], "modified": found["LastModified"]}
            found = fs.info(path)
            if found.get("type") == "directory":
                raise FileNotFoundError(path)
            return found

        try:
            found = self._run("reading", key, work)
        except NotFound:
            self._look(key)
            raise
        self._seen = True
        return found

    def size(self, key: str) -> int:
        """See Store.size."""
        return int(self._head(key)["size"])

    def modified(self, key: str) -> float:
        """See Store.modified."""
        found = self._head(key)
        when = found["modified"] if self._s3 else self._run("reading", key, lambda fs, path: fs.modified(path))
        assert isinstance(when, datetime)
        return when.timestamp()

    def keys(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """See Store.keys."""
        if self._s3:
            yield from self._s3_keys(prefix, after)
            return

        def work(fs: Any, path: str) -> list[str]:
            fs.invalidate_cache()
            try:
                return list(fs.find(path.rstrip("/")))
            except FileNotFoundError:
                return []

        _, root = self._fs()
        found = self._run("listing", prefix, work)
        cut = len(root) + 1 if root else 0
        keys = [path[cut:] for path in found]
        yield from sorted(key for key in keys if key.startswith(prefix) and key > after)

    def _s3_keys(self, prefix: str, after: str) -> Iterator[str]:
        start = {"StartAfter": self._root + after} if after else {}

        def work(fs: Any, _path: str) -> Any:
            return fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=self._root + prefix, **start)

        while True:
            try:
                page = self._run("listing", prefix, work)
            except NotFound as exc:
                raise self._no_bucket() from exc
            self._seen = True
            for found in page.get("Contents", ()):
                yield found["Key"][len(self._root) :]
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}
            if more == start:
                raise StoreError(f"listing {prefix} in {self.url}: the store gives the same page again and again")
            start = more

    def delete(self, key: str) -> None:
        """See Store.delete."""

        def work(fs: Any, path: str) -> None:
            if self._s3:
                bucket, _, name = path.partition("/")
                fs.call_s3("delete_object", Bucket=bucket, Key=name)
            else:
                fs.rm_file(path)

        with contextlib.suppress(NotFound):
            self._run("deleting", key, work)


def _make_parent(fs: Any, path: str) -> None:
    """Make the folder of a file where there are folders."""
    with contextlib.suppress(FileExistsError, NotImplementedError):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def _put_s3_parts(fs: Any, path: str, body: Body) -> None:
    """Upload in parts; whatever goes wrong, no unfinished upload stays."""
    bucket, _, key = path.partition("/")
    where = {"Bucket": bucket, "Key": key}
    where["UploadId"] = fs.call_s3("create_multipart_upload", **where)["UploadId"]

    def send(number: int, piece: bytes) -> dict[str, object]:
        sent = fs.call_s3("upload_part", PartNumber=number, Body=piece, **where)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    pool = ThreadPoolExecutor(_PARTS_IN_FLIGHT, thread_name_prefix="deltackpt-upload")
    try:
        done: list[dict[str, object]] = []
        waiting: list[Future[dict[str, object]]] = []
        for number, piece in enumerate(body.pieces(PART), 1):
            waiting.append(pool.submit(send, number, piece))
            if len(waiting) >= _PARTS_IN_FLIGHT:
                done.append(waiting.pop(0).result())
        done += [one.result() for one in waiting]
        fs.call_s3("complete_multipart_upload", MultipartUpload={"Parts": done}, **where)
    except BaseException:
        # A part that arrives after the end of its upload would stay.
        pool.shutdown(cancel_futures=True)
        # If the store does not answer now, its lifecycle rule has to do it.
        with contextlib.suppress(Exception):
            fs.call_s3("abort_multipart_upload", **where)
        raise
    finally:
        pool.shutdown()


def _stream(fs: Any, path: str, body: Body) -> None:
    """Write a large object in pieces; what goes wrong leaves nothing under the key."""
    _make_parent(fs, path)
    file = fs.open(path, "wb", block_size=PART)
    try:
        for piece in body.pieces(PART):
            file.write(piece)
        file.close()
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(Exception):
            fs.rm_file(path)
        raise


# ---------------------------------------------------------------- the filesystem


def require_known(scheme: str, url: str) -> None:
    """Raise ConfigError for a scheme that fsspec does not know, before anything is asked of it."""
    from fsspec.registry import known_implementations, registry

    if scheme not in known_implementations and scheme not in registry:
        raise ConfigError(
            f"{url}: no kind of store is called {scheme}; expected a path or for example s3://bucket/prefix"
        )


def _answer(exc: BaseException) -> Answer:
    """Return what the store said: its client's error is somewhere behind that of the filesystem."""
    seen: BaseException | None = exc
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            error = response.get("Error", {})
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(error.get("Code", ""))
            return Answer(status, "" if code.isdigit() else code, str(error.get("Message", "")))
        # A body that broke off has a 400 of its parser's, not of the store's.
        names = () if type(seen).__module__ == "aiohttp.http_exceptions" else ("status", "status_code", "code")
        for name in names:
            status = getattr(seen, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                return Answer(status, str(getattr(seen, "error_code", "") or ""), str(seen).partition("\n")[0])
        seen = seen.__cause__ or seen.__context__
    if isinstance(exc, FileNotFoundError):
        return Answer(404, "", "")
    text = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    if type(exc).__name__ in _PERMANENT or isinstance(exc, (TypeError, ValueError, AttributeError, LookupError)):
        return Answer(400, "Refused", text)
    return Answer(None, "", text)


def _filesystem(url: str, options: Mapping[str, str], *, s3: bool) -> tuple[Any, str]:
    """Make a filesystem of its own, without caches, and return it with the root's path."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        arguments: dict[str, Any] = _s3_arguments(options) if s3 else dict(options)
        if s3:
            from s3fs import S3FileSystem

            fs = S3FileSystem(**arguments, skip_instance_cache=True, use_listings_cache=False)
            # The one wrapper retries.
            fs.retries = 1
            return fs, url.partition("://")[2]
        found: tuple[Any, str] = url_to_fs(url, **arguments, skip_instance_cache=True, use_listings_cache=False)
        return found
    except ImportError as exc:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}.get(scheme)
        hint = f"pip install 'deltackpt[{extra}]'" if extra else f"install what fsspec needs for it ({exc})"
        raise ConfigError(f"{url}: no client for {scheme}:// is installed; {hint}") from exc
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{url}: {exc}; check the URL and --storage-option") from exc


def _s3_arguments(options: Mapping[str, str]) -> dict[str, Any]:
    how = connection(options)
    arguments: dict[str, Any] = {
        "anon": how.anonymous,
        "config_kwargs": {
            "connect_timeout": CONNECT_S,
            "read_timeout": TIMEOUT_S,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 2 * REQUESTS,
            # Many endpoints know no other; every object has a checksum of its own.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"addressing_style": "path" if how.path_style else "virtual"},
        },
        "client_kwargs": {"region_name": how.region} if how.region else {},
    }
    if how.endpoint:
        arguments["endpoint_url"] = how.endpoint
    if how.profile:
        arguments["profile"] = how.profile
    names = {"access_key_id": "key", "secret_access_key": "secret", "session_token": "token"}
    for key, value in how.rest.items():
        arguments[names.get(key, key)] = flag(key, value) if key == "use_ssl" else value
    return arguments
