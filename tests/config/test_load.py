"""Loading a configuration: all mistakes are reported at once, with key, place and remedy, and no value is guessed.

If this breaks, a typo trains for days with a default, or a user fixes mistakes one start at a time.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modernbert_train.__main__ import main
from modernbert_train.config.load import WrongKeys, differences, load_run, load_typed, to_yaml
from modernbert_train.config.renamed import SYNONYMS
from modernbert_train.config.schema import AdamWConfig, PhaseConfig, RunConfig, StableAdamWConfig
from modernbert_train.config.tools.prepare import PrepareConfig
from modernbert_train.errors import ConfigError
from tests.support.configurations import BASE, Load, Refused
from tests.support.verbs import Says

# keys of other trainers, for which a list of thirty keys would not help
OTHERS = {
    "optim.learning_rate": "Here it is optim.lr.",
    "batch_size": "Here it is phases.NAME.batch_rows, in packed rows of the global batch.",
    "max_seq_len": "Here it is phases.NAME.row_tokens.",
    "model.num_hidden_layers": "Here it is model.num_layers.",
    "gradient_accumulation_steps": "There is none here: it follows from phases.NAME.batch_rows",
    "resume_from_checkpoint": "There is none here: the same command resumes from the newest checkpoint by itself",
    "optim.grad_clip": "Here it is optim.max_grad_norm of optim.name=adamw",
    "optim.gradient_clip_val": "Here it is optim.max_grad_norm of optim.name=adamw",
    "optim.gradient_clipping": "Here it is optim.max_grad_norm of optim.name=adamw",
}


def test_the_files_and_the_defaults_make_a_typed_tree(load: Load) -> None:
    config = load()
    assert config.name == "base" and config.seed == 17
    assert config.optim == StableAdamWConfig(lr=1e-3)
    assert list(config.phases) == ["stable", "decay"]
    assert config.phases["stable"].tokens == 1_000_000 and config.total_tokens == 1_500_000
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]


def test_mistakes_of_every_kind_and_place_are_reported_together(refused: Refused) -> None:
    lines = refused(
        "seed: 1\nseed: 2\nmodel: {num_headz: 4}\noptim: {lr: fast}\n", "compute.device=gpu", "eval.x.y=1", "nonsense"
    )
    assert [line.split(" ")[0] for line in lines] == [
        "seed",  # duplicate
        "'nonsense':",
        "optim.lr='fast'",
        "model.num_headz",
        "compute.device='gpu'",
        "eval.x",
    ]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("phases: {stable: {tokens: 1e9}}", "phases.stable.tokens", 1_000_000_000),
        ("optim: {lr: 1e-4}", "optim.lr", 1e-4),
        ("optim: {lr: 1}", "optim.lr", 1.0),
        ("optim: {betas: [0, 0.98]}", "optim.betas", (0.0, 0.98)),
        ("compute: {compile: true}", "compute.compile", True),
        ("name: on", "name", "on"),  # a name may be what YAML 1.1 calls a boolean
        ("name: '010'", "name", "010"),
        ("eval: {max_tokens:}", "eval.max_tokens", None),
        ("phases: {stable: {objective: {mask_rate: 1}}}", "phases.stable.objective.mask_rate", 1.0),
        ("loggers: {wandb: {tags: [a, 1e-3]}}", "loggers.wandb.tags", ["a", 1e-3]),
        ("callbacks: {speed_monitor: {window_size: 10}}", "callbacks.speed_monitor.window_size", 10),
        ("callbacks: {lr_monitor: false}", "callbacks", {}),
    ],
)
def test_values_mean_what_people_mean(load: Load, text: str, key: str, value: object) -> None:
    found: object = load(text)
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: on", "seed='on' (extra.yaml:1): expected a whole number."),
        ("seed: '5'", "seed='5' (extra.yaml:1): expected a whole number."),
        ("seed: 1.5", "seed=1.5 (extra.yaml:1): expected a whole number."),
        ("seed: 2k", "seed='2k' (extra.yaml:1): expected a whole number. Write 2e3."),
        ("seed: null", "seed=None (extra.yaml:1): expected a whole number."),
        ("seed: 010", "seed=010 (extra.yaml:1): a leading zero means octal. Write it without."),
        ("optim: {lr: fast}", "optim.lr='fast' (extra.yaml:1): expected a number."),
        ("optim: {lr: .nan}", "optim.lr=nan (extra.yaml:1): expected a number."),
        ("compute: {compile: on}", "compute.compile='on' (extra.yaml:1): expected true or false."),
        ("name: 5", "name=5 (extra.yaml:1): expected text."),
        (
            "compute: {device: cpuu}",
            "compute.device='cpuu' (extra.yaml:1): expected one of auto, cpu, cuda. Did you",
        ),
        ("optim: {betas: [0.9]}", "optim.betas=(0.9,) (extra.yaml:1): expected a list like [float, float]."),
        ("callbacks: 3", "callbacks=3 (extra.yaml:1): expected a section with one entry for each name."),
        ("callbacks: {lr_monitor: true}", "callbacks.lr_monitor=True (extra.yaml:1): expected a section with its"),
        ("phases: {my one: {tokens: 'a  b'}}", "phases.my one.tokens='a  b' (extra.yaml:1): expected a whole number."),
        ("\n\ncheckpoint: 3", "checkpoint=3 (extra.yaml:3): expected a section with keys interval_seconds,"),
        ("optim: null", "optim.name=None (extra.yaml:1): expected one of stable_adamw, adamw, muon, normuon."),
        ("seed: 1\nseed: 2", "seed (extra.yaml:2): given twice. Remove one of the two."),
        ("model:\n  num_heads: 2\n\n  num_heads: 4", "model.num_heads (extra.yaml:4): given twice."),
        ("- name: x", "extra.yaml: holds no keys. Expected `key: value` lines."),
        ("a: b: c", "extra.yaml: not valid YAML. mapping values are not allowed here (line 1, column 5). Close every"),
        ("a:\n\tb: 3", "extra.yaml: not valid YAML. found character '\\t' that"),
        ("? [a, b]\n: 3", "extra.yaml:1: a list or a section where a key is expected."),
        ("name: !!python/object/apply:os.getcwd []", "name (extra.yaml:1): not a plain value"),
        (
            "callbacks: {speed_monitr: {}}",
            "callbacks.speed_monitr (extra.yaml:1): unknown key. Did you mean callbacks.speed_monitor?",
        ),
        (
            "callbacks: {checkpoint_saver: {}}",
            "callbacks.checkpoint_saver (extra.yaml:1): cannot work here, the checkpoint: section writes and",
        ),
        (
            "loggers: {neptune: {api_token: abc}}",
            "loggers.neptune.api_token (extra.yaml:1): cannot work here, it would be saved with the run's c",
        ),
        # a misspelt key, with the known ones where none is like it
        ("model: {num_headz: 2}", "model.num_headz (extra.yaml:1): unknown key. Did you mean model.num_heads?"),
        (
            "checkpoint: {zzz: 1}",
            "checkpoint.zzz (extra.yaml:1): unknown key. Known here: interval_seconds, interval_steps, interval_tokens"
            ", milestones, keep, copy_to, copy_keep, copy_timeout_seconds.",
        ),
    ],
)
def test_a_mistake_in_a_file_is_answered_with_its_place_and_its_remedy(
    refused: Refused, text: str, message: str
) -> None:
    (line,) = refused(text)
    assert line.startswith(message)


def test_a_missing_and_an_unreadable_file_are_named_together(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError) as error:
        load_run([tmp_path / "absent.yaml", binary])
    first, second = str(error.value).splitlines()
    assert first.startswith(f"{tmp_path / 'absent.yaml'}: no such file.")
    assert second.startswith(f"{binary}: cannot be read")


def test_numbers_may_be_the_texts_of_a_name() -> None:
    """The years of a column are numbers in YAML, and texts in the data."""
    file = Path(__file__).parents[2] / "yamls/data/quickstart.yaml"
    spec = load_typed(PrepareConfig, [file], ["streams.values={old: [1999, true]}", "streams.scores={old: 1}"])
    assert spec.streams.values == {"old": ["1999", "true"]} and type(spec.streams.scores["old"]) is float
    with pytest.raises(ConfigError, match=r"plugins=\[1\] \(command line\): expected a list of texts"):
        load_typed(RunConfig, [], ["plugins=[1]"])


def test_every_missing_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("phases: {a: {tokens: 5, batch_warmup: {tokens: 3}}}", encoding="utf-8")
    with pytest.raises(WrongKeys) as error:
        load_run([file])
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "data.tokenizer",
        "name",
        "optim.lr",
        "phases.a.batch_rows",
        "phases.a.batch_warmup.start_rows",
        "phases.a.batch_warmup.step_rows",
        "phases.a.row_tokens",
    ]
    assert error.value.rest.name == "1" and error.value.rest.optim.lr == 1.0, "of the right types, to look further"
    assert lines[2] == "optim.lr: missing. It has no default; set it in the YAML or as optim.lr=..."


def test_later_files_win_and_overrides_win_over_them(load: Load) -> None:
    assert load("seed: 3\noptim: {lr: 2e-3}").seed == 3
    config = load(
        "seed: 3\noptim: {lr: 2e-3, eps: 1e-7}", "seed=4", "optim.eps=1e-8", "phases.decay.tokens=1e3", "seed=5"
    )
    assert (config.seed, config.optim.lr, config.optim.eps) == (5, 2e-3, 1e-8)
    assert config.phases["decay"].tokens == 1000 and config.phases["stable"].tokens == 1_000_000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "'seed': not an override. Write section.key=value, for example optim.lr=1e-3."),
        ("name=caf\udce9", r"'name=caf\udce9': not UTF-8, which YAML and JSON need. Rename the folder"),
        ("optim.betas=[0.9", "'optim.betas=[0.9': the value is not valid YAML. while parsing a flow sequence (line"),
        ("seed=010", "seed=010 (command line): a leading zero means octal. Write it without."),
        ("optim={lr: 1, lr: 2}", "optim.lr (command line): given twice."),
        ("optim.betaz=1", "optim.betaz (command line): unknown key. Did you mean optim.betas?"),
        *((f"{key}=1", f"{key} (command line): unknown key. {answer}") for key, answer in OTHERS.items()),
        *(
            (f"{key}={word}", f"{key}='{word}' (command line): expected one of {known}. Here it is {own}.")
            for key, word, known, own in (
                ("compute.device", "gpu", "auto, cpu, cuda", "cuda"),
                ("compute.precision", "bfloat16", "auto, fp32, bf16", "bf16"),
                ("distributed.strategy", "fsdp", "ddp, fsdp2, hsdp", "fsdp2"),
            )
        ),
    ],
)
def test_an_override_is_held_to_the_same_rules(refused: Refused, override: str, message: str) -> None:
    (line,) = refused("", override)
    assert line.startswith(message)


def test_the_name_of_a_variant_chooses_its_defaults_once_everything_is_merged(load: Load) -> None:
    assert load("", "optim.name=adamw").optim == AdamWConfig(lr=1e-3, weight_decay=0.01)
    assert load("optim: {name: adamw, weight_decay: 0.1}", "optim.name=stable_adamw").optim == StableAdamWConfig(
        lr=1e-3, weight_decay=0.1
    )


def test_a_phase_is_removed_with_null_and_an_optional_section_too(load: Load) -> None:
    text = "phases: {stable: null, decay: {batch_warmup: {start_rows: 1, step_rows: 1, tokens: 9}}}"
    config = load(text)
    assert list(config.phases) == ["decay"] and config.phases["decay"].batch_warmup is not None
    assert load(text, "phases.decay.batch_warmup=null").phases["decay"].batch_warmup is None


@pytest.mark.runs
def test_interpolations_stand_for_other_keys_and_keep_types_checked(load: Load, refused: Refused) -> None:
    config = load(
        "phases: {decay: {schedule: {decay_tokens: '${phases.decay.tokens}'}}}\nloggers: {wandb: {tags: ['${name}']}}",
        "runs_folder=out/${name}",
        "optim.eps=${seed}",
        "checkpoint.copy_to=${seed}",
    )
    assert config.phases["decay"].schedule.decay_tokens == 500_000
    assert (config.runs_folder, config.loggers["wandb"]["tags"]) == ("out/base", ["base"])
    assert config.optim.eps == 17.0 and type(config.optim.eps) is float
    assert config.checkpoint.copy_to == "17"
    for text in ("seed: ${name}", "seed: ${no.such}", "seed: ${seed}", "compute: {device: '${name}'}", "name: ${data}"):
        (line,) = refused(text)
        assert line.startswith("an interpolation cannot be resolved: ") and text.split(":")[0] in line
    (line,) = refused("seed: ${no.such}")
    assert line.endswith(r"Name a key that has a value, or write \${ for text with ${.")
    config = load(
        "name: a", r"runs_folder=x\${no.such}", r"data.train=${name}\${no.such}", r"data.validation=\${oc.env:HOME}"
    )
    assert (config.runs_folder, config.data.train) == ("x${no.such}", "a${no.such}")
    assert config.data.validation == "${oc.env:HOME}"


@pytest.mark.parametrize(
    "override",
    [
        "data.train=${oc.env:TRAINING_SECRET}",
        "data.train=${oc.${compute.attention}:TRAINING_SECRET}",
        "seed=${oc.env:TRAINING_SECRET}",
        "loggers.wandb.init_kwargs={settings: {x: '${oc.env:TRAINING_SECRET}'}}",
        "name={a: '${oc.env:TRAINING_SECRET}'}",
    ],
)
def test_no_secret_of_the_environment_reaches_the_configuration(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("TRAINING_SECRET", "hunter2")
    (line,) = refused("", override)
    assert "hunter2" not in line and line.startswith(override.split("=")[0]) and "expected" in line


@pytest.mark.parametrize(
    "override",
    [
        "loggers.wandb={init_kwargs: {api_key: hunter2hunter}}",
        "loggers.wandb.init_kwargs={settings: {api_key: hunter2hunter}}",
        "loggers.wandb.init_kwargs={settings: [{password: hunter2hunter}]}",
    ],
)
def test_a_secret_below_a_key_is_refused_however_deep(refused: Refused, override: str) -> None:
    """It would be in config.yaml, in every checkpoint and in the report, which are copied and published."""
    (line,) = refused("", override)
    assert "hunter2" not in line and line.startswith("loggers.wandb") and "init_kwargs" in line
    assert "looks like a key" in line


@pytest.mark.runs
def test_the_resolved_configuration_is_a_runnable_yaml_that_loads_to_itself(load: Load, tmp_path: Path) -> None:
    config = load(
        "name: '1e3'\ndata: {validation: on, num_workers: 0}\noptim: {name: adamw, betas: [0.8, 0.9], eps: 1e-12}\n"
        "phases: {stable: {batch_warmup: {start_rows: 2, step_rows: 2, tokens: 1e4}, objective: {mask_rate: 0.2}}}\n"
        "loggers: {wandb: {tags: ['true', '010']}}\ncallbacks: {lr_monitor: {}}\n"
        "eval: {max_tokens: null}\nruns_folder: ${name}/x\n"
    )
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    again = load_run([file])
    assert again == config and type(again.optim) is AdamWConfig
    assert differences(config, again) == []
    assert load_run([file], ["phases.decay=null"]).total_tokens == 1_000_000


@pytest.mark.runs
@example(text="${seed}", number=1.0, whole=1)
@example(text="\\${oc.env:HOME}", number=1.0, whole=1)
@settings(max_examples=6, deadline=None)
@given(
    text=st.lists(st.sampled_from(["${", "}", "\\", "seed", "oc.env:", "'"]) | st.characters(exclude_categories=["Cs"]))
    .map("".join)
    .filter(lambda text: text != "???"),
    number=st.floats(allow_nan=False, allow_infinity=False),
    whole=st.integers(-(10**12), 10**12),
)
def test_any_text_and_number_survives_the_saved_configuration(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, whole: int
) -> None:
    file = tmp_path_factory.mktemp("saved") / "config.yaml"
    file.write_text(BASE, encoding="utf-8")
    config = load_run([file], [f"optim.lr={number!r}", f"seed={whole}"])
    config = RunConfig(**{**vars(config), "name": text})
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load_run([file]) == config


def test_differences_name_keys_with_both_values(load: Load) -> None:
    old = load()
    long = "phases.long={tokens: 5, row_tokens: 64, batch_rows: 4, microbatch_tokens: 64}"
    own = "phases.stable.objective.mask_rate=0.1"
    new = load("", "seed=18", "optim.name=adamw", "phases.decay=null", long, own)
    found = {key: (a, b) for key, a, b in differences(old, new)}
    assert found["seed"] == (17, 18)
    assert found["optim.name"] == ("stable_adamw", "adamw") and found["optim.weight_decay"] == (1e-5, 0.01)
    assert found["phases.decay.tokens"] == (500_000, None) and found["phases.long.tokens"] == (None, 5)
    assert found["phases.stable.objective.mask_rate"] == (None, 0.1)
    assert {key.split(".")[0] for key in found} == {"seed", "optim", "phases"}
    assert differences(old, old) == []


def test_included_files_come_first_and_the_file_itself_wins(tmp_path: Path) -> None:
    """A recipe's phases are written once: each file is a run, and included in order they are one."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "common.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "parts/one.yaml").write_text("include: ../common.yaml\nname: one\noptim: {lr: 2.0e-3}\n")
    (tmp_path / "parts/two.yaml").write_text("include: [../common.yaml]\nname: two\nphases: {decay: {tokens: 7_000}}\n")
    (tmp_path / "all.yaml").write_text("include: [parts/one.yaml, parts/two.yaml]\nname: all\n")
    assert load_run([tmp_path / "parts/one.yaml"]).optim.lr == 2e-3
    everything = load_run([tmp_path / "all.yaml"], ["seed=3"])
    assert (everything.name, everything.seed, everything.phases["decay"].tokens) == ("all", 3, 7_000)
    assert everything.optim.lr == 2e-3, "common.yaml is merged once, at its first place, and undoes no later value"


