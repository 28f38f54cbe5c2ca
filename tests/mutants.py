"""The mutation check: `python tests/mutants.py` breaks one line at a time, in a copy, and shows that the tests see it.

Every mutant is an exact piece of source, what it becomes, and the test files that should notice. The script fails if a piece is not
found exactly once (the list must follow the code) or if a mutant survives. It writes results/reports/mutation/. POSIX only: each
mutant is a forked process, so that torch is imported once.
"""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "results" / "reports" / "mutation"


@dataclass(frozen=True)
class Mutant:
    file: str  # under grpo_repro/
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]  # under tests/, the narrowest first


def of(file: str, *mutants: tuple[str, str, str, str]) -> list[Mutant]:
    """(old, new, what it breaks, test files by their names, separated by spaces)."""
    return [Mutant(file, old, new, breaks, tuple(f"tests/{t}.py" for t in tests.split())) for old, new, breaks, tests in mutants]


MUTANTS = [
    # ① ratio and correction
    *of(
        "knobs/ratio.py",
        ("    return now.logp_NT - b.old_NT\n", "    return b.old_NT - now.logp_NT\n", "the ratio upside down", "knobs/test_ratio"),
        ("return _change(now, b).clamp(-BOUND, BOUND)", "return _change(now, b)", "no bound before exp", "knobs/test_ratio"),
        ("mean_N1 = logw_NT.sum(1, keepdim=True) / b.tokens_N1", "mean_N1 = logw_NT.mean(1, keepdim=True)", "the sequence mean counts masked tokens", "knobs/test_ratio"),
        ("logw_NT = _change(now, b) * b.mask_NT\n", "logw_NT = _change(now, b).clamp(-5, 5) * b.mask_NT\n", "tokens bounded before the mean (OpenRLHF#1293)", "test_cases"),
        ("return _own(sequence(now, b).detach(), now)", "return _own(sequence(now, b), now)", "a detach dropped: GSPO-token's gradient doubled", "knobs/test_ratio"),
        (".detach().cumsum(1)", ".cumsum(1)", "a detach dropped: a prefix ratio with the gradients of all earlier tokens", "knobs/test_ratio"),
        ("return now.logp_NT - now.logp_NT.detach()", "return now.logp_NT * 0", "w ≡ 1 without the score function", "knobs/test_ratio"),
        (" * (value_NT.abs() < BOUND)", "", "gradient beyond the bound", "knobs/test_ratio test_objective"),
    ),
    *of(
        "knobs/correction.py",
        ("((b.old_NT - b.sampler_NT) * b.mask_NT).detach()", "((b.sampler_NT - b.old_NT) * b.mask_NT).detach()", "the correction upside down", "knobs/test_correction"),
        (".clamp(max=w_max)", "", "TIS without its cap", "knobs/test_correction"),
        ("(rho_NT >= w_min) & (rho_NT <= w_max)", "(rho_NT <= w_max)", "MIS without its lower end", "knobs/test_correction"),
        ('if level == "geometric" else total_N1', 'if level == "sequence" else total_N1', "sequence and geometric level exchanged", "knobs/test_correction"),
    ),
    # ② clip, gates
    *of(
        "knobs/clip.py",
        ("w_NT.clamp(lowest, highest) * b.advantage", "w_NT.clamp(2 - highest, 2 - lowest) * b.advantage", "the clip's sides swapped", "knobs/test_clip"),
        ("return torch.minimum(free_NT, bounded_NT), ", "return torch.maximum(free_NT, bounded_NT), ", "max for min", "knobs/test_clip"),
        ("(bounded_NT < free_NT) & b.mask_NT", "(bounded_NT != w_NT) & b.mask_NT", "hits counted without the sign of Â (trl#3144)", "knobs/test_clip"),
        ("(bounded_NT < free_NT) & b.mask_NT", "(bounded_NT < free_NT)", "masked tokens counted as clipped", "test_contract"),
        ("floored_NT = (b.advantage < 0) & (floor_NT > gain_NT)", "floored_NT = floor_NT > gain_NT", "dual clip's floor under good answers too", "knobs/test_clip test_exact"),
        ("floor_NT = w_max * b.advantage", "floor_NT = (1 + w_max) * b.advantage", "c read as a width", "knobs/test_clip"),
        ("edge = 1 + (eps_high or 0.0)", "edge = eps_high or 0.0", "c ≤ 1+ε_high accepted", "knobs/test_clip"),
        ("w_NT = torch.exp(logw_NT).detach()", "w_NT = torch.exp(logw_NT)", "a detach dropped: CISPO's weight carries gradient", "knobs/test_clip"),
        ("return weight_NT * b.advantage * now.logp_NT, ", "return weight_NT * b.advantage, ", "CISPO without log π: no gradient (open-instruct#1269)", "knobs/test_clip"),
        ("weight_NT = w_NT.clamp(w_min, w_max)", "weight_NT = w_NT.clamp(w_min, 1 + w_max)", "CISPO's cap read as a width (CLAIMS E2)", "knobs/test_clip"),
        ("gate_NT = 4 / tau_NT", "gate_NT = 2 / tau_NT", "SAPO's scale", "knobs/test_clip"),
        ("torch.where(b.advantage > 0, torch.full_like(b.advantage, tau_pos), negative)", "torch.where(b.advantage > 0, tau_pos, tau_neg)", "1.05 in float32", "test_objective"),
        ("torch.where(b.advantage > 0, torch.full_like(b.advantage, tau_pos), negative)", "torch.where(b.advantage < 0, torch.full_like(b.advantage, tau_pos), negative)", "SAPO's temperatures exchanged", "knobs/test_clip"),
        ("torch.tanh(tau * logw_NT) / tau", "torch.tanh(tau * (torch.exp(logw_NT) - 1)) / tau", "a tanh on w instead of log w", "knobs/test_clip"),
        ('kl.ESTIMATES["k3"](logw_NT)', 'kl.ESTIMATES["k3"](-logw_NT)', "the penalty's KL the other way round", "knobs/test_clip"),
        ('kl.ESTIMATES["k3"](logw_NT)', "torch.exp(logw_NT) - 1 - logw_NT", "cancellation near w = 1 in float32", "knobs/test_clip"),
        ("0.5 if realised < target / 1.5 else 2.0", "2.0 if realised < target / 1.5 else 0.5", "β adapts the wrong way", "test_adaptive"),
        ('return {"beta": state["beta"] * factor}', 'return {"beta": beta * factor}', "β forgets its past", "test_adaptive"),
        ('state.get("beta", beta)', "beta", "β's state not used", "knobs/test_clip"),
    ),
    *of(
        "knobs/gate.py",
        ("(b.advantage > 0) & (moved_NT > eps_high)", "(moved_NT > eps_high)", "DPPO closes for bad answers that were raised", "knobs/test_gate"),
        ("(moved_NT < -eps_low)", "(moved_NT < -eps_high)", "DPPO's low side with the high width", "knobs/test_gate"),
        ("_xlog(p_NT, q_NT) + _xlog(1 - p_NT, 1 - q_NT)", "_xlog(q_NT, p_NT) + _xlog(1 - q_NT, 1 - p_NT)", "the binary KL the other way round", "knobs/test_gate"),
        ("_xlog(p_NT, q_NT) + _xlog(1 - p_NT, 1 - q_NT)", "_xlog(p_NT, q_NT)", "half of the binary KL", "knobs/test_gate"),
        ("(b.advantage >= 0) | (gone_NT <= delta)", "(b.advantage >= 0) | (-gone_NT <= delta)", "V3.2's mask hides what the policy came back to", "knobs/test_gate"),
        ("(torch.exp(now.logp_NT) - torch.exp(b.sampler_NT)).detach()", "(torch.exp(now.logp_NT) - torch.exp(b.old_NT)).detach()", "DPPO anchored to π_old", "knobs/test_gate"),
    ),
    # ③ advantage and transforms
    *of(
        "knobs/advantage.py",
        ("(_group_sum(centred_N**2, index_N)[index_N] / (size_N - ddof).clamp(min=1)).sqrt()", "(_group_sum(centred_N**2, index_N)[index_N] / size_N).sqrt()", "ddof 0 for 1", "knobs/test_advantage"),
        ("torch.where(_mixed(b, index_N), centred_N / (std_N + eps), ", "torch.where(_mixed(b, index_N), centred_N / (std_N**2 + eps).sqrt(), ", "ε inside the root (verl#6348)", "knobs/test_advantage"),
        ("size_G = _group_sum(torch.ones_like(r_N), index_N)\n", "size_G = _group_sum(torch.ones_like(r_N), index_N) + 1\n", "a group counted one too large", "knobs/test_advantage"),
        ("centred_N * size_N / (size_N - 1).clamp(min=1)", "centred_N", "leave-one-out without its G/(G−1)", "knobs/test_advantage"),
        ("    return (high_G > low_G)[index_N]\n", "    return (high_G >= low_G)[index_N]\n", "round-off becomes an advantage (NeMo-RL#4158)", "test_cases"),
        ("std = _std(b.return_N, ddof)\n", "std = _std(centred_N, ddof)\n", "Lite PPO's std of centred rewards", "knobs/test_advantage"),
        ("b.penalty_NT.flip(1).cumsum(1).flip(1)", "b.penalty_NT.cumsum(1)", "REINFORCE++ charges a KL to the tokens after it", "knobs/test_advantage"),
        ("centred_N / (mean_N + eps)", "centred_N / (mean_N.sqrt() + eps)", "MaxRL by the root of the mean", "knobs/test_advantage"),
        ("right_N = (b.r_N == high_G[index_N]) & (b.r_N > 0)", "right_N = b.return_N > 0", "a KL in the reward makes a wrong answer right", "knobs/test_advantage"),
        ("_choose_ratio(wrong_N - 1, total_N - 1, k - 1)", "_choose_ratio(wrong_N, total_N, k - 1)", "pass@k counts the response twice", "knobs/test_advantage"),
        ("decay * state[\"mean\"] + (1 - decay) * mean", "(1 - decay) * state[\"mean\"] + decay * mean", "running statistics with the decay on the wrong side", "test_adaptive"),
        ("state[\"square\"] - state[\"mean\"] ** 2", "state[\"square\"]", "running std without the mean", "knobs/test_advantage"),
        ("delta_N + gamma * lam * ahead_N", "delta_N + lam * ahead_N", "GAE without γ", "knobs/test_advantage"),
        ("next_N = torch.where(live_N, value_NT[:, t], next_N)", "next_N = value_NT[:, t]", "GAE reads the value of a masked token", "test_objective knobs/test_advantage"),
        ("target_NT = advantage_NT + value_NT\n", "target_NT = advantage_NT\n", "the critic's target without its value", "knobs/test_advantage"),
        ("b.value_NT.masked_fill(~b.mask_NT, 0.0)", "b.value_NT", "a masked value reaches the target", "test_contract"),
        ("normalised_NT.flip(1).cumsum(1).flip(1).masked_fill", "normalised_NT.cumsum(1).masked_fill", "a token is paid for steps that ended before it", "knobs/test_advantage"),
        ("end_NT = b.step_end_NT & b.mask_NT", "end_NT = b.step_end_NT", "a step that ends in a masked token", "test_contract"),
    ),
    *of(
        "knobs/transform.py",
        ("(below_N + equal_N / 2)", "(below_N + equal_N)", "ties share the highest rank", "knobs/test_transform"),
        ("torch.sigmoid((r_N - center) / scale)", "torch.sigmoid(r_N / scale - center)", "the centre in the wrong unit", "knobs/test_transform"),
    ),
    # ④ aggregation
    *of(
        "knobs/aggregation.py",
        ("(b.tokens_N1 * max(norm.live_rows, 1))", "(b.tokens_N1 * len(b.mask_NT))", "a local denominator: rows of the slice", "knobs/test_aggregation"),
        ("float(max(norm.tokens, 1))", "float(max(int(b.mask_NT.sum()), 1))", "a local denominator: tokens of the slice", "knobs/test_aggregation"),
        ("float(max(norm.live_rows, 1) * norm.limit)", "float(max(norm.live_rows, 1) * b.mask_NT.shape[1])", "Dr. GRPO divides by the padded width (verl#3741)", "knobs/test_aggregation"),
        ("return b.mask_NT.double() / float(max(norm.live_rows, 1))\n", "return b.mask_NT.double() / float(max(norm.rows, 1))\n", "hidden rows in the denominator", "knobs/test_aggregation"),
        ("max(norm.groups, 1))", "max(norm.live_rows, 1))", "the mean over groups divided by rows", "knobs/test_aggregation"),
        ("at_good * (sign_N1 > 0).double() + at_bad * (sign_N1 < 0).double()", "at_bad * (sign_N1 > 0).double() + at_good * (sign_N1 < 0).double()", "balanced with its sides exchanged", "knobs/test_aggregation"),
        ("b.mask_NT.double() * (at_good * (sign_N1 > 0).double()", "b.mask_NT * (at_good * (sign_N1 > 0).float()", "a share in float32", "knobs/test_aggregation test_objective"),
    ),
    # ⑤ KL
    *of(
        "knobs/kl.py",
        ('"k1": lambda d: -d,', '"k1": lambda d: d,', "k1's sign flipped", "knobs/test_kl"),
        ('lambda d: 0.5 * d**2', 'lambda d: d**2', "k2 doubled", "knobs/test_kl"),
        ("torch.expm1(d) - d", "torch.expm1(-d) + d", "k3 inverted (CLAIMS E1)", "knobs/test_kl"),
        ("torch.expm1(d) - d", "torch.exp(d) - 1 - d", "k3 cancels near 0 in float32", "knobs/test_kl"),
        ("torch.exp(ratio.token(now, b)) * k3(", "torch.exp(ratio.token(now, b)).detach() * k3(", "w·k3 with a detached w", "knobs/test_kl"),
        ("torch.exp(d_NT).detach() * d_NT", "torch.exp(d_NT) * d_NT", "a detach dropped: the forward KL's weight", "knobs/test_kl"),
        (".clamp(-BOUND, BOUND)\n", "\n", "k3 overflows (trl#3015)", "test_cases"),
        ("return beta * now.exact_kl_NT", "return now.exact_kl_NT", "the exact KL without its β", "knobs/test_kl"),
        ('@variant(needs=("ref", "old"))', '@variant(needs=("ref",))', "w·k3 does not say that it needs π_old", "test_contract"),
    ),
    # ⑥ sampling and overlong
    *of(
        "knobs/sampling.py",
        ("return (high_G > low_G)[index_N]", "return (high_G >= low_G)[index_N]", "flat groups are kept", "knobs/test_sampling"),
        ('scatter_reduce_(0, index_N, r_N, "amin")', 'scatter_reduce_(0, index_N, r_N, "amax")', "every group counts as flat", "knobs/test_sampling"),
    ),
    *of(
        "knobs/overlong.py",
        ("b.mask_NT & ~b.cut_N.unsqueeze(1)", "b.mask_NT & b.cut_N.unsqueeze(1)", "what ended is hidden instead of what was cut", "knobs/test_overlong"),
        ("(b.length_N - (b.limit - cache))", "(b.length_N - (b.limit - cache) - 1)", "the penalty starts one token late", "knobs/test_overlong"),
        ("r_N - over_N.masked_fill(b.cut_N, 1.0)", "r_N - over_N", "a row that was cut early is not penalised", "knobs/test_overlong"),
    ),
    # ⑦ reward
    *of(
        "knobs/reward.py",
        ("return float(response.u < chance)", "return float(response.u > chance)", "the coin's other side", "knobs/test_reward"),
        ("per_note * _note(response, note) if note", "per_note if note", "a coin that ignores what it is told to favour", "knobs/test_reward"),
        ("return sum(weight * reward(prompt, response)", "return sum(reward(prompt, response)", "weights of rewards ignored", "knobs/test_reward"),
        ("(response.correct == 1.0 or not if_right)", "True", "format pays a wrong answer", "knobs/test_reward"),
    ),
    # the formula, its data, the binding of parameters
    *of(
        "objective.py",
        ("total = -(weight_NT", "total = (weight_NT", "the sign of the loss", "test_objective"),
        (" * gain_NT - kl_NT\n", " * (gain_NT - kl_NT)\n", "the KL corrected like the gain", "test_cases test_objective"),
        ("gain_NT = gain_NT * gate(now, b)", "pass", "gates ignored", "test_objective"),
        ("now, b = now.masked(b.mask_NT), b.masked()\n", "b = b.masked()\n", "a masked NaN reaches the gradient", "test_contract"),
        ("weight_NT * b.prompt_weight_N.to(gain_NT.dtype).unsqueeze(1)", "weight_NT", "prompt weights ignored", "test_objective"),
        ("(old, b.masked()).masked_fill(~b.mask_NT, 0.0))", "(old, b.masked()))", "a KL charged for masked tokens", "test_objective"),
        ("b = replace(b, r_N=r_N, mask_NT=mask_NT)", "b = replace(b, r_N=r_N)", "overlong's mask ignored", "test_objective"),
        ("    _finite_inputs(now, b)\n", "", "a NaN in the loss is not named", "test_objective"),
    ),
    *of(
        "types.py",
        ("return self.r_N if self.penalty_NT is None else self.r_N - self.penalty_NT.sum(1)", "return self.r_N", "the KL in the reward ignored", "knobs/test_advantage"),
        ("return self.mask_NT.sum(1, keepdim=True).clamp(min=1)", "return self.length_N.unsqueeze(1).clamp(min=1)", "|y| counts tokens that are not in the loss", "test_cases test_objective"),
        ("live_rows=int(live_N.sum()),", "live_rows=len(live_N),", "hidden rows count as live", "knobs/test_aggregation"),
        ("frozen = {k: v.detach() for k, v in _tensors(self).items()}", "frozen = dict(_tensors(self))", "a detach dropped: gradient into the data", "test_contract"),
        ("    _fit(self, mask_NT)\n", "    pass\n", "shapes that disagree are broadcast", "test_objective"),
    ),
    *of(
        "spec.py",
        ("(wrong := validate(**values))", "(wrong := None)", "parameters that exclude each other are accepted", "knobs/test_clip"),
    ),
    *of(
        "packed.py",
        (
            "torch.cat([prompt_BP[group_N, -1:], response_NT], 1)",
            "torch.cat([response_NT, prompt_BP[group_N, -1:]], 1)",
            "off by one between states and tokens (trl#2683)",
            "test_logprobs",
        ),
        ("(there_BP[:, None, None] & causal_PP)", "there_BP[:, None, None]", "a prompt sees its own future", "test_packed"),
    ),
    *of(
        "logprobs.py",
        ("scaled_MV = _scaled(logits_MV, temperature or 1.0)", "scaled_MV = logits_MV", "the temperature forgotten (trl#3029)", "test_logprobs"),
        ("states_NSD[:, P - 1 : P + T - 1]", "states_NSD[:, P : P + T]", "off by one between logits and tokens (trl#2683)", "test_packed"),
        ("return x if x.dtype == torch.float64 else x.float()", "return x", "log_softmax in bf16", "test_logprobs"),
    ),
    *of(
        "adaptive.py",
        ("if k != \"state\"}", "}", "the state passed to init as a parameter", "test_adaptive"),
        ("functools.partial(getattr(objective, slot), state=state)", "getattr(objective, slot)", "states never reach their variants", "test_adaptive"),
    ),
]  # fmt: skip


