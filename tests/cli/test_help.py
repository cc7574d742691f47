"""Help, examples, versions, wrong words, and what a shell completes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from importlib import metadata

import pytest

import jaxtrain
from jaxtrain.cli.arguments import COMMANDS
from jaxtrain.cli.commands.onboarding.completion import SCRIPTS, completions
from jaxtrain.cli.examples import EXAMPLES
from jaxtrain.cli.main import _parser, main
from jaxtrain.config.shipped import find_file


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_ends_with_examples_that_parse(name: str, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert EXAMPLES[name]
    for example in EXAMPLES[name]:
        assert f"  jaxtrain {name} {example}".rstrip() in out
        words = shlex.split(example.partition(">")[0])
        words = words[: words.index("--")] if "--" in words else words
        args, unknown = _parser(name).parse_known_intermixed_args(words)
        assert unknown == []
        is_override = "=" in (getattr(args, "config", None) or "")  # of both sides of --diff
        if hasattr(args, "config") and args.config not in (None, "my.yaml") and not is_override:
            assert find_file(args.config, None).is_file(), example


def test_the_version_is_that_of_the_installed_package(capsys):
    version = metadata.version("jaxtrain")
    assert jaxtrain.__version__ == version
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"jaxtrain {version}, jax {metadata.version('jax')}, Python 3.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian", "quickstart"], "unknown command `trian` (did you mean `train`?)"),
        (["train"], "jaxtrain train: expected config, as in `jaxtrain train quickstart`"),
        (["train", "quickstart", "--steps", "20"], "write"),
        (["train", "quickstart", "--reume=auto"], "--reume=auto (did you mean `--resume`?)"),
        (["plan", "quickstart", "--tagret", "h100:1x8"], "--tagret (did you mean `--target`"),
        (["data", "shwo", "quickstart"], "invalid choice: 'shwo' (choose from"),
        (
            ["train", "quickstart", "--simulate", "many"],
            "--simulate: invalid int value: 'many'",
        ),
        (["layouts", "fdsp"], "did you mean `fsdp`"),
        (["quickstart", "layout=fsdp"], "it is a config: jaxtrain train quickstart layout=fsdp"),
        (["train", "steps=20"], "expected a config before it, as in `jaxtrain train quickstart steps=20`"),
        (["train", "quikstart"], "quikstart: no such file (did you mean `quickstart`?)"),
        (["config", "models/llama_8b"], "did you mean `models/llama3_8b`"),
        (
            ["train", "quickstart", "data.sources=[text]"],
            'command line: data.sources.0.path: no such file or folder: "text"',
        ),
        (["train", "quickstart", "data.batch_size=4"], "jaxtrain calls it `data.global_batch`"),
        (["train", "quickstart", "hidden_size=4"], "jaxtrain calls it `model.embed`"),
        (["train", "quickstart", "optimizer.learning_rate=1"], "jaxtrain calls it `optimizer.lr`"),
        (["train", "quickstart", "--batch-size", "8"], "written key=value: data.global_batch=8"),
    ],
)
def test_wrong_words_are_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    found = capsys.readouterr()
    lines = (found.out + found.err).strip().splitlines()
    said = "config values are written key=value: steps=20" if said == "write" else said
    assert len(lines) == 1
    assert said in lines[0]


def test_layouts_are_listed_with_mesh_and_a_sentence(capsys):
    assert main(["layouts"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[:-2]] == jaxtrain.config.layout_names()
    assert "fsdp_tp     fsdp -1 x model 4             Large models on many nodes: " in "\n".join(rows)
    assert all(row.endswith(".") for row in rows if row)
    assert main(["layouts", "fsdp"]) == 0
    assert "mesh: {fsdp: -1}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("jaxtrain tra", "train"),
        ("jaxtrain train quick", "quickstart"),
        ("jaxtrain train quickstart optim", "optimizer."),
        ("jaxtrain train quickstart optimizer.l", "optimizer.lr="),
        ("jaxtrain train quickstart --simulate 8 layout=fsdp_", "layout=fsdp_tp"),
        ("jaxtrain train quickstart precision=bf16_", "precision=bf16_pure"),
        ("jaxtrain train quickstart log.wandb=t", "log.wandb=true"),
        ("jaxtrain train quickstart --resume n", "never"),
        ("jaxtrain checkpoint pr", "prune"),
        ("jaxtrain layouts fsdp_", "fsdp_tp"),
        ("jaxtrain init --template own", "own-model"),
    ],
)
def test_words_are_completed(line: str, word: str):
    assert completions(line.split()[:-1], line.split()[-1]) == [word]


def test_paths_are_completed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", "mine.bin", ".mine.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert completions(["jaxtrain", "train"], "mi") == ["mine.yaml"]
    assert completions(["jaxtrain", "resume"], "runs/") == ["runs/first/"]
    assert completions(["jaxtrain", "nothing"], "x") == []


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_parses(shell: str, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_a_line(capsys):
    """What is behind the last `=` alone, which is what bash replaces."""
    if shutil.which("bash") is None or shutil.which("jaxtrain") is None:
        pytest.skip("no bash, or no jaxtrain command on the PATH")
    main(["completion", "bash"])
    asked = (
        "COMP_LINE='jaxtrain train quickstart layout=fsdp_'; COMP_POINT=${#COMP_LINE}; _jaxtrain; echo ${COMPREPLY[@]}"
    )
    script = capsys.readouterr().out + asked
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "fsdp_tp"