def test_the_paths_of_the_help_work_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Says) -> None:
    """A user of a wheel lacks yamls/, which examples of the help and the `run:` of sweeps name."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "yamls/quickstart.yaml", "--gpu", "h100"]) == 0
    assert "yamls/quickstar.yaml: no such file" in says("plan", "yamls/quickstar.yaml", code=78)
    assert load_run(["yamls/recipes/ettin-17m.yaml"]).name == "ettin-17m", "its include is the installed one's"
    (tmp_path / "yamls").mkdir()
    (tmp_path / "yamls/quickstart.yaml").write_text(BASE.replace("name: base", "name: mine"), encoding="utf-8")
    assert load_run(["yamls/quickstart.yaml"]).name == "mine", "a file here is taken first"


def test_a_bad_include_is_reported_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: [b.yaml, gone.yaml]\nnme: x\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    (tmp_path / "c.yaml").write_text("seed: 1\ninclude: {a: b}\n")
    with pytest.raises(ConfigError) as error:
        load_run([tmp_path / "a.yaml", tmp_path / "c.yaml"])
    text = str(error.value).replace(f"{tmp_path}/", "")
    assert "b.yaml:1: a.yaml includes itself, by way of b.yaml" in text
    assert "gone.yaml: no such file" in text
    assert "include={'a': 'b'} (c.yaml:2): expected a list of YAML files" in text
    assert "nme (a.yaml:2): unknown key. Did you mean name?" in text


def test_every_key_that_is_answered_with_exists() -> None:
    """An answer that names a removed key would send its reader in a circle."""
    sections = {field.name: type(getattr(RunConfig(), field.name)) for field in fields(RunConfig)}
    sections["optim"] = AdamWConfig  # the optimizer with all keys that others share
    for word in SYNONYMS.values():
        for key in re.findall(r"\b[a-z_]+\.[a-zA-Z_.]+[a-z]\b", word.replace("docs/stability.md", "")):
            section, *rest = key.split(".")
            if section == "phases":
                assert rest[1] in {field.name for field in fields(PhaseConfig)}, key
            elif section != "loggers":
                assert rest[0] in {field.name for field in fields(sections[section])}, key
