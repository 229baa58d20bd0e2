"""What the clients of object stores have in common: where a store lies, its options, what an HTTP status means.

"Cannot see" is never "not there": only a 404 that names the key is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from deltackpt.codec import Bytes
from deltackpt.errors import AlreadyExists, ConfigError, IntegrityError, NotFound, StoreError, Unavailable

REQUESTS = 12
"""Requests in flight: one connection gives a tenth of what a bucket does."""
SINGLE = 128 << 20
"""An object up to this size is put by one request, which alone can be exclusive."""
PART = 32 << 20
"""A larger one goes in parts: S3 takes 10,000 of them, and a part that fails is sent again."""
CONNECT_S, TIMEOUT_S = 10, 120
"""For a connection, and for a whole request: a part must get through a slow link."""

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted"}
_BUSY = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy"}
_FULL = {"EntityTooLarge", "QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"}


class Place(NamedTuple):
    """Where a store lies. root: what every key of the store begins with, empty or with a slash at its end."""

    scheme: str
    bucket: str
    root: str

    @property
    def url(self) -> str:
        """The URL in its plain form: no empty segments, no slash at the end."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.root[:-1]}" if self.root else "")


def parse(url: str) -> Place:
    """Take a bucket URL apart. All of it is taken as it is: no percent-encoding, no globs, no query."""
    scheme, _, rest = url.partition("://")
    bucket, *segments = rest.split("/")
    if not bucket:
        raise ConfigError(f"{url} names no bucket; expected {scheme}://bucket/prefix")
    segments = [segment for segment in segments if segment]
    for segment in segments:
        if segment in (".", ".."):
            raise ConfigError(f"{url}: the part {segment!r} has no meaning in a bucket; leave it out")
    return Place(scheme, bucket, "".join(f"{segment}/" for segment in segments))


class Answer(NamedTuple):
    """How a request failed. status: of HTTP, None where there was none; code: the store's word for it."""

    status: int | None
    code: str
    message: str

    @property
    def expired(self) -> bool:
        """Whether new credentials may help. A bare 400 is what S3 says of expired ones where it sends no body."""
        return self.code in _EXPIRED or (self.status == 400 and not self.code)


def answer_of(text: str, status: int | None = None) -> Answer:
    """Read what a store said from the text of a client's error."""
    if status is None and (found := re.search(r"status(?: code)?:? (\d{3})\b", text)):
        status = int(found[1])
    code, message = (re.search(f"<{name}>([^<]*)</{name}>", text) for name in ("Code", "Message"))
    return Answer(status, code[1] if code else "", message[1] if message else "")


def failure(answer: Answer, what: str, key: str, where: str) -> StoreError | IntegrityError:
    """Return the error that a failed request means; the class says whether a retry can help.

    what: what was done, as "writing data/x in s3://b"; key and where: the object, for the two errors that name it.
    """
    status, code, _ = answer
    said = ": ".join(filter(None, (" ".join(filter(None, (str(status or ""), code))), answer.message)))
    if answer.expired:
        return Unavailable(f"{what}: the credentials have expired ({said}); renew them, the next try reads them anew")
    if code in _NO_BUCKET:
        return StoreError(f"{what}: the bucket does not exist or cannot be seen ({said}); make it, or correct the URL")
    if status == 404:
        return NotFound(f"{key} is not in {where}")
    if status == 412:
        return AlreadyExists(f"{key} exists already")
    if status == 416:
        return IntegrityError(f"{key}: it ends at byte")
    if status is None or status in (408, 429, 409) or status >= 500 or code in _BUSY | _CONFLICT:
        if status == 507 or code in _FULL:
            return StoreError(f"{what}: no space ({said}); free some and run again")
        return Unavailable(f"{what}: {said or 'no answer'}; try again")
    if status in (401, 403):
        if code == "RequestTimeTooSkewed":
            return StoreError(f"{what}: the clocks of this host and of the store differ ({said}); set them right")
        return StoreError(
            f"{what}: no permission ({said}); check the credentials and the policy of the bucket "
            "(a missing object looks the same without the right to list)"
        )
    if status in (301, 307, 308):
        return StoreError(f"{what}: the bucket is in another region or at another endpoint ({said}); name it")
    if status == 413 or code in _FULL:
        return StoreError(f"{what}: no space ({said}); free some and run again")
    return StoreError(f"{what}: the store refused ({said})")


# ---------------------------------------------------------------- options


class Connection(NamedTuple):
    """How to reach S3. Empty: what the client finds by itself. rest: options for the client alone."""

    endpoint: str
    region: str
    path_style: bool
    profile: str
    anonymous: bool
    rest: Mapping[str, str]


def connection(options: Mapping[str, str]) -> Connection:
    """Read options, and where they say nothing the usual AWS environment."""
    rest = {key.replace("-", "_").lower(): value for key, value in options.items()}

    def take(*names: str, env: Sequence[str] = ()) -> str:
        given = [rest.pop(name) for name in names if name in rest]
        return given[0] if given else next((os.environ[e] for e in env if os.environ.get(e)), "")

    return Connection(
        take("endpoint", "endpoint_url", env=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
        take("region", "region_name", env=("AWS_REGION", "AWS_DEFAULT_REGION")),
        flag("path_style", take("path_style") or "yes"),
        take("profile", env=("AWS_PROFILE",)),
        flag("anonymous", take("anonymous", "anon") or "no"),
        rest,
    )


def flag(name: str, value: str) -> bool:
    """Read an option that is yes or no."""
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"storage option {name}={value}: expected yes or no")


# ---------------------------------------------------------------- bodies


class Body:
    """The parts of an object: all of them where they fit a single request, else what was taken of them so far."""

    def __init__(self, parts: Iterable[Bytes]) -> None:
        self._rest = iter(parts)
        self._held: list[memoryview] = []
        self._error: BaseException | None = None
        self.nbytes = 0
        self.single = True
        for part in self._rest:
            self._held.append(memoryview(part).cast("B"))
            self.nbytes += len(self._held[-1])
            if self.nbytes > SINGLE:
                self.single = False
                break

    def whole(self) -> bytes | memoryview:
        """Return a body that fits a single request."""
        assert self.single
        return self._held[0] if len(self._held) == 1 else b"".join(self._held)

    def __iter__(self) -> Iterator[memoryview]:
        held, self._held = self._held, []
        yield from held
        try:
            for part in self._rest:
                yield memoryview(part).cast("B")
        except BaseException as exc:
            self._error = exc
            raise

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Let an error of the parts come out as it is, whatever a client made of it."""
        try:
            yield
        except Exception as exc:
            if self._error is not None and self._error is not exc:
                raise self._error from None
            raise

    def pieces(self, nbytes: int) -> Iterator[bytes]:
        """Yield all bytes in pieces of one size, the last one shorter."""
        held = bytearray()
        for part in self:
            at = 0
            while at < len(part):
                more = part[at : at + nbytes - len(held)]
                held += more
                at += len(more)
                if len(held) == nbytes:
                    yield bytes(held)
                    held.clear()
        if held:
            yield bytes(held)
