"""The learned reward: Bradley–Terry by hand, scores that no batch or padding changes, and the same model for the same seed."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from grpo_repro import policy as policies
from grpo_repro import preferences, start, tasks
from grpo_repro.config import parse_run
from grpo_repro.judge import judge
from grpo_repro.knobs import resolve
from grpo_repro.policy import Policy
from grpo_repro.preferences import Compared, Sizes, accuracy, bradley_terry, collect, train_preferences
from grpo_repro.reward_model import RewardModel, load, score, step_scores
from grpo_repro.rollout import sample
from grpo_repro.tasks import pairs
from grpo_repro.types import Prompt, Response, UserError

TINY = policies.tiny(pairs.SYMBOLS)
SMALL = Sizes(warm_steps=15, prompts=40, group=16, steps=3, batch=4)


def prompt(text: str) -> Prompt:
    return Prompt(text, text, TINY.encode_chat(text), text[1:-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose head is random, as a folder."""
    made = preferences._untaught(TINY, seed=3)
    with torch.no_grad():
        made.score.weight.normal_(0, 1, generator=torch.Generator().manual_seed(0))  # type: ignore[operator, union-attr]
    where = tmp_path_factory.mktemp("rewards") / "random"
    policies.save(Policy(made, TINY.tokenizer, TINY.end_ids, "random"), where)
    return where


