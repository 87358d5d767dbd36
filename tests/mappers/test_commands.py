from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from mappers import QualityGate, QualityProtocol, load, load_manifest
from mappers.bundle import REPORT, update
from mappers.commands import bundle, eval, fit
from mappers.data import documents, read_conversations
from mappers.diagnose import diagnose
from mappers.families import find_family
from mappers.models import load_model, load_tokenizer
from mappers.report import diagnosis_json
from tests.mappers.pairs import add_tokenizer, disguised, llama, saved, talks_file

SHORT = ["--lengths", "40,60", "--documents", "3", "--tail", "8", "--scored", "8"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two model folders with a tokenizer, a file of conversations, and a fitted bundle."""
    root = tmp_path_factory.mktemp("workplace")
    large = llama(1, 3)
    for name, model in (("large", large), ("small", disguised(large))):
        add_tokenizer(saved(model, root / name))
    talks_file(root / "talks.jsonl", 120, 40)
    assert fit.main([*pair(root), "--out", str(root / "bundle"), "--tokens", "2000", "--layers", "2"]) == 0
    return root


def pair(root: Path) -> list[str]:
    return ["--source", str(root / "small"), "--target", str(root / "large"), "--data", str(root / "talks.jsonl")]


def test_fit_reports_its_plan_and_writes_a_bundle(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*pair(workplace), "--out", str(tmp_path / "b"), "--tokens", "900", "--method", "identity"]
    gate = ["--max-ppl-ratio", "3", "--gate-lengths", "40,60", "--gate-documents", "3"]
    assert fit.main([*arguments, "--precision", "float32", *gate]) == 0
    out, err = capsys.readouterr()
    assert "3 layers of 2 x 8 to 3 of 2 x 8; statistics take up to 0.0 GB" in err
    assert "902 tokens in 11 documents\n" in err and "902 of 902 tokens" in err and "6 of 6 outputs" in err
    command = ["kvrelay", "eval", str(tmp_path / "b"), *pair(workplace), "--lengths", "40,60", "--documents", "3"]
    assert err.endswith(f"{shlex.join([*command, '--write'])}\n")
    assert re.search(r"prefill took \d+\.\d s; everything else took \d+\.\d s", err)
    assert "layer   2   keys identity of" in out and f"written to {tmp_path / 'b'}" in out
    manifest = load_manifest(tmp_path / "b")
    assert manifest.calibration.name == "talks.jsonl, split calibrate"
    assert manifest.gate == QualityGate(max_ppl_ratio=3, min_top1=0.80, lengths=(40, 60), min_documents=3)
    assert manifest.precision == "float32" and manifest.target.tokenizer_digest is not None


def test_a_fit_resumes_from_the_checkpoint_beside_its_bundle(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".b.partial").write_bytes(b"not a checkpoint")
    arguments = [*pair(workplace), "--out", str(tmp_path / "b"), "--tokens", "900", "--method", "identity"]
    assert fit.main(arguments) == 1
    output = capsys.readouterr().err
    assert "resuming from" in output and ".b.partial is not a checkpoint of a fit; remove it" in output
    assert fit.main([*arguments, "--no-checkpoint"]) == 0
    (tmp_path / ".b.partial").unlink()
    assert fit.main([*arguments, "--checkpoint-minutes", "0"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "lowrank", "--rank", "3", "--layers", "auto", "--joint"],
        ["--method", "ridge-head", "--weighting", "attention", "--effective-share", "0.9", "--dtype", "bfloat16"],
        ["--method", "hidden", "--choose", "forward", "--layers", "1", "--dtype", "auto"],
    ],
)
def test_the_bundle_records_the_options_of_fit(workplace: Path, tmp_path: Path, options: list[str]) -> None:
    assert fit.main([*pair(workplace), "--out", str(tmp_path / "b"), "--tokens", "1000", *options]) == 0
    manifest = load_manifest(tmp_path / "b")
    assert manifest.method == options[1]
    recorded = {name.replace("_", "-"): str(value) for name, value in manifest.options.items()}
    for name, value in zip(options, options[1:], strict=False):
        if name.startswith("--") and not value.startswith("--") and name != "--method":
            assert recorded[name.removeprefix("--")] == value
    assert eval.main([str(tmp_path / "b"), *pair(workplace), *SHORT, "--arms", "hybrid", "--write"]) == 0
    evaluation = load_manifest(tmp_path / "b").evaluation
    assert evaluation is not None and [score.arm for score in evaluation.arms] == ["hybrid"]


def test_eval_prints_a_table_and_writes_json(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert eval.main([str(workplace / "bundle"), *pair(workplace), *SHORT, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["bundle"] == load(workplace / "bundle").bundle_id
    assert figures["tokens"] == 2 * 3 * 8 and figures["data"] == "talks.jsonl, split test"
    assert [at["length"] for at in figures["lengths"]] == [40, 60]
    assert {"arm", "ppl_ratio", "top1", "kl_mean", "kl_p95"} <= set(figures["arms"][0])
    rows = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {arm["arm"] for arm in figures["arms"]} <= rows
    assert load_manifest(workplace / "bundle").evaluation is None


def test_eval_stores_the_evaluation_that_the_gate_checks(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*pair(workplace), "--out", str(tmp_path / "b"), "--tokens", "2000"]
    assert fit.main([*arguments, "--max-ppl-ratio", "50", "--min-top1", "0"]) == 0
    assert bundle.main(["verify", str(tmp_path / "b")]) == 0
    assert "has no evaluation" in capsys.readouterr().out
    assert eval.main([str(tmp_path / "b"), *pair(workplace), *SHORT, "--arms", "hybrid", "--write"]) == 0
    output = capsys.readouterr().err
    assert "evaluated on 0 documents at prefix length 384; the gate requires" in output  # the protocol was shortened
    own = QualityGate(max_ppl_ratio=50, min_top1=0, lengths=(40, 60), min_documents=3, min_scored=8)
    update(tmp_path / "b", gate=own)
    assert bundle.main(["verify", str(tmp_path / "b")]) == 0
    assert "is intact; it passes its gate" in capsys.readouterr().out
    page = (tmp_path / "b" / REPORT).read_text()
    assert "b: ridge" in page and str(tmp_path) not in page, "the report must not reveal the path"
    (tmp_path / "b" / REPORT).write_text(page + " ")
    assert bundle.main(["verify", str(tmp_path / "b")]) == 1
    assert "report.html does not match its digest" in capsys.readouterr().err
    assert load(tmp_path / "b").refusal() is None


def test_bundle_show_is_json_without_the_configs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bundle.main(["show", str(workplace / "bundle")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bundle_id"] == load(workplace / "bundle").bundle_id
    assert shown["source"]["name"] == "small" and "config" not in shown["source"]


def test_bundle_speed_reports_times_and_the_share_of_the_peak(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, folder = tmp_path / "speed.json", str(workplace / "bundle")
    assert bundle.main(["speed", folder, "--json", str(report)]) == 0
    speed = json.loads(report.read_text())
    assert [row["tokens"] for row in speed["map"]] == [512, 1024, 2048, 4096]
    assert speed["peak_gflops"] > 0 and speed["share_of_peak"] > 0
    output = re.search(r"product (\d+) GFLOPS", capsys.readouterr().out)
    assert output is not None and int(output[1]) == pytest.approx(speed["peak_gflops"], abs=0.6), "rounded twice"
    shutil.copytree(folder, tmp_path / "other")
    assert bundle.main(["speed", folder, str(tmp_path / "other"), "--json", str(report)]) == 0
    output = json.loads(report.read_text())["bundles"]
    assert [(each["method"], each["bundle"]) for each in output] == [("ridge", load(folder).bundle_id)] * 2
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [[folder, "ridge"], [str(tmp_path / "other"), "ridge"]]


def test_eval_refuses_other_weights(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = ["--source", str(workplace / "large"), "--target", str(workplace / "small")]
    data = ["--data", str(workplace / "talks.jsonl")]
    assert eval.main([str(workplace / "bundle"), *swapped, *data, *SHORT]) == 1
    assert "was fitted for source small" in capsys.readouterr().err


FAMILY_MODULE = """
from dataclasses import dataclass
from pathlib import Path
from mappers.data import read_conversations

ROOT = Path({root!r})

@dataclass(frozen=True)
class Pair:
    source: Path = ROOT / "small"
    target: Path = ROOT / "large"
    bundle: Path = ROOT / "family bundle"
    corpus: str = "toy talk"

    def prepare(self, say):
        say("preparing toys")

    def conversations(self):
        return read_conversations(ROOT / "talks.jsonl")
"""


@pytest.fixture
def toys(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Register a family as an installed package would."""
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvrelay.families]\ntoys = toy_family:Pair\n")
    (tmp_path / "toy_family.py").write_text(FAMILY_MODULE.format(root=str(workplace)))
    monkeypatch.syspath_prepend(tmp_path)
    return "toys"


