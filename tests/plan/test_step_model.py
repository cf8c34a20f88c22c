"""Fitting step times, the clock, and estimates for chips."""

import math
import random

import msgspec
import pytest

from octavo.errors import ConfigError
from octavo.plan.chips import CHIPS, chip_of, estimate
from octavo.plan.machine import FORMAT, MachineCosts, read_costs, write_costs
from octavo.plan.model_shape import ModelShape, read_shape
from octavo.plan.settings import Front
from octavo.plan.step_model import PICOSECONDS, MeasuredStep, StepClock, StepModel, fit_model, without_slow_stretches
from octavo.schedule.step_costs import MOST_SPREAD, StepShape

TRUE = StepModel([1, 8, 32, 512], [0.006, 0.008, 0.02, 0.2], 3e-4, 3e-7, 2e-7)


def samples_of(model: StepModel, noise: float, seed: int = 0) -> list[MeasuredStep]:
    dice = random.Random(seed)
    samples = []
    for _ in range(600):
        rows, more = dice.choice([1, 2, 4, 8, 16, 32, 64]), dice.choice([0, 0, 0, 16, 60, 130, 400])
        shape = StepShape(rows, more, rows * dice.randrange(2000), more * dice.randrange(1, 1500))
        seconds = model.step_seconds(shape) * dice.uniform(1 - noise, 1 + noise)
        samples.append(MeasuredStep(shape, seconds * (5 if noise and dice.random() < 0.02 else 1)))
    return samples


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_fit_finds_the_curve_that_was_measured(noise):
    found = fit_model(samples_of(TRUE, noise))
    for sample in samples_of(TRUE, 0.0, seed=1):
        assert abs(found.model.step_seconds(sample.shape) / sample.seconds - 1) < 0.02 + noise / 2
    assert found.median_error < 0.001 + noise and found.num_samples == 600


def test_stretches_in_which_others_used_the_machine_are_left_out():
    quiet = samples_of(TRUE, 0.05)
    timed = [(at / 30, sample) for at, sample in enumerate(quiet)]  # 20 s
    kept, share = without_slow_stretches(timed)
    assert share == 0 and len(kept) == len(quiet)
    slow = [(ended, MeasuredStep(each.shape, each.seconds * (2 if 4 <= ended < 10 else 1))) for ended, each in timed]
    kept, share = without_slow_stretches(slow)
    assert 0.3 < share < 0.6 and len(kept) == 420
    model = fit_model(kept).model
    off = [abs(model.step_seconds(sample.shape) / sample.seconds - 1) for sample in samples_of(TRUE, 0.0, seed=1)]
    assert max(off) < 0.06


def test_long_steps_scatter_less_than_short_ones():
    """What holds a step up comes at random times: its share of a step falls with the root of the step's time."""
    dice = random.Random(6)
    steps = []
    for _ in range(2000):
        shape = StepShape(1, dice.choice([15, 63, 127, 511]), 0, dice.randrange(1, 1500))
        seconds = TRUE.step_seconds(shape)
        steps.append(MeasuredStep(shape, seconds * (1 + dice.choice([-0.2, 0.2]) * math.sqrt(0.01 / seconds))))
    model = fit_model(steps).model
    clock = StepClock(model)
    for more in (15, 127, 511):
        shape = StepShape(1, more, 0, 100)
        seconds = TRUE.step_seconds(shape)
        times = sorted(clock.step(shape, number) / PICOSECONDS for number in range(512))
        off = 0.2 * math.sqrt(0.01 / seconds)
        assert abs(times[64] / seconds - 1 + off) < 0.03 and abs(times[-64] / seconds - 1 - off) < 0.03, more
    old = msgspec.structs.replace(model, noise_seconds=0.0)
    spread = [StepClock(old).step(StepShape(1, 511, 0, 100), number) for number in range(512)]
    assert max(spread) / min(spread) > 1.1, "costs of earlier versions scatter alike at every length"


def test_what_wakes_an_engine_and_follows_a_first_token_is_told_from_the_steps():
    dice = random.Random(4)
    true = msgspec.structs.replace(TRUE, wake=0.003, first=0.002)
    steps = []
    for sample in samples_of(TRUE, 0.0):
        wakes, after = dice.random() < 0.2, dice.choice([0.0, 0.0, 1.0, 0.5, 0.25, 0.125])
        step = sample._replace(wakes=wakes, after_first=0.0 if wakes else after)
        steps.append(step._replace(seconds=true.seconds_of(step) * dice.uniform(0.98, 1.02)))
    found = fit_model(steps).model
    assert abs(found.wake / 0.003 - 1) < 0.1 and abs(found.first / 0.002 - 1) < 0.1
    assert max(found.steady_noise + found.noise) < 1.05, "what they take is no scatter of the steps"
    for sample in samples_of(TRUE, 0.0, seed=1):
        assert abs(found.step_seconds(sample.shape) / sample.seconds - 1) < 0.02


