"""Composer in a file of the user's own: a callback, a test or a notebook that imports it before anything of ours."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from modernbert_train import import_stubs
from tests.support.paths import ROOT
from tests.support.tiny_run import TinyRun


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages with the file that install.sh writes into the environment's."""
    folder = tmp_path / "packages"
    folder.mkdir()
    assert import_stubs.write_hook(folder).parent == folder
    return folder


def run(packages: Path, code: str, *, project: bool = True, alone: bool = False) -> subprocess.CompletedProcess[str]:
    """A program of an environment with these packages; alone: with none of those that are installed here."""
    start = f"import site, sys; sys.path.insert(0, {str(packages)!r}); site.addsitedir({str(packages)!r})\n"
    own = [f"sys.path.insert(0, {str(ROOT)!r})"] if project else ["sys.modules['modernbert_train'] = None"]
    program = "\n".join(["import sys", *own, start, code])
    return subprocess.run(
        [sys.executable, *(["-S"] if alone else []), "-c", program],
        cwd=packages, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def printed(packages: Path, code: str, *, alone: bool = False) -> str:
    """Return the output of such a program, which must end well."""
    done = run(packages, code, alone=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def put(packages: Path, version: str, *names: str) -> None:
    """Write empty packages of a version."""
    for name in names:
        (packages / name).mkdir(parents=True, exist_ok=True)
        (packages / name / "__init__.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")


def put_torchvision(packages: Path) -> None:
    """Write a release of torchvision with the names that Composer imports."""
    for module, names in import_stubs._STUBS["torchvision"].items():
        folder = module.replace(".", "/")
        put(packages, "9.9", folder)
        with (packages / folder / "__init__.py").open("a") as file:
            file.writelines(f"class {name}: real = True\n" for name in names)


CALLBACK = """\
from composer import Callback, Logger, State, Trainer
import streaming

class Mine(Callback):
    def batch_end(self, state, logger):
        pass

print(Mine.__base__.__name__, Trainer.__name__, streaming.StreamingDataset.__name__)
assert "scipy" not in sys.modules
"""


@pytest.mark.runs
def test_the_real_torchvision_wins(packages: Path) -> None:
    """A user who installs a fitting release wants it used."""
    put_torchvision(packages)
    put(packages, "0", "composer")
    composer = packages / "composer/__init__.py"
    composer.write_text("from torchvision.datasets import VisionDataset", encoding="utf-8")
    code = "import composer; print(composer.__file__, composer.VisionDataset.real)"
    assert printed(packages, code) == f"{composer} True\n"


@pytest.mark.runs
def test_nothing_is_imported_or_found_before_composer_is(packages: Path) -> None:
    """Every program of the environment reads the file; transformers would look for missing names in a stub."""
    code = """\
from importlib.util import find_spec
assert find_spec("composer") is not None
print(find_spec("torchvision") is None, *sorted({"torch", "torchmetrics", "composer"} & set(sys.modules)))
"""
    assert printed(packages, code) == f"{PathFinder.find_spec('torchvision') is None}\n"


@pytest.fixture
def bundle(packages: Path) -> str:
    """Code for a program in a wheel's environment: the bundled libraries, and a torchvision."""
    put(packages, "0.32.1", "bundled/composer")
    put(packages, "0.13.0", "bundled/streaming")
    put_torchvision(packages)
    versions = '{"mosaicml": "0.32.1", "mosaicml-streaming": "0.13.0"}'
    (packages / "bundled/versions.json").write_text(versions, encoding="utf-8")
    return (
        "from pathlib import Path\nfrom modernbert_train.core import installed\n"
        f"installed.BUNDLED = Path({str(packages)!r}, 'bundled')\n"
    )


def put_other_release(packages: Path) -> None:
    put(packages, "0.30.0", "composer", "streaming")
    for package in ("mosaicml", "mosaicml_streaming"):
        record = packages / f"{package}-0.30.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Name: {package}\nVersion: 0.30.0\n", encoding="utf-8")


VERSIONS = "import composer, streaming\nprint(composer.__version__, streaming.__version__)"


@pytest.mark.runs
def test_a_wheel_brings_both_to_any_program_where_there_are_none(packages: Path, bundle: str) -> None:
    """A callback of the user's own says `import composer`, and knows nothing of us."""
    assert printed(packages, bundle + VERSIONS, alone=True) == "0.32.1 0.13.0\n"


@pytest.mark.runs
def test_other_releases_are_those_of_other_programs_and_ours_gets_its_own(packages: Path, bundle: str) -> None:
    put_other_release(packages)
    assert printed(packages, bundle + VERSIONS, alone=True) == "0.30.0 0.30.0\n"
    ours = f"{bundle}import modernbert_train.train\n{VERSIONS}"
    assert printed(packages, ours, alone=True) == "0.32.1 0.13.0\n"


@pytest.mark.runs
def test_another_release_that_is_imported_already_is_refused_in_one_line(packages: Path, bundle: str) -> None:
    put_other_release(packages)
    done = run(packages, bundle + "import composer, modernbert_train.train", alone=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode and "composer: imported from" in last and "release 0.32.1 alone" in last


@pytest.mark.runs
def test_without_the_project_the_file_is_silent(packages: Path) -> None:
    """It outlives an uninstall, and must not print at every start of Python."""
    done = run(packages, "print('here')", project=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "here\n", "")


def test_the_command_writes_it_beside_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(import_stubs.sysconfig, "get_path", lambda name: str(tmp_path) if name == "purelib" else None)
    monkeypatch.setattr(sys, "argv", ["compat", "--environment"])
    import_stubs._main()
    [file] = tmp_path.iterdir()
    assert file.suffix == ".pth" and len(file.read_text(encoding="utf-8").splitlines()) == 1


# imported by Composer, Streaming and torchmetrics if installed, and unused by a run
UNUSED = (
    "transformers", "tokenizers", "huggingface_hub", "sklearn", "scipy.stats", "scipy.sparse", "scipy.special",
    "pandas", "pyarrow", "datasets", "matplotlib", "wandb", "mlflow", "tensorboard", "boto3", "google.cloud",
    "azure.storage", "peft", "onnx", "rich", "optuna",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_imports_nothing_heavy_that_it_does_not_use(tiny_run: TinyRun) -> None:
    """They are half of the time until the first step. torch itself imports sympy and torch._dynamo. And a line is
    printed before torch: loading it takes ten seconds or more, and a silent terminal looks like a hang."""
    words = tiny_run("phases.long=null", "phases.short={tokens: 500, batch_warmup: null}", "data.validation=null")
    code = f"""\
import builtins, sys
real = builtins.__import__
def look(name, *rest, **more):
    if name == "torch" and "torch" not in sys.modules:
        print("TORCH", flush=True)
    return real(name, *rest, **more)
builtins.__import__ = look
from modernbert_train.__main__ import main
code = main(["train", *{words!r}])
print(code, *[name for name in {UNUSED!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    lines = done.stdout.splitlines()
    assert lines[-1] == "0", done.stdout + done.stderr
    assert lines[:3] == [
        "checking the configuration, the data and the run's folder ...", "loading torch and Composer ...", "TORCH",
    ]  # fmt: skip


AFTERWARDS = """\
import composer.algorithms, streaming, torchmetrics
from composer.algorithms.gated_linear_units import apply_gated_linear_units
from streaming.base.dataloader import BatchEncoding
from streaming.text.c4 import AutoTokenizer
from torchmetrics.functional.text import bert_score
from torchmetrics.multimodal import CLIPScore
from torchmetrics.text import BERTScore, InfoLM

assert "transformers" not in sys.modules
assert not isinstance({}, BatchEncoding)
assert "transformers" not in sys.modules

import torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers

assert transformers.__file__ and isinstance(transformers.AutoModel, type)
assert isinstance(transformers.BatchEncoding({}), (list, BatchEncoding)) and not isinstance({}, BatchEncoding)

words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "one": 5, "two": 6}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("tiny")
config = transformers.BertConfig(
    vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
transformers.BertModel(config).save_pretrained("tiny")

assert AutoTokenizer.from_pretrained("tiny").vocab_size == 7
score = bert_score(["one two two one"], ["one two two one"], model_name_or_path="tiny", num_layers=1, max_length=8)
assert abs(float(score["f1"]) - 1) < 1e-4, score
model = transformers.BertForMaskedLM(config)
apply_gated_linear_units(model, torch.optim.SGD(model.parameters(), lr=0.1))
assert "BERTGatedFFOutput" in str(model)
print("all there")
"""


@pytest.mark.slow
@pytest.mark.parametrize("afterwards", ["print('all there')", AFTERWARDS])
def test_a_users_callback_can_be_written_and_what_was_left_for_later_is_all_there(
    packages: Path, afterwards: str
) -> None:
    """Otherwise Composer is unusable in a user's files: torchvision is absent, and its import needs one. SciPy is
    delayed, since torchmetrics imports its signal processing: a second of every start, unused. A user's own metric or
    callback may use transformers itself, or through torchmetrics and Composer."""
    lines = printed(packages, CALLBACK + afterwards).splitlines()
    assert (lines[0], lines[-1]) == ("Callback Trainer StreamingDataset", "all there")


@pytest.mark.runs
def test_a_loaded_transformers_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's program that has imported it continues with the real one; otherwise a stub replaces it."""

    def stands_in() -> bool:
        finders = list(sys.meta_path)
        with import_stubs.imported_later():
            try:
                some = importlib.import_module("transformers.some.where")
            except ModuleNotFoundError:
                return False
            assert type(some.Thing) is import_stubs._Later and "transformers.some" in sys.modules
        assert sys.meta_path == finders and not [name for name in sys.modules if name.startswith("transformers.some")]
        return True

    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert stands_in()
    monkeypatch.setitem(sys.modules, "transformers", sys)
    assert not stands_in()


@pytest.mark.slow
def test_scipy_does_not_wait_where_transformers_is_there(packages: Path) -> None:
    """Then torchmetrics' imports from it are real, and import scikit-learn if that is installed."""
    code = "import transformers, composer\nprint(transformers.AutoModel.__name__)"
    assert printed(packages, code).splitlines()[-1] == "AutoModel"