def test_a_family_is_fitted_evaluated_and_shown_by_name(
    toys: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_family(toys).corpus == "toy talk"
    assert fit.main([toys, "--tokens", "2000", "--layers", "1"]) == 0
    assert eval.main([toys, *SHORT, "--arms", "hybrid,no_cache", "--write"]) == 0
    assert bundle.main(["show", toys]) == 0
    out, err = capsys.readouterr()
    assert err.count("preparing toys") == 2 and "no_cache" in out
    stored = load_manifest(workplace / "family bundle")
    assert stored.evaluation is not None and stored.evaluation.data == "toy talk, split test"


def test_an_unknown_family_is_reported_with_the_known_ones(toys: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (eval.main, fit.main):
        assert command(["smoll"]) == 1
    assert bundle.main(["verify", "smoll"]) == 1
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 3
    assert all(
        "'smoll' is neither a bundle nor a family; known families:" in line and "toys" in line for line in output
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out is missing"),
        (["--out", "x", "--source", "s"], "--target, --data missing; name them, or a family"),
        (["PAIR", "--out", "x", "--method", "rige"], "unknown mapper 'rige'; known: hidden, identity"),
        (
            ["PAIR", "--out", "x", "--tokens", "10"],
            "78 tokens for 48 features; at least 192 are needed besides the held-out ones",
        ),
        (["PAIR", "--out", "x", "--data", "/nonesuch"], "cannot read /nonesuch"),
        (["PAIR", "--out", "x", "--source", "/nonesuch"], "no model at '/nonesuch'"),
    ],
)
def test_fit_reports_what_is_missing(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [*pair(workplace), *arguments[1:]] if "PAIR" in arguments else arguments
    assert fit.main(given) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "rige"], "unknown mapper 'rige'; known: hidden"),
        (["--method", "ridge", "--rank", "3"], "ridge has no option 'rank'"),
        (["--layers", "0"], "layers is 0; allowed: 1 or more, or auto"),
        (["--choose", "best"], "choose is 'best'; allowed: attention"),
        (["--weighting", "heavy"], "weighting is 'heavy'; allowed: uniform"),
        (["--effective-share", "nan"], "effective_share is nan; allowed: above 0, up to 1"),
        (["--tokens", "0"], "tokens is 0; allowed: 1 or more"),
        (["--head", "-1"], "head is -1; allowed: 0 or more"),
        (["--device", "cuda:99"], "device is 'cuda:99'; allowed here: cpu"),
        (["--statistics", "nowhere/file"], "cannot write nowhere/file: the folder nowhere does not exist"),
        (["--statistics", "/"], "cannot write /: it is a folder"),
        (["--out", "/"], "/ exists and is not a bundle; allowed: a new path, or a bundle to replace"),
        (["--checkpoint-minutes", "nan"], "checkpoint_minutes is nan; allowed: 0 or more"),
        (["--max-ppl-ratio", "0.5"], "max_ppl_ratio is 0.5; allowed: 1 or more"),
        (["--min-top1", "80"], "min_top1 is 80.0; allowed: 0 to 1"),
        (["--gate-documents", "0"], "gate_documents is 0; allowed: 1 or more"),
        (["--gate-lengths", "384,0"], "gate_lengths is 0; allowed: 1 or more"),
    ],
)
def test_fit_checks_its_arguments_before_it_prepares_anything(
    toys: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert fit.main([toys, *arguments]) == 1
    output = capsys.readouterr().err
    assert message in output and "preparing toys" not in output


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (fit, ["smol", "--layers", "two"], "'two'; allowed: 1 or more, or auto"),
        (eval, ["smol", "--lengths", "384,x"], "'384,x'; allowed: token counts such as 384,1024"),
    ],
)
def test_malformed_numbers_are_reported_with_what_is_allowed(
    command: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def test_eval_diagnoses_on_the_tune_split_only(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures are of the tune documents; the bundle's evaluation does not change."""
    file, folder = tmp_path / "rows.json", workplace / "bundle"
    assert eval.main([str(folder), *pair(workplace), *SHORT, "--diagnose", "--json", str(file)]) == 0
    output = json.loads(file.read_text())
    talks = read_conversations(workplace / "talks.jsonl")
    tune = documents(talks, "tune", load_tokenizer(workplace / "large"))
    models = load_model(workplace / "small"), load_model(workplace / "large")
    rows = diagnose(load(folder), *models, tune, QualityProtocol((40, 60), 3, tail=8, scored=8))
    assert output["data"] == "talks.jsonl, split tune" and output["rows"] == diagnosis_json(rows)
    assert "layers    2-2" in capsys.readouterr().out and load_manifest(folder).evaluation is None


def test_eval_compares_bundles_and_writes_html(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*pair(workplace), "--out", str(tmp_path / "plain"), "--tokens", "900", "--method", "identity"]
    assert fit.main(arguments) == 0
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    bundles = [str(workplace / "bundle"), str(tmp_path / "plain")]
    assert eval.main([*bundles, *pair(workplace), *SHORT, *files]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[:2] for row in rows] == [[bundles[0], "ridge"], [bundles[1], "identity"]]
    output = json.loads((tmp_path / "a.json").read_text())["bundles"]
    assert [each["bundle"] for each in output] == [load(path).bundle_id for path in bundles]
    for each, path in zip(output, bundles, strict=True):
        assert each["weight_bytes"] <= (Path(path) / "weights.safetensors").stat().st_size
        assert [row["tokens"] for row in each["speed"]["map"]] == [512, 1024, 2048, 4096]
    assert "Side by side" in (tmp_path / "a.html").read_text()


def test_eval_writes_figures_and_diagnosis_to_one_file(workplace: Path, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    arguments = ["--lengths", "77", "--documents", "1", "--tail", "8", "--scored", "4", "--diagnose"]
    assert eval.main([str(workplace / "bundle"), *pair(workplace), *arguments, *files]) == 0
    output, page = json.loads((tmp_path / "a.json").read_text()), (tmp_path / "a.html").read_text()
    assert output["data"] == "talks.jsonl, split test" and output["diagnosis"]["data"] == "talks.jsonl, split tune"
    assert {row["by"] for row in output["diagnosis"]["rows"]} == {"all", "what", "layers", "distance", "head"}
    assert [row["distance"] for row in output["by_distance"]] == ["0-64", "64-256"]
    assert "Where the error lies" in page and "Attention by distance" in page


class InterruptedAtTheEnd(io.StringIO):
    """A user who presses Ctrl-C after the last document."""

    def write(self, text: str) -> int:
        if re.search(r"(\d+) of \1 tokens", text):
            raise KeyboardInterrupt
        return super().write(text)


def test_an_evaluation_resumes_until_everything_is_written(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, figures = tmp_path / "home", tmp_path / "a.json"
    monkeypatch.setenv("KVRELAY_HOME", str(home))
    shutil.copytree(workplace / "bundle", tmp_path / "b")
    arguments = [str(tmp_path / "b"), *pair(workplace), *SHORT, "--arms", "hybrid", "--write", "--json", str(figures)]
    # 1. Interrupted: only the scores are saved.
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", stderr := InterruptedAtTheEnd())
        assert eval.main(arguments) == 130
    (saved,) = (home / "evaluations").iterdir()
    assert f"interrupted; the same command resumes from {saved}" in stderr.getvalue() and not figures.exists()
    # 2. A file cannot be written: the figures before it are written, and no score is lost.
    assert eval.main([*arguments, "--html", "/dev/full"]) == 1
    output = capsys.readouterr().err
    assert f"resuming from {saved}" in output and "cannot write /dev/full" in output and "tokens" not in output
    assert figures.exists() and saved.exists() and load_manifest(tmp_path / "b").evaluation is None
    # 3. Done.
    assert eval.main(arguments) == 0
    assert load_manifest(tmp_path / "b").evaluation is not None and not saved.exists()
    assert "tokens" not in capsys.readouterr().err, "everything was scored before"


def test_an_unwritable_home_only_prevents_resuming(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_HOME", "/sys/kvrelay")
    assert eval.main([str(workplace / "bundle"), *pair(workplace), *SHORT, "--arms", "hybrid"]) == 0
    assert "an interrupted evaluation will start over: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "two", "--diagnose"], "--diagnose with 2 bundles; allowed: one"),
        (["one", "--diagnose", "--write"], "allowed: add --html for both"),
        (["smol", "tiny"], "families smol, tiny; allowed: one"),
        (["one", "--documents", "0"], "num_documents is 0; allowed: 1 or more"),
        (["smol", "--arms", "hybrid,none"], "unknown arm 'none'; known: native, mapped"),
        (["smol", "--device", "gpu"], "device is 'gpu'; allowed here: cpu"),
        (
            ["one", "--json", "nowhere/report.json"],
            "cannot write nowhere/report.json: the folder nowhere does not exist",
        ),
        (
            ["one", "--html", "nowhere/report.html"],
            "cannot write nowhere/report.html: the folder nowhere does not exist",
        ),
        (["one", "--html", "/sys/report.html"], "cannot write to /sys: "),
    ],
)
def test_eval_refuses_inconsistent_options(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert eval.main(arguments) == 1
    assert message in capsys.readouterr().err
