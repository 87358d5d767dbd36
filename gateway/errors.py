"""Errors that the gateway raises itself, and what a client sees of any error.

KvrelayError                (workers.api.errors, with all that workers raise)
├── InvalidRequest           400  and its subclasses, shared with workers: ModelNotFound 404, RequestTooSlow 408,
│                                 RequestTooLarge 413
├── EdgeError                     workers.api.http.errors: no such route, headers too large, client disconnected ...
├── SettingsError                 workers.api.config: at startup; names the key and what is allowed
└── GatewayError
    ├── AuthenticationFailed 401  no API key, or an unknown one
    ├── PermissionDenied     403  the tenant may not use this model
    ├── CacheUnknown         404  the tenant has no such cache
    ├── NoMapper             409  no usable mapper for the transfer that a client asked for
    ├── RateLimited          429  the tenant has too many requests in flight, or has used up its minute
    ├── NoUsableWorker       503  every worker of the tier is down, or its circuit is open
    ├── CircuitOpen          503  this worker's circuit is open
    └── UpstreamError        502  a worker failed, and no fallback was left
"""

from __future__ import annotations

from workers.api.errors import DeadlineExceeded, InvalidRequest, KvrelayError, Overloaded
from workers.api.http.errors import EdgeError


class GatewayError(KvrelayError):
    """Shown to the client unchanged."""


class AuthenticationFailed(GatewayError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class PermissionDenied(GatewayError):
    status, type, code = 403, "permission_error", "permission_denied"


class CacheUnknown(GatewayError):
    status, type, code = 404, "invalid_request_error", "cache_not_found"


class NoMapper(GatewayError):
    status, type, code = 409, "invalid_request_error", "no_mapper"


class RateLimited(GatewayError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class NoUsableWorker(GatewayError):
    status, type, code = 503, "overloaded", "no_usable_worker"


class CircuitOpen(GatewayError):
    status, type, code = 503, "overloaded", "circuit_open"


class UpstreamError(GatewayError):
    """Hides the worker's message, which may name addresses; the log has it."""

    status, type, code = 502, "upstream_error", "upstream_error"


def for_client(error: KvrelayError) -> KvrelayError:
    """The error as a client may see it."""
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded("no answer within the time that a request may take")
    if isinstance(error, (GatewayError, EdgeError, InvalidRequest, Overloaded)):
        return error
    return UpstreamError(f"the model's worker failed ({error.code})")
