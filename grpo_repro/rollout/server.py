"""A `vllm serve` on this machine, over HTTP: prompts as token ids, weights through its weight-transfer interface. For vLLM 0.32.

Start it on the model the policy starts from, in the environment where this package is installed (it brings the backend):

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --dtype bfloat16 --logprobs-mode processed_logprobs --generation-config vllm \\
        --weight-transfer-config '{"backend": "grpo_repro"}'

Its RL routes are for development: they let anyone who reaches them change the weights, so bind it to this machine (--host 127.0.0.1).
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from safetensors.torch import save_file

from grpo_repro.policy import Policy
from grpo_repro.rollout.engine import Ask, Completion
from grpo_repro.types import EngineError, UserError

AT_ONCE = 64  # requests under way
PROBE = "12 + 30 = 42 <b>é"  # spelled by both tokenizers


class Refused(EngineError):
    """The server answered, with an error."""


class Server:
    """An `Engine`. Open it with `opened`; `close` removes what was written for the server, which runs on."""

    name = "vllm server"

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self.timeout, self.model = url.rstrip("/"), timeout, ""
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine: no proxy
        self._scratch = tempfile.TemporaryDirectory(prefix="grpo-repro-weights-")
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def draw(
        self, asks: Sequence[Ask], limit: int, end_ids: Collection[int], temperature: float, top_p: float, top_k: int
    ) -> list[list[Completion]]:
        how = {
            "model": self.model,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_tokens": limit,
            "stop_token_ids": sorted(end_ids),
            "ignore_eos": True,  # ours are among the stop tokens
            "logprobs": 0,  # the drawn token's alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }

        def one(ask: Ask) -> list[Completion]:
            return _responses(self.call("v1/completions", {**how, "prompt": list(ask.prompt), "n": ask.n, "seed": ask.seed}))

        return list(self._pool.map(one, asks))

    def sync(self, policy: Policy) -> None:
        weights = {name: p.detach().cpu().contiguous() for name, p in policy.model.named_parameters()}
        file = os.path.join(self._scratch.name, "weights.safetensors")
        try:
            save_file(weights, file)
        except OSError as error:
            raise EngineError(
                f"the weights for the vLLM server cannot be written to {file} ({error.strerror}): make room."
            ) from None
        self.call("start_weight_update", {})
        try:
            self.call("update_weights", {"update_info": {"file": file}})
            self.call("finish_weight_update", {})
        except EngineError as error:
            raise EngineError(
                f"the weights arrived only in part: {str(error).rstrip('.')}; what the server holds now is undefined: start it anew."
            ) from None
        if self.call("reset_prefix_cache", {}).get("success") is not True:
            raise EngineError(
                f"the vLLM server at {self.url} did not empty its prefix cache after new weights, as others use it: give each run its own."
            )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._scratch.cleanup()

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST a JSON body (GET without one), and the JSON that comes back. Raises EngineError, a sentence for each way to fail."""
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        at = f"the vLLM server at {self.url}"
        try:
            with self._direct.open(request, timeout=self.timeout) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:200]
            if error.code == 404 and not path.startswith("v1/"):
                raise EngineError(
                    f"{at} has no route /{path}: start it with VLLM_SERVER_DEV_MODE=1 in its environment and "
                    '--weight-transfer-config \'{"backend": "grpo_repro"}\'.'
                ) from None
            raise Refused(f"{at} refused /{path} ({error.code}: {said}): see its log.") from None
        except TimeoutError:
            raise self._slow(path) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._slow(path) from None
            raise EngineError(f"{at} cannot be reached ({error.reason}): start it, or correct machine.server.") from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{at} broke off /{path} ({type(error).__name__}: {error}): see its log, then start it anew."
            ) from None
        try:
            answer = json.loads(text or b"{}")
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineError(f"{at} answered /{path} with what is no JSON object: is it a vLLM server?")
        return answer

    def _slow(self, path: str) -> EngineError:
        return EngineError(
            f"the vLLM server at {self.url} did not answer /{path} within {self.timeout:g} s: give it fewer tokens a request, or raise "
            "machine.vllm.timeout."
        )


def opened(url: str, policy: Policy, *, context: int, timeout: float = 600.0) -> Server:
    """Connect to a server that is up, and see that it speaks the policy's tokens and holds `context`: one more than a prompt and its
    response have.

    Whether its model is the policy's shows after the first sync, by log-probs (verified.py). Raises UserError.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"machine.server: {url!r} is not a URL: write e.g. http://127.0.0.1:8000.")
    server = Server(url, timeout)
    try:
        models = server.call("v1/models").get("data")
        if not isinstance(models, list) or not models or "id" not in models[0]:
            raise UserError(f"the server at {url} lists no model: is it a vLLM server?")
        server.model, holds = str(models[0]["id"]), models[0].get("max_model_len")
        if isinstance(holds, int) and holds < context:
            raise UserError(
                f"the vLLM server at {url} holds {holds} tokens, and prompt and response need up to {context}: start it with "
                f"--max-model-len {context}, or lower rollout.limit."
            )
        _same_tokens(server, policy)
        server.call("init_weight_transfer_engine", {"init_info": {}})
    except UserError:
        server.close()
        raise
    return server


def _same_tokens(server: Server, policy: Policy) -> None:
    """Raises UserError where the server's tokenizer spells a text otherwise."""
    known = policy.tokenizer.get_vocab()
    text = PROBE if policy.tokenizer.chat_template is not None else "".join(s for s in list(known)[:16] if len(s) == 1)
    ours = [int(t) for t in policy.tokenizer.encode(text, add_special_tokens=False)]
    asked = {"model": server.model, "prompt": text, "add_special_tokens": False}
    try:
        theirs = server.call("tokenize", asked).get("tokens")
    except Refused:  # a character that its vocabulary lacks
        theirs = None
    if theirs != ours:
        raise UserError(
            f"the vLLM server at {server.url} serves {server.model!r}, whose tokenizer spells {text!r} as {theirs}, and that of "
            f"{policy.name!r} as {ours}: start the server on the policy's own model."
        )


def _responses(answer: dict[str, Any]) -> list[Completion]:
    """The responses of a completion, in order; what is missing is left out, for `answered` to count."""
    choices = answer.get("choices") or []
    drawn = []
    for choice in sorted(choices, key=lambda c: c.get("index", 0)):
        logprobs = choice.get("logprobs") or {}
        drawn.append(Completion(choice.get("token_ids") or [], logprobs.get("token_logprobs") or []))
    return drawn
