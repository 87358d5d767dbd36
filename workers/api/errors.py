"""The errors between a worker and its callers.

    KvrelayError
    ├── InvalidRequest        400  the request itself is wrong; a retry does not help
    │   ├── ContextLengthExceeded 400
    │   ├── ModelNotFound     404  the worker runs another model
    │   ├── RequestTooLarge   413
    │   └── RequestTooSlow    408  the body did not arrive in time
    ├── Unauthorized          401  the cluster secret is missing or wrong
    ├── CacheUnusable         409  the cache no longer exists, or may not serve this request
    │   ├── CacheNotFound     404  unknown, expired or evicted
    │   ├── CacheStale        409  the worker restarted, or the blocks were overwritten
    │   └── CacheMismatch     409  another tenant, model, layout, token sequence or provenance
    ├── BundleUnusable        409  no mapper for this pair, or one below the gate
    ├── HandoffDeclined       409  declined by cost; not a failure
    │   ├── PrefillCheaper    409  a full prefill takes no longer
    │   └── NoTime            409  the handoff is predicted to miss its deadline
    ├── Overloaded            503  a queue is full; carries `retry_after_s`
    │   └── PoolFull          503  every block of the pool is used by requests or leases
    ├── DeadlineExceeded      504
    ├── TransferFailed        502  the source could not be read
    │   └── TransferCorrupted 502  the data that arrived is not what was sent
    └── WorkerUnavailable     503  no answer, or not one of this API

The worker raises these classes, and `WorkerClient` raises the same class again from the reply.
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_RETRY_AFTER_S = 3600.0


class KvrelayError(Exception):
    """Base of the tree. `param` names the offending field; `code` is the stable, machine-readable name."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error object of the OpenAI API."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(KvrelayError):
    status, type, code = 400, "invalid_request_error", "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status, code = 404, "model_not_found"


class RequestTooLarge(InvalidRequest):
    status, code = 413, "request_too_large"


class RequestTooSlow(InvalidRequest):
    status, code = 408, "request_timeout"


class Unauthorized(KvrelayError):
    status, type, code = 401, "authentication_error", "invalid_secret"


class CacheUnusable(KvrelayError):
    status, type, code = 409, "cache_error", "cache_unusable"


class CacheNotFound(CacheUnusable):
    status, code = 404, "cache_not_found"


class CacheStale(CacheUnusable):
    code = "cache_stale"


class CacheMismatch(CacheUnusable):
    code = "cache_mismatch"


class BundleUnusable(KvrelayError):
    status, type, code = 409, "bundle_error", "no_bundle"


class HandoffDeclined(KvrelayError):
    status, type, code = 409, "cost_error", "handoff_declined"


class PrefillCheaper(HandoffDeclined):
    code = "prefill_cheaper"


class NoTime(HandoffDeclined):
    code = "no_time"


class Overloaded(KvrelayError):
    status, type, code = 503, "overloaded", "overloaded"


class PoolFull(Overloaded):
    code = "pool_full"


class DeadlineExceeded(KvrelayError):
    status, type, code = 504, "upstream_timeout", "deadline_exceeded"


class TransferFailed(KvrelayError):
    status, type, code = 502, "upstream_error", "transfer_failed"


class TransferCorrupted(TransferFailed):
    code = "transfer_corrupted"


class WorkerUnavailable(KvrelayError):
    status, type, code = 503, "upstream_error", "worker_unavailable"


def _tree(base: type[KvrelayError]) -> list[type[KvrelayError]]:
    """The classes of this module, without subclasses defined elsewhere, which no worker sends."""
    children = [child for child in base.__subclasses__() if child.__module__ == __name__]
    return [base, *(leaf for child in children for leaf in _tree(child))]


def from_reply(status: int, body: Any, retry_after: str | None = None) -> KvrelayError:
    """Return the error of a worker's reply, by its `code`; `WorkerUnavailable` for a reply without an error object."""
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return WorkerUnavailable(f"worker answered {status} without an error object")
    by_code = {cls.code: cls for cls in _tree(KvrelayError)}
    cls, param = by_code.get(str(detail.get("code")), KvrelayError), detail.get("param")
    return cls(
        str(detail.get("message", "")),
        param=param if isinstance(param, str) else None,
        retry_after_s=_seconds(retry_after) if retry_after else None,
    )


def _seconds(retry_after: str) -> float | None:
    """Parse a `Retry-After` header; None if malformed or too long."""
    try:
        seconds = float(retry_after)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= MAX_RETRY_AFTER_S else None
