"""Pools through the package in clients/python: the control plane with and without asyncio, LangChain's model, LangGraph's nodes."""

import asyncio
import os
import sys
from typing import Any, TypedDict

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../clients/python"))

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph

from harness import KEY, check, refused
from opencoti import AsyncPolykvClient, OpencotiError, PolykvClient, PoolSaturatedError
from opencoti.agents import CapacityGate, CompactionNode, pool_tools
from opencoti.chat import OpencotiChatModel

SYSTEM = "You are the clerk of a small library. " + "The library opens at nine and closes at five. " * 40


def session(base, log):
    client = PolykvClient(base, api_key=KEY)
    conversation = [{"role": "system", "content": SYSTEM}]
    rendered = client.apply_template(conversation, add_generation_prompt=False)
    state = {}

    @check("a pool of a rendered system message is shared by every agent")
    def _():
        pool = client.create_pool(prompt=rendered, pin=True)
        state["pool"] = pool
        assert pool.pinned and pool.orphaned_pin and pool.parent is None, pool
        for agent in ("alice", "bob"):
            answer = client.chat(
                conversation + [{"role": "user", "content": f"My name is {agent}. When do you open?"}],
                pool_id=pool.pool_id,
                session_id=agent,
                max_tokens=12,
                temperature=0,
            )
            # What agents say alike behind the pool is shared, too.
            assert answer.cache_n >= pool.prefix_len, (answer.cache_n, pool.prefix_len)
            assert answer.session_tps and answer.session_tps > 0
        now = client.pool(pool.pool_id)
        assert (now.n_sessions, now.hits, now.orphaned_pin) == (2, 2, False), now

    @check("a child begins with its parent, token for token")
    def _():
        root = client.tokenize(rendered, add_special=True)
        parent = client.create_pool(tokens=root, expect_len=len(root))
        suffix = client.tokenize("Alice borrowed the red book.")
        child = client.fork_pool(parent.pool_id, tokens=root + suffix)
        assert (child.parent, child.branch_pos, child.prefix_len) == (parent.pool_id, len(root), len(root) + len(suffix))
        refused(OpencotiError, "shorter", lambda: client.fork_pool(parent.pool_id, tokens=suffix))
        assert client.pools().tree_depth == 2
        for pool in (child, parent):
            client.release(pool.pool_id)
        refused(OpencotiError, "no pool", lambda: client.pool(child.pool_id))

    @check("capacity and rates are answered, once and as a stream")
    def _():
        now = client.capacity(state["pool"].pool_id, expected_tokens=50)
        assert now.n_pool_sessions == 2 and 0 <= now.compaction_pressure <= 1, now
        assert {s.session_id for s in client.tps().sessions} >= {"alice", "bob"}
        for rates in client.watch_tps():
            assert rates.sessions
            break

    @check("a saturated pool raises PoolSaturatedError, and an overcommitted request passes")
    def _():
        pool = state["pool"].pool_id
        client.set_admission(pool, mode="enforced", target_tps_per_session=1e9)
        body = conversation + [{"role": "user", "content": "hello"}]
        error = refused(
            PoolSaturatedError, "saturated", lambda: client.chat(body, pool_id=pool, session_id="carol", max_tokens=2)
        )
        assert error.retry_after >= 1 and error.status == 429
        assert client.chat(body, pool_id=pool, session_id="carol", max_tokens=2, overcommit=True).cache_n
        client.set_admission(pool, mode="enforced", target_tps_per_session=1e9, on_saturation="warn")
        marked = client.chat(body, pool_id=pool, session_id="dave", max_tokens=2)
        assert marked.saturated == f"pool-{pool}", marked.saturated
        client.set_admission(pool)

    @check("the same calls are awaited with asyncio")
    def _():
        asyncio.run(asynchronous(base, state["pool"].pool_id, conversation))

    @check("LangChain's model attaches, streams, and tells what was shared")
    def _():
        langchain(base, state["pool"])

    @check("a LangGraph graph asks before it spawns, and compacts by a fork")
    def _():
        langgraph(client, base, state["pool"], rendered)

    @check("tools make and release pools")
    def _():
        tools = {tool.name: tool for tool in pool_tools(client)}
        made = tools["create_pool"].invoke({"prompt": rendered})
        assert tools["pool_capacity"].invoke({"pool_id": made["pool_id"]})["can_admit"]
        assert tools["release_pool"].invoke({"pool_id": made["pool_id"]})["released"]

    @check("nothing is left once everything is released")
    def _():
        client.unpin(state["pool"].pool_id)
        client.release(state["pool"].pool_id)
        assert client.pools().pools == []


