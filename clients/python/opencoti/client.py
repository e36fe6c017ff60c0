"""The control plane, with and without asyncio.

Every call is described once, as a request and what its answer becomes (`_Calls`); the two clients differ in how they send it.
Redirects are not followed and nothing is retried: when to come back is for the caller to decide.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional

import httpx

from .errors import OpencotiError, from_body
from .types import Capacity, Completion, Pool, PoolList, Rates

TIMEOUT = 600.0
SOURCES = ("prompt", "tokens", "from_session", "from_slot")


@dataclass
class _Call:
    method: str
    path: str
    into: Callable[[Any, Any], Any]
    body: Optional[dict] = None
    params: Optional[dict] = None


def _only_body(make):
    return lambda body, headers: make(body)


def _given(**values):
    return {name: value for name, value in values.items() if value is not None}


class _Calls:
    """Each method is one request; `_send` is what the client adds."""

    def create_pool(
        self,
        *,
        prompt=None,
        tokens=None,
        from_session=None,
        from_slot=None,
        pin=None,
        ephemeral=None,
        expect_len=None,
    ):
        """A root pool of exactly one of a text, tokens, a session or a slot."""
        body = _given(
            prompt=prompt,
            tokens=tokens,
            from_session=from_session,
            from_slot=from_slot,
            pin=pin,
            ephemeral=ephemeral,
            expect_len=expect_len,
        )
        if len([name for name in SOURCES if name in body]) != 1:
            raise ValueError(f"a pool is made of exactly one of {', '.join(SOURCES)}")
        return self._send(_Call("POST", "/polykv/pools", _only_body(Pool.of), body))

    def fork_pool(self, pool_id, *, prompt=None, tokens=None, branch_pos=None, pin=None):
        """A child; `prompt` or `tokens` is its whole prefix, the parent's part included."""
        body = _given(prompt=prompt, tokens=tokens, branch_pos=branch_pos, pin=pin)
        if ("prompt" in body) == ("tokens" in body):
            raise ValueError("a fork is made of exactly one of prompt and tokens")
        return self._send(_Call("POST", f"/polykv/pools/{pool_id}/fork", _only_body(Pool.of), body))

    def pools(self):
        """All pools."""
        return self._send(_Call("GET", "/polykv/pools", _only_body(PoolList.of)))

    def pool(self, pool_id):
        """One pool."""
        return self._send(_Call("GET", f"/polykv/pools/{pool_id}", _only_body(Pool.of)))

    def pin(self, pool_id):
        """Keeps a pool with nothing attached to it."""
        return self._change(pool_id, "pin", {})

    def unpin(self, pool_id):
        """Takes the pin back."""
        return self._change(pool_id, "unpin", {})

    def release(self, pool_id):
        """Lets a pool go once nothing refers to it."""
        return self._change(pool_id, "release", {})

    def set_sampling(self, pool_id, placement):
        """Where the pool's sessions are sampled."""
        return self._change(pool_id, "sampling", {"placement": placement})

    def set_admission(self, pool_id, **settings):
        """How the pool admits sessions; what is left out has its default."""
        return self._change(pool_id, "admission", settings)

    def _change(self, pool_id, what, body):
        return self._send(_Call("POST", f"/polykv/pools/{pool_id}/{what}", _only_body(Pool.of), body))

    def capacity(self, pool_id, expected_tokens=None):
        """Whether another session may come."""
        params = _given(expected_tokens=expected_tokens)
        return self._send(
            _Call("GET", f"/polykv/pools/{pool_id}/capacity", _only_body(Capacity.of), params=params)
        )

    def tps(self):
        """The rates of all sessions now."""
        return self._send(_Call("GET", "/polykv/tps", _only_body(Rates.of), params={"once": "1"}))

    def tokenize(self, content, *, add_special=False, parse_special=True):
        """The tokens of a text, by default without those that begin a prompt."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        return self._send(_Call("POST", "/tokenize", _only_body(lambda found: found["tokens"]), body))

    def apply_template(self, messages, **fields):
        """The prompt that a conversation becomes."""
        body = {"messages": messages, **fields}
        return self._send(_Call("POST", "/apply-template", _only_body(lambda found: found["prompt"]), body))

    def completion(self, prompt, **fields):
        """The native completion, not streamed."""
        return self._send(_Call("POST", "/completion", Completion.of, {"prompt": prompt, **fields}))

    def chat(self, messages, **fields):
        """A chat completion, not streamed."""
        return self._send(_Call("POST", "/v1/chat/completions", Completion.of, {"messages": messages, **fields}))


def _options(base_url, api_key, timeout):
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return {"base_url": base_url.rstrip("/"), "headers": headers, "timeout": timeout}


def _result(call, answer):
    if answer.status_code >= 300:
        raise from_body(answer.status_code, answer.content, answer.headers)
    return call.into(answer.json(), answer.headers)


def _event(line):
    """The JSON of a line of a stream; `None` for what is no event."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    event = json.loads(line[6:])
    if "error" in event:
        raise OpencotiError(event["error"].get("message", "the stream broke off"), kind=event["error"].get("type"))
    return event


