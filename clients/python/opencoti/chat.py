"""A LangChain chat model whose calls attach to a pool.

Needs `langchain-core`. A call that finds no room raises `PoolSaturatedError`.
"""

import asyncio
from typing import Any, AsyncIterator, Iterator, Optional, Sequence

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from .client import TIMEOUT, AsyncPolykvClient, PolykvClient
from .types import Completion

CHAT = "/v1/chat/completions"


class OpencotiChatModel(BaseChatModel):
    """Chat of an opencoti server, in a session and on a pool."""

    base_url: str
    api_key: Optional[str] = None
    timeout: float = TIMEOUT
    pool_id: Optional[int] = None
    session_id: Optional[str] = None
    overcommit: bool = False
    temperature: Optional[float] = None
    max_tokens: Optional[int] = None
    extra: dict[str, Any] = {}

    _sync: PolykvClient = PrivateAttr()
    _async: Any = PrivateAttr(default=None)

    def model_post_init(self, context):
        super().model_post_init(context)
        self._sync = PolykvClient(self.base_url, api_key=self.api_key, timeout=self.timeout)

    @property
    def _llm_type(self):
        return "opencoti"

    def attach(self, pool_id, session_id=None):
        """The same model on another pool, in another session if one is named."""
        return self.model_copy(update={"pool_id": pool_id, "session_id": session_id or self.session_id})

    def bind_tools(self, tools: Sequence[Any], *, tool_choice=None, **kwargs):
        """The model with tools that it may call."""
        described = [convert_to_openai_tool(tool) for tool in tools]
        chosen = {} if tool_choice is None else {"tool_choice": "required" if tool_choice == "any" else tool_choice}
        return self.bind(tools=described, **chosen, **kwargs)

    def _body(self, messages: list[BaseMessage], stop, kwargs):
        own = {
            "pool_id": self.pool_id,
            "session_id": self.session_id,
            "overcommit": self.overcommit or None,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stop": stop,
            **self.extra,
            **kwargs,
        }
        given = {name: value for name, value in own.items() if value is not None}
        return {"messages": convert_to_openai_messages(messages), **given}

    def _client(self):
        # Connections belong to the event loop in which they were made.
        loop = asyncio.get_running_loop()
        if self._async is None or self._async[0] is not loop:
            self._async = (loop, AsyncPolykvClient(self.base_url, api_key=self.api_key, timeout=self.timeout))
        return self._async[1]

    def _generate(self, messages, stop=None, run_manager: Optional[CallbackManagerForLLMRun] = None, **kwargs):
        return _result(self._sync.chat(**self._body(messages, stop, kwargs)))

    async def _agenerate(self, messages, stop=None, run_manager: Optional[AsyncCallbackManagerForLLMRun] = None, **kwargs):
        return _result(await self._client().chat(**self._body(messages, stop, kwargs)))

    def _stream(self, messages, stop=None, run_manager=None, **kwargs) -> Iterator[ChatGenerationChunk]:
        for event in self._sync.stream(CHAT, self._body(messages, stop, kwargs)):
            if (chunk := _chunk(event)) is not None:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(self, messages, stop=None, run_manager=None, **kwargs) -> AsyncIterator[ChatGenerationChunk]:
        async for event in self._client().stream(CHAT, self._body(messages, stop, kwargs)):
            if (chunk := _chunk(event)) is not None:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk


def _usage(found):
    if not found:
        return None
    return UsageMetadata(
        input_tokens=found.get("prompt_tokens", 0),
        output_tokens=found.get("completion_tokens", 0),
        total_tokens=found.get("total_tokens", 0),
    )


def _result(answer: Completion):
    choice = answer.body["choices"][0]
    said = choice["message"]
    calls, broken = [], []
    for call in said.get("tool_calls") or []:
        try:
            calls.append(parse_tool_call(call, return_id=True))
        except Exception as error:
            broken.append(make_invalid_tool_call(call, str(error)))
    facts = {
        "finish_reason": choice.get("finish_reason"),
        "model_name": answer.body.get("model"),
        "cache_n": answer.cache_n,
        "session_tps": answer.session_tps,
        "sessions_remaining": answer.sessions_remaining,
        "saturated": answer.saturated,
    }
    thought = {"reasoning_content": said["reasoning_content"]} if said.get("reasoning_content") else {}
    message = AIMessage(
        content=said.get("content") or "",
        additional_kwargs=thought,
        tool_calls=calls,
        invalid_tool_calls=broken,
        response_metadata={name: value for name, value in facts.items() if value is not None},
        usage_metadata=_usage(answer.body.get("usage")),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(event):
    """A chunk of an event; `None` for one without a choice."""
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    delta = choice.get("delta") or {}
    calls = [
        tool_call_chunk(
            name=(call.get("function") or {}).get("name"),
            args=(call.get("function") or {}).get("arguments"),
            id=call.get("id"),
            index=call.get("index"),
        )
        for call in delta.get("tool_calls") or []
    ]
    facts = {}
    if choice.get("finish_reason"):
        facts["finish_reason"] = choice["finish_reason"]
    if event.get("timings"):
        facts["cache_n"] = event["timings"].get("cache_n")
    message = AIMessageChunk(content=delta.get("content") or "", tool_call_chunks=calls, response_metadata=facts)
    return ChatGenerationChunk(message=message)
