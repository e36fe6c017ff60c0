"""Scripted sessions of the OpenAI and Anthropic Python clients against running servers.

    session.py OPENCOTI SCRIPTED CHAT_MODEL BASE_MODEL

Starts the server with the chat model on a free port, drives every OpenAI and Anthropic route that exists, and stops it by
POST /shutdown; completes with the base model, which has no chat template of its own; and talks with the scripted model, which
says what it is told. Texts of the real models are never compared with expected texts: a small model says what it says. Shapes,
counts, orders and constraints are. Pools are driven by the package in clients/python, with LangChain and LangGraph.
"""

import json
import re
import sys
import threading
import time

import openai

import messages
import pools
import responses
import scripted
from harness import KEY, check, get, passed, refused, serve

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "What is the capital of France?"}]


def main():
    binary, scripted_binary, chat_model, base_model = sys.argv[1:]
    command = [binary, "serve", "--port", "PORT", "--ctx-size", "1024", "--parallel", "4", "--api-key", KEY,
               "--alias", "tested", "--model"]

    def all_surfaces(base, log):
        for session in (chat_session, messages.session, responses.session):
            session(base, log)

    serve([*command, chat_model], all_surfaces)
    serve([*command, base_model, "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"], base_session)
    serve([*command, chat_model, "--polykv-max-pools", "4"], pools.session)
    serve([scripted_binary, chat_model, "PORT"], scripted.session)
    print(f"{len(passed)} passed, 0 failed")


def connect(base):
    return openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0, timeout=120)


def base_session(base, log):
    client = connect(base)

    @check("a base model completes, over a quantised cache")
    def _():
        answer = client.completions.create(model="tested", prompt="The first five numbers are one, two, three,",
                                           max_tokens=8, temperature=0, logprobs=1)
        choice = answer.choices[0]
        assert choice.text and all(p <= 0 for p in choice.logprobs.token_logprobs)
        assert "four" in choice.text, choice.text

    @check("a base model chats with its architecture's template, and the boot summary says so")
    def _():
        answer = client.chat.completions.create(model="tested", messages=ASK, max_completion_tokens=8, temperature=0)
        assert answer.choices[0].finish_reason in ("stop", "length")
        log.seek(0)
        assert "the default of gemma3" in log.read()

    @check("sliding windows hold over a prompt of several windows")
    def _():
        words = " ".join(f"word{i}" for i in range(250))
        answer = client.completions.create(model="tested", prompt=words, max_tokens=4, temperature=0)
        again = client.completions.create(model="tested", prompt=words, max_tokens=4, temperature=0)
        assert answer.usage.prompt_tokens > 512 and answer.choices[0].text == again.choices[0].text
        assert again.usage.prompt_tokens_details.cached_tokens > 0


