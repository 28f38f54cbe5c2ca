"""Faults that people met in other frameworks, those of the loop and its parts; and where every case is tested.

CASES is the table: case → the tests that cover its class. Beside it stand the tests that are at home nowhere else: temperature and
support of sampler and trainer, stale weights, precision, order of the data, passes over one rollout, empty steps.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import batches
import models
import pytest
import torch
from test_loop import config, learner_of, parameters, rows_of
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_repro import knobs, measure, metrics, policy, start, train, update
from grpo_repro.anchor import Anchor
from grpo_repro.collect import collect
from grpo_repro.learner import Learner
from grpo_repro.logprobs import forward, logprobs_from_logits
from grpo_repro.objective import Objective, score
from grpo_repro.policy import Policy
from grpo_repro.rollout import sample
from grpo_repro.types import UserError
from grpo_repro.uniform import draw, restrict

CASES = {
    "N01": "test_cases::test_n01_k3_stays_finite_when_policy_and_reference_part test_cases::test_n01_values_of_k3 "
    "test_cases::test_n01_every_estimator_stays_finite test_metrics::test_estimators_of_the_distance_between_two_policies",
    "N03": "test_cases::test_n03_the_bound_is_on_the_mean_of_a_sequence knobs/test_ratio::test_bound",
    "N04": "test_cases::test_n04_a_ratio_out_of_range_is_finite_for_both_signs test_cases::test_n04_every_clip_is_finite_out_of_range "
    "test_contract::test_log_ratios_of_a_hundred_stay_finite",
    "N06": "test_cases::test_n06_every_advantage_of_equal_rewards_is_exactly_zero "
    "test_cases::test_n06_equal_rewards_have_no_spread_whatever_rounding_says",
    "N08": "test_cases::test_n08_epsilon_is_added_to_the_standard_deviation",
    "N09": "test_logprobs::test_bf16_logits_are_upcast_before_the_softmax_case_N09",
    "N11": "test_logprobs::test_temperature_in_value_and_gradient_case_N11 "
    "test_rollout::test_temperature_scales_the_recorded_log_prob_case_N11",
    "N13": "test_rollout::test_temperature_zero_is_argmax_case_N13 test_rollout::test_a_token_ruled_out_by_minus_infinity_is_fine "
    "test_rollout::test_bad_arguments_are_named",
    "M01": "test_rollout::test_length_mask_and_cut test_logprobs::test_the_end_token_learns_where_it_is_also_the_padding",
    "M03": "test_rollout::test_length_mask_and_cut test_policy::test_every_end_token_that_any_file_names_counts_case_M03",
    "M04": "test_logprobs::test_padding_and_batch_mates_change_nothing_case_M04",
    "M06": "test_cases::test_m06_numerator_and_denominator_share_a_mask",
    "M07": "test_cases::test_m07_a_batch_that_is_masked_altogether_is_zero test_cases_loop::test_m07_a_step_without_a_token_is_skipped",
    "M08": "test_cases::test_m08_tokens_of_a_tool_are_in_no_sum_and_no_count",
    "M11": "test_logprobs::test_value_and_gradient_equal_plain_autograd_row_by_row",
    "A01": "test_cases::test_a01_a05_micro_batches_are_parts_of_one_step test_train::test_one_batch_equals_row_by_row_equals_left_padded",
    "A03": "test_cases::test_a03_dr_grpo_divides_by_the_limit_not_by_the_padding",
    "A05": "test_cases::test_a01_a05_micro_batches_are_parts_of_one_step",
    "A06": "test_cases::test_a06_advantages_that_sum_to_zero_need_not_give_a_loss_of_zero",
    "A08": "test_cases::test_a08_gspo_is_not_weighted_by_length",
    "A09": "test_cases::test_a09_one_row_a_micro_batch_is_still_a_token_mean",
    "A12": "test_cases::test_a12_an_aggregation_is_what_its_name_says",
    "A13": "test_train::test_one_batch_equals_row_by_row_equals_left_padded",  # one path here; between frameworks: make parity
    "G01": "test_cases::test_g01_groups_go_by_id_not_by_position",
    "G03": "test_cases::test_g03_a_prompt_drawn_twice_is_two_groups",
    "G04": "test_cases::test_g04_a_group_of_one_teaches_nothing test_cases::test_g04_g07_the_config_refuses_a_group_of_one",
    "G06": "test_cases::test_g06_ragged_groups_keep_their_own_statistics",
    "G07": "test_cases::test_g04_g07_the_config_refuses_a_group_of_one",
    "G08": "test_cases_loop::test_g08_a_rollout_is_repeated_whole_and_the_next_has_other_prompts",
    "G10": "test_cases_loop::test_g10_every_planned_step_is_made",
    "G12": "test_cases::test_g12_advantages_are_normalised_once",
    "G13": "test_cases::test_g13_siblings_without_a_common_id_teach_nothing test_rollout::test_rows_padding_and_groups",
    "K01": "test_cases::test_k01_the_direction_of_k3",
    "K03": "test_cases::test_k03_k1_in_the_loss_says_of_itself_that_it_teaches_nothing "
    "test_check::test_a_pair_that_is_not_what_it_looks_like",
    "K04": "test_cases::test_k04_a_flat_group_keeps_its_kl_unless_it_is_dropped",
    "K07": "test_cases::test_k07_kl_is_charged_once_where_it_is_asked_for",
    "K09": "test_cases::test_k09_the_loss_of_the_first_step_is_the_kl_term",
    "K10": "test_cases_loop::test_k10_the_reference_is_scored_as_the_policy_is",
    "S01": "test_cases_loop::test_s01_the_recorded_log_prob_is_at_the_temperature "
    "test_rollout::test_recorded_log_probs_are_the_models_own",
    "S02": "test_cases_loop::test_s02_the_trainer_renormalises_over_what_the_sampler_kept "
    "test_sampling_modes::test_the_trainer_renormalises_over_the_sampler_s_support",
    "S03": "test_check::test_a_pair_that_is_not_what_it_looks_like test_cases_loop::test_s03_a_support_that_is_forgotten_is_seen",
    "S05": "test_cases_loop::test_s05_the_sampler_never_lags_behind_the_trainer test_rollout::test_weights_are_read_at_each_call",
    "S07": "test_cases_loop::test_s07_experts_chosen_differently_are_a_reported_number",
    "S10": "test_cases::test_s10_log_probs_shifted_by_one_are_no_small_correction test_contract::test_equal_sampler_needs_no_correction",
    "S12": "test_cases_loop::test_s12_the_noise_of_bf16_is_tested_by_its_quantiles",
    "O01": "test_cases::test_o01_one_update_a_rollout_never_clips_and_still_learns "
    "test_train::test_an_update_on_policy_has_ratio_one_no_clipping_and_the_plain_gradient",
    "O03": "test_cases_loop::test_o03_what_follows_an_optimiser_step_is_off_policy_micro_batches_are_not",
    "O04": "test_cases::test_o04_a_hit_depends_on_the_side_and_on_the_sign "
    "test_cases::test_o04_a_hit_of_a_two_sided_bound_is_where_it_acts test_metrics::test_clip_by_side_and_sign",
    "O06": "test_cases::test_o06_a_detached_weight_keeps_the_score_function",
    "O08": "test_cases::test_o08_the_token_ratio_is_not_the_product",
    "O09": "test_cases_loop::test_o09_dropout_is_off_so_the_ratio_is_one_before_any_update",
    "R01": "test_verify::test_in_a_thread_it_says_the_same",
    "R02": "test_verify::test_an_answer_that_hangs_is_stopped_and_leaves_nothing_behind",
    "R03": "test_verify::test_wrong_answers_are_wrong",
    "R06": "test_verify::test_a_gold_that_does_not_parse_is_neither_right_nor_wrong "
    "knobs/test_reward::test_a_gold_that_is_no_mathematics_names_its_prompt",
    "R07": "test_judge::test_one_reward_of_a_group_that_is_none_stops_the_run test_cases::test_r07_a_reward_that_is_missing_is_not_a_zero",
    "R09": "test_judge::test_a_batch_that_is_not_a_number_a_response_is_refused",
    "R11": "test_tasks::test_the_last_number_of_a_text test_tasks::test_a_number_written_last_is_the_number_read",
    "R13": "test_cases::test_r13_partial_credit_is_an_advantage test_tasks::test_partial_credit_is_not_accuracy",
    "R15": "test_verify::test_wrong_answers_are_wrong test_tasks::test_a_short_response_must_be_exactly_its_digits",
    "R16": "test_cases::test_r16_the_zscore_forgets_the_scale_of_the_reward "
    "knobs/test_reward::test_a_format_may_count_only_where_the_answer_is_right",
    "R18": "test_judge::test_a_reward_that_raises_is_named_with_its_place "
    "knobs/test_reward::test_a_note_that_is_not_there_is_named_with_those_that_are",
    "R19": "knobs/test_reward::test_weights_act_on_rewards_and_are_summed",
    "R20": "knobs/test_reward::test_the_best_answer_known_gets_the_most",
    "D01": "test_loop::test_dynamic_sampling_gives_up_with_a_sentence",
    "D03": "test_cases::test_d01_d03_a_rollout_of_flat_groups_is_empty_and_harmless "
    "test_loop::test_dynamic_sampling_gives_up_with_a_sentence",
    "D04": "test_cases::test_d04_rows_and_groups_that_were_dropped_are_two_numbers "
    "test_loop::test_dynamic_sampling_fills_the_batch_with_mixed_groups_and_counts_what_it_cost",
    "D06": "test_cases_loop::test_d06_the_reward_of_the_rows_that_are_left_is_beside_that_of_all",
    "D08": "test_cases::test_d08_how_many_groups_are_flat_at_two",
}
HERE = Path(__file__).parent


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    for address in CASES[case].split():
        file, _, name = address.partition("::")
        source = ast.parse((HERE / f"{file}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}, address


# ---- M: an empty step ----


def test_m07_a_step_without_a_token_is_skipped() -> None:
    """unsloth-zoo#1286: with every row hidden the loss is 0; a step on its gradient of 0 would still move the weights by momentum."""
    learner = learner_of({"scale.lr": 1e-2})
    train.one_step(learner, 0)
    rollout, judged, _ = collect(learner.sampler, 1)
    old = measure.measure(learner.policy.model, rollout, learner.run, learner.policy.vocab)
    scored = score(learner.objective, train.assembled(learner, rollout, judged, Anchor.at(old), None))
    hidden = replace(scored, b=replace(scored.b, mask_NT=torch.zeros_like(scored.b.mask_NT)))
    before = parameters(learner)
    totals, made = update.update(learner, learner.objective, rollout, hidden, old, None, 1)
    assert (made, learner.updates) == (0, 1)
    assert torch.equal(parameters(learner), before)
    row = metrics.finish(totals, made)
    assert all(v == v for v in row.values())
    for p in learner.policy.model.parameters():  # what the skipped step would have done
        p.grad = torch.zeros_like(p)
    learner.optimizer.step()
    assert not torch.equal(parameters(learner), before)


