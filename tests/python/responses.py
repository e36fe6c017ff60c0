"""The OpenAI client's responses on a real model."""

import json

import openai

from harness import KEY, check, refused

TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Current weather of a city",
        "strict": True,
        "parameters": {
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
ASK = "What is the capital of France?"


def session(base, _log):
    client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=120)
    create = client.responses.create

    @check("responses: an answer with usage")
    def _():
        answer = create(model="tested", input=ASK, instructions="Be brief.", max_output_tokens=400, temperature=0,
                        metadata={"a": "b"})
        assert answer.status == "completed" and answer.output_text and answer.error is None, answer
        assert answer.id.startswith("resp_") and answer.metadata == {"a": "b"} and answer.store is False
        usage = answer.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        again = create(model="tested", input=ASK, instructions="Be brief.", max_output_tokens=400, temperature=0)
        assert again.output_text == answer.output_text
        assert again.usage.input_tokens_details.cached_tokens == usage.input_tokens - 1

    @check("responses: an answer that is cut short is incomplete")
    def _():
        answer = create(model="tested", input=ASK, max_output_tokens=2, temperature=0)
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete" and answer.usage.output_tokens == 2

    @check("responses: a stream gives the same answer, every event numbered")
    def _():
        whole = create(model="tested", input=ASK, max_output_tokens=400, temperature=0)
        with client.responses.stream(model="tested", input=ASK, max_output_tokens=400, temperature=0) as stream:
            events = list(stream)
            last = stream.get_final_response()
        assert [e.sequence_number for e in events] == list(range(len(events)))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == whole.output_text == last.output_text
        kinds = [e.type.removeprefix("response.") for e in events if not e.type.endswith("delta")]
        assert kinds == ["created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
                         "content_part.done", "output_item.done", "completed"], kinds

    @check("responses: tokens are counted as the answer counts them")
    def _():
        counted = client.responses.input_tokens.count(model="tested", input=ASK, tools=TOOLS)
        answer = create(model="tested", input=ASK, tools=TOOLS, max_output_tokens=1)
        assert counted.input_tokens == answer.usage.input_tokens

    @check("responses: a demanded function call is valid by its schema, and its output goes back")
    def _():
        items = [{"role": "user", "content": "Weather in Rome, in celsius?"}]
        ask = dict(model="tested", tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"},
                   max_output_tokens=200, temperature=0)
        answer = create(input=items, **ask)
        (call,) = (item for item in answer.output if item.type == "function_call")
        assert call.name == "get_weather" and set(json.loads(call.arguments)) == {"city", "unit"}
        with client.responses.stream(input=items, **ask) as stream:
            parts = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        assert "".join(parts) == call.arguments and len(parts) > 1
        items += answer.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny"})
        answer = create(model="tested", input=items, tools=TOOLS, max_output_tokens=16)
        assert answer.status in ("completed", "incomplete")

    @check("responses: a schema binds the answer, with log-probabilities")
    def _():
        schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
                  "required": ["age"], "additionalProperties": False}
        answer = create(model="tested", input="Invent an age.", max_output_tokens=64, top_logprobs=2,
                        include=["message.output_text.logprobs"],
                        text={"format": {"type": "json_schema", "name": "age", "schema": schema, "strict": True}})
        assert 0 <= json.loads(answer.output_text)["age"] <= 120
        logprobs = answer.output[0].content[0].logprobs
        assert "".join(entry.token for entry in logprobs) == answer.output_text
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in logprobs)

    @check("responses: what would need stored responses is refused by its name")
    def _():
        for arguments, word in [
            (dict(input=ASK, previous_response_id="resp_1"), "previous_response_id"),
            (dict(input=ASK, background=True), "background"),
            (dict(input=[{"type": "item_reference", "id": "msg_1"}]), "input[0].type"),
            (dict(input=ASK, tools=[{"type": "web_search"}]), "tools[0].type"),
            (dict(input=[]), "input"),
            (dict(input="word " * 3000), "context"),
        ]:
            refused(openai.BadRequestError, word, lambda arguments=arguments: create(model="tested", **arguments))
