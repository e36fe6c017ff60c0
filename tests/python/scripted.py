"""Both clients on the scripted model, which says what stands between the last [say] and [/say] of the conversation: thoughts,
tool calls and whole conversations, exactly."""

import json

import anthropic
import openai

from harness import KEY, check

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
    "required": ["city", "days"],
}
THOUGHT = "The user wants Rome.\nSo I look."
TEXT = "Let me look: 21 °C?"
ARGUMENTS = {"city": "Rome", "days": [1, 2]}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
ASK = f"Weather? [say]<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALL}[/say]"
RESULT = "[say]It is sunny in Rome.[/say]"


def session(base, _log):
    openai_client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=120)
    chat(openai_client)
    messages(anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0, timeout=120))
    responses(openai_client)


def chat(client):
    ask = dict(model="scripted", temperature=0, tools=[
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}])

    @check("scripted chat: thought, text and call, and the result goes back")
    def _():
        history = [{"role": "user", "content": ASK}]
        choice = client.chat.completions.create(messages=history, **ask).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == TEXT
        assert choice.message.reasoning_content == THOUGHT
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
        history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        answer = client.chat.completions.create(messages=history, **ask)
        assert answer.choices[0].message.content == "It is sunny in Rome."
        assert answer.usage.prompt_tokens_details.cached_tokens > 100, answer.usage

    @check("scripted chat: the stream says the same")
    def _():
        thought = text = name = arguments = reason = ""
        for chunk in client.chat.completions.create(messages=[{"role": "user", "content": ASK}], stream=True, **ask):
            choice = chunk.choices[0]
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        assert (thought, text, name, reason) == (THOUGHT, TEXT, "weather", "tool_calls")
        assert json.loads(arguments) == ARGUMENTS


def messages(client):
    ask = dict(model="scripted", max_tokens=500, tools=[{"name": "weather", "input_schema": PARAMETERS}])

    def is_right(message):
        thought, text, call = message.content
        assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", THOUGHT, True)
        assert (text.type, text.text) == ("text", TEXT)
        assert (call.type, call.name, call.input) == ("tool_use", "weather", ARGUMENTS)
        assert message.stop_reason == "tool_use"

    @check("scripted messages: thought, text and call are blocks, and the result goes back")
    def _():
        history = [{"role": "user", "content": ASK}]
        answer = client.messages.create(messages=history, **ask)
        is_right(answer)
        result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": RESULT}
        history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(messages=history, **ask)
        assert [block.text for block in answer.content] == ["It is sunny in Rome."]
        assert answer.stop_reason == "end_turn" and answer.usage.cache_read_input_tokens > 100, answer.usage

    @check("scripted messages: the stream says the same")
    def _():
        with client.messages.stream(messages=[{"role": "user", "content": ASK}], **ask) as stream:
            kinds = [event.type for event in stream]
            is_right(stream.get_final_message())
        assert {"text", "thinking", "signature", "input_json"} <= set(kinds), set(kinds)

    @check("scripted messages: a turned-off thought, a stop sequence and a bound")
    def _():
        def say(script, **arguments):
            history = [{"role": "user", "content": f"[say]{script}[/say]"}]
            return client.messages.create(**{**ask, "messages": history, **arguments})

        assert say("Four.", thinking={"type": "disabled"}).content[0].text == "Four."
        cut = say("one two three four", stop_sequences=["three"])
        assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "three", "one two ")
        assert say("one two three four", max_tokens=2).stop_reason == "max_tokens"


def responses(client):
    ask = dict(model="scripted", tools=[{"type": "function", "name": "weather", "parameters": PARAMETERS}])

    def is_right(response):
        thought, message, call = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
        assert (message.type, message.content[0].text) == ("message", TEXT)
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ARGUMENTS)
        assert response.status == "completed" and response.usage.output_tokens_details.reasoning_tokens > 3

    @check("scripted responses: thought, text and call are items, and the output goes back")
    def _():
        items = [{"role": "user", "content": ASK}]
        answer = client.responses.create(input=items, **ask)
        is_right(answer)
        items += answer.output
        items.append({"type": "function_call_output", "call_id": answer.output[2].call_id, "output": RESULT})
        answer = client.responses.create(input=items, **ask)
        assert answer.output_text == "It is sunny in Rome."
        assert answer.usage.input_tokens_details.cached_tokens > 100, answer.usage

    @check("scripted responses: the stream says the same")
    def _():
        with client.responses.stream(input=ASK, **ask) as stream:
            events = list(stream)
            is_right(stream.get_final_response())

        def joined(kind):
            return "".join(event.delta for event in events if event.type == f"response.{kind}.delta")

        assert joined("reasoning_text") == THOUGHT and joined("output_text") == TEXT
        assert json.loads(joined("function_call_arguments")) == ARGUMENTS
