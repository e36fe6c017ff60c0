"""Pools for agents: tools that a model can call, and nodes of a LangGraph graph.

Needs `langchain-core`; the nodes are plain functions of a state, so that any graph takes them.
"""

from dataclasses import asdict
from typing import Any, Callable

from langchain_core.tools import StructuredTool

from .client import PolykvClient


def pool_tools(client: PolykvClient):
    """Tools with which an orchestrating model makes, forks, inspects and releases pools."""

    def create_pool(prompt: str, pin: bool = False) -> dict:
        """Make a shared prefix of a text that several agents will begin with."""
        return asdict(client.create_pool(prompt=prompt, pin=pin))

    def fork_pool(pool_id: int, prompt: str) -> dict:
        """Extend a shared prefix; the prompt is the child's whole text, the parent's included."""
        return asdict(client.fork_pool(pool_id, prompt=prompt))

    def pool_capacity(pool_id: int, expected_tokens: int = 0) -> dict:
        """Ask whether another agent may join a shared prefix now."""
        return asdict(client.capacity(pool_id, expected_tokens or None))

    def release_pool(pool_id: int) -> dict:
        """Give a shared prefix back once its agents are done."""
        return asdict(client.release(pool_id))

    return [StructuredTool.from_function(tool) for tool in (create_pool, fork_pool, pool_capacity, release_pool)]


class CapacityGate:
    """A node that says whether an agent may be spawned: it sets `can_admit` and `capacity`.

    A pool that settles is waited for up to `patience` seconds; in that time the rates do not tell yet what a session costs.
    """

    def __init__(self, client: PolykvClient, *, expected_tokens=None, patience=5.0):
        self.client = client
        self.expected_tokens = expected_tokens
        self.patience = patience

    def __call__(self, state: dict[str, Any]):
        now = self.client.capacity(state["pool_id"], self.expected_tokens)
        if now.settling and not now.can_admit:
            now = self.client.wait_for_capacity(
                state["pool_id"], expected_tokens=self.expected_tokens, timeout=self.patience
            )
        return {"can_admit": now.can_admit, "capacity": asdict(now)}

    def route(self, state: dict[str, Any]):
        """For conditional edges: `spawn` or `wait`."""
        return "spawn" if state["can_admit"] else "wait"


class CompactionNode:
    """A node that, under pressure, moves a working pool to a summary: it sets `pool_id` and `compacted`.

    The state has `pool_id` (the working pool). `stable` is the ancestor that stays, `stable_tokens` its prefix; `summarise` makes
    the text that takes the place of what came after it.
    """

    def __init__(
        self,
        client: PolykvClient,
        *,
        stable: int,
        stable_tokens: list[int],
        summarise: Callable[[dict[str, Any]], str],
        pressure=0.8,
    ):
        self.client = client
        self.stable = stable
        self.stable_tokens = stable_tokens
        self.summarise = summarise
        self.pressure = pressure

    def __call__(self, state: dict[str, Any]):
        working = state["pool_id"]
        if self.client.capacity(working).compaction_pressure < self.pressure:
            return {"compacted": False}
        child = self.client.compact_by_refork(
            self.stable,
            ancestor_tokens=self.stable_tokens,
            summary=self.summarise(state),
            working=working if working != self.stable else None,
        )
        return {"pool_id": child.pool_id, "compacted": True}
