"""`jaxtrain plan`: bad input in a line before anything is compiled, exit codes, files, and one real run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plan_examples import crashed, fitting, refused, simulated

from jaxtrain.cli.main import main
from jaxtrain.config.schema import Config
from jaxtrain.core.resolve import resolve
from jaxtrain.planning import predict
from jaxtrain.planning.choices import SearchSpace
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.result import Plan

LARGE = str(Path(__file__).parents[2] / "configs/models/llama3_8b.yaml")
TEXT = """
simulate: 2
layout: fsdp
model: {embed: 64, layers: 2, heads: 4, kv_heads: 2, mlp: 128}
data: {sources: [{path: not/there}], sequence: 64, global_batch: 8}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(TEXT)
    return str(path)


class Compiler:
    """Replaces `predict`: returns its plans one after the other and records its calls."""

    def __init__(self, *plans: Plan):
        self.plans, self.asked = list(plans), []

    def __call__(
        self, config: Config, vocab: int | None, target: str, *, hlo: Path | None = None,
        max_devices: int | None = None, dcn: str | None = None, server_dcn: str | None = None,
    ) -> Plan:  # fmt: skip
        self.asked.append((config, vocab, target))
        self.max_devices, self.dcn, self.server_dcn = max_devices, dcn, server_dcn
        return self.plans.pop(0)


