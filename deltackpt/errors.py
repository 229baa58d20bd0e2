"""Every error that the package raises; the class says what to do next.

DeltaError            1   root
├ ConfigError         3   stop: the call or the input does not fit; nothing was written
├ Busy                4   another process holds the target: wait or try later
├ StoreError         10   stop: the store refused
│ ├ NotFound         11   stop
│ ├ AlreadyExists    12   stop: another publisher won this version
│ │ └ Fenced         12   stop: another publisher claimed a higher epoch
│ └ Unavailable      13   retry
├ FormatError        20   stop: bytes that break the format
│ └ UnsupportedFormat 21  stop: bytes for a newer reader
├ IntegrityError     30   fetched or local bytes are wrong, weights untouched: retry, bounded
│ └ SignatureError   31   stop
├ ChainError         40   a gap in the chain or a wrong base: reseed
├ Poisoned           50   an apply began and did not finish: reseed
└ RankFailed         60   a rank of a group failed, all stay at the version before: repair it, try again

The number is the exit code of the command line.
"""


class DeltaError(Exception):
    """Root of all errors of this package. One line: found, expected, what to do next."""

    exit_code = 1


class ConfigError(DeltaError):
    """The call or its input does not fit the store; nothing was written."""

    exit_code = 3


class Busy(DeltaError):
    """Another living process holds the target."""

    exit_code = 4


class StoreError(DeltaError):
    """The store refused for good: no space, no permission, a path that is no store."""

    exit_code = 10


class NotFound(StoreError):
    """The key does not exist. Never raised when the store could not be seen."""

    exit_code = 11


class AlreadyExists(StoreError):
    """An exclusive create lost: the key holds other bytes."""

    exit_code = 12


class Fenced(AlreadyExists):
    """Another publisher has claimed a higher epoch; this one must stop."""


class Unavailable(StoreError):
    """The store did not answer, or its answer leaves the outcome unknown. Retry."""

    exit_code = 13


class FormatError(DeltaError):
    """Bytes that break the format."""

    exit_code = 20


class UnsupportedFormat(FormatError):
    """Bytes that need a newer reader, or a feature that this installation lacks."""

    exit_code = 21


class IntegrityError(DeltaError):
    """A checksum or fingerprint does not match; the weights are untouched."""

    exit_code = 30


class SignatureError(IntegrityError):
    """A signature is missing or wrong."""

    exit_code = 31


class ChainError(DeltaError):
    """The versions at hand do not lead from the target's version to the wanted one."""

    exit_code = 40


class Poisoned(DeltaError):
    """An apply began and did not finish; the target holds no version until it is reseeded."""

    exit_code = 50


class RankFailed(DeltaError):
    """A rank of a group failed, and is named; the group is where it was before. Repair the rank, then try again."""

    exit_code = 60