def chat_session(base, _log):
    client = connect(base)

    @check("models are listed")
    def _():
        models = client.models.list().data
        assert [m.id for m in models] == ["tested"], models

    @check("chat answers with usage and a finish reason")
    def _():
        answer = client.chat.completions.create(model="tested", messages=ASK, max_completion_tokens=16, temperature=0)
        choice = answer.choices[0]
        assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
        assert choice.message.role == "assistant" and choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.completion_tokens <= 16

    @check("a stream concatenates to the whole answer and ends with usage")
    def _():
        whole = client.chat.completions.create(model="tested", messages=ASK, max_completion_tokens=24, temperature=0)
        chunks = list(client.chat.completions.create(
            model="tested", messages=ASK, max_completion_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert len({c.id for c in chunks}) == 1
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert all(c.usage is None for c in chunks[:-1])
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == whole.choices[0].finish_reason and not any(reasons[:-1])
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content, (text, whole.choices[0].message.content)

    @check("the second request with the same prompt takes it from the cache")
    def _():
        messages = [{"role": "user", "content": "Count: " + " ".join(str(i) for i in range(60))}]
        first = client.chat.completions.create(model="tested", messages=messages, max_completion_tokens=1)
        again = client.chat.completions.create(model="tested", messages=messages, max_completion_tokens=1)
        assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1

    @check("a seed makes a sampled answer reproducible")
    def _():
        ask = dict(model="tested", messages=ASK, max_completion_tokens=16, temperature=1.5, seed=7)
        texts = {client.chat.completions.create(**ask).choices[0].message.content for _ in range(3)}
        assert len(texts) == 1, texts

    @check("a required tool call is valid by its schema")
    def _():
        answer = client.chat.completions.create(
            model="tested", messages=[{"role": "user", "content": "Weather in Rome, in celsius?"}], tools=TOOLS,
            tool_choice="required", max_completion_tokens=128, temperature=0)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls", choice
        call = choice.message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        assert call.type == "function" and call.id and call.function.name == "get_weather"
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")

    @check("a streamed tool call gives the same, with arguments in parts")
    def _():
        name, arguments, reason, parts = "", "", None, 0
        for chunk in client.chat.completions.create(
            model="tested", messages=[{"role": "user", "content": "Weather in Rome?"}], tools=TOOLS, stream=True,
            tool_choice={"type": "function", "function": {"name": "get_weather"}}, max_completion_tokens=128,
        ):
            choice = chunk.choices[0]
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
                parts += bool(call.function.arguments)
        assert name == "get_weather" and reason == "tool_calls" and parts > 1, (name, reason, parts)
        assert set(json.loads(arguments)) == {"city", "unit"}

    @check("a tool's result goes back into the conversation")
    def _():
        call = {"id": "call_1", "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Rome","unit":"celsius"}'}}
        answer = client.chat.completions.create(
            model="tested", tools=TOOLS, max_completion_tokens=16,
            messages=[{"role": "user", "content": "Weather in Rome?"},
                      {"role": "assistant", "content": None, "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees, sunny"}])
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")

    @check("a JSON schema binds the answer")
    def _():
        answer = client.chat.completions.create(
            model="tested", messages=[{"role": "user", "content": "Invent a person."}], max_completion_tokens=96,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}})
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"name", "age"} and 0 <= value["age"] <= 120, value

    @check("log-probabilities are consistent")
    def _():
        answer = client.chat.completions.create(
            model="tested", messages=ASK, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
        entries = answer.choices[0].logprobs.content
        assert len(entries) == answer.usage.completion_tokens
        for entry in entries:
            assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
            assert entry.token == entry.top_logprobs[0].token and entry.logprob == entry.top_logprobs[0].logprob
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob

    @check("two choices come back with their indices")
    def _():
        answer = client.chat.completions.create(
            model="tested", messages=ASK, n=2, max_completion_tokens=8, temperature=1.5, seed=3)
        assert [c.index for c in answer.choices] == [0, 1]

    @check("stop texts end the answer and are not returned")
    def _():
        answer = client.chat.completions.create(model="tested", messages=ASK, max_completion_tokens=64, temperature=0)
        word = re.findall(r"\w+", answer.choices[0].message.content)[2]
        cut = client.chat.completions.create(
            model="tested", messages=ASK, max_completion_tokens=64, temperature=0, stop=[word])
        assert word not in cut.choices[0].message.content and cut.choices[0].finish_reason == "stop"

    @check("legacy completions, with echo and log-probabilities of the prompt")
    def _():
        answer = client.completions.create(model="tested", prompt="The sky is", max_tokens=4, temperature=0, echo=True,
                                           logprobs=2)
        choice = answer.choices[0]
        assert answer.object == "text_completion" and choice.text.startswith("The sky is")
        logprobs = choice.logprobs
        assert logprobs.token_logprobs[0] is None and all(p <= 0 for p in logprobs.token_logprobs[1:])
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
        assert "".join(logprobs.tokens) == choice.text

    @check("embeddings are normalised, in floats and in base64")
    def _():
        plain = client.embeddings.create(model="tested", input=["A man eats.", "A man is eating."],
                                         encoding_format="float")
        coded = client.embeddings.create(model="tested", input=["A man eats.", "A man is eating."])
        for a, b in zip(plain.data, coded.data, strict=True):
            assert abs(sum(x * x for x in a.embedding) - 1) < 1e-3
            assert max(abs(x - y) for x, y in zip(a.embedding, b.embedding, strict=True)) < 1e-5

    @check("errors have the client's classes and name the field")
    def _():
        create = client.chat.completions.create
        refusals = [
            (dict(messages=[]), "messages"),
            (dict(messages=[{"role": "robot", "content": "x"}]), "role"),
            (dict(messages=ASK, temperature="hot"), "temperature"),
            (dict(messages=ASK, response_format={"type": "xml"}), "response_format"),
            (dict(messages=ASK, tools=[{"type": "magic"}]), "tools"),
            (dict(messages=ASK, extra_body={"grammar": "root ::= ("}), "grammar"),
            (dict(messages=[{"role": "user", "content": "word " * 3000}]), "context"),
        ]
        for arguments, word in refusals:
            refused(openai.BadRequestError, word,
                    lambda arguments=arguments: create(model="tested", max_completion_tokens=4, **arguments))
        stranger = openai.OpenAI(base_url=f"{base}/v1", api_key="wrong", max_retries=0)
        refused(openai.AuthenticationError, "Key",
                lambda: stranger.chat.completions.create(model="tested", messages=ASK))

    @check("a client that goes away frees its slot")
    def _():
        stream = client.chat.completions.create(model="tested", messages=ASK, max_completion_tokens=900, stream=True,
                                                extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        deadline = time.time() + 10
        while time.time() < deadline and any(s["is_processing"] for s in get(base, "/slots")):
            time.sleep(0.05)
        assert not any(s["is_processing"] for s in get(base, "/slots"))

    @check("many clients at once each get an answer or a 429")
    def _():
        outcomes = []

        def one(i):
            try:
                answer = client.chat.completions.create(
                    model="tested", messages=[{"role": "user", "content": f"Say {i}. " * 20}], max_completion_tokens=24)
                outcomes.append(answer.choices[0].finish_reason)
            except openai.RateLimitError as e:
                assert int(e.response.headers["retry-after"]) >= 1
                outcomes.append("429")

        threads = [threading.Thread(target=one, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 24 and set(outcomes) <= {"stop", "length", "429"} and outcomes.count("429") < 24, outcomes

    @check("plugins are listed with the codec in use")
    def _():
        plugins = get(base, "/plugins")
        names = [p["name"] for p in (plugins["plugins"] if isinstance(plugins, dict) else plugins)]
        assert {"kv-scalar", "residency-resident", "admission-gate"} <= set(names), plugins


if __name__ == "__main__":
    main()
