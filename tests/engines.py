"""Stand-ins for vLLM: an engine with weights of its own that draws by seeds, and the HTTP server that speaks vLLM 0.32's routes.

Both do as asked until a fault is named; tests/test_vllm.py runs the same path against vLLM itself.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_repro.policy import Policy
from grpo_repro.rollout.engine import Ask, Completion


@dataclass
class StandIn:
    """An `Engine`: a copy of the policy's model, sampled token by token with a generator seeded by seed + i."""

    model: Any
    name: str = "stand-in"
    faults: set[str] = field(default_factory=set)
    asked: list[Ask] = field(default_factory=list)
    closed: int = 0

    @classmethod
    def of(cls, policy: Policy, *faults: str) -> StandIn:
        return cls(copy.deepcopy(policy.model), faults=set(faults))

    @torch.no_grad()
    def draw(
        self, asks: Sequence[Ask], limit: int, end_ids: Collection[int], temperature: float, top_p: float, top_k: int
    ) -> list[list[Completion]]:
        self.asked += asks
        drawn = [[self._one(ask.prompt, ask.seed + i, limit, end_ids, temperature) for i in range(ask.n)] for ask in asks]
        if "fewer prompts" in self.faults:
            return drawn[:-1]
        if "fewer samples" in self.faults:
            drawn[0] = drawn[0][:-1]
        return drawn

    def _one(self, prompt: tuple[int, ...], seed: int, limit: int, end_ids: Collection[int], temperature: float) -> Completion:
        generator = torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        logp: list[float] = []
        while len(tokens) < limit and not (tokens and tokens[-1] in end_ids):
            logits_V = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float()
            logp_V = torch.log_softmax(logits_V / temperature, -1)
            token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
            recorded_V = torch.log_softmax(logits_V, -1) if "raw log-probs" in self.faults else logp_V
            tokens.append(token)
            logp.append(float(recorded_V[token]))
        if "fewer log-probs" in self.faults:
            logp.pop()
        if "no log-prob" in self.faults:
            logp[-1] = None  # type: ignore[call-overload]
        if "a token too many" in self.faults:
            tokens, logp = [*tokens, *[1] * limit], [*logp, *[-1.0] * limit]
        if "stops early" in self.faults:
            tokens, logp = [1], [-1.0]
        if "a foreign token" in self.faults:
            tokens[0] = 10**6
        return Completion(tokens, logp)

    def sync(self, policy: Policy) -> None:
        if "keeps its weights" not in self.faults:
            self.model.load_state_dict(policy.model.state_dict())
        if "keeps its head" in self.faults:  # what a packed copy of a tied head does
            self.model.lm_head.weight = torch.nn.Parameter(self.model.lm_head.weight.detach().clone())
            self.faults |= {"keeps its weights"}

    def close(self) -> None:
        self.closed += 1


@dataclass
class Served:
    """What the HTTP stand-in does, and has done."""

    engine: StandIn
    tokenizer: Any
    context: int = 64
    faults: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    syncs: int = 0
    break_at: int = 10**9  # the sync that fails half-way
    awake: threading.Event = field(default_factory=threading.Event)  # a slow answer waits for it

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append(path)
        if "slow" in self.faults:
            self.awake.wait(20)
        if path == "v1/models":
            return 200, {"data": [{"id": "the-model", "max_model_len": self.context}]}
        if path == "tokenize":
            tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=False)
            return 200, {"tokens": [t + ("other tokenizer" in self.faults) for t in tokens]}
        if path == "v1/completions":
            return 200, self._completion(body)
        if "no dev mode" in self.faults:
            return 404, {"detail": "Not Found"}
        if path == "update_weights":
            self.syncs += 1
            if self.syncs == self.break_at:
                return 500, {"error": {"message": "Worker failed"}}
            stored = load_file(body["update_info"]["file"])
            self.engine.model.load_state_dict({**self.engine.model.state_dict(), **stored})
            self.engine.model.tie_weights()
        if path == "reset_prefix_cache":
            return 200, {"success": "cache in use" not in self.faults}
        return 200, {"message": "done"}

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        assert (body["logprobs"], body["return_token_ids"], body["ignore_eos"]) == (0, True, True)
        ask = Ask(tuple(body["prompt"]), body["seed"], body["n"])
        how = body["max_tokens"], body["stop_token_ids"], body["temperature"], body["top_p"], body["top_k"]
        group = self.engine.draw([ask], *how)[0]
        choices = [
            {"index": i, "token_ids": d.tokens, "logprobs": {"token_logprobs": d.logp}, "finish_reason": "stop"}
            for i, d in enumerate(group)
        ]
        return {"choices": choices[::-1]}  # the order is in `index`


@contextmanager
def serving(policy: Policy, *faults: str, **settings: Any) -> Iterator[tuple[str, Served]]:
    """(url, what is served) of a server in a thread, on the policy's present weights."""
    served = Served(StandIn.of(policy, *faults), policy.tokenizer, faults=set(faults), **settings)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            code, said = served.answer(self.path.strip("/"), body)
            text = b"<html>" if "not vLLM" in served.faults else json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text[:1] if "hangs up" in served.faults else text)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def handle(self) -> None:
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):
                time.sleep(0)  # the client gave up waiting, as tests of a slow server do

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", served
    finally:
        served.awake.set()
        server.shutdown()
        server.server_close()
        thread.join()
