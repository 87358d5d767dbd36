"""What the gateway itself refuses, and how any error is told to an OpenAI client.

    KvrelayError                (workers.api.errors; what workers raise lies there too)
    ├── InvalidRequest           400  and, below it, what is shared with workers: ModelNotFound 404, RequestTooSlow 408,
    │                                 RequestTooLarge 413
    ├── SettingsError                 at start: the configuration names a key and what it allows
    ├── AuthenticationFailed     401  no API key, or an unknown one
    ├── PermissionDenied         403  the tenant may not use this model
    ├── NotFound                 404  no such route
    ├── CacheUnknown             404  the tenant has no such cache, or has it no more
    ├── NoMapper                 409  for a cache that a client wants handed over
    ├── MethodNotAllowed         405
    ├── HeadersTooLarge          431
    ├── RateLimited              429  the tenant has too much in flight, or has used up its minute
    ├── NoUsableWorker           503  every worker of the tier is down, or its circuit is open
    ├── CircuitOpen              503  this worker's circuit is open
    ├── InternalError            500  a bug of ours; the log knows more
    ├── UpstreamError            502  a worker failed, and there was no other way to answer
    └── ClientDisconnected       499  in logs and metrics only
"""

from __future__ import annotations

import math

from workers.api.errors import DeadlineExceeded, InvalidRequest, KvrelayError, Overloaded

DEFAULT_RETRY_AFTER_S = 1.0


class SettingsError(KvrelayError):
    type, code = "settings_error", "invalid_settings"


class GatewayError(KvrelayError):
    """Told to the client as it stands."""


class AuthenticationFailed(GatewayError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class PermissionDenied(GatewayError):
    status, type, code = 403, "permission_error", "permission_denied"


class NotFound(GatewayError):
    status, type, code = 404, "invalid_request_error", "not_found"


class CacheUnknown(GatewayError):
    status, type, code = 404, "invalid_request_error", "cache_not_found"


class NoMapper(GatewayError):
    status, type, code = 409, "invalid_request_error", "no_mapper"


class MethodNotAllowed(GatewayError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class HeadersTooLarge(GatewayError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class RateLimited(GatewayError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class NoUsableWorker(GatewayError):
    status, type, code = 503, "overloaded", "no_usable_worker"


class CircuitOpen(GatewayError):
    status, type, code = 503, "overloaded", "circuit_open"


class ClientDisconnected(GatewayError):
    status, type, code = 499, "client_disconnected", "client_disconnected"


class InternalError(GatewayError):
    status, type, code = 500, "internal_error", "internal_error"


class UpstreamError(GatewayError):
    """The worker's own words stay in the log: they name addresses."""

    status, type, code = 502, "upstream_error", "upstream_error"


def for_client(error: KvrelayError) -> KvrelayError:
    """The error as a client may see it."""
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded("no answer within the time that a request may take")
    if isinstance(error, (GatewayError, InvalidRequest, Overloaded)):
        return error
    return UpstreamError(f"the model's worker failed ({error.code})")


def reply_headers(error: KvrelayError) -> dict[str, str]:
    """`Retry-After` where waiting helps; `x-should-retry: false` where the client's own retries cannot."""
    if error.status in (429, 503):
        return {"retry-after": str(math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S))}
    headers = {"x-should-retry": "false"} if error.status in (408, 409, 504) else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
