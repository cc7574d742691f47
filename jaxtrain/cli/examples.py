"""Command lines that `jaxtrain COMMAND --help` ends with, for each command; a test parses them all."""

from __future__ import annotations

QUICKSTART, LLAMA = "quickstart", "models/llama3_8b"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": ("", "digits --template classifier", "mine --template own-model"),
    "train": (f"{QUICKSTART}", f"{QUICKSTART} layout=fsdp steps=100", "my.yaml optimizer.lr=1e-3 model.from=gpt2"),
    "resume": ("runs/quickstart", "runs/quickstart steps=800 layout=fsdp"),
    "launch": (
        f"local --processes 4 --devices-per-process 2 {QUICKSTART}",
        "node --nodes 2 --processes 8 --coordinator head:29400 my.yaml",
        "local --processes 4 -- python train.py",
        f"islands --islands 4 {QUICKSTART} sync.strategy=diloco sync.every=50",
    ),
    "islands": ("status runs/quickstart", "report runs/quickstart --html islands.html"),
    "eval": ("runs/quickstart --batches 10", "runs/quickstart --tasks hellaswag --limit 100"),
    "generate": ('runs/quickstart --prompt "Once"', 'gpt2 --prompt "Once" --temperature 0'),
    "import": ("meta-llama/Llama-3.2-1B --to runs/llama", "path/to/model --to runs/llama layout=fsdp"),
    "export": ("runs/llama --to my-model --dtype bfloat16",),
    "report": ("runs/quickstart", "runs/quickstart --html report.html"),
    "plan": (
        f"{LLAMA} layout=fsdp data.global_batch=64 --target h100:8x8",
        f"{LLAMA} layout=fsdp_tp data.global_batch=64 --target v5p:4x4x8",
        f"{LLAMA} data.global_batch=64 --target h100:8x8 --search",
        f'--diff "{LLAMA} layout=fsdp" "{LLAMA} layout=fsdp_tp" data.global_batch=64 --target h100:8x8',
    ),
    "verify": (f"{QUICKSTART}", f"{QUICKSTART} --layouts fsdp,tp"),
    "layouts": ("", "fsdp_tp"),
    "doctor": ("",),
    "schedule": ("zb_h1 --stages 4 --microbatches 8", "--compare"),
    "checkpoint": (
        "ls runs/quickstart",
        "verify runs/quickstart",
        "prune runs/quickstart --keep 1 --dry-run",
        "rewind runs/quickstart --step 200",
    ),
    "config": (f"{QUICKSTART} layout=fsdp",),
    "schema": ("> schema.json",),
    "diff": ("runs/a runs/b", f"{QUICKSTART} my.yaml"),
    "data": (f"show {QUICKSTART}", f"build {QUICKSTART}", "tokenizer my.yaml --vocab 8192"),
    "completion": ("bash > ~/.local/share/bash-completion/completions/jaxtrain", "zsh > ~/.zfunc/_jaxtrain"),
}