class PolykvClient(_Calls):
    """The control plane for programs without asyncio."""

    def __init__(self, base_url, *, api_key=None, timeout=TIMEOUT, transport=None):
        self._http = httpx.Client(**_options(base_url, api_key, timeout), transport=transport)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._http.close()

    def _send(self, call):
        return _result(call, self._http.request(call.method, call.path, json=call.body, params=call.params))

    def stream(self, path, body):
        """The events of a route that generates."""
        with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code >= 300:
                raise from_body(answer.status_code, answer.read(), answer.headers)
            for line in answer.iter_lines():
                if (event := _event(line)) is not None:
                    yield event

    def watch_tps(self):
        """The rates of all sessions, as they change."""
        with self._http.stream("GET", "/polykv/tps") as answer:
            if answer.status_code >= 300:
                raise from_body(answer.status_code, answer.read(), answer.headers)
            for line in answer.iter_lines():
                if (event := _event(line)) is not None:
                    yield Rates.of(event)

    def wait_for_capacity(self, pool_id, *, expected_tokens=None, timeout=60.0, poll=0.25):
        """Waits until the pool may take another session; the last answer, also when the time is over."""
        deadline = time.monotonic() + timeout
        while True:
            now = self.capacity(pool_id, expected_tokens)
            if now.can_admit or time.monotonic() >= deadline:
                return now
            time.sleep(poll)

    def compact_by_refork(self, pool_id, *, ancestor_tokens, summary, working=None, pin=False):
        """A child of a stable ancestor that ends in a summary. `working` is unpinned and released, now that sessions can move."""
        tokens = [*ancestor_tokens, *self.tokenize(summary)]
        child = self.fork_pool(pool_id, tokens=tokens, branch_pos=len(ancestor_tokens), pin=pin)
        if working is not None:
            self.unpin(working)
            self.release(working)
        return child


class AsyncPolykvClient(_Calls):
    """The control plane for asyncio; every call of `PolykvClient` is awaited."""

    def __init__(self, base_url, *, api_key=None, timeout=TIMEOUT, transport=None):
        self._http = httpx.AsyncClient(**_options(base_url, api_key, timeout), transport=transport)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def close(self):
        await self._http.aclose()

    async def _send(self, call):
        return _result(call, await self._http.request(call.method, call.path, json=call.body, params=call.params))

    async def stream(self, path, body):
        """The events of a route that generates."""
        async with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code >= 300:
                raise from_body(answer.status_code, await answer.aread(), answer.headers)
            async for line in answer.aiter_lines():
                if (event := _event(line)) is not None:
                    yield event

    async def watch_tps(self):
        """The rates of all sessions, as they change."""
        async with self._http.stream("GET", "/polykv/tps") as answer:
            if answer.status_code >= 300:
                raise from_body(answer.status_code, await answer.aread(), answer.headers)
            async for line in answer.aiter_lines():
                if (event := _event(line)) is not None:
                    yield Rates.of(event)

    async def wait_for_capacity(self, pool_id, *, expected_tokens=None, timeout=60.0, poll=0.25):
        """As `PolykvClient.wait_for_capacity`."""
        deadline = time.monotonic() + timeout
        while True:
            now = await self.capacity(pool_id, expected_tokens)
            if now.can_admit or time.monotonic() >= deadline:
                return now
            await asyncio.sleep(poll)

    async def compact_by_refork(self, pool_id, *, ancestor_tokens, summary, working=None, pin=False):
        """As `PolykvClient.compact_by_refork`."""
        tokens = [*ancestor_tokens, *await self.tokenize(summary)]
        child = await self.fork_pool(pool_id, tokens=tokens, branch_pos=len(ancestor_tokens), pin=pin)
        if working is not None:
            await self.unpin(working)
            await self.release(working)
        return child
