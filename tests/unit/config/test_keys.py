"""Unknown, misspelt, misplaced, repeated and deprecated keys."""

from __future__ import annotations

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_problems import edit_distance, near_miss, nearest
from tests.unit.config.cases import BATCH, only_problem, parse, problems


@pytest.mark.parametrize(
    ("config", "path", "meant"),
    (
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"gradient_accumulation_step": 4}, "gradient_accumulation_step", "gradient_accumulation_steps"),
        ({"Zero_Optimization": {}}, "Zero_Optimization", "zero_optimization"),
        ({"gradient-clipping": 1}, "gradient-clipping", "gradient_clipping"),
        ({"gradient_clipping ": 1}, "gradient_clipping ", "gradient_clipping"),
        ({"bf61": {}}, "bf61", "bf16"),
        ({"steps_per_pirnt": 1}, "steps_per_pirnt", "steps_per_print"),
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        ({"reduce_bucket_size": 1}, "reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
        (
            {"stage3_max_live_parameters": 1},
            "stage3_max_live_parameters",
            "zero_optimization.stage3_max_live_parameters",
        ),
        ({"initial_scale_power": 8}, "initial_scale_power", "fp16.initial_scale_power"),
        ({"grad_accum_dtype": "fp32"}, "grad_accum_dtype", "data_types.grad_accum_dtype"),
        ({"warmup_num_steps": 8}, "warmup_num_steps", "scheduler.params.warmup_num_steps"),
        ({"lr": 1}, "lr", "optimizer.params.lr"),
        ({"zero_stage": 2}, "zero_stage", "zero_optimization.stage"),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com",
            "zero_optimization.overlap_comm",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "none"}}},
            "zero_optimization.offload_optimizer.devise",
            "zero_optimization.offload_optimizer.device",
        ),
        (
            {"zero_optimization": {"stage": 3, "zenflow": {"topk": 0.1}, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.zenflow.topk",
            "zero_optimization.zenflow.topk_ratio",
        ),
        ({"aio": {"queue_dept": 1}}, "aio.queue_dept", "aio.queue_depth"),
        (
            {"checkpoint": {"parallel_write": {"pipeline_stag": True}}},
            "checkpoint.parallel_write.pipeline_stag",
            "checkpoint.parallel_write.pipeline_stage",
        ),
        ({"optimizer": {"type": "Adam", "parms": {}}}, "optimizer.parms", "optimizer.params"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_decya": 0}}},
            "optimizer.params.weight_decya",
            "optimizer.params.weight_decay",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_num_steps",
        ),
        (
            {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enable": True}}}},
            "data_efficiency.data_sampling.dynamic_batching.enable",
            "data_efficiency.data_sampling.dynamic_batching.enabled",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["x"], "partition_typ": "row"}]}}},
            "tensor_parallel.partition_config.layer_specs.0.partition_typ",
            "tensor_parallel.partition_config.layer_specs.0.partition_type",
        ),
    ),
)
def test_near_misses_name_the_key_meant(config: dict, path: str, meant: str) -> None:
    line = only_problem(config)
    assert line.startswith(f"{path}: unknown")
    assert f"nearest known key: {meant};" in line


@pytest.mark.parametrize(
    ("key", "places"),
    (
        ("super_offload", ("offload_optimizer",)),
        ("topk_ratio", ("zenflow",)),
        ("nvme_path", ("offload_param", "offload_optimizer")),
    ),
)
def test_a_key_of_a_section_below_is_sent_there(key: str, places: tuple[str, ...]) -> None:
    line = only_problem({"train_batch_size": 1, "zero_optimization": {"stage": 2, key: 1}})
    assert " or ".join(f"zero_optimization.{place}.{key}" for place in places) + "; move it there" in line



@pytest.mark.parametrize(
    ("section", "key", "other"),
    (
        ("offload_optimizer", "buffer_size", "offload_param"),
        ("offload_optimizer", "max_in_cpu", "offload_param"),
        ("offload_param", "pipeline_read", "offload_optimizer"),
    ),
)
def test_a_key_of_the_other_offload_section(section: str, key: str, other: str) -> None:
    line = only_problem({"zero_optimization": {"stage": 3, section: {"device": "cpu", key: 1}}})
    assert line.startswith(f"zero_optimization.{section}.{key}: unknown key (found 1 (integer)); ")
    assert line.endswith(f"it is a key of zero_optimization.{other}; move it there, or remove it")