@pytest.fixture
def compiler(monkeypatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(predict, "predict", made)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(targets, "missing_packages", lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CONFIG"], "expected --target, such as h100:"),
        ([], "expected a config, or --diff A B"),
        (["CONFIG", "--target", "v5x:8x8x8"], "target v5x:8x8x8: no such device (did you mean `v5p` or `v5e`?)"),
        (["CONFIG", "--target", "v5p:8x8"], "target v5p:8x8: v5p has 3 sizes, not 2"),
        (["CONFIG", "--target", "v5p:64x64x64"], "262144 chips; the largest slice of v5p has 6144"),
        (["CONFIG", "--target", "h100:4x16"], "a node of h100 has at most 8 GPUs; expected e.g. h100:8x8"),
        (["CONFIG", "--target", "h100:4x8", "--slices", "2"], "only TPUs have slices"),
        (["CONFIG", "--target", "h100:2x2", "mesh.fsdp=8"], "mesh: fsdp 8 needs 8 devices, and there are 4"),
        (
            ["CONFIG", "--target", "h100:3", "layout=tp", "mesh.model=3", "model.mlp=129"],
            "rules.heads: 4 of dim `heads`",
        ),
        (["CONFIG", "--target", "h100:2", "layout=pp", "pipeline.schedule=1f2b"], "pipeline.schedule: "),
        (["CONFIG", "--target", "v5p:2x2x1", "--slices", "2"], "mesh.dcn: target v5p:2x2x1*2 has 2 slices"),
        (["CONFIG", "--target", "h100:2", "model.hads=8"], "model.hads: unknown key (did you mean `heads`"),
        (["nowhere.yaml", "--target", "h100:2"], "nowhere.yaml: no such file"),
        (["CONFIG", "--target", "h100:2", "data.tokenizer=nowhere.json"], "nowhere.json: No such file"),
        (["CONFIG", "--target", "h100:2", "--html", "no/folder/x.html"], "no/folder/x.html: no folder no/folder"),
        (["CONFIG", "--target", "h100:2", "--json", "."], ".: is a folder"),
        (["--diff", "CONFIG", "CONFIG"], "expected --target"),
        (["--diff", "nowhere.json", "nowhere.json"], "nowhere.json: No such file"),
        (["--diff", "CONFIG", "nowhere.yaml", "--target", "h100:2"], "nowhere.yaml: no such file"),
        (["--diff", "CONFIG", "CONFIG mesh.fsdp=4", "--target", "h100:2"], "mesh: fsdp 4 needs 4 devices"),
        (
            ["--diff", "CONFIG", "CONFIG", "--target", "h100:2", "--html", "x.html"],
            "--html and --hlo do not go with --diff",
        ),
        (["CONFIG", "--target", "h100:2", "--top", "3", "--jobs", "1"], "plan: --top and --jobs need --search"),
        (
            ["CONFIG", "--target", "h100:2", "--search", "--html", "x.html"],
            "--html, --hlo, --whole, --diff, --dcn and --server-dcn do not go with --search",
        ),
        (
            ["--search", "--diff", "CONFIG", "CONFIG", "--target", "h100:2"],
            "--whole, --diff, --dcn and --server-dcn do not go with --search",
        ),
        (["CONFIG", "--target", "h100:2", "--search", "--out", "best"], "--out best: a layout file ends in .yaml"),
        (["CONFIG", "--target", "h100:2", "--search", "--jobs", "0"], "jobs: expected at least 1, not 0"),
        (["CONFIG", "--target", "h100:2", "--search", "--devices", "-2"], "devices: expected at least 1, not -2"),
        (["CONFIG", "--target", "h100:2", "--search", "--top", "-1"], "top: expected at least 0, not -1"),
        (["CONFIG", "--target", "v5p:2x2x1*2", "--slices", "4"], "has 2 slices, but --slices is 4"),
        (
            ["CONFIG", "--target", "h100:2", "--search", "--budget", "soon"],
            "--budget soon: expected a time such as 90s",
        ),
        (["CONFIG", "--target", "h100:2", "--search", "--objective", "tiem"], "did you mean `time`"),
        (["CONFIG", "--target", "local", "--search"], "target local: the number of devices is unknown"),
        (["CONFIG", "--target", "h100:2x8", "--search", "--devices", "12"], "devices: 12 are not whole nodes of 8"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_compiled(
    compiler, config, capsys, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    code = main(["plan", *(argument.replace("CONFIG", config) for argument in arguments)])
    out, err = capsys.readouterr()
    assert (code, out, compiler.asked) == (2, "", [])
    (line,) = err.splitlines()
    assert said in line


def test_a_missing_extra_is_one_line(compiler, config, capsys, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(predict, "predict", compiler)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(targets, "installed_version", lambda package: "")
    for target, extra in (("h100:2", "plan-gpu"), ("v5p:2x1x1", "plan-tpu")):
        assert main(["plan", config, "--target", target]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"pip install 'jaxtrain[{extra}]'" in line
    assert compiler.asked == []


@pytest.mark.parametrize(
    ("plan", "code", "said"),
    [(fitting(), 0, "FITS"), (simulated(), 0, "FIT UNKNOWN"), (refused(), 1, "DOES NOT FIT"),
     (crashed(), 2, "NOT COMPILED")],
)  # fmt: skip
def test_the_exit_code_says_whether_it_fits(compiler, config, capsys, plan, code, said):
    compiler.plans = [plan]
    assert main(["plan", config, "--target", "h100:2"]) == code
    out, err = capsys.readouterr()
    assert f"\n{said}  " in out
    assert err == ""


def test_the_target_determines_the_devices(compiler, config, capsys):
    compiler.plans = [fitting(), fitting(), fitting()]
    # Not the config's two simulated devices; and neither its data nor a token cache need be there.
    assert main(["plan", config, "mesh.fsdp=8", "--target", "h100:8"]) == 0
    assert (
        main(["plan", config, "--target", "v5p:2x2x1", "--slices", "2", "mesh.dcn={fsdp: 2}", "model.vocab=1000"]) == 0
    )
    assert main(["plan", config, "mesh.fsdp=4", "--target", "local"]) == 0  # nobody knows yet how many
    (first, vocab, target), (second, given, slices), (_, _, local) = compiler.asked
    assert local == "local"
    assert (first.mesh.fsdp, vocab, target) == (8, 384, "h100:1x8")  # 257 bytes, rounded up
    assert (second.mesh.fsdp, given, slices) == (-1, 1000, "v5p:2x2x1*2")
    capsys.readouterr()


def test_plans_from_smaller_pods_are_marked(compiler, config, capsys, tmp_path):
    pod, page = "h100:4096x8 (data 2 instead of 8)", tmp_path / "plan.html"
    compiler.plans = [fitting(pods=(pod,)), fitting()]
    assert main(["plan", config, "--target", "h100:8", "--html", str(page)]) == 0
    assert compiler.max_devices == 2**15
    marked = f"extrapolated from a smaller pod: {pod}"
    assert marked in capsys.readouterr().out
    assert marked in page.read_text()
    assert main(["plan", config, "--target", "h100:8", "--whole", "--dcn", "10Gbit"]) == 0
    assert (compiler.max_devices, compiler.dcn, compiler.server_dcn) == (None, "10Gbit", None)
    assert "extrapolated" not in capsys.readouterr().out


def test_files_hold_the_plan(compiler, config, capsys, tmp_path):
    compiler.plans = [fitting()]
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "html")}
    assert main(["plan", config, "--target", "h100:8", *(f"--{kind}={file}" for kind, file in files.items())]) == 0
    assert Plan.from_dict(json.loads(files["json"].read_text())) == fitting()
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["written:", "written:"]


def test_a_diff_of_configs_and_of_saved_plans(compiler, config, capsys, tmp_path):
    saved, out = tmp_path / "saved.json", tmp_path / "diff.json"
    saved.write_text(json.dumps(fitting().as_dict()))
    assert main(["plan", "--diff", str(saved), str(saved)]) == 0  # nothing to compile: no target
    assert compiler.asked == []
    compiler.plans = [fitting(step_seconds=0.5)]
    side = f"{config} layout=ddp mesh.data=16"
    keys = ["data.global_batch=16", "--target", "h100:2x8", "--json", str(out)]
    assert main(["plan", "--diff", str(saved), side, *keys]) == 0
    ((asked, _, _),) = compiler.asked
    assert (asked.layout, asked.mesh.data, asked.data.global_batch) == ("ddp", 16, 16)
    values = json.loads(out.read_text())
    (step,) = [one for one in values["rows"] if one["name"] == "step time"]
    assert (step["a"], step["b"], step["relative"]) == (1.0, 0.5, -0.5)
    assert "-50.0%" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"target": "h100:8"}', '{"target": 3}'])
def test_a_file_that_is_no_plan_is_one_line(compiler, capsys, tmp_path, text):
    path = tmp_path / "no.json"
    path.write_text(text)
    assert main(["plan", "--diff", str(path), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected a plan that `jaxtrain plan --json` wrote" in line


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxtrain.cli.main", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_real_step_on_simulated_devices(config, tmp_path):
    files = [f"--{kind}={tmp_path / f'plan.{kind}'}" for kind in ("json", "html", "hlo")]
    done = run(config, "--target", "simulate:4", "step.attention=reference", *files)
    assert done.returncode == 0, done.stderr
    assert "FIT UNKNOWN" in done.stdout
    plan = Plan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert (plan.devices, plan.sizes["fsdp"], plan.layout) == (4, 4, "fsdp: fsdp 4")
    assert {row.axes for row in plan.traffic} == {"fsdp"}
    assert plan.memory["params"] > 0
    assert plan.step_seconds is not None
    assert plan.step_seconds > plan.compute_seconds > 0
    assert (tmp_path / "plan.hlo").read_text().startswith("HloModule")
    assert "</html>" in (tmp_path / "plan.html").read_text()


def test_a_users_own_model_and_data(tmp_path):
    file = tmp_path / "plan.json"
    done = run("configs/recipes/spirals.yaml", "--target", "simulate:8", "--json", str(file))
    assert done.returncode == 0, done.stderr
    plan = Plan.from_dict(json.loads(file.read_text()))
    assert plan.layout == "3d: data 2 x fsdp 2 x model 2"
    assert plan.flops_model is None
    assert plan.memory["batch"] > 0


def search(config: str, *arguments: str) -> int:
    return main(["plan", config, "--target", "h100:1x4", "--search", "--top", "0", "model.vocab=256", *arguments])


@pytest.mark.parametrize(
    "keys", [(), ("layout=fsdp_tp", "mesh.model=2"), ("mesh.fsdp=4", "zero=0", "rules.mlp=[]", "optimizer.lr=0.01")]
)
def test_a_search_prints_the_ranking_and_writes_a_layout_to_use(
    compiler, config, capsys, tmp_path, monkeypatch, keys: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    assert search(config, *keys, "--json", "found.json") == 0
    out, err = capsys.readouterr()
    assert "Layouts for h100:1x4  least time first" in out
    assert "tensor parallel" in out  # a family that lost
    assert err.splitlines()[-1] == "written: h100-1x4.yaml"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranking"][0]["source"] == "estimate"
    (command,) = (line for line in "".join(out.splitlines(True)).splitlines() if line.startswith("use it: "))
    words = shlex.split(command.removeprefix("use it: jaxtrain train "))
    used, _ = resolve(words[0], *words[1:], "simulate=4", paths=False, checks=())
    assert {axis: size for axis, size in used.mesh if axis != "dcn" and size > 1} == found["ranking"][0]["mesh"]
    layout = found["ranking"][0]["layout"]
    assert {name: list(axes) for name, axes in used.rules.items()} == layout["rules"]
    assert (used.model.vocab, used.optimizer.lr == 0.01) == (256, "optimizer.lr=0.01" in keys)


def test_a_search_overwrites_its_own_files_alone(compiler, config, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert search(config) == 0
    assert search(config) == 0
    (tmp_path / "h100-1x4.yaml").write_text("mine: 1\n")
    capsys.readouterr()
    assert search(config) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "h100-1x4.yaml: already exists, and no search wrote it" in line
    assert (tmp_path / "h100-1x4.yaml").read_text() == "mine: 1\n"


def test_search_output_is_not_markup(compiler, config, capsys, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(targets, "installed_version", lambda package: "")
    assert search(config, "--top", "1") == 0
    assert "[plan-gpu]" in capsys.readouterr().out


def test_an_early_ctrl_c_is_one_line(compiler, config, capsys, tmp_path, monkeypatch):
    def interrupted(self: SearchSpace) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SearchSpace, "__iter__", interrupted)
    assert search(config) == 130
    assert capsys.readouterr() == ("", "jaxtrain: interrupted before the first layout was estimated\n")


def until(check: Callable[[], Any], seconds: float) -> Any:
    """What it says once it is true; the test fails where that takes longer."""
    end = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_compiler_outlives_the_command(tmp_path: Path, number: int):
    """It would go on for a minute."""
    command = [sys.executable, "-m", "jaxtrain.cli.main", "plan", LARGE, "step.unroll=0", "--target", "simulate:8"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        child = Path("/proc") / until(lambda: children.read_text().split(), 60)[0]
        until(lambda: "jaxlib" in (child / "maps").read_text(), 60)
        parent.send_signal(number)
        _, said = parent.communicate(timeout=20)
    assert parent.returncode == (130 if number == signal.SIGINT else -number)
    until(lambda: not child.exists(), 10)
    if number == signal.SIGINT:
        assert said.splitlines()[-1] == "jaxtrain: interrupted"
        assert list(tmp_path.iterdir()) == []