def test_bradley_terry_by_hand() -> None:
    """r = 2 (right), 0 and 1 (wrong): −[log σ(2) + log σ(1)]/2, gradients σ(−gap)/2; another pool is not compared."""
    r_K = torch.tensor([2.0, 0.0, 1.0, 9.0], dtype=torch.float64, requires_grad=True)
    right_K, pool_K = torch.tensor([True, False, False, False]), torch.tensor([0, 0, 0, 1])
    loss = bradley_terry(r_K, right_K, pool_K)
    loss.backward()

    def s(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert loss.item() == pytest.approx(-(math.log(s(2)) + math.log(s(1))) / 2, abs=1e-12)
    assert r_K.grad is not None
    assert r_K.grad.tolist() == pytest.approx([-(s(-2) + s(-1)) / 2, s(-2) / 2, s(-1) / 2, 0.0], abs=1e-12)
    assert float(bradley_terry(torch.zeros(4), right_K, pool_K)) == pytest.approx(math.log(2))


def test_a_score_is_the_head_at_the_last_token_whatever_the_batch(folder: Path) -> None:
    """Against the class's own forward on each row alone, without padding."""
    scorer = load(str(folder))
    prompts = [prompt("+537="), prompt("*12="), prompt("-000="), prompt("+537=")]
    texts = ["505843", "1", "", "505843"]
    together = score(scorer, prompts, texts)
    alone = [
        float(scorer.model(input_ids=torch.tensor([[*p.tokens, *TINY.encode_chat(text)]])).logits[0, 0])
        for p, text in zip(prompts, texts, strict=True)
    ]
    assert together == pytest.approx(alone, abs=1e-5)
    assert together[0] == together[3]
    assert len(set(together)) == 3
    assert score(scorer, [], []) == []


def test_a_step_s_score_is_the_score_of_its_prefix(folder: Path) -> None:
    scorer = load(str(folder))
    found = step_scores(scorer, [prompt("+537="), prompt("-537="), prompt("*537=")], [["50", "5058"], [], ["12"]])
    by_hand = score(scorer, [prompt("+537="), prompt("+537="), prompt("*537=")], ["50", "5058", "12"])
    assert [len(own) for own in found] == [2, 0, 1]
    assert [r for own in found for r in own] == pytest.approx(by_hand, abs=1e-5)


def test_the_learned_reward_and_its_steps_in_a_rollout(folder: Path) -> None:
    task = tasks.bound("short")(TINY.encode_chat)
    rollout = sample(TINY, task.train[:2], 3, limit=7, temperature=1.0, seed=0, step=0)
    ask = resolve("reward", {"name": "learned", "model": str(folder)})
    judged = judge(ask, rollout, task, TINY, 0, 0, steps=True)
    scorer = load(str(folder))
    for n in range(6):
        p, tokens = rollout.prompts[int(rollout.group_N[n])], rollout.response_NT[n, : int(rollout.length_N[n])].tolist()
        text = TINY.decode(tokens)
        assert float(judged.r_N[n]) == pytest.approx(score(scorer, [p], [text])[0], abs=1e-5)
        assert ask(p, Response(text, tuple(tokens), False, 0.0, {}, 0.0)) == pytest.approx(float(judged.r_N[n]), abs=1e-5)
        ends = judged.step_end_NT[n].nonzero()[:, 0].tolist()
        assert ends == [t for t, _ in task.steps(p, TINY.tokenizer.convert_ids_to_tokens(tokens))]
        expected = score(scorer, [p] * len(ends), [TINY.decode(tokens[: t + 1]) for t in ends])
        assert judged.step_r_NT[n, ends].tolist() == pytest.approx(expected, abs=1e-5)


def test_what_is_no_reward_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward model 'preferences': there is no such folder with a config.json"):
        load("preferences")
    policies.save(TINY, tmp_path / "policy")
    with pytest.raises(UserError, match=r"lacks the weights score.weight: it was not trained as a reward model"):
        load(str(tmp_path / "policy"))
    scorer = load(str(folder))
    with pytest.raises(UserError, match="cannot read '\\+537=abc'"):
        score(scorer, [prompt("+537=")], ["abc"])
    with pytest.raises(UserError, match="reads at most 64 tokens, and prompt and response have 105"):
        score(scorer, [prompt("+537=")], ["1" * 100])
    with pytest.raises(UserError, match="an empty text"):
        score(scorer, [Prompt("", "", (), "")], [""])


def fives(n: int) -> list[Compared]:
    """An easy preference: texts that begin with 5."""
    made = []
    for i in range(n):
        texts = (f"5{i % 10}", f"{(i + 6) % 10}5")
        rights = (True, texts[1][0] == "5")
        made.append(Compared(prompt(f"+{i:03d}="), texts, rights, tuple((-1, k, 1, right) for k, right in enumerate(rights))))
    return [one for one in made if not all(one.right)]


def test_it_learns_a_preference_and_depends_on_the_seed_alone() -> None:
    shown, asked = fives(60), fives(30)[20:]
    sizes = Sizes(steps=25, batch=16)
    before = torch.random.get_rng_state()
    first, again, other = (train_preferences(TINY, shown, seed, sizes) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [torch.cat([p.flatten() for p in m.model.parameters()]) for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not any(p.requires_grad for p in first.model.parameters())
    untaught = RewardModel(preferences._untaught(TINY, 0), TINY.tokenizer, "untaught")
    assert accuracy(untaught, asked) == 0.5  # its head is 0: every pair is a draw
    assert accuracy(first, asked) == 1.0


def test_comparisons_are_right_against_wrong_of_one_prompt_and_ties_are_dropped() -> None:
    """The whole response by the verifier's word, a prefix by its last pair, counted here again from the rule."""
    task = tasks.bound("tail")(TINY.encode_chat)
    found = collect(TINY, task, task.train[:60], seed=0, step=-2, group=32)
    assert found
    rule = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: 3 * a + b}
    for one in found:
        assert len(set(one.texts)) == len(one.texts)
        verdicts: dict[int, set[bool]] = {}
        for what, i, end, right in one.verdicts:
            verdicts.setdefault(what, set()).add(right)
            text = one.texts[i]
            if what == -1:
                assert (end, right) == (len(text) - 1, task.verify(one.prompt, text)[0] == 1.0)
            elif end == 2 * what + 1:
                digits, t = text[2 * what : end + 1], int(one.prompt.answer[what])
                by_rule = digits.isdigit() and rule[one.prompt.text[0]](int(digits[0]), int(digits[1])) % 10 == t
                assert (end < len(text) - 1, right) == (True, by_rule)
            else:
                assert not right  # what is missing, or should not be there
        assert all(both == {True, False} for both in verdicts.values())


def test_a_policy_that_is_never_right_has_no_preferences() -> None:
    task = tasks.bound("short")(TINY.encode_chat)
    with pytest.raises(UserError, match="no prompt of task short got a right and a wrong response"):
        collect(TINY, task, task.train[:1], seed=0, step=-2, group=2)


def test_a_run_that_names_preferences_trains_one_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model: preferences`, also inside a sum: trained at the start, cached, found again, and the config keeps the word."""
    monkeypatch.setattr(preferences, "Sizes", partial(Sizes, **vars(SMALL)))
    learned = {"name": "learned", "model": "preferences"}
    reward = {"name": "weighted", "parts": [{"reward": learned, "weight": 1.0}, {"reward": "exact_match", "weight": 2.0}]}
    base = {"name": "t", "policy": {"name": "tiny", "start": "scratch"}, "task": "tail", "scale": {"steps": 1}}
    run = parse_run({**base, "objective": {"preset": "grpo", "reward": reward}}, "test")
    made, task = start.load(run, tmp_path)
    where = Path(task.models["preferences"])
    report = json.loads((where / "preferences.json").read_text())
    assert report["task"] == "tail"
    assert report["seed"] == run.seed
    assert 0.0 <= report["heldout_accuracy"] <= 1.0
    written = {p: p.stat().st_mtime_ns for p in where.iterdir()}
    assert start.load(run, tmp_path)[1].models == task.models
    assert {p: p.stat().st_mtime_ns for p in where.iterdir()} == written
    rollout = sample(made, task.train[:2], 2, limit=8, temperature=1.0, seed=0, step=0)
    judged = judge(run.built().reward, rollout, task, made, 0, 0)
    assert set(judged.parts) == {"learned", "exact_match"}
    assert judged.r_N.tolist() == pytest.approx((judged.parts["learned"] + 2 * judged.parts["exact_match"]).tolist())
    plain = parse_run({**base, "objective": {"preset": "grpo"}}, "test")
    assert start.load(plain, tmp_path)[1].models == {}


@pytest.mark.parametrize("task", ["chain_sum"])
def test_a_task_without_a_warm_start_has_no_reward_model_of_its_own(task: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'preferences'.*short, tail.*not 'chain_sum'"):
        preferences.prepare(task, 0, tmp_path, SMALL)