def test_first_words_that_several_keys_share_mean_none_of_them() -> None:
    assert nearest("topk", ["topk_ratio", "interval"]) == "topk_ratio"
    assert nearest("topk", ["topk_ratio_of_all", "topk_interval_of_all"]) is None
    assert nearest("top", ["topk_ratio_of_all"]) is None


def test_far_off_keys_in_closed_sections_list_what_is_known() -> None:
    assert only_problem({"comms_logger": {"colour": 1}}) == (
        "comms_logger.colour: unknown key (found 1 (integer)); known keys: enabled, prof_all, prof_ops, verbose, debug;"
        " remove it"
    )


CLIENTS_OWN = [
    "comms_config",
    "monitor_config",
    "cuda_visible_devices",
    "msamp",
    "inference",
    "seed",
    "project",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
]


@pytest.mark.parametrize("key", CLIENTS_OWN)
def test_keys_of_clients_are_kept_and_named(key: str) -> None:
    config = parse({key: 1})
    assert config.unknown_keys == [key]
    assert any(key in line for line in config.notes())


@pytest.mark.parametrize("key", CLIENTS_OWN)
def test_strict_refuses_every_unknown_key(key: str) -> None:
    assert only_problem({key: 1}, strict=True).startswith(f"{key}: unknown key")


@pytest.mark.parametrize("key", ("_comment", "__doc", "comment", "comments", "#", "// stage"))
def test_remarks_are_no_keys_wherever_they_stand(key: str) -> None:
    """JSON has no comments: authors write them as keys. Named in one line, and no error under strictness either."""
    adam = {"type": "Adam", "params": {"lr": 1e-3, key: "why"}, key: 2}
    config = parse({key: "x", "zero_optimization": {"stage": 1, key: [1]}, "optimizer": adam}, strict=True)
    paths = [key, f"zero_optimization.{key}", f"optimizer.params.{key}", f"optimizer.{key}"]
    assert config.comments == paths
    assert config.unknown_keys == []
    assert f"config keys taken as comments: {', '.join(paths)}" in config.notes()
    assert config.optimizer_params == {"lr": 1e-3}


def test_strict_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    with pytest.raises(DeepSpeedConfigError, match="msamp: unknown key"):
        DeepSpeedConfig({**BATCH, "msamp": 1})
    monkeypatch.setenv("DS_CONFIG_STRICT", "0")
    assert DeepSpeedConfig({**BATCH, "msamp": 1}).unknown_keys == ["msamp"]


def test_parse_does_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_CONFIG_STRICT", "1")
    assert parse({"msamp": 1}).unknown_keys == ["msamp"]


def test_open_sections_keep_other_keys() -> None:
    config = parse({"aio": {"thread_count": 1}, "pipeline": {"mine": 1}})
    assert config.unknown_keys == ["aio.thread_count", "pipeline.mine"]
    assert config.pipeline["mine"] == 1


def test_amp_passes_every_key_on() -> None:
    config = parse({"amp": {"enabled": False, "opt_level": "O1"}})
    assert config.amp_params == {"opt_level": "O1"}
    assert config.unknown_keys == []


@pytest.mark.parametrize("pair", (("bf16", "bfloat16"),))
def test_a_key_under_both_its_names(pair: tuple[str, str]) -> None:
    line = only_problem({name: {"enabled": True} for name in pair})
    assert "found both bf16 and bfloat16, which are one key" in line


def test_an_alias_given_with_its_field_name() -> None:
    line = only_problem({"zero_optimization": {"stage3_max_reuse_distance": 1, "max_reuse_distance": 2}})
    assert "zero_optimization.max_reuse_distance and zero_optimization.stage3_max_reuse_distance" in line