async def asynchronous(base, pool, conversation):
    async with AsyncPolykvClient(base, api_key=KEY) as client:
        asks = (
            client.chat(
                conversation + [{"role": "user", "content": f"Question {i}"}],
                pool_id=pool,
                session_id=f"async-{i}",
                max_tokens=4,
            )
            for i in range(3)
        )
        answers = await asyncio.gather(*asks)
        assert all(answer.cache_n for answer in answers)
        assert (await client.wait_for_capacity(pool)).can_admit
        child = await client.compact_by_refork(
            pool, ancestor_tokens=await client.tokenize(await rendered_by(client, conversation), add_special=True),
            summary="They asked three questions.",
        )
        assert child.parent == pool
        assert (await client.release(child.pool_id)).released
        body = {"prompt": "One, two,", "n_predict": 3}
        assert [event async for event in client.stream("/completion", body)][-1]["stop"]


async def rendered_by(client, conversation):
    return await client.apply_template(conversation, add_generation_prompt=False)


def langchain(base, pool):
    model = OpencotiChatModel(base_url=base, api_key=KEY, temperature=0, max_tokens=8).attach(pool.pool_id, "chain")
    messages = [SystemMessage(SYSTEM), HumanMessage("When do you close?")]
    answer = model.invoke(messages)
    assert answer.content and answer.response_metadata["cache_n"] >= pool.prefix_len, answer
    assert answer.usage_metadata["output_tokens"] <= 8
    streamed = "".join(chunk.content for chunk in model.stream(messages))
    assert streamed == answer.content, (streamed, answer.content)
    again = asyncio.run(model.ainvoke(messages))
    assert again.content == answer.content


class Graph(TypedDict, total=False):
    pool_id: int
    can_admit: bool
    capacity: dict[str, Any]
    compacted: bool
    answer: str


def langgraph(client, base, pool, rendered):
    tokens = client.tokenize(rendered, add_special=True)
    working = client.fork_pool(pool.pool_id, tokens=tokens + client.tokenize(" A long talk. " * 20))
    model = OpencotiChatModel(base_url=base, api_key=KEY, max_tokens=4)
    gate = CapacityGate(client, expected_tokens=64)
    compaction = CompactionNode(
        client, stable=pool.pool_id, stable_tokens=tokens, summarise=lambda state: "They had a long talk.", pressure=0.0
    )

    def agent(state):
        said = model.attach(state["pool_id"], "graph").invoke([SystemMessage(SYSTEM), HumanMessage("Hello")])
        return {"answer": said.content}

    graph = StateGraph(Graph)
    graph.add_node("gate", gate)
    graph.add_node("agent", agent)
    graph.add_node("compact", compaction)
    graph.add_edge(START, "gate")
    graph.add_conditional_edges("gate", gate.route, {"spawn": "agent", "wait": END})
    graph.add_edge("agent", "compact")
    graph.add_edge("compact", END)
    end = graph.compile().invoke({"pool_id": working.pool_id})
    assert end["can_admit"] and end["answer"] and end["compacted"], end
    assert end["pool_id"] != working.pool_id and client.pool(end["pool_id"]).parent == pool.pool_id
    refused(OpencotiError, "no pool", lambda: client.pool(working.pool_id))
    client.release(end["pool_id"])