# ---- G: the order of the data ----


def test_g08_a_rollout_is_repeated_whole_and_the_next_has_other_prompts() -> None:
    """trl#3675: 3 prompts, G = 2, two passes: 0 0 1 1 2 2, twice; then three others."""
    learner = learner_of({"rollout.group_size": 2, "rollout.prompts": 3, "rollout.updates": 2, "rollout.minibatches": 3})
    rollout, judged, _ = collect(learner.sampler, 0)
    assert rollout.group_N.tolist() == [0, 0, 1, 1, 2, 2]
    old = measure.measure(learner.policy.model, rollout, learner.run, learner.policy.vocab)
    b = train.assembled(learner, rollout, judged, Anchor.at(old), None)
    for epoch in (0, 1):
        parts = update.minibatches(b, learner.run, 0, epoch)
        assert [sorted(part.tolist()) for part in sorted(parts, key=lambda part: int(part.min()))] == [[0, 1], [2, 3], [4, 5]]
    drawn = [[p.id for p in collect(learner.sampler, step)[0].prompts] for step in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[1] != drawn[2] != drawn[3]


def test_g10_every_planned_step_is_made() -> None:
    """verl#481: two steps are two optimiser steps, the last one too."""
    run = config({"scale.steps": 2})
    learner = Learner.of(run, *start.load(run, Path("unused")))
    rows = list(train.steps(learner))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert learner.updates == 2
    assert rows[1]["update/norm"] > 0


# ---- K, S: sampler, trainer and reference see one distribution ----


@pytest.mark.parametrize("how", [{}, {"rollout.top_p": 0.7}, {"rollout.top_k": 3}])
def test_k10_the_reference_is_scored_as_the_policy_is(how: dict[str, Any]) -> None:
    """trl#3169: with equal weights the KL is 0 exactly, at T = .7 as well, by every estimate; and its gradient is 0."""
    row = rows_of({**how, "rollout.temperature": 0.7, "objective.kl": {"name": "k2", "beta": 1.0}, "scale.steps": 1})[0]
    assert row["kl_ref/exact"] == row["kl_ref/k1"] == row["kl_ref/k2"] == row["kl_ref/k3"] == 0.0
    assert row["kl_term"] == pytest.approx(0.0, abs=1e-9)
    assert row["sampler/difference"] < 1e-5


def test_s01_the_recorded_log_prob_is_at_the_temperature() -> None:
    """trl#4159: logits (2, 1, 0), T = .6: −.202573 on both sides, ratio 1; the raw −.407606 would make it 1.2276."""
    logits_V = torch.tensor([2.0, 1.0, 0.0])
    token_N, sampler_N, _ = draw(logits_V[None], torch.zeros(1, dtype=torch.float64), 0.6)
    assert token_N.item() == 0
    trainer_NT = logprobs_from_logits(logits_V[None, None], token_N[None], torch.ones(1, 1, dtype=torch.bool), 0.6)
    assert sampler_N.item() == pytest.approx(-0.202573, abs=1e-6)
    assert (trainer_NT[0, 0] - sampler_N[0]).exp().item() == pytest.approx(1.0, abs=1e-6)
    assert (trainer_NT[0, 0] - torch.log_softmax(logits_V, -1)[0]).exp().item() == pytest.approx(1.2276, abs=1e-4)


def test_s02_the_trainer_renormalises_over_what_the_sampler_kept() -> None:
    """trl#6789: p = (.5, .3, .15, .05), top-p .8: kept .8; token 0 has log(.5/.8) = −.470004, not −.693147."""
    p_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    kept_V = restrict(p_V.log()[None], 1.0, 0.8, 0)[0]
    assert torch.isfinite(kept_V).tolist() == [True, True, False, False]
    token_N, logp_N, _ = draw(kept_V[None], torch.zeros(1, dtype=torch.float64), 1.0)
    assert token_N.item() == 0
    assert logp_N.item() == pytest.approx(-0.470004, abs=1e-6)


def test_s03_a_support_that_is_forgotten_is_seen() -> None:
    """NeMo-RL#69: the trainer over the whole vocabulary: off by the kept mass, at every token, in the log that says so."""
    off = rows_of({"rollout.top_p": 0.5, "rollout.keep_support": False, "scale.steps": 1})[0]
    kept = rows_of({"rollout.top_p": 0.5, "scale.steps": 1})[0]
    assert kept["sampler/difference"] < 1e-5
    assert off["sampler/difference"] > 0.4  # up to −log .5, where the nucleus holds little more than half


@pytest.mark.parametrize("engine", ["decoder", "transformers"])
def test_s05_the_sampler_never_lags_behind_the_trainer(engine: str) -> None:
    """trl#5312: the difference rose from .015 to .201 once the update was lost. Here it is round-off at every step of a fast run."""
    rows = rows_of({"machine.engine": engine, "scale.steps": 8, "scale.lr": 1e-2})
    assert max(row["sampler/difference"] for row in rows) < 1e-5
    assert all(row["kl_old/exact"] > 1e-4 for row in rows[1:])


def moe(dtype: torch.dtype = torch.float32) -> Policy:
    """Two experts, one a token, and a router whose logits nearly tie."""
    sizes = models.SIZES | {"intermediate_size": 16}
    settings = Qwen3MoeConfig(**sizes, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        model = Qwen3MoeForCausalLM(settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.02 if "mlp.gate.weight" in name else 0.4
            weight.copy_((1.0 if "norm" in name else 0.0) + scale * torch.randn(weight.shape, generator=generator))
    return Policy(model.to(dtype).eval(), models.random_policy("llama").tokenizer, models.ENDS, "moe")


def test_s07_experts_chosen_differently_are_a_reported_number() -> None:
    """Megatron-LM#4168: a sampler in bf16 and a trainer in fp32 route near ties differently: the difference of their log-probs shows it.
    Our own engine is the trainer's module, so both choose alike, and there is no second copy to load: twice is once."""
    exact, coarse, prompts = moe(), moe(torch.bfloat16), models.prompts(3, 5, 7, 4)

    def draws(from_: Policy) -> Any:
        return sample(from_, prompts, 8, limit=8, seed=0, step=0, engine="transformers")

    mine, again, foreign = draws(exact), draws(exact), draws(coarse)
    assert torch.equal(mine.response_NT, again.response_NT)
    assert torch.equal(mine.sampler_NT, again.sampler_NT)

    def difference(rollout: Any) -> torch.Tensor:
        with torch.no_grad():
            return (forward(exact.model, rollout, 1.0).logp_NT - rollout.sampler_NT).abs()[rollout.mask_NT]

    assert float(difference(mine).max()) < 1e-4
    assert float(difference(foreign).mean()) > 100 * float(difference(mine).mean())


def test_s12_the_noise_of_bf16_is_tested_by_its_quantiles() -> None:
    """trl#6789: one row or eight at a time: fp32 agrees to 1e-5 at every token; bf16 has outliers, around no bias."""
    rollout = sample(models.random_policy("llama"), models.prompts(3, 7, 5, 2), 16, limit=12, seed=0, step=0)

    def by(rows: int, dtype: torch.dtype) -> torch.Tensor:
        model = models.random_model("llama", dtype=dtype)
        with torch.no_grad():
            parts = [forward(model, rollout.rows(k), 1.0).logp_NT for k in torch.arange(len(rollout.length_N)).split(rows)]
        return torch.cat(parts)[rollout.mask_NT]

    assert float((by(1, torch.float32) - by(8, torch.float32)).abs().max()) < 1e-4
    noise = by(8, torch.bfloat16) - by(8, torch.float32)
    assert float(noise.abs().max()) > 1e-3
    assert float(noise.mean().abs()) < 0.05
    assert float(noise.abs().quantile(0.5)) < 0.1


# ---- O: which slices are off-policy ----


def test_o03_what_follows_an_optimiser_step_is_off_policy_micro_batches_are_not() -> None:
    """trl#3493: every minibatch reads the stored π_old. One minibatch in many micro-batches has w = 1; the second of two has not."""
    fast = {"scale.steps": 1, "scale.lr": 1e-2, "scale.warmup": 0}
    slices = rows_of({**fast, "machine.token_budget": 1})[0]
    assert slices["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    whole, split = (rows_of({**fast, "rollout.minibatches": 2, "machine.token_budget": n})[0] for n in (10**6, 1))
    assert whole["ratio/std"] > 1e-2
    assert split["ratio/std"] == pytest.approx(whole["ratio/std"], rel=1e-3)


def test_o09_dropout_is_off_so_the_ratio_is_one_before_any_update(tmp_path: Path) -> None:
    """unsloth#4502: a model that was saved with dropout .1; its loader and the loop leave it off."""
    made = policy.tiny("0123456789abcdefghijk=", end="$", pad="_", d=16, layers=1, heads=2, ffn=16)
    settings = LlamaConfig(**{**made.model.config.to_dict(), "attention_dropout": 0.1})
    dropped = LlamaForCausalLM(settings)
    dropped.load_state_dict(made.model.state_dict())
    policy.save(replace(made, model=dropped.train()), tmp_path / "model")
    loaded = policy.pretrained(tmp_path / "model")
    assert loaded.model.config.attention_dropout == 0.1
    rollout = sample(loaded, models.prompts(3, 5), 8, limit=8, seed=0, step=0)
    now = forward(loaded.model, rollout, 1.0).logp_NT
    assert torch.equal(now, forward(loaded.model, rollout, 1.0).logp_NT)
    assert float((now - rollout.sampler_NT).detach().abs().max()) < 1e-5
    assert not torch.equal(now, forward(copy.deepcopy(loaded.model).train(), rollout, 1.0).logp_NT)  # it would have mattered


# ---- D: what the log says of a filtered rollout ----


def test_d06_the_reward_of_the_rows_that_are_left_is_beside_that_of_all() -> None:
    """NeMo-RL#3794: two groups, the second flat at 4 and dropped: the kept mean is ½, of the rows that are trained on; `reward` is 9/4."""
    b = batches.minibatch([0, 1, 4, 4], [0, 0, 1, 1], [[1]] * 4)
    left = score(Objective(sampling=knobs.sampling.drop_zero_variance), b)
    assert metrics.groups(b, left)["reward/kept"] == 0.5 == float(left.b.r_N.mean())
    assert "reward/kept" not in metrics.groups(b, score(Objective(), b)), "nothing was dropped"
    flat = b.rows(torch.tensor([2, 3]))
    assert "reward/kept" not in metrics.groups(flat, score(Objective(sampling=knobs.sampling.drop_zero_variance), flat))


# ---- mistakes that must be a sentence ----


@pytest.mark.parametrize("changes", [{"objective.kl": {"name": "full", "beta": 0.1}}, {"objective.step": "trpo"}])
def test_whole_distributions_of_a_large_vocabulary_are_refused(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_repro.learner.WHOLE_VOCABULARY", 4)
    with pytest.raises(
        UserError, match=r"objective\.(kl: full|step: trpo) needs the whole distribution .* up to 4, and the model 'tiny'"
    ):
        learner_of(changes)


def test_a_partial_rollout_beyond_the_model_s_context_is_refused() -> None:
    learner = learner_of({"rollout.chunk": 2, "rollout.limit": 100})
    with pytest.raises(UserError, match="with a limit of 100 exceed the context of 64"):
        [train.one_step(learner, step) for step in range(3)]


# ---- chance stays paired ----


def test_a_reward_s_coin_is_that_of_the_response_s_birth() -> None:
    """Responses finished later, under the same weights, are those of the plain rollout, and so are their rewards."""
    small = {"rollout.group_size": 2, "rollout.prompts": 24}
    plain, judged, _ = collect(learner_of(small).sampler, 0)

    def told(rollout: Any, r_N: torch.Tensor) -> dict[str, list[tuple[tuple[int, ...], float]]]:
        groups: dict[str, list[tuple[tuple[int, ...], float]]] = {}
        for g, tokens, n, r in zip(
            rollout.group_N.tolist(), rollout.response_NT.tolist(), rollout.length_N.tolist(), r_N.tolist(), strict=True
        ):
            groups.setdefault(rollout.prompts[g].id, []).append((tuple(tokens[:n]), r))
        return groups

    expected = told(plain, judged.r_N)
    learner, late = learner_of({**small, "rollout.chunk": 2}), []
    for step in range(8):
        rollout, judged, _ = collect(learner.sampler, step)
        for prompt, rows in told(rollout, judged.r_N).items():
            if prompt in expected and [t for t, _ in rows] == [t for t, _ in expected[prompt]]:
                assert rows == expected[prompt]
                late += [step] if step else []
    assert late, "no group of step 0 was finished later"
