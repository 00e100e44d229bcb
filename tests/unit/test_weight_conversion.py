"""Conversion of whole checkpoints: round trips, bad input, failed writes, the command lines and their exit codes."""

from __future__ import annotations

import json
import resource
import runpy
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, SIZES, write_checkpoint
from torch import Tensor
from transformers import Qwen2Config

from megatron_calclip.convert import conversion
from megatron_calclip.convert.checkpoints import open_checkpoint, open_hf
from megatron_calclip.convert.conversion import hf_to_megatron, megatron_to_hf
from megatron_calclip.convert.verification import first_difference, quick_sample
from megatron_calclip.errors import UserError
from megatron_calclip.weights.dist_load import DistCheckpoint, hf_source
from megatron_calclip.weights.dist_save import ShardLayout, write_dist_checkpoint
from megatron_calclip.weights.load import INDEX_FILE, HFSource
from megatron_calclip.weights.mapping import ModelShape, hf_shapes

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "convert"
MODEL = "model.safetensors"
SHARD_BYTES = 20_000


def silent(source: HFSource, _: str) -> HFSource:
    return source


def to_megatron(hf: Path, target: Path, **arguments: Any) -> Path:
    hf_to_megatron(hf, target, **{"layout": ShardLayout(), "progress": silent} | arguments)
    return target


def to_hf(megatron: Path, target: Path, **arguments: Any) -> Path:
    megatron_to_hf(megatron, target, **{"max_shard_bytes": SHARD_BYTES, "progress": silent} | arguments)
    return target


def tool(name: str, *arguments: object) -> int:
    """Run a script as the shell would; returns its exit code."""
    previous, sys.argv = sys.argv, [name, *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOLS / name), run_name="__main__")
        return int(ended.value.code or 0)
    finally:
        sys.argv = previous


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    result = {}
    for name, config in CONFIGS.items():
        result[name] = write_checkpoint(config, tmp_path_factory.mktemp(name))
        (result[name] / "tokenizer.json").write_text("{}")
    return result