def test_a_simulated_scheduler_has_the_margin_that_an_engine_learns():
    """A fifth of the steps with prompts beside rows takes 1.3 times as long."""
    dice = random.Random(5)
    plain = fit_model(samples_of(TRUE, 0.0)).model
    assert plain.margin == plain.costs(64, 512).spread < 1.1  # the sum of a scheduler's costs is not quite the curve
    slow = [each._replace(seconds=each.seconds * (1 + 0.3 * (dice.random() < 0.2))) for each in samples_of(TRUE, 0.0)]
    model = fit_model(slow).model
    assert 1.15 < model.margin == model.costs(64, 512).spread < 1.35
    assert fit_model([each for each in slow if not each.shape.more_tokens]).model.margin == 1
    wild = [each._replace(seconds=each.seconds * dice.choice([1, 1, 1, 2.5])) for each in samples_of(TRUE, 0.0)]
    assert fit_model(wild).model.margin == MOST_SPREAD


def test_a_flat_beginning_is_kept():
    """On a GPU a few more tokens cost nothing, as long as weights are read."""
    flat = StepModel([1, 256, 4096], [0.004, 0.0041, 0.1], 0.0, 3e-8, 1e-9)
    found = fit_model(samples_of(flat, 0.0)).model
    assert abs(found.products(64) / flat.products(64) - 1) < 0.02


def test_steps_of_one_size_are_no_curve():
    with pytest.raises(ValueError, match="same number"):
        fit_model([MeasuredStep(StepShape(1, 0, 5, 0), 0.1)] * 3)


def test_the_clock_is_the_model_in_integers():
    clock = StepClock(TRUE)
    for sample in samples_of(TRUE, 0.0):
        assert abs(clock.step(sample.shape) / 1e12 - sample.seconds) < 1e-9


def test_drafts_shorten_a_token_where_they_pay():
    """Reading weights is most of a step of one row, so five tokens take little more than one; a full batch gains nothing."""
    flat = StepModel([1, 64, 512], [0.01, 0.012, 0.1], 0.0, 1e-7, 0.0, draft_tokens=4, acceptance=0.5)
    assert flat.tokens_per_step == 1.9375
    plain, drafting = StepClock(msgspec.structs.replace(flat, draft_tokens=0)), StepClock(flat)
    assert abs(drafting.base(1) * 1.9375 / (flat.products(5) * 1e12) - 1) < 1e-9
    assert drafting.base(1) < 0.6 * plain.base(1) and drafting.context(1) == round(plain.context(1) * 5 / 1.9375)
    assert drafting.base(128) == plain.base(128) and drafting.context(128) == plain.context(128)
    with_prompt = StepShape(4, 60, 100, 2000)
    assert drafting.step(with_prompt) == plain.step(with_prompt)


def test_beyond_the_last_point_the_slope_goes_on():
    assert abs(TRUE.products(992) - 0.38) < 1e-9 and TRUE.products(1) == 0.006


def test_costs_for_the_scheduler_are_near():
    costs = TRUE.costs(64, 512)
    for shape in (StepShape(1, 0, 100, 0), StepShape(32, 0, 9000, 0), StepShape(8, 256, 2000, 40000)):
        assert 0.6 < costs.seconds(shape) / TRUE.step_seconds(shape) < 1.5


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [1]},
        {"tokens": [4, 2, 8, 9]},
        {"seconds": [0.0, 1.0, 2.0, 3.0]},
        {"row": float("nan")},
        {"pair": -1.0},
        {"wake": -1.0},
        {"margin": 0.9},
        {"first": float("inf")},
        {"acceptance": 1.5},
        {"draft_tokens": -1},
    ],
)
def test_a_model_without_sense_is_refused(change):
    with pytest.raises(ValueError, match="must be"):
        StepModel(**(msgspec.structs.asdict(TRUE) | change))


LLAMA = ModelShape(
    "8b", 8_030_000_000, 7_500_000_000, 0, 0, 0, 32, 4096, 32, 128, 32 * 2 * 8 * 128, 128_256, 131_072, 16_060_000_000
)


def costs_file(**changes: object) -> MachineCosts:
    costs = MachineCosts(
        FORMAT, "2026-01-01", "1", "a machine", True, LLAMA, 16_060_000_000, 2_097_152, 16, 1000, 4096, 64, 512, 0, TRUE, Front(0.01), 5.0, 10,
        0.01, 0.05,
    )  # fmt: skip
    return msgspec.structs.replace(costs, **changes)


