"""The Anthropic client on a real model."""

import json
import time

import anthropic

from harness import KEY, check, get, refused

# The client has no argument for it any more; the server takes it from the body.
GREEDY = {"extra_body": {"temperature": 0}}
ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "Current weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    }
]


def connect(base, **key):
    return anthropic.Anthropic(base_url=base, max_retries=0, timeout=120, **(key or {"api_key": KEY}))


def session(base, _log):
    client = connect(base)
    create = client.messages.create

    @check("messages: an answer with usage and a stop reason")
    def _():
        answer = create(model="tested", max_tokens=16, **GREEDY, system="Be brief.", messages=ASK)
        assert answer.type == "message" and answer.role == "assistant" and answer.id.startswith("msg_")
        assert answer.content[0].type == "text" and answer.content[0].text
        assert answer.stop_reason in ("end_turn", "max_tokens") and answer.stop_sequence is None
        assert 0 < answer.usage.output_tokens <= 16 and answer.model == "tested" and answer._request_id
        bearer = connect(base, auth_token=KEY)
        again = bearer.messages.create(model="tested", max_tokens=16, **GREEDY, system="Be brief.", messages=ASK)
        assert again.content == answer.content and again.usage.cache_read_input_tokens > 0
        total = [a.usage.input_tokens + a.usage.cache_read_input_tokens for a in (answer, again)]
        assert total[0] == total[1], total

    @check("messages: a stream gives the same answer, event by event")
    def _():
        whole = create(model="tested", max_tokens=24, **GREEDY, messages=ASK)
        with client.messages.stream(model="tested", max_tokens=24, **GREEDY, messages=ASK) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == whole.content[0].text and last.content[0].text == text
        assert last.stop_reason == whole.stop_reason and last.usage.output_tokens == whole.usage.output_tokens
        kinds = [e.type for e in create(model="tested", max_tokens=4, **GREEDY, messages=ASK, stream=True)]
        assert kinds[:2] == ["message_start", "content_block_start"], kinds
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds

    @check("messages: tokens are counted as the answer counts them")
    def _():
        counted = client.messages.count_tokens(model="tested", messages=ASK, tools=TOOLS, system="Be brief.")
        answer = create(model="tested", max_tokens=1, messages=ASK, tools=TOOLS, system="Be brief.")
        assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens

    @check("messages: a demanded tool call is valid by its schema, streamed too")
    def _():
        ask = dict(model="tested", max_tokens=200, **GREEDY, tools=TOOLS,
                   tool_choice={"type": "any", "disable_parallel_tool_use": True},
                   messages=[{"role": "user", "content": "Weather in Rome, in celsius?"}])
        answer = create(**ask)
        assert answer.stop_reason == "tool_use", answer
        (call,) = (block for block in answer.content if block.type == "tool_use")
        assert call.name == "get_weather" and set(call.input) == {"city", "unit"}
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
        assert [b.input for b in streamed.content if b.type == "tool_use"] == [call.input]
        answer = create(
            model="tested", max_tokens=8, tools=TOOLS,
            messages=[*ask["messages"], {"role": "assistant", "content": answer.content},
                      {"role": "user", "content": [
                          {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees, sunny"}]}])
        assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")

    @check("messages: a stop sequence is told as such and not returned")
    def _():
        text = create(model="tested", max_tokens=48, **GREEDY, messages=ASK).content[0].text
        word = text.split()[2]
        cut = create(model="tested", max_tokens=48, **GREEDY, messages=ASK, stop_sequences=[word])
        assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == word, cut
        assert word not in cut.content[0].text

    @check("messages: a schema binds the answer")
    def _():
        schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
                  "required": ["age"], "additionalProperties": False}
        answer = create(model="tested", max_tokens=64, messages=[{"role": "user", "content": "Invent an age."}],
                        output_config={"format": {"type": "json_schema", "schema": schema}})
        assert 0 <= json.loads(answer.content[0].text)["age"] <= 120

    @check("messages: errors have the client's classes and name the field")
    def _():
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        for arguments, word in [
            (dict(messages=[]), "messages"),
            (dict(messages=[{"role": "user", "content": [image]}]), "messages[0].content[0].type"),
            (dict(messages=ASK, extra_body={"temperature": "hot"}), "temperature"),
            (dict(messages=ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0].type"),
            (dict(messages=[{"role": "user", "content": "word " * 3000}]), "context"),
        ]:
            error = refused(anthropic.BadRequestError, word,
                            lambda arguments=arguments: create(model="tested", max_tokens=4, **arguments))
            assert error.body["type"] == "error" and error.body["error"]["type"] == "invalid_request_error", error.body
        stranger = connect(base, api_key="wrong")
        refused(anthropic.AuthenticationError, "Key",
                lambda: stranger.messages.create(model="tested", max_tokens=4, messages=ASK))

    @check("messages: a client that goes away frees its slot")
    def _():
        with create(model="tested", max_tokens=900, messages=ASK, stream=True, extra_body={"ignore_eos": True}) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    break
        for _ in range(200):
            if not any(slot["is_processing"] for slot in get(base, "/slots")):
                return
            time.sleep(0.05)
        raise AssertionError("the slot was still busy")