def run(copy: Path, tests: tuple[str, ...], output: Path) -> None:
    """In a forked process: the tests of the copy, against the copy's package. Exit code: pytest's, or 9 if it was not the copy."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    local = {p.stem for p in (copy / "tests").rglob("*.py")} | {"grpo_repro"}
    for name in [m for m in sys.modules if m.split(".")[0] in local]:
        del sys.modules[name]
    sys.path[:] = [
        str(copy),
        str(copy / "tests"),
        *[p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")],
    ]
    import pytest

    code = int(pytest.main(["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *tests]))
    package = sys.modules.get("grpo_repro")
    mine = package is not None and Path(str(package.__file__)).is_relative_to(copy)
    sys.stdout.flush()
    os._exit(code if mine or code not in (0, 1) else 9)


def judged(copy: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """pytest's exit code, and the first test that failed."""
    output = copy / "output.txt"
    process = multiprocessing.get_context("fork").Process(target=run, args=(copy, tests, output))
    process.start()
    process.join()
    text = output.read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    if process.exitcode not in (0, 1):
        print(text[-2000:], file=sys.stderr)
    return int(process.exitcode or 0), failed.group(1) if failed else ""


def check(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the list itself."""
    wrong = []
    for m in mutants:
        found = (ROOT / "grpo_repro" / m.file).read_text(encoding="utf-8").count(m.old)
        if found != 1:
            wrong.append(f"{m.file}: {m.old!r} is found {found} times, not once ({m.breaks})")
        wrong += [f"{m.file}: there is no {t}" for t in m.tests if not (ROOT / t).is_file()]
    return wrong


def report(rows: list[dict[str, object]], seconds: float) -> None:
    REPORT.mkdir(parents=True, exist_ok=True)
    (REPORT / "mutants.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    caught = sum(bool(r["caught"]) for r in rows)
    lines = [
        "# Mutation check",
        "",
        f"One line of the package is broken at a time, in a copy, and the tests are run: {caught} of {len(rows)} mutants are caught, in "
        f"{seconds / 60:.0f} minutes on one core. Written by `python tests/mutants.py`; the exact edits are in mutants.json.",
        "",
        "| what breaks | where | caught by |",
        "|---|---|---|",
    ]
    for r in rows:
        by = str(r["by"]).removeprefix("tests/").split("[")[0] if r["caught"] else "**survives**"
        lines.append(f"| {r['breaks']} | {r['file']} | {by} |")
    (REPORT / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only mutants whose file or description holds this; writes no report")
    only = parser.parse_args().only
    mutants = [m for m in MUTANTS if only in m.file or only in m.breaks]
    if wrong := check(mutants):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", "batches", "test_logprobs"):  # what takes long to import, before the first fork
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        skip = shutil.ignore_patterns("__pycache__")
        for part in ("grpo_repro", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", copy)
        files = tuple(dict.fromkeys(t for m in mutants for t in m.tests))
        began = time.monotonic()
        code, failed = judged(copy, files)
        if code:
            print(f"the tests fail without any mutant: {failed or code}", file=sys.stderr)
            return 1
        print(
            f"{len(mutants)} mutants; without any, {len(files)} test files pass in {time.monotonic() - began:.0f} s", flush=True
        )
        began = time.monotonic()
        for number, m in enumerate(mutants, 1):
            file = copy / "grpo_repro" / m.file
            source = file.read_text(encoding="utf-8")
            file.write_text(source.replace(m.old, m.new), encoding="utf-8")
            code, failed = judged(copy, m.tests)
            file.write_text(source, encoding="utf-8")
            caught = code == 1 and bool(failed)
            rows.append({**asdict(m), "caught": caught, "by": failed})
            spent = time.monotonic() - began
            left = spent / number * (len(mutants) - number)
            verdict = f"caught by {failed}" if caught else "SURVIVES" if code == 0 else f"pytest stopped with {code}"
            print(f"[{number}/{len(mutants)}, {left:.0f} s left] {m.file}: {m.breaks}: {verdict}", flush=True)
    if not only:
        report(rows, time.monotonic() - began)
    lost = [r for r in rows if not r["caught"]]
    print(f"{len(rows) - len(lost)} of {len(rows)} caught")
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
