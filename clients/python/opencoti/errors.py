"""What a server's refusal becomes."""

import json


class OpencotiError(Exception):
    """The server refused a request, or broke a stream off. `status` is the HTTP status, `param` the field at fault."""

    def __init__(self, message, status=None, kind=None, param=None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class PoolSaturatedError(OpencotiError):
    """There is no room now (429). `retry_after` says in how many seconds to come back."""

    def __init__(self, message, retry_after, **facts):
        super().__init__(message, status=429, **facts)
        self.retry_after = retry_after


def from_body(status, body, headers):
    """The error of an answer, whatever its body."""
    try:
        found = json.loads(body).get("error") or {}
    except (ValueError, AttributeError):
        found = {}
    message = found.get("message") or f"the server answered {status}"
    facts = {"kind": found.get("type"), "param": found.get("param")}
    if status == 429:
        try:
            retry_after = int(headers.get("retry-after", "1"))
        except ValueError:
            retry_after = 1
        return PoolSaturatedError(message, retry_after, **facts)
    return OpencotiError(message, status=status, **facts)