def test_a_costs_file_is_read_as_written(tmp_path):
    write_costs(tmp_path / "c", costs_file())
    assert read_costs(tmp_path / "c") == costs_file()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "is not a file of"),
        (b"no", "is not a file of"),
        (b'{"made": "\xff"}', "is not a file of"),
        (b"x" * 2**21, "more than"),
    ],
)
def test_a_bad_costs_file_is_named(tmp_path, content, words):
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_costs(tmp_path / "c")
    write_costs(tmp_path / "d", costs_file(format=7))
    with pytest.raises(ConfigError, match="format 7"):
        read_costs(tmp_path / "d")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"weights_bytes": 0}, "weights_bytes"),
        ({"shape": msgspec.structs.replace(LLAMA, active_parameters=0)}, "active_parameters"),
        ({"shape": msgspec.structs.replace(LLAMA, kv_numbers=-1)}, "kv_numbers"),
        ({"shape": msgspec.structs.replace(LLAMA, num_experts=8)}, "experts_per_token"),
        ({"step": msgspec.structs.replace(TRUE, seconds=[TRUE.seconds[0], *[0.0] * (len(TRUE.seconds) - 1)])}, "step.seconds"),
    ],
)  # fmt: skip
def test_numbers_that_others_are_divided_by_are_checked(tmp_path, changes, name):
    write_costs(tmp_path / "c", costs_file(**changes))
    with pytest.raises(ConfigError, match=f"{name} is out of range"):
        read_costs(tmp_path / "c")


def test_another_model_takes_time_in_proportion():
    twice = msgspec.structs.replace(
        LLAMA, num_parameters=2 * LLAMA.num_parameters, active_parameters=2 * LLAMA.active_parameters
    )
    step = costs_file().step_of(twice, 2 * 16_060_000_000, 2.0)
    assert (step.wake, step.first, step.noise) == (TRUE.wake, TRUE.first, TRUE.noise)
    assert step.products(1) == 2 * TRUE.products(1) and step.context == 2 * TRUE.context
    assert costs_file().step_of(LLAMA, 16_060_000_000, 1.0) == TRUE


# ── chips ──


def test_an_h200_is_as_fast_as_it_was_measured():
    """benchmarks/gpu.md: 251 tokens/s of one stream, 42,400 prompt tokens/s."""
    found = estimate(chip_of("H200"), LLAMA, weights_bytes=16_060_000_000, kv_bytes=2, page_size=16)
    assert 220 < 1 / found.model.step_seconds(StepShape(1, 0, 256, 0)) < 280
    assert 35_000 < 8192 / found.model.step_seconds(StepShape(8, 8184, 0, 8 * 1024 * 512)) < 50_000
    assert found.num_pages * found.page_bytes + 16.06e9 < 141e9 and "not measured" in found.note


def test_faster_chips_take_less_time():
    def one(name: str, tokens: int) -> float:
        found = estimate(chip_of(name), LLAMA, weights_bytes=8_030_000_000, kv_bytes=2, page_size=16)
        return found.model.products(tokens)

    assert one("h200", 1) < one("h100", 1) < one("a100", 1) < one("rtx4090", 1) < one("l4", 1)
    assert one("mi300x", 4096) < one("h100", 4096) < one("a100", 4096) < one("l4", 4096)
    assert one("cpu:64x12", 1) < one("cpu:16x8", 1) and one("cpu:64x8", 512) < one("cpu:16x8", 512)


def test_ranks_share_the_work_but_not_all_of_it():
    def with_ranks(ranks: int) -> float:
        found = estimate(chip_of("h100"), LLAMA, weights_bytes=16_060_000_000, kv_bytes=2, page_size=16, ranks=ranks)
        return found.model.products(64)

    assert with_ranks(1) / 4 < with_ranks(4) < with_ranks(1)


def test_a_model_that_is_too_large_says_what_would_do():
    with pytest.raises(ConfigError, match=r"does not fit.*--tensor-parallel-size 2"):
        estimate(chip_of("l4"), LLAMA, weights_bytes=32_000_000_000, kv_bytes=2, page_size=16)


@pytest.mark.parametrize(
    ("name", "hint"), [("h1000", "did you mean h100"), ("B9000", "Known are h100"), ("cpu:0x0", "Known are")]
)
def test_an_unknown_chip_is_named(name, hint):
    with pytest.raises(ConfigError, match=hint):
        chip_of(name)


def test_names_of_chips():
    assert chip_of("NVIDIA RTX 4090") is CHIPS["rtx4090"] and chip_of("cpu:8x4:32g").memory == 32 * 2**30


def test_experts_are_read_as_tokens_reach_them():
    mixture = msgspec.structs.replace(
        LLAMA, num_experts=64, experts_per_token=4, expert_parameters=LLAMA.num_parameters // 2
    )
    assert 0.5 < mixture.bytes_read(1, 100) / 100 < 0.55 and mixture.bytes_read(10_000, 100) == pytest.approx(100)


def test_the_shape_of_a_configuration_without_weights(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 256, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    shape = read_shape(str(tmp_path))
    assert shape.kv_numbers == 2 * 2 * 2 * 16 and shape.context_len == 256
    assert shape.num_parameters == 2 * 100 * 64 + 2 * (64 * 16 * 12 + 3 * 64 * 128)