@pytest.fixture
def hf(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of one checkpoint, to be damaged."""
    return Path(shutil.copytree(folders["qwen2"], tmp_path / "hf"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    layout = ShardLayout(tp=2, pp=2, ep=2 if name == "qwen3_moe" else 1)
    megatron = to_megatron(folders[name], tmp_path / "megatron", layout=layout, verify="full")
    again = to_hf(megatron, tmp_path / "hf", verify="full")
    original = load_file(folders[name] / MODEL)
    source = HFSource.from_folder(again)
    assert source.specs.keys() == original.keys()
    assert all(torch.equal(source.read(key), value) for key, value in original.items())
    assert (again / INDEX_FILE).is_file() and (again / "tokenizer.json").read_text() == "{}"
    config = json.loads((again / "config.json").read_text())
    assert config == json.loads((folders[name] / "config.json").read_text())
    assert names(tmp_path) == ["hf", "megatron"]  # nothing aside


def test_types_are_set_on_the_way(folders: dict[str, Path], tmp_path: Path) -> None:
    megatron = to_megatron(folders["qwen3"], tmp_path / "megatron", dtype=torch.bfloat16)
    original = load_file(folders["qwen3"] / MODEL)
    again = HFSource.from_folder(to_hf(megatron, tmp_path / "hf"))
    assert all(torch.equal(value, original[key].bfloat16()) for key, value in again.stream())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    half = HFSource.from_folder(to_hf(megatron, tmp_path / "half", dtype=torch.float16))
    assert all(torch.equal(value, original[key].bfloat16().half()) for key, value in half.stream())


def test_fp8_round_trip_through_megatron(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 1, "num_key_value_heads": 1}
    hf = write_checkpoint(Qwen2Config(**sizes), tmp_path / "plain", dtype=torch.bfloat16)
    megatron = to_megatron(hf, tmp_path / "one")
    fp8 = to_hf(megatron, tmp_path / "fp8", fp8_power_of_two=True, verify="full")
    assert json.loads((fp8 / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    imported = to_megatron(fp8, tmp_path / "two", layout=ShardLayout(pp=2), verify="full")
    plain, quantized = open_checkpoint(megatron).source, open_checkpoint(imported).source
    name = "model.layers.0.mlp.up_proj.weight"
    error = (plain.read(name).float() - quantized.read(name).float()).abs()
    assert 0 < float(error.max()) <= float(plain.read(name).float().abs().max()) / 16
    # Values of codes are exact in BF16: exported once more, the files are the same.
    again = to_hf(imported, tmp_path / "fp8_again", fp8_power_of_two=True)
    assert (again / INDEX_FILE).read_text() == (fp8 / INDEX_FILE).read_text()
    for path in fp8.glob("*.safetensors"):
        assert path.read_bytes() == (again / path.name).read_bytes()


def _damage(hf: Path, fault: str) -> None:
    tensors = load_file(hf / MODEL)
    key = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[key]
    elif fault == "extra":
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors[key].clone()
    elif fault == "shape":
        tensors[key] = tensors[key][1:].clone()
    save_file(tensors, hf / MODEL)
    if fault == "truncated":
        (hf / MODEL).write_bytes((hf / MODEL).read_bytes()[:-100])
    elif fault == "pickled":
        (hf / MODEL).rename(hf / "pytorch_model.bin")
    elif fault == "config":
        (hf / "config.json").write_text("{")
    elif fault == "architecture":
        (hf / "config.json").write_text('{"model_type": "gpt2"}')


FAULTS = {
    "missing": "tensor 'model.layers.1.mlp.up_proj.weight' is missing",
    "extra": "tensor 'model.layers.9.mlp.up_proj.weight' is not part of this qwen2 model",
    "shape": "has shape [47, 32], but the configuration says [48, 32]",
    "truncated": "model.safetensors: is cut short or no safetensors file",
    "pickled": "has pickled weights only",
    "config": "config.json: cannot be read",
    "architecture": "model_type 'gpt2' is not supported",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input(fault: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _damage(hf, fault)
    assert tool("hf_to_megatron.py", "--hf-model", hf, "--megatron-path", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and FAULTS[fault] in error
    assert names(tmp_path) == ["hf"]


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this size inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [5_000, 60_000])
def test_full_disk(num_bytes: int, folders: dict[str, Path], tmp_path: Path) -> None:
    with (
        full_disk(num_bytes),
        pytest.raises(UserError, match=r"megatron: cannot be written \(.*File too large") as caught,
    ):
        to_megatron(folders["qwen2"], tmp_path / "megatron")
    assert caught.value.exit_code == 1 and names(tmp_path) == []
    to_megatron(folders["qwen2"], tmp_path / "megatron")
    with full_disk(num_bytes), pytest.raises(UserError, match=r"hf: cannot be written \(.*File too large"):
        to_hf(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=10**9)
    assert names(tmp_path) == ["megatron"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interruption_keeps_what_was_there(
    error: type[BaseException], folders: dict[str, Path], tmp_path: Path
) -> None:
    megatron = to_megatron(folders["qwen2"], tmp_path / "megatron")
    hf = to_hf(megatron, tmp_path / "hf")

    def interrupted(source: HFSource, _: str) -> HFSource:
        def read(name: str) -> Tensor:
            if "layers.2" in name:
                raise error
            return source.read(name)

        return HFSource(source.where, specs=source.specs, read=read)

    with pytest.raises(error):
        to_megatron(folders["llama"], megatron, overwrite=True, progress=interrupted)
    with pytest.raises(error):
        to_hf(megatron, hf, overwrite=True, progress=interrupted)
    assert names(tmp_path) == ["hf", "megatron"]
    assert open_checkpoint(megatron).shape.model_type == "qwen2" and open_checkpoint(hf).shape.model_type == "qwen2"


def test_names_that_are_taken(folders: dict[str, Path], tmp_path: Path) -> None:
    megatron = to_megatron(folders["qwen2"], tmp_path / "megatron")
    with pytest.raises(UserError, match=r"exists already; .*--overwrite"):
        to_megatron(folders["qwen3"], megatron)
    to_megatron(folders["qwen3"], megatron, overwrite=True)
    assert open_checkpoint(megatron).shape.model_type == "qwen3"
    for taken in (folders["qwen2"], megatron):  # never replace what is no HF checkpoint, or no Megatron one
        convert = to_megatron if taken == folders["qwen2"] else to_hf
        source = folders["qwen3"] if convert is to_megatron else megatron
        with pytest.raises(UserError, match="exists and is no"):
            convert(source, taken, overwrite=True)


@pytest.mark.parametrize("verify", ["quick", "full"])
def test_verification_finds_a_wrong_conversion(
    verify: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = conversion.write_dist_checkpoint
    wrong = "model.layers.0.mlp.up_proj.weight" if verify == "quick" else "model.layers.1.mlp.up_proj.weight"

    def careless(source: HFSource, *arguments: Any, **options: Any) -> None:
        def read(name: str) -> Tensor:
            value = source.read(name).clone()
            if name == wrong:
                value[3, 5] += 0.5
            return value

        honest(HFSource(source.where, specs=source.specs, read=read), *arguments, **options)

    monkeypatch.setattr(conversion, "write_dist_checkpoint", careless)
    with pytest.raises(UserError, match=rf"{wrong} \[48, 32\] float32 differs: 1 of 1536 values, first at \[3, 5\]"):
        to_megatron(folders["qwen2"], tmp_path / "megatron", verify=verify)
    assert names(tmp_path) == []
    to_megatron(folders["qwen2"], tmp_path / "megatron", verify="none")


def test_first_difference() -> None:
    good = HFSource.from_tensors({"a": torch.tensor([0.0, torch.nan]), "b": torch.ones(3)})

    def against(**tensors: Tensor) -> str | None:
        return first_difference(good.stream(), good.specs, HFSource.from_tensors(tensors))

    a, b = torch.tensor([0.0, torch.nan]), torch.ones(3)
    assert against(a=a, b=b) is None  # a NaN of the same bits is the same
    assert "a [2] float32 differs: 1 of 2 values, first at [0]: -0 instead of 0" in str(against(a=a * -1.0, b=b))
    assert against(a=a) == "1 tensors are missing and 0 too many, the first b"
    assert against(a=a, b=b, c=b) == "0 tensors are missing and 1 too many, the first c"
    assert against(a=a, b=b.half()) == "b is [3] float16 instead of [3] float32"
    assert "largest |difference| 2, mean |expected| 1" in str(against(a=a, b=torch.tensor([1.0, 3.0, 1.0])))


def test_the_quick_sample_has_every_rule() -> None:
    for name, config in CONFIGS.items():
        shape = ModelShape.from_hf_config(config)
        sample = quick_sample(shape)
        if name != "qwen3_moe":  # whose only dense layer is in the middle
            assert {key.replace(".1.", ".0.") for key in hf_shapes(shape) if ".layers.1." in key} <= sample
        assert not any(".layers.2." in key for key in sample) and "model.embed_tokens.weight" in sample


def test_command_lines(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = tmp_path / "run" / "step_20"
    step.parent.mkdir()
    assert (
        tool("hf_to_megatron.py", "--hf-model", hf, "--megatron-path", step, "--tp", 4, "--torch-dtype", "bfloat16")
        == 0
    )
    assert tool("megatron_to_hf.py", step, "--max-shard-gb", 1e-5) == 0
    again = tmp_path / "run" / "step_20_hf"
    assert (again / INDEX_FILE).is_file()
    assert tool("verify.py", step, again) == 0
    assert "the same, bit for bit: 51 tensors" in capsys.readouterr().out
    assert tool("verify.py", hf, again) == 1  # FP32 against BF16
    assert "is [100, 32] bfloat16 instead of [100, 32] float32" in capsys.readouterr().out
    # A bare checkpoint needs a configuration.
    bare = step / "megatron"
    assert tool("megatron_to_hf.py", "--megatron-path", bare, "--hf-path", tmp_path / "other") == 2
    assert (
        "has no configuration beside its weights; give a HF folder of the model (--hf-model)" in capsys.readouterr().err
    )
    arguments = ("--megatron-path", bare, "--hf-path", tmp_path / "other", "--hf-model", hf)
    assert tool("megatron_to_hf.py", *arguments) == 0
    assert tool("verify.py", bare, tmp_path / "other", "--hf-model", hf) == 0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "hf_to_megatron.py",
            ("--hf-model", "HF", "--megatron-path", "OUT", "--tp", "3"),
            "which tp=3 does not divide",
        ),
        (
            "hf_to_megatron.py",
            ("--hf-model", "HF", "--megatron-path", "OUT", "--pp", "0"),
            "--pp: is 0; give 1 or more",
        ),
        ("hf_to_megatron.py", ("--hf-model", "HF"), "--megatron-path: is missing"),
        ("hf_to_megatron.py", ("--hf-model", "OUT", "--megatron-path", "OUT2"), "OUT: has no config.json"),
        ("megatron_to_hf.py", ("HF", "--hf-path", "OUT"), "holds no Megatron distributed checkpoint"),
        ("megatron_to_hf.py", ("HF", "--backend", "bridge", "--hf-path", "OUT"), "--hf-model: is missing"),
        ("megatron_to_hf.py", ("HF", "--max-shard-gb", "0"), "--max-shard-gb: is 0.0; give a positive number"),
        ("verify.py", ("HF", "OUT"), "OUT: is no folder"),
        ("verify.py", ("HF", "HF", "--logits", "1,5,700"), "gives no tokens below 100"),
    ],
)
def test_wrong_usage(
    name: str, arguments: tuple[str, ...], message: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"HF": str(hf), "OUT": str(tmp_path / "OUT"), "OUT2": str(tmp_path / "OUT2")}
    assert tool(name, *(places.get(argument, argument) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert names(tmp_path) == ["hf"]


def test_dry_run_needs_the_configuration_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).resolve().parents[2] / "conf" / "hf" / "qwen2.5-32b"
    assert tool("hf_to_megatron.py", "--hf-model", config, "--tp", 8, "--pp", 2, "--dry-run") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {line[0]: line[1:] for line in lines if line[0].startswith(("decoder.", "embedding.", "output_layer."))}
    # 64 layers of 7 parameters each (qkv weight and bias, 2 norms, projection, fc1, fc2), 2 embeddings, the last norm.
    assert len(table) == 64 * 7 + 3
    assert table["decoder.layers.63.mlp.linear_fc1.weight"][:7] == ["55296", "x", "5120", "6912", "x", "5120", "8-15"]
    totals = [" ".join(line) for line in lines[-3:]]
    # 771 = 64 * 12 + 3; the vocabulary needs no padding; 2 bytes each.
    assert totals[0] == "451 parameters from 771 HF tensors, 32,763,876,352 elements"
    assert totals[1].startswith(f"{2 * 32_763_876_352:,} bytes") and totals[2].startswith("none unmapped")


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for Megatron-Bridge on our own readers and writers; `.damage` changes what it exports."""

    class AutoBridge:
        damage = 0.0

        @staticmethod
        def import_ckpt(hf_model: str, megatron_path: str, **_: Any) -> None:
            checkpoint = open_hf(Path(hf_model))
            weights = Path(megatron_path) / "iter_0000000"
            weights.mkdir(parents=True)
            write_dist_checkpoint(checkpoint.source, checkpoint.shape, weights, layout=ShardLayout())
            (Path(megatron_path) / "latest_checkpointed_iteration.txt").write_text("0\n")

        def __init__(self, hf_model: Path) -> None:
            self.hf_model = hf_model

        @classmethod
        def from_hf_pretrained(cls, hf_model: str) -> AutoBridge:
            return cls(Path(hf_model))

        def export_ckpt(self, megatron_path: str, hf_path: str) -> None:
            source = hf_source(DistCheckpoint(Path(megatron_path) / "iter_0000000"), open_hf(self.hf_model).shape)
            tensors = {name: value.contiguous() for name, value in source.stream()}
            tensors["model.norm.weight"] += self.damage
            Path(hf_path).mkdir(exist_ok=True)
            save_file(tensors, Path(hf_path) / MODEL)
            shutil.copy(self.hf_model / "config.json", hf_path)

    module = types.ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    return AutoBridge


def test_bridge_backend(bridge: Any, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--backend", "bridge")
    assert tool("hf_to_megatron.py", "--hf-model", hf, "--megatron-path", tmp_path / "megatron", *options) == 0
    assert names(tmp_path / "megatron") == ["iter_0000000", "latest_checkpointed_iteration.txt"]
    arguments = (tmp_path / "megatron", "--hf-model", hf, *options)
    assert tool("megatron_to_hf.py", *arguments, "--hf-path", tmp_path / "again") == 0
    assert names(tmp_path / "again") == ["config.json", MODEL]
    assert torch.equal(
        load_file(tmp_path / "again" / MODEL)["model.norm.weight"], open_hf(hf).source.read("model.norm.weight")
    )
    bridge.damage = 1.0
    assert tool("hf_to_megatron.py", "--hf-model", hf, "--megatron-path", tmp_path / "bad", *options) == 1
    assert "model.norm.weight [32] float32 differs: 32 of 32 values" in capsys.readouterr().err
    assert tool("megatron_to_hf.py", *arguments, "--hf-path", tmp_path / "bad") == 1
    assert "decoder.final_layernorm.weight [32] float32 differs: 32 of 32 values" in capsys.readouterr().err
    assert names(tmp_path) == ["again", "hf", "megatron"]


def test_weights_of_stacked_layers_get_their_numbers(tmp_path: Path) -> None:
    """Megatron saves homogeneous layers stacked; a comparison finds each of them, and leaves padding out."""
    state = {
        "decoder.layers.mlp.linear_fc2.weight": torch.arange(24.0).view(2, 3, 4),
        "embedding.word_embeddings.weight": torch.arange(20.0).view(10, 2),
        "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2": torch.zeros(1),
        "decoder.layers.0.mlp.linear_fc2.fp8.input_scaling.amax_history": torch.zeros(4),  # of delayed scaling
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.zeros(2, 3, 4),
    }
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    weights = DistCheckpoint(tmp_path).weights(vocab_size=7)
    assert {name: tuple(spec.shape) for name, spec in weights.specs.items()} == {
        "decoder.layers.0.mlp.linear_fc2.weight": (3, 4),
        "decoder.layers.1.mlp.linear_fc2.weight": (3, 4),
        "embedding.word_embeddings.weight": (7, 2),
    }
    assert torch.equal(weights.read("decoder.layers.1.mlp.linear_fc2.weight"), torch.arange(12.0, 24).view(3, 4))
    assert torch.equal(weights.read("embedding.word_embeddings.weight"), torch.arange(14.0).view(7, 2))


def test_bridge_that_is_not_installed(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hf-model", hf, "--megatron-path", tmp_path / "megatron", "--backend", "bridge")
    assert tool("hf_to_megatron.py", *arguments) == 2
    assert "--backend: bridge needs Megatron-Bridge, which cannot be imported here" in capsys.readouterr().err
    assert names(tmp_path) == ["hf"]
