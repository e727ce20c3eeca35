"""Code in a checkpoint does not run, wherever transformers can find it: without a prompt to the user or a download."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.test_tokenizer import write

# Leaves its name in the file MARKER; stands for whatever a class of that name would do.
EVIL = """
from pathlib import Path
with Path({marker!r}).open("a") as file:
    file.write({place!r} + "\\n")
from transformers import PreTrainedConfig as EvilConfig, PreTrainedModel as EvilModel
from transformers import PreTrainedTokenizerFast as EvilTokenizer, ProcessorMixin as EvilProcessor
def generate(*args, **kwargs): pass
"""
CODE = "evil_code.EvilTokenizer"
AUTO = {
    "AutoConfig": "evil_code.EvilConfig",
    "AutoModel": "evil_code.EvilModel",
    "AutoModelForCausalLM": "evil_code.EvilModel",
    "AutoProcessor": "evil_code.EvilProcessor",
    "AutoTokenizer": [CODE, CODE],
}


class Pickled:
    def __init__(self, marker: Path, place: str) -> None:
        self.call = f"open({str(marker)!r}, 'a').write({place + chr(10)!r})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, (self.call,)


def edit(file: Path, **changes: object) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | changes))


def in_the_tokenizer(path: Path) -> None:
    edit(
        path / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, CODE]},
        tokenizer_class="EvilTokenizer",
    )


def in_the_tokenizer_the_old_way(path: Path) -> None:
    edit(path / "tokenizer_config.json", auto_map=[CODE, None], tokenizer_class="EvilTokenizer")


def in_the_tokenizer_of_another_repository(path: Path) -> None:
    edit(path / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, f"some/repository--{CODE}"]})


def in_a_tokenizer_without_tokenizer_json(path: Path) -> None:
    in_the_tokenizer(path)
    (path / "tokenizer.json").rename(path / "tiktoken.model")


def in_the_config(path: Path) -> None:
    edit(path / "config.json", auto_map=AUTO, tokenizer_class="EvilTokenizer")


def in_the_config_of_an_unknown_model(path: Path) -> None:
    edit(path / "config.json", auto_map=AUTO, model_type="evil")
    (path / "tokenizer_config.json").unlink()


def in_the_generation_config(path: Path) -> None:
    edit(path / "generation_config.json", auto_map=AUTO, custom_generate=str(path), eos_token_id=1)
    (path / "custom_generate").mkdir()
    shutil.copy(path / "evil_code.py", path / "custom_generate" / "generate.py")


def in_a_processor(path: Path) -> None:
    edit(path / "tokenizer_config.json", tokenizer_class="AutoProcessor", processor_class="EvilProcessor")
    for name in ("processor_config.json", "preprocessor_config.json"):
        edit(path / name, auto_map=AUTO, processor_class="EvilProcessor")


def in_a_class_without_auto_map(path: Path) -> None:
    edit(path / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    for name in (
        "tokenization_evil.py",
        "modeling_deepseek.py",
        "configuration_deepseek.py",
        "__init__.py",
        "setup.py",
    ):
        shutil.copy(path / "evil_code.py", path / name)


def in_pickles(path: Path) -> None:
    content = pickle.dumps(Pickled(path.parent / "marker", path.name))
    for name in ("pytorch_model.bin", "model.pt", "adapter_model.bin", "training_args.bin", "tokenizer.pkl"):
        (path / name).write_bytes(content)
    edit(path / "adapter_config.json", auto_mapping=AUTO, base_model_name_or_path=str(path), peft_type="LORA")


def in_pickles_alone(path: Path) -> None:
    in_pickles(path)
    for file in path.glob("*.safetensors*"):
        file.unlink()


def in_a_chat_template(path: Path) -> None:
    marker = path.parent / "marker"
    code = f"{{{{ cycler.__init__.__globals__.os.system('echo {path.name} >> {marker}') }}}}"
    (path / "chat_template.jinja").write_text(code)


# With what it is refused; None where it loads and the code is passed over.
PLACES = {
    in_the_tokenizer: "tokenizer_config.json: auto_map: expected a tokenizer that is not code",
    in_the_tokenizer_the_old_way: "tokenizer_config.json: auto_map: expected a tokenizer that is not code",
    in_the_tokenizer_of_another_repository: "tokenizer_config.json: auto_map: expected a tokenizer that is not code",
    in_a_tokenizer_without_tokenizer_json: "tokenizer_config.json: auto_map: expected a tokenizer that is not code",
    in_the_config: None,
    in_the_config_of_an_unknown_model: "config.json: model_type: expected one of deepseek_v2",
    in_the_generation_config: None,
    in_a_processor: None,
    in_a_class_without_auto_map: None,
    in_pickles: None,
    in_pickles_alone: "expected at least one .safetensors file, got none",
    in_a_chat_template: None,
}

# Loads every directory in the one given to it, then shows that the traps work; what happened goes to stderr.
LOADER = """
import json, pickle, sys
from functools import partial
from pathlib import Path
root = Path(sys.argv[1])
marker = root / "marker"

def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "os.system", "subprocess.Popen"):
        with marker.open("a") as file:
            file.write(event + "\\\\n")

import transformers
from mla_compile import MLAError, load_tokenizer
from mla_compile.engine import Checkpoint
sys.addaudithook(note)
errors = {}
for path in sorted(root.iterdir()):
    errors[path.name] = None
    for load in (load_tokenizer, partial(Checkpoint.load, text=False)):
        try:
            load(path)
        except MLAError as error:
            errors[path.name] = str(error)
report = {"errors": errors, "ran": marker.exists() and marker.read_text(), "stdin": sys.stdin.read()}
transformers.AutoTokenizer.from_pretrained(root / "in_the_tokenizer", trust_remote_code=True)
pickle.loads((root / "in_pickles" / "model.pt").read_bytes())
report["traps"] = marker.read_text().split()
print(json.dumps(report), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def report(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("evil")
    for plant in PLACES:
        path = shutil.copytree(checkpoint, root / plant.__name__)
        write(path, {"eos_token": "<end>"})
        (path / "evil_code.py").write_text(EVIL.format(marker=str(root / "marker"), place=plant.__name__))
        plant(path)
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(root)],
        input="y\n" * 9, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stderr.splitlines()[-1]) | {"stdout": done.stdout}


def test_nothing_of_a_checkpoint_runs(report):
    assert not report["ran"]
    assert report["traps"] == ["in_the_tokenizer", "in_pickles"], (
        "the code that was planted does run where it may"
    )


def test_nobody_is_asked(report):
    assert report["stdin"] == "y\n" * 9
    assert report["stdout"] == ""


@pytest.mark.parametrize("plant", PLACES, ids=lambda plant: plant.__name__)
def test_code_that_is_needed_is_refused_by_name_and_other_code_passed_over(report, plant):
    error = report["errors"][plant.__name__]
    assert (error is None) == (PLACES[plant] is None)
    if error is not None:
        assert PLACES[plant] in error