def test_bfloat16_is_bf16() -> None:
    config = parse({"bfloat16": {"enabled": True}})
    assert config.bfloat16_config.enabled
    assert only_problem({"bfloat16": {"enabled": 7}}).startswith("bfloat16.enabled: ")


@pytest.mark.parametrize(
    ("zero", "line", "check"),
    (
        (
            {"cpu_offload": False},
            "zero_optimization.cpu_offload is deprecated: use zero_optimization.offload_optimizer, which it sets.",
            lambda z: z.offload_optimizer is None,
        ),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            "zero_optimization.stage3_gather_fp16_weights_on_model_save"
            " is deprecated: use zero_optimization.gather_16bit_weights_on_model_save, which it sets.",
            lambda z: z.gather_16bit_weights_on_model_save,
        ),
        (
            {"cpu_offload_use_pin_memory": True},
            "zero_optimization.cpu_offload_use_pin_memory is deprecated and has no"
            " effect: use zero_optimization.offload_optimizer.pin_memory.",
            lambda z: z.offload_optimizer is None,
        ),
    ),
)
def test_deprecated_keys_map_and_name_themselves(zero: dict, line: str, check) -> None:
    config = parse({"zero_optimization": zero})
    assert config.deprecations == [line]
    assert check(config.zero_config)


def test_a_deprecated_key_with_a_wrong_value() -> None:
    assert only_problem({"zero_optimization": {"cpu_offload": "x"}}) == (
        'zero_optimization.cpu_offload: found "x" (string); expected true or false'
    )


def test_a_deprecated_key_beside_its_replacement() -> None:
    line = only_problem({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}})
    assert line.startswith("zero_optimization.cpu_offload: ")
    assert "zero_optimization.offload_optimizer replaces it, but both are set" in line


@pytest.mark.parametrize(("flag", "stage"), ((True, 1), (False, 0)))
def test_the_boolean_form_of_zero(flag: bool, stage: int) -> None:
    config = parse({"zero_optimization": flag, "allgather_size": 1000})
    assert config.zero_optimization_stage == stage
    assert config.zero_config.allgather_bucket_size == 1000
    assert len(config.deprecations) == 1
    assert f"zero_optimization.stage, which it sets to {stage}" in config.deprecations[0]
    assert config.unknown_keys == []


def test_all_problems_in_one_error() -> None:
    config = {
        "zero_optimization": {"stage": 9, "reduce_bucket_sise": 1, "offload_param": {"device": "gpu"}},
        "fp16": {"enabled": True, "loss_scale": -1},
        "bf16": {"enabled": True},
        "steps_per_prin": 1,
        "optimizer": {"type": "Adam", "params": {"learning_rate": 1}},
        "tensorboard": {"enabled": True},
    }
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig({**BATCH, "train_batch_size": 7, "gradient_accumulation_steps": 2, **config})
    lines = str(caught.value).splitlines()
    assert lines[0] == "DeepSpeed config (dict) has 9 problems:"
    assert [line.strip().split(":")[0] for line in lines[1:]] == [
        "zero_optimization.reduce_bucket_sise",
        "steps_per_prin",
        "fp16.loss_scale",
        "zero_optimization.stage",
        "zero_optimization.offload_param.device",
        "tensorboard.enabled",
        "fp16.enabled",
        "optimizer.params.learning_rate",
        "train_batch_size",
    ]
    assert len(caught.value.problems) == 9


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    (("abc", "abc", 0), ("abc", "acb", 1), ("abc", "ab", 1), ("abc", "xbcd", 2), ("a", "wxyz", 3)),
)
def test_edit_distance(left: str, right: str, distance: int) -> None:
    assert edit_distance(left, right, 2) == distance
    assert edit_distance(right, left, 2) == distance


@pytest.mark.parametrize("key", ("amps", "aim", "msamp", "comment", "comets_", "fp32"))
def test_short_names_are_not_guessed(key: str) -> None:
    assert near_miss(key, ["amp", "aio", "comet", "fp16", "compile"]) is None


def test_keys_that_are_no_strings() -> None:
    assert problems({7: 1}) == []  # as any other key nothing reads
    assert parse({7: 1}).unknown_keys == ["7"]  # type: ignore[dict-item]
